"""Bad input to training and evaluation ends in one sentence, and leaves nothing behind."""

import re
import shutil

import pytest
import torch


class Opener:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), 'w')


@pytest.fixture(scope='module')
def outcomes(workplace, trained_detector):
    """What each bad input led to."""
    folder, coco = workplace.folder, workplace.data / 'coco'
    whole = torch.load(trained_detector / 'epoch_1.pth', weights_only=False)

    def checkpoint(name, content):
        torch.save(content, folder / name)
        return name

    weights = whole['state_dict']
    last = [name for name in weights if name.endswith('bias')][-1]
    foreign = checkpoint('foreign.pth', {f'blocks.{i}.weight': torch.zeros(3) for i in range(4)})
    evil = checkpoint('evil.pth', dict(whole, optimizer=Opener(folder / 'executed')))
    wider = checkpoint(
        'wider.pth',
        {k: v.repeat(2, *[1] * (v.ndim - 1)) if v.ndim else v for k, v in weights.items()},
    )
    partial = checkpoint(
        'partial.pth',
        {k: v for k, v in weights.items() if 'mask_head' not in k} | {'extra': torch.zeros(1)},
    )
    spoilt = checkpoint(
        'spoilt.pth',
        {k: torch.full_like(v, torch.nan) if k == last else v for k, v in weights.items()},
    )
    (folder / 'short.pth').write_bytes((trained_detector / 'epoch_1.pth').read_bytes()[:999])

    hole = folder / 'hole'  # the data set without one of its images
    hole.mkdir()
    (hole / 'annotations').symlink_to(coco / 'annotations')
    (hole / 'val2017').symlink_to(coco / 'val2017')
    (hole / 'train2017').mkdir()
    first, *others = sorted((coco / 'train2017').iterdir())
    for path in others:
        (hole / 'train2017' / path.name).symlink_to(path)

    damaged = folder / 'damaged'  # ... and with files that are no images, whichever comes first
    shutil.copytree(coco, damaged)
    for image in (damaged / 'train2017').iterdir():
        image.write_bytes(b'not an image')

    def det(*options, data=coco):
        return [
            'train',
            'det.py',
            '--data-root',
            str(data),
            '--cfg-options',
            'randomness.seed=0',
            *options,
        ]

    def test(path, *options):
        return ['test', 'det.py', path, '--data-root', str(coco), *options]

    annotations = 'train_dataloader.dataset.ann_file=annotations/none.json'
    cases = dict(
        config=['train', 'dte.py'],
        data_root=det(data=folder / 'nowhere'),
        annotations=det(annotations),
        image=det(data=hole),
        unreadable=det('train_dataloader.num_workers=1', data=damaged),
        classes=det('model.roi_head.bbox_head.num_classes=80'),
        option=det('model.backbone.drop_path=0.1'),
        option_form=det('drop_path'),
        scale_lr=[
            *det('auto_scale_lr={}')[:4],
            '--auto-scale-lr',
            '--cfg-options',
            'auto_scale_lr=None',
        ],
        resume=[*det()[:4], '--resume', 'none.pth'],
        resume_short=[*det()[:4], '--resume', 'short.pth'],
        nan=det(
            'optim_wrapper.optimizer.lr=1e30', 'param_scheduler=None', 'train_cfg.max_epochs=9'
        ),
        checkpoint=test('none.pth'),
        foreign=test(foreign),
        evil=test(evil),
        wider=test(wider),
        spoilt=test(spoilt),
        out=test(partial, '--out', 'predictions.json'),
        partial=test(partial),
    )
    found = workplace.in_forks(cases)
    return dict(found, first_image=first.name, folder=folder)


SENTENCES = dict(
    config=r'dte\.py does not exist; did you mean .*det\.py\?',
    data_root=r'nowhere does not exist; .*--data-root',
    annotations=r'annotations/none\.json',
    image=r'1 of 4 images .* the first is ',
    unreadable=r'The image .*train2017.* cannot be read \(it cannot be decoded\); replace it',
    classes=r'roi_head\.bbox_head\.num_classes is 80, but the data set CocoDataset has \d classes',
    option=r"model\.backbone \(mala_mm\.MAViT\) has no 'drop_path'; did you mean drop_path_rate",
    option_form=r"takes key=value pairs, got 'drop_path'",
    scale_lr=r'--auto-scale-lr needs auto_scale_lr\.base_batch_size in .*det\.py',
    resume=r'none\.pth does not exist',
    resume_short=r'short\.pth is damaged',
    nan=r'stopped at iteration \d: loss.* = (nan|inf).*, images: .*\.jpg',
    checkpoint=r'none\.pth does not exist',
    foreign=r'foreign\.pth holds nothing for the backbone MAViT',
    evil=r'evil\.pth was refused because it asks for \S*open',
    wider=r'wider\.pth looks like a custom arch',
    spoilt=r'spoilt\.pth holds values that are not finite, the first in roi_head\.\S+bias',
    out=r'--out must end in \.pkl, got predictions\.json',
)


@pytest.mark.parametrize('name', SENTENCES)
def test_one_sentence(outcomes, name):
    found = outcomes[name]
    *usage, sentence = found['err'].strip().splitlines()
    assert re.search(SENTENCES[name], sentence), found['err']
    assert 'Traceback' not in found['err']
    if name == 'option_form':  # argparse's own form
        assert found['code'] == 2
    else:
        assert found['code'] == 1
        assert not usage
    assert found['left'] == (name == 'nan')  # the log of a run that did train stays


def test_names_the_missing_image(outcomes):
    assert outcomes['first_image'] in outcomes['image']['err']


def test_nothing_in_a_checkpoint_is_executed(outcomes):
    assert not (outcomes['folder'] / 'executed').exists()


def test_a_damaged_model_is_not_saved(outcomes):
    assert not [*(outcomes['folder'] / 'nan').glob('*.pth')]


def test_partial_checkpoint_is_listed_and_used(outcomes):
    assert outcomes['partial']['code'] == 0, outcomes['partial']['err']
    (log,) = (outcomes['folder'] / 'partial').glob('*/*.log')
    text = log.read_text()
    assert 'MISSING in the file, these keep their initial values: roi_head.mask_head.' in text
    assert 'UNEXPECTED in the file, not used: extra' in text
