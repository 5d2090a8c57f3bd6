"""Models load both forms of files, say what they did, and refuse what does not fit."""

import itertools
import logging
import warnings
from collections import OrderedDict

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.model import BaseModel, BaseModule, BaseTTAModel
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner
from mmengine.runner import load_checkpoint as mmengine_load_checkpoint
from torch import nn
from torch.utils.data import Dataset

from mala_mm.checkpoint import (
    enforce_safe_loading,
    load_checkpoint,
    load_into,
    save_checkpoint,
)
from mala_mm.checkpoint.files import META_KEY
from mala_mm.engine.hooks import CheckpointGuard
from mala_mm.errors import UserError
from mala_mm.models import RAVLT, MAViT

from .published import ARCHS, Arch, evaluate, random_weights

ARCH = Arch(dims=(8, 16, 16, 32), depths=(1, 2, 1, 1), heads=(1, 2, 2, 4))
CONFIG = dict(embed_dims=ARCH.dims, depths=ARCH.depths, num_heads=ARCH.heads)
NORMS = tuple(f'norm{i}.{part}' for i in range(4) for part in ('weight', 'bias'))


@pytest.fixture(autouse=True)
def log(caplog, monkeypatch):
    """What is logged, where caplog sees it."""
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    caplog.handler.setLevel(logging.INFO)
    # mmengine logs two lines per parameter after it has initialised a model.
    monkeypatch.setattr(BaseModule, '_dump_init_info', lambda self: None)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Published files: a classifier, the backbone of a dense model, a detector."""
    folder = tmp_path_factory.mktemp('published')
    classifier = random_weights(ARCH, projection=24)
    dense = random_weights(ARCH, norms=(0, 1, 2, 3))
    detector = OrderedDict(('module.backbone.' + n, t) for n, t in dense.items())
    detector['module.bbox_head.weight'] = torch.ones(5, 32)
    detector['module.bbox_head.bias'] = torch.ones(5)
    torch.save({'model': classifier}, folder / 'classifier.pth')
    torch.save(dense, folder / 'dense.pth')
    torch.save({'state_dict': detector}, folder / 'detector.pth')
    return folder


@pytest.fixture(scope='module')
def image():
    return torch.randn(1, 3, 48, 40, generator=torch.Generator().manual_seed(3))


class Detector(BaseModel):
    """A backbone and a head, named as in mmdet."""

    def __init__(self, classes=5, **kwargs):
        super().__init__()
        self.backbone = MAViT(CONFIG, **kwargs)
        self.bbox_head = nn.Linear(32, classes)

    def forward(self, inputs, mode='tensor'):
        scores = self.bbox_head(self.backbone(inputs)[-1].mean(dim=(2, 3)))
        return dict(loss=scores.square().mean()) if mode == 'loss' else scores


class Averaged(BaseTTAModel):
    """What tools/test.py --tta wraps around a model."""

    def merge_preds(self, data_samples_list):
        raise NotImplementedError


def pretrained(path, cls=MAViT, prefix=None, **kwargs):
    init_cfg = dict(type='Pretrained', checkpoint=str(path))
    if prefix is not None:
        init_cfg['prefix'] = prefix
    model = cls(kwargs.pop('arch', CONFIG), init_cfg=init_cfg, **kwargs)
    model.init_weights()
    return model.eval()


def assert_close(outputs, expected):
    for output, target in zip(outputs, expected, strict=True):
        error = (output.double() - target).abs().max() / target.abs().max()
        assert error < 1e-5


def messages(log, text):
    return [record.getMessage() for record in log.records if text in record.getMessage()]


@pytest.mark.parametrize('cls, attention', [(MAViT, 'mala'), (RAVLT, 'rala')])
def test_pretrained_takes_a_published_classifier(folder, image, log, cls, attention):
    path = folder / 'classifier.pth'
    weights = load_checkpoint(path)['model']
    model = pretrained(path, cls, output_norm=False)
    with torch.no_grad():
        assert_close(model(image), evaluate(weights, ARCH, attention, image)[0])
    (account,) = messages(log, f'{path} (published names) -> {cls.__name__}: ')
    loaded = len(model.state_dict())
    assert f'{loaded} tensors loaded, 0 missing, 9 unexpected, 0 of another shape' in account
    assert f'the model runs {attention}, {attention}, softmax, softmax' in account
    assert 'no use for them: neck (7), head (2)' in account
    assert all(record.levelno < logging.WARNING for record in log.records)


def test_output_norms_that_a_classifier_lacks_are_no_alarm(folder, log):
    model = pretrained(folder / 'classifier.pth')
    assert torch.equal(model.norm0.weight, torch.ones(8))
    (account,) = messages(log, '8 missing')
    assert 'missing, as in every classifier' in account
    assert all(record.levelno < logging.WARNING for record in log.records)


@pytest.mark.parametrize('name, prefix', [
    ('dense', None), ('detector', None), ('detector', 'backbone.'), ('detector', 'backbone')
])  # fmt: skip
def test_pretrained_takes_published_dense_models(folder, image, log, name, prefix):
    weights = load_checkpoint(folder / 'dense.pth')
    model = pretrained(folder / f'{name}.pth', prefix=prefix)
    with torch.no_grad():
        assert_close(model(image), evaluate(weights, ARCH, 'mala', image)[0])
    assert all(record.levelno < logging.WARNING for record in log.records)


def test_a_part_of_the_stages_is_enough(folder, image, log):
    """As in RetinaNet, or on top of a shorter pyramid."""
    weights = load_checkpoint(folder / 'dense.pth')
    maps, _ = evaluate(weights, ARCH, 'mala', image)
    for out_indices in ((1, 2, 3), (0, 1)):
        model = pretrained(folder / 'dense.pth', out_indices=out_indices)
        with torch.no_grad():
            assert_close(model(image), [maps[i] for i in out_indices])
    assert messages(log, 'no use for them: norm0 (2)')
    assert messages(log, 'no use for them: downsamples.1 (7), stages.2 (')
    assert all(record.levelno < logging.WARNING for record in log.records)


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_pretrained_takes_this_packages_files(tmp_path, image, suffix):
    model = Detector().eval()
    path = tmp_path / f'detector{suffix}'
    save_checkpoint(path, model.state_dict(), {})
    for prefix in (None, 'backbone.'):
        loaded = pretrained(path, prefix=prefix)
        with torch.no_grad():
            for output, expected in zip(loaded(image), model.backbone(image), strict=True):
                assert torch.equal(output, expected)


def test_other_initialisers_come_first(folder):
    init_cfg = [
        dict(type='Pretrained', checkpoint=str(folder / 'classifier.pth')),
        dict(type='Constant', layer='LayerNorm', val=2.0),
    ]
    model = MAViT(CONFIG, init_cfg=init_cfg)
    model.init_weights()
    weights = load_checkpoint(folder / 'classifier.pth')['model']
    assert torch.equal(
        model.stages[0][0].norm1.weight, weights['layers.0.blocks.0.norm1.norm.weight']
    )
    assert torch.equal(model.norm0.weight, torch.full((8,), 2.0))
    assert model.init_cfg == init_cfg
    nn.init.zeros_(model.stem[0].weight)
    model.init_weights()  # a second call changes nothing, as everywhere in mmengine
    assert not model.stem[0].weight.any()


def test_the_map_location_of_an_init_cfg_is_heeded(folder):
    asked = []

    def note(storage, location):
        asked.append(location)
        return storage

    init_cfg = dict(type='Pretrained', checkpoint=str(folder / 'dense.pth'), map_location=note)
    MAViT(CONFIG, init_cfg=init_cfg).init_weights()
    assert set(asked) == {'cpu'}


def test_missing_tensors_of_the_trunk_are_an_alarm(tmp_path, folder, log):
    weights = load_checkpoint(folder / 'dense.pth')
    del weights['layers.0.blocks.0.pos.bias']
    weights['layers.0.blocks.0.foo'] = torch.ones(1)
    torch.save(weights, tmp_path / 'partial.pth')
    pretrained(tmp_path / 'partial.pth')
    (account,) = [r for r in log.records if '1 missing, 1 unexpected' in r.getMessage()]
    assert account.levelno == logging.WARNING
    assert 'MISSING in the file, these keep their initial values: stages.0.0.pos.bias' in (
        account.getMessage()
    )
    assert 'UNEXPECTED in the file, not used: layers.0.blocks.0.foo' in account.getMessage()


def test_counters_that_old_files_lack_are_no_alarm(tmp_path, folder, log):
    weights = load_checkpoint(folder / 'dense.pth')
    weights = {n: t for n, t in weights.items() if not n.endswith('num_batches_tracked')}
    torch.save(weights, tmp_path / 'old.pth')
    assert load_into(MAViT(CONFIG), tmp_path / 'old.pth').missing == ()
    assert all(record.levelno < logging.WARNING for record in log.records)


def test_files_that_do_not_fit_are_refused(tmp_path, folder):
    torch.save({'conv1.weight': torch.ones(3)}, tmp_path / 'other.pth')
    with pytest.raises(UserError, match='other.pth holds nothing for the backbone MAViT: its names '
                                        'begin with conv1.weight, those of the model'):  # fmt: skip
        pretrained(tmp_path / 'other.pth')
    small = {
        f'layers.{i}.blocks.{j}.norm1.norm.weight': torch.ones(dim)
        for i, (dim, depth, _) in enumerate(zip(*ARCHS['small'], strict=True))
        for j in range(depth)
    }
    torch.save(small, tmp_path / 'small.pth')
    with pytest.raises(UserError, match=r'small.pth looks like small \(embed_dims .*the model is '
                                        r'tiny \(embed_dims'):  # fmt: skip
        pretrained(tmp_path / 'small.pth', arch='tiny')
    deeper = dict(CONFIG, depths=(1, 2, 2, 1))
    with pytest.raises(UserError, match=r'looks like a custom arch .*depths \(1, 2, 1, 1\)'):
        pretrained(folder / 'dense.pth', arch=deeper)
    with pytest.raises(
        UserError,
        match=r'1 tensors in .* differ in shape from the model, the '
        r'first stem.0.weight with \(4, 3, 3, 3\) where',
    ):
        pretrained(folder / 'dense.pth', in_channels=4)
    with pytest.raises(UserError, match=r"No name in .*dense.pth begins with 'backbone.', they"):
        pretrained(folder / 'dense.pth', prefix='backbone.')
    with pytest.raises(UserError, match='none.pth does not exist'):
        pretrained(tmp_path / 'none.pth')
    heads = dict(CONFIG, num_heads=(1, 1, 2, 4))
    with pytest.raises(UserError, match=r'layers.1.RoPE.angle in .* is not 10000 \*\*'):
        pretrained(folder / 'dense.pth', arch=heads)


def test_another_attention_warns_through_any_loader(tmp_path, log):
    """State dicts note the operators, so that mmengine's and torch's own loaders warn too."""
    path = tmp_path / 'mavit.pth'
    torch.save({'state_dict': Detector().state_dict()}, path)
    same, other = Detector(), Detector(attn_types=('mala', 'rala', 'softmax', 'softmax'))
    text = r'weights are of a MAViT with attention mala, mala, softmax, softmax, the model is a ' \
           r'MAViT with mala, rala, softmax, softmax'  # fmt: skip
    loaders = (
        lambda model: load_into(model, path),
        lambda model: mmengine_load_checkpoint(model, str(path), map_location='cpu'),
        lambda model: model.load_state_dict(torch.load(path)['state_dict']),
        lambda model: load_into(model.backbone, path),
    )
    for load in loaders:
        log.clear()
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            load(same)
        with pytest.warns(UserWarning, match=text) as caught:
            load(other)
        assert len([w for w in caught if 'These weights' in str(w.message)]) == 1
        assert len(messages(log, 'These weights are of')) == 1


def test_another_family_warns(tmp_path, folder):
    path = tmp_path / 'mavit.pth'
    save_checkpoint(path, MAViT(CONFIG).state_dict(), {})
    with pytest.warns(UserWarning, match='are of a MAViT .*the model is a RAVLT with rala, rala'):
        pretrained(path, RAVLT)
    # The stages that are not built do not matter.
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        pretrained(path, attn_types=('mala', 'mala', 'mala', 'mala'), out_indices=(0, 1))


@pytest.mark.parametrize(
    'width, family, cls', [(1024, 'ravlt', MAViT), (2048, 'mavit', RAVLT), (2560, 'mavit', RAVLT)]
)
def test_a_published_classifier_tells_its_family_by_its_width(tmp_path, width, family, cls):
    path = tmp_path / 'classifier.pth'
    torch.save(random_weights(ARCH, projection=width), path)
    text = f'is a {family} by its classifier .*the model is a {cls.__name__}'
    with pytest.warns(UserWarning, match=text):
        pretrained(path, cls)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        pretrained(path, RAVLT if cls is MAViT else MAViT)


def test_a_converted_file_warns_in_both_formats(tmp_path):
    record = dict(family='ravlt', attn_types=RAVLT(CONFIG).attn_types, target='backbone')
    weights = OrderedDict(MAViT(CONFIG).state_dict())
    for suffix in ('.pth', '.safetensors'):
        path = tmp_path / f'converted{suffix}'
        save_checkpoint(path, weights, {META_KEY: record})
        with pytest.warns(UserWarning, match='These weights are of a ravlt with attention rala'):
            pretrained(path)
        with pytest.warns(UserWarning, match='These weights are of a ravlt with attention rala'):
            load_into(Detector(), path)


def test_whole_models(tmp_path, folder, image, log):
    report = load_into(Detector(), folder / 'detector.pth')
    assert len(report.loaded) == len(Detector().state_dict())
    assert report.missing == report.unexpected == report.mismatched == ()
    # A backbone leaves the head as it was, and says so.
    report = load_into(Detector(), folder / 'classifier.pth')
    assert report.missing == (*('backbone.' + name for name in NORMS), 'bbox_head.weight',
                              'bbox_head.bias')  # fmt: skip
    assert len(report.unexpected) == 9
    assert messages(log, 'MISSING in the file, these keep their initial values: bbox_head.weight,')


def test_a_published_retinanet_fills_that_of_mmdet(tmp_path, repo):
    """Its backbone has four stages and three output norms; the file may have four."""
    cfg = Config.fromfile(repo / 'configs/det/mavit/retinanet_mavit-t_fpn_amp-1x_coco.py')
    cfg.model.backbone.arch = CONFIG
    cfg.model.neck.in_channels = list(ARCH.dims[1:])
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(cfg.model)
    backbone = random_weights(ARCH, norms=(0, 1, 2, 3))
    weights = {'backbone.' + name: tensor for name, tensor in backbone.items()}
    for name, tensor in model.state_dict().items():
        if not name.startswith('backbone.'):
            weights[name] = torch.randn_like(tensor)
    torch.save({'state_dict': weights}, tmp_path / 'retinanet.pth')
    report = load_into(model, tmp_path / 'retinanet.pth')
    assert len(report.loaded) == len(model.state_dict()) and report.missing == ()
    assert report.unexpected == ('backbone.norm0.weight', 'backbone.norm0.bias')
    assert torch.equal(model.bbox_head.retina_cls.weight, weights['bbox_head.retina_cls.weight'])
    assert torch.equal(model.backbone.norm3.weight, backbone['extra_norms.3.norm.weight'])


@pytest.mark.parametrize('wrap', [nn.DataParallel, Averaged])
def test_wrappers_are_looked_through(folder, wrap):
    model = Detector()
    load_into(wrap(model), folder / 'detector.pth')
    assert torch.equal(model.bbox_head.bias, torch.ones(5))


def test_another_number_of_classes(tmp_path, folder):
    """Fine-tuning starts a new head; testing with a random one would mean nothing."""
    with pytest.raises(UserError, match=r'first bbox_head.weight with \(5, 32\) where the model '
                                        r'has \(3, 32\); use the config'):  # fmt: skip
        load_into(Detector(classes=3), folder / 'detector.pth')
    model = Detector(classes=3)
    before = model.bbox_head.weight.clone()
    report = load_into(model, folder / 'detector.pth', other_heads=True)
    assert report.mismatched == ('bbox_head.weight', 'bbox_head.bias')
    assert torch.equal(model.bbox_head.weight, before)
    with pytest.raises(UserError, match='first backbone.stem.0.weight with .* where the model has'):
        load_into(Detector(classes=3, in_channels=4), folder / 'detector.pth', other_heads=True)
    with pytest.raises(UserError, match='looks like a custom arch'):
        torch.save(random_weights(Arch((8, 8, 16, 32), *ARCH[1:])), tmp_path / 'other.pth')
        load_into(model, tmp_path / 'other.pth', other_heads=True)


def test_a_backbone_that_matches_nothing_is_refused(tmp_path):
    model = Detector()
    head = {'bbox_head.weight': torch.ones(5, 32), 'bbox_head.bias': torch.ones(5)}
    torch.save(head, tmp_path / 'head.pth')
    with pytest.raises(UserError, match='holds nothing for the backbone MAViT'):
        load_into(model, tmp_path / 'head.pth')


class Noise(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(index))


class Trained(Detector):
    def train_step(self, data, optim_wrapper):
        loss = self(data, mode='loss')['loss']
        optim_wrapper.update_params(loss)
        return dict(loss=loss.detach())


@pytest.fixture
def build_runner(tmp_path, restore_loading):
    """A function that builds mmengine's runner as the command lines do."""

    def build(epochs=1, classes=5, other_heads=False, **kwargs):
        runner = Runner(
            Trained(classes=classes),
            work_dir=str(tmp_path / 'work'),
            train_dataloader=dict(
                batch_size=2,
                dataset=Noise(),
                sampler=dict(type='DefaultSampler', shuffle=False),
                collate_fn=dict(type='default_collate'),
            ),
            train_cfg=dict(by_epoch=True, max_epochs=epochs),
            optim_wrapper=dict(optimizer=dict(type='AdamW', lr=1e-3)),
            experiment_name=f'{tmp_path.name}-{next(count)}',
            log_level='WARNING',
            **kwargs,
        )
        runner.register_hook(CheckpointGuard(other_heads))
        return runner

    count = itertools.count()  # mmengine keeps what belongs to a name
    enforce_safe_loading()
    return build


@pytest.mark.parametrize('load_from', ['work/epoch_1.pth', None])
def test_the_runner_resumes_what_it_saved(build_runner, tmp_path, load_from):
    """mmengine 0.10.7 alone cannot read its own checkpoint with torch 2.6 or later."""
    runner = build_runner(epochs=1)
    runner.train()
    first = {name: t.clone() for name, t in runner.model.state_dict().items()}
    path = None if load_from is None else str(tmp_path / load_from)
    runner = build_runner(epochs=2, resume=True, load_from=path)
    runner.load_or_resume()
    assert runner.epoch == 1
    assert all(torch.equal(t, first[name]) for name, t in runner.model.state_dict().items())
    runner.train()
    assert runner.epoch == 2
    assert runner.message_hub.log_scalars['train/loss'].data[0].size == 2


def test_the_runner_starts_from_a_published_model(build_runner, folder):
    runner = build_runner(load_from=str(folder / 'detector.pth'))
    runner.load_or_resume()
    weights = load_checkpoint(folder / 'dense.pth')
    assert torch.equal(runner.model.backbone.norm2.bias, weights['extra_norms.2.norm.bias'])
    assert torch.equal(runner.model.bbox_head.bias, torch.ones(5))


def test_the_runner_refuses_what_does_not_fit(build_runner, folder, tmp_path):
    detector = str(folder / 'detector.pth')
    with pytest.raises(UserError, match='tensors in .*detector.pth differ in shape'):
        build_runner(classes=3, load_from=detector).load_or_resume()
    build_runner(classes=3, load_from=detector, other_heads=True).load_or_resume()
    with pytest.raises(UserError, match='detector.pth holds no state of a training to resume, only '
                                        'state_dict; to start from its weights'):  # fmt: skip
        build_runner(load_from=detector, resume=True).load_or_resume()
    with pytest.raises(UserError, match='none.pth does not exist'):
        build_runner(load_from=str(tmp_path / 'none.pth')).load_or_resume()
