"""One training step and one prediction of each config, on tiny images on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS
from mmengine.runner import Runner
from mmengine.structures import InstanceData, PixelData

from .recipe_grid import GRID, RECIPES, scope_of, to_cpu

SIDE = 64
# The smallest of each recipe and family in the normal run, all others in the slow one.
ENTRIES = [
    pytest.param(
        entry,
        id=str(entry),
        marks=() if entry.size == entry.recipe.sizes[0] else pytest.mark.slow,
    )
    for entry in GRID
]


def shrink(cfg):
    """Less work, same modules: few regions, small crops, and no path that is dropped."""
    cfg = to_cpu(cfg)
    model = cfg.model
    model.setdefault('data_preprocessor', cfg.get('data_preprocessor'))  # as the runner does
    model.backbone.drop_path_rate = 0.0
    if cfg.default_scope == 'mmseg':
        model.data_preprocessor.size = (SIDE, SIDE)
    if 'roi_head' in model:
        model.train_cfg.rpn_proposal.max_per_img = model.test_cfg.rpn.max_per_img = 8
        # Of a tiny image, every anchor of the coarse levels crosses the border.
        model.train_cfg.rpn.allowed_border = -1
        stages = model.train_cfg.rcnn
        for stage in stages if isinstance(stages, list) else [stages]:
            stage.sampler.num = 8
        model.test_cfg.rcnn.max_per_img = 8
    return cfg


def build(cfg):
    with scope_of(cfg):
        torch.manual_seed(0)
        model = revert_sync_batchnorm(MODELS.build(cfg.model))
        model.init_weights()
        optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    return model.train(), optim_wrapper


def make_batch(scope):
    """Two random images with ground truth, as a data loader would yield them."""
    generator = torch.Generator().manual_seed(0)
    images = [
        torch.randint(0, 256, (3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
        for _ in range(2)
    ]
    meta = dict(img_shape=(SIDE, SIDE), ori_shape=(SIDE, SIDE), scale_factor=(1.0, 1.0))
    if scope == 'mmdet':
        from mmdet.structures import DetDataSample
        from mmdet.structures.mask import BitmapMasks

        boxes = [[4, 4, 40, 46], [20, 12, 60, 60], [46, 46, 60, 60]]
        masks = np.zeros((len(boxes), SIDE, SIDE), np.uint8)
        for mask, (x0, y0, x1, y1) in zip(masks, boxes):
            mask[y0:y1, x0:x1] = 1
        instances = InstanceData(
            bboxes=torch.tensor(boxes, dtype=torch.float32),
            labels=torch.tensor([0, 1, 79]),
            masks=BitmapMasks(masks, SIDE, SIDE),
        )
        samples = [DetDataSample(metainfo=meta, gt_instances=instances) for _ in images]
    elif scope == 'mmseg':
        from mmseg.structures import SegDataSample

        labels = torch.randint(0, 150, (1, SIDE, SIDE), generator=generator)
        gt = PixelData(data=labels)
        samples = [SegDataSample(metainfo=meta, gt_sem_seg=gt) for _ in images]
    else:
        from mmpretrain.structures import DataSample

        images = torch.stack(images)
        samples = [DataSample(metainfo=meta).set_gt_label(label) for label in (3, 999)]
    return dict(inputs=images, data_samples=samples)


def compute_gradients(model, scope):
    """The sum of the losses of one batch, after its backward pass."""
    data = model.data_preprocessor(make_batch(scope), training=True)
    torch.manual_seed(1)
    losses = model(**data, mode='loss')
    loss, logged = model.parse_losses(losses)
    for name, value in logged.items():
        assert torch.isfinite(value), name
    loss.backward()
    return loss


def check_prediction(sample, scope):
    if scope == 'mmdet':
        found = sample.pred_instances
        assert len(found.bboxes) == len(found.scores) == len(found.labels) <= 100
        assert torch.isfinite(found.bboxes).all() and torch.isfinite(found.scores).all()
    elif scope == 'mmseg':
        logits = sample.seg_logits.data
        assert logits.shape == (150, SIDE, SIDE) and torch.isfinite(logits).all()
        assert torch.equal(sample.pred_sem_seg.data[0], logits.argmax(0))
    else:
        assert sample.pred_score.shape == (1000,)
        # A sum of 1000 values of about 1e-3 in float32: at most 1000 roundings of 6e-8.
        assert sample.pred_score.sum().item() == pytest.approx(1.0, abs=6e-5)
        assert sample.pred_label.item() == sample.pred_score.argmax().item()


@pytest.mark.parametrize('entry', ENTRIES)
def test_train_step_and_prediction(entry):
    scope = entry.recipe.scope
    model, optim_wrapper = build(shrink(entry.load()))
    before = [p.detach().clone() for p in model.parameters()]
    loss = compute_gradients(model, scope)
    assert loss.item() > 0
    for name, param in model.named_parameters():
        assert param.grad is not None, f'{name} has no gradient'
        assert torch.isfinite(param.grad).all(), name
        assert param.grad.abs().max() > 0, f'the gradient of {name} is zero'
    optim_wrapper.step()
    for old, (name, param) in zip(before, model.named_parameters()):
        # The first step of AdamW is lr * g / (|g| + 1e-8). Layer scales of 1e-6 leave some
        # gradients so far below 1e-8 that float32 does not see the step.
        if param.grad.abs().max() > 1e-7:
            assert not torch.equal(old, param), name

    model.eval()
    with torch.no_grad():
        samples = model.test_step(make_batch(scope))
    assert len(samples) == 2
    for sample in samples:
        check_prediction(sample, scope)


def tiny(name, family='mavit'):
    return next(
        e for e in GRID if e.recipe is RECIPES[name] and (e.family, e.size) == (family, 't')
    )


def test_with_cp():
    """Recomputed blocks give the same loss and gradients, drop path and all."""
    gradients = {}
    for with_cp in (False, True):
        cfg = shrink(tiny('mask-rcnn_{}_fpn_amp-1x_coco').load())
        cfg.merge_from_dict({'model.backbone.with_cp': with_cp})
        del cfg.model.backbone.drop_path_rate
        model, _ = build(cfg)
        assert {b.with_cp for stage in model.backbone.stages for b in stage} == {with_cp}
        loss = compute_gradients(model, 'mmdet')
        gradients[with_cp] = [loss.detach(), *(p.grad for p in model.backbone.parameters())]
    for plain, recomputed in zip(*gradients.values()):
        # The same operations on the same values, in the same order.
        assert torch.equal(plain, recomputed)


def test_frozen_stages():
    cfg = shrink(tiny('retinanet_{}_fpn_amp-1x_coco', 'ravlt').load())
    cfg.merge_from_dict({'model.backbone.frozen_stages': 2})
    model, optim_wrapper = build(cfg)
    before = {n: p.detach().clone() for n, p in model.state_dict().items()}
    compute_gradients(model, 'mmdet')
    optim_wrapper.step()
    frozen = (
        'backbone.stem.',
        'backbone.stages.0.',
        'backbone.stages.1.',
        'backbone.downsamples.0.',
    )
    for name, value in model.state_dict().items():
        if name.startswith(frozen):
            assert torch.equal(value, before[name]), name
    for name, param in model.named_parameters():
        assert (param.grad is None) == name.startswith(frozen), name
    assert any(n.startswith(frozen) for n in before)


def test_layer_decay():
    cfg = shrink(tiny('upernet_{}_8xb2-amp-160k_ade20k-512x512').load())
    cfg.merge_from_dict(
        {
            'optim_wrapper.constructor': 'mala_mm.LayerDecayOptimizerConstructor',
            'optim_wrapper.paramwise_cfg.decay_rate': 0.9,
        }
    )
    model, optim_wrapper = build(cfg)
    groups = {p: g for g in optim_wrapper.param_groups for p in g['params']}
    backbone = model.backbone
    blocks = [block for stage in backbone.stages for block in stage]
    layers = [backbone.stem, *blocks]  # layer by layer, from the image on
    for depth, layer in enumerate(layers):
        (rate,) = {groups[p]['lr'] for p in layer.parameters()}
        assert rate == pytest.approx(6e-5 * 0.9 ** (len(layers) - depth), rel=1e-12)
    assert {groups[p]['lr'] for p in model.decode_head.parameters()} == {6e-5}
    # Weight decay stays that of the recipe.
    assert {groups[p]['weight_decay'] for p in backbone.norm0.parameters()} == {0.0}
    assert groups[backbone.stem[0].bias]['weight_decay'] == 0.01


def test_ema(tmp_path):
    """With mmengine's EMAHook, a checkpoint holds the averaged weights."""

    class Images(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {key: value[index % 2] for key, value in make_batch('mmpretrain').items()}

    class Recorder(Hook):
        priority = 'VERY_LOW'

        def __init__(self):
            self.weights = []

        def after_train_iter(self, runner, **kwargs):
            self.weights.append(runner.model.head.fc.weight.detach().clone())

    cfg = shrink(tiny('{}_8xb128_in1k', 'ravlt').load())
    with scope_of(cfg):
        runner = Runner(
            model=cfg.model,
            work_dir=str(tmp_path),
            train_dataloader=dict(
                dataset=Images(), batch_size=2, num_workers=0, sampler=dict(type='DefaultSampler')
            ),
            train_cfg=dict(by_epoch=True, max_epochs=1),
            optim_wrapper=cfg.optim_wrapper,
            custom_hooks=[dict(type='EMAHook', momentum=0.25), recorder := Recorder()],
            default_scope='mmpretrain',
            experiment_name='test_ema',
            log_level='ERROR',
        )
        runner.train()
    first, second = recorder.weights
    assert not torch.equal(first, second)
    saved = torch.load(tmp_path / 'epoch_1.pth', map_location='cpu', weights_only=False)
    # The average begins with the first weights.
    assert torch.equal(saved['state_dict']['head.fc.weight'], first.lerp(second, 0.25))
    assert torch.equal(saved['ema_state_dict']['module.head.fc.weight'], second)
