"""What the configs build: models, optimizers and schedules as published."""

import itertools
import re

import mmengine.optim.optimizer.amp_optimizer_wrapper as amp
import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, PARAM_SCHEDULERS
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mala_mm.models import ARCHS, FAMILIES

from .recipe_grid import CONFIGS, GRID, RECIPES, SIZES, scope_of, to_cpu

# Counted from the definition of the published classifiers, with 1000 classes.
CLASSIFIER_PARAMS = {
    'mavit': dict(t=16_449_128, s=27_142_568, b=49_792_648, l=97_766_088),
    'ravlt': dict(t=14_897_768, s=25_591_208, b=48_241_288, l=95_242_440),
}


def build(cfg):
    """The model without memory behind its parameters."""
    with scope_of(cfg), torch.device('meta'):
        return MODELS.build(cfg.model)


def total(module):
    return sum(p.numel() for p in module.parameters())


def norm_kinds(module):
    return {type(m).__name__ for m in module.modules() if isinstance(m, _BatchNorm)}


@pytest.fixture(scope='module', params=GRID, ids=str)
def built(request):
    """An entry of the grid, its config and its model, for all tests of this file in turn."""
    cfg = request.param.load()
    return request.param, cfg, build(cfg)


def test_parameter_count(built):
    entry, _, model = built
    header = (CONFIGS / entry.file).read_text()
    printed = int(re.search(r'(\d+) M parameters', header)[1])
    assert abs(total(model) / 1e6 - printed) <= 0.5
    if entry.recipe.task == 'cls':
        assert total(model) == CLASSIFIER_PARAMS[entry.family][entry.size]


def test_backbone(built):
    entry, _, model = built
    backbone = model.backbone
    assert type(backbone) is FAMILIES[entry.family]
    assert backbone.embed_dims == ARCHS[SIZES[entry.size]]['embed_dims']
    linear = {'mavit': 'mala', 'ravlt': 'rala'}[entry.family]
    assert backbone.attn_types == (linear, linear, 'softmax', 'softmax')
    dense = entry.recipe.task != 'cls'
    assert norm_kinds(backbone) == {'SyncBatchNorm' if dense else 'BatchNorm2d'}
    outputs = [f'norm{i}' for i in range(4) if hasattr(backbone, f'norm{i}')]
    used = (1, 2, 3) if 'retinanet' in entry.recipe.name else (0, 1, 2, 3) if dense else (3,)
    assert backbone.out_indices == used
    assert outputs == ([f'norm{i}' for i in used] if dense else [])


def test_channels_match(built):
    entry, _, model = built
    backbone = model.backbone
    channels = [backbone.embed_dims[i] for i in backbone.out_indices]
    if entry.recipe.task == 'cls':
        width = FAMILIES[entry.family].tail_widths[SIZES[entry.size]]
        assert (model.neck.proj.in_channels, model.neck.proj.out_channels) == (channels[-1], width)
        assert (model.head.fc.in_features, model.head.fc.out_features) == (width, 1000)
    elif 'upernet' in entry.recipe.name:
        head = model.decode_head
        laterals = [m.conv.in_channels for m in head.lateral_convs]
        assert [*laterals, head.bottleneck.conv.in_channels - 4 * 512] == channels
        assert model.auxiliary_head.convs[0].conv.in_channels == channels[2]
    else:
        assert [m.conv.in_channels for m in model.neck.lateral_convs] == channels


def test_heads(built):
    """What the recipes change in the libraries' own models."""
    entry, cfg, model = built
    name = entry.recipe.name
    if entry.recipe.task == 'seg':
        assert isinstance(model.test_cfg.mode, str) and model.test_cfg.mode == 'whole'
        assert model.decode_head.num_classes == 150
        assert model.decode_head.dropout.p == 0.1
        assert tuple(cfg.model.data_preprocessor.size) == (512, 512)
        assert norm_kinds(model.decode_head) == {'SyncBatchNorm'}
    if name.startswith('fpn'):
        assert cfg.model.neck.out_channels == 256 and cfg.model.neck.num_outs == 4
        assert model.decode_head.channels == 128
    elif name.startswith('upernet'):
        assert model.decode_head.channels == 512
        assert [m[0].output_size for m in model.decode_head.psp_modules] == [1, 2, 3, 6]
        auxiliary = model.auxiliary_head
        assert (auxiliary.in_index, auxiliary.channels, auxiliary.num_classes) == (2, 256, 150)
        assert auxiliary.loss_decode.loss_weight == 0.4
    elif name.startswith('retinanet'):
        assert cfg.model.neck.add_extra_convs == 'on_input'
        assert len(model.neck.fpn_convs) == 5
        assert model.neck.fpn_convs[3].conv.in_channels == ARCHS[SIZES[entry.size]]['embed_dims'][3]
        strides = model.bbox_head.prior_generator.strides
        assert strides == [(s, s) for s in (8, 16, 32, 64, 128)]
    elif name.startswith('cascade'):
        # Each stage expects offsets as small as the one before it leaves them.
        assert [tuple(head.bbox_coder.stds) for head in model.roi_head.bbox_head] == [
            (0.1, 0.1, 0.2, 0.2),
            (0.05, 0.05, 0.1, 0.1),
            (0.033, 0.033, 0.067, 0.067),
        ]
        for head in model.roi_head.bbox_head:
            assert (len(head.shared_convs), len(head.shared_fcs)) == (4, 1)
            assert norm_kinds(head) == {'SyncBatchNorm'}
            assert type(head.loss_bbox).__name__ == 'GIoULoss'
            assert head.loss_bbox.loss_weight == 10.0
            assert head.reg_decoded_bbox and not head.reg_class_agnostic
    elif entry.recipe.task == 'cls':
        assert model.head.loss_module.label_smooth_val == 0.1
        augments = [(a['type'], a['alpha']) for a in cfg.model.train_cfg.augments]
        assert augments == [('Mixup', 0.8), ('CutMix', 1.0)]


def kind(module, name):
    if isinstance(module, (_BatchNorm, nn.LayerNorm, nn.GroupNorm)):
        return 'norm'
    return 'bias' if name == 'bias' else 'weight'


def test_weight_decay_of_each_parameter(built):
    entry, cfg, model = built
    recipe = entry.recipe
    with scope_of(cfg):
        wrapper = build_optim_wrapper(model, to_cpu(cfg).optim_wrapper)
    optimizer = wrapper.optimizer
    assert type(optimizer) is torch.optim.AdamW
    assert not wrapper.clip_grad_kwargs
    decay = {}
    for group in optimizer.param_groups:
        assert group['lr'] == entry.lr
        assert group['betas'] == (0.9, 0.999)
        decay.update({p: group['weight_decay'] for p in group['params']})
    kinds = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            found = kind(module, name)
            kinds.add(found)
            expected = 0.0 if found in recipe.spared else recipe.weight_decay
            assert decay.pop(param) == expected, f'{prefix}.{name}'
    assert not decay
    assert kinds == {'norm', 'bias', 'weight'}
    # Layer scales are vectors, but neither norms nor biases.
    scales = [p for n, p in model.named_parameters() if '.gamma' in n]
    assert len(scales) == 2 * sum(model.backbone.depths)
    groups = {p: g for g in optimizer.param_groups for p in g['params']}
    assert {groups[p]['weight_decay'] for p in scales} == {recipe.weight_decay}


def test_batch_and_precision(built, monkeypatch):
    entry, cfg, _ = built
    recipe = entry.recipe
    assert cfg.auto_scale_lr.get('enable', False) is False
    assert cfg.auto_scale_lr.base_batch_size == recipe.batch
    assert 8 * cfg.train_dataloader.batch_size == recipe.batch
    named = re.search(r'_(\d+)xb(\d+)', str(entry))
    assert (named is None) == (recipe.task == 'det')  # as mmdet's own names
    if named:
        assert [int(n) for n in named.groups()] == [8, cfg.train_dataloader.batch_size]
    wrapper = entry.load().optim_wrapper
    amp_is_on = wrapper.get('type', 'OptimWrapper') == 'AmpOptimWrapper'
    assert amp_is_on == ('amp-' in str(entry)) == (recipe.loss_scale is not None)
    if not amp_is_on:
        return
    # The wrapper itself wants a GPU; torch's scaler then warns that there is none.
    monkeypatch.setattr(amp, 'is_cuda_available', lambda: True)
    with pytest.warns(UserWarning, match='[Gg]radScaler'):
        built_wrapper = build_optim_wrapper(nn.Linear(1, 1), wrapper)
    scale = built_wrapper._scale_update_param
    assert scale == (None if recipe.loss_scale == 'dynamic' else recipe.loss_scale)


def learning_rates(cfg, epochs, iterations):
    """Yield (epoch, iteration, lr) before each step, as mmengine's runner would have it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=cfg.optim_wrapper.optimizer.lr)
    defaults = dict(optimizer=optimizer, epoch_length=iterations)
    schedulers = [PARAM_SCHEDULERS.build(s, default_args=defaults) for s in cfg.param_scheduler]
    for epoch in range(epochs):
        for iteration in range(iterations):
            yield epoch, iteration, optimizer.param_groups[0]['lr']
            optimizer.step()
            for scheduler in schedulers:
                if not scheduler.by_epoch:
                    scheduler.step()
        for scheduler in schedulers:
            if scheduler.by_epoch:
                scheduler.step()


def first_of(recipe):
    return next(entry for entry in GRID if entry.recipe == recipe)


@pytest.mark.parametrize('length, milestones', [(12, (8, 11)), (36, (27, 33))])
def test_detection_schedule(length, milestones):
    iterations = 501
    for recipe in RECIPES.values():
        if recipe.task != 'det' or recipe.length != length:
            continue
        cfg = first_of(recipe).load()
        assert cfg.train_cfg.type == 'EpochBasedTrainLoop'
        assert cfg.train_cfg.max_epochs == length
        rates = {(e, i): lr for e, i, lr in learning_rates(cfg, length, iterations)}
        lr = cfg.optim_wrapper.optimizer.lr
        for i in (0, 1, 250, 498, 499, 500):
            # Linear over 500 iterations, from a thousandth to all of it.
            expected = lr * min(1, 0.001 + 0.999 * i / 499)
            assert rates[0, i] == pytest.approx(expected, rel=1e-9)
        steps = {
            0: (1, milestones[0] - 1),
            1: (milestones[0], milestones[1] - 1),
            2: (milestones[1], length - 1),
        }
        for power, epochs in steps.items():
            for epoch, i in itertools.product(epochs, (0, iterations - 1)):
                assert rates[epoch, i] == pytest.approx(lr * 0.1**power, rel=1e-9)


def test_segmentation_schedules():
    fpn, upernet = (first_of(r).load() for r in RECIPES.values() if r.task == 'seg')
    assert fpn.train_cfg.type == upernet.train_cfg.type == 'IterBasedTrainLoop'
    assert (fpn.train_cfg.max_iters, upernet.train_cfg.max_iters) == (80_000, 160_000)

    rates = [lr for _, _, lr in learning_rates(fpn, 1, 80_000)]
    for i in (0, 1, 40_000, 79_999):
        expected = 1e-6 + (1e-4 - 1e-6) * (1 - i / 79_999) ** 0.9
        # The schedule multiplies its way down: 8e4 roundings of 1.1e-16 each.
        assert rates[i] == pytest.approx(expected, rel=1e-11)

    rates = [lr for _, _, lr in learning_rates(upernet, 1, 160_000)]
    for i in (0, 1, 750, 1499):
        assert rates[i] == pytest.approx(6e-5 * (1e-6 + (1 - 1e-6) * i / 1499), rel=1e-9)
    for i in (1500, 80_000, 159_998):
        expected = 6e-5 * (1 - (i - 1500) / 158_499)
        assert rates[i] == pytest.approx(expected, rel=1e-9)
    assert rates[159_999] == 0.0


def test_classification_schedule():
    cfg = first_of(RECIPES['{}_8xb128_in1k']).load()
    assert cfg.train_cfg.by_epoch and cfg.train_cfg.max_epochs == 300
    assert 'custom_hooks' not in cfg  # no EMA
    iterations = 4
    rates = {(e, i): lr for e, i, lr in learning_rates(cfg, 300, iterations)}
    warm = 5 * iterations
    for e, i in ((0, 0), (0, 3), (2, 1), (4, 3)):
        expected = 1e-3 * (1e-3 + (1 - 1e-3) * (e * iterations + i) / (warm - 1))
        assert rates[e, i] == pytest.approx(expected, rel=1e-9)
    for e in (5, 6, 152, 299):
        angle = torch.tensor(torch.pi * (e - 5) / 295, dtype=torch.float64)
        expected = 1e-5 + (1e-3 - 1e-5) * (1 + angle.cos().item()) / 2
        assert rates[e, 0] == rates[e, 3] == pytest.approx(expected, rel=1e-9)


def test_classification_head():
    """DeiT's: weights of deviation 0.02, a tenth of the label spread over all classes."""
    cfg = first_of(RECIPES['{}_8xb128_in1k']).load()
    with scope_of(cfg):
        head = MODELS.build(cfg.model.head)
    torch.manual_seed(0)
    head.init_weights()
    # the standard error of the deviation of two million values is 0.05 %
    assert head.fc.weight.std().item() == pytest.approx(0.02, rel=0.003)
    assert not head.fc.bias.any()
    scores = torch.randn(1, 1000)
    log = scores.log_softmax(1)[0]
    expected = -(0.9 * log[3] + 0.1 * log.mean())
    torch.testing.assert_close(head.loss_module(scores, torch.tensor([3])), expected)


def test_multi_scale_pipeline():
    """Half the images are resized once, half are resized, cropped and resized again."""
    cfg = first_of(RECIPES['mask-rcnn_{}_fpn_amp-ms-crop-3x_coco']).load()
    pipeline = cfg.train_dataloader.dataset.pipeline
    assert pipeline == cfg.train_pipeline
    assert [t.type for t in pipeline] == [
        *('LoadImageFromFile', 'LoadAnnotations', 'RandomFlip', 'RandomChoice', 'PackDetInputs')
    ]
    assert pipeline[1].with_mask and pipeline[2].prob == 0.5
    once, twice = pipeline[3].transforms
    sides = [480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800]
    assert once == [twice[2]]
    assert once[0].scales == [(side, 1333) for side in sides] and once[0].keep_ratio
    assert [min(s) for s in twice[0].scales] == [400, 500, 600] and twice[0].keep_ratio
    assert twice[1].crop_size == (384, 600) and twice[1].crop_type == 'absolute_range'
    assert twice[1].allow_negative_crop
