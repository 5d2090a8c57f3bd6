"""Layer-wise learning-rate decay."""

import pytest
from mmengine.optim import build_optim_wrapper
from torch import nn

from mala_mm.models import MAViT

ARCH = dict(embed_dims=(8, 8, 16, 16), depths=(1, 2, 3, 1), num_heads=(1, 1, 2, 2))


class Detector(nn.Module):
    def __init__(self, **backbone):
        super().__init__()
        self.backbone = MAViT(ARCH, **backbone)
        self.neck = nn.Conv2d(8, 8, 1)


def build(model, **paramwise):
    cfg = dict(
        type='OptimWrapper',
        optimizer=dict(type='AdamW', lr=1.0, weight_decay=0.05),
        constructor='mala_mm.LayerDecayOptimizerConstructor',
        paramwise_cfg=paramwise,
    )
    return build_optim_wrapper(model, cfg)


def settings(model, wrapper):
    """(learning rate, weight decay) of each parameter by name."""
    groups = {p: g for g in wrapper.optimizer.param_groups for p in g['params']}
    return {n: (groups[p]['lr'], groups[p]['weight_decay']) for n, p in model.named_parameters()}


def test_each_block_is_a_layer():
    model = Detector()
    wrapper = build(model, decay_rate=0.5, norm_decay_mult=0.0)
    found = settings(model, wrapper)
    # Stem, 1 + 2 + 3 + 1 blocks, and all that comes after the backbone: layers 0 to 8.
    expected = {
        'backbone.stem.': 0,
        'backbone.stages.0.0.': 1,
        'backbone.downsamples.0.': 2,
        'backbone.stages.1.0.': 2,
        'backbone.stages.1.1.': 3,
        'backbone.downsamples.1.': 4,
        'backbone.stages.2.0.': 4,
        'backbone.stages.2.2.': 6,
        'backbone.downsamples.2.': 7,
        'backbone.stages.3.0.': 7,
        'backbone.norm0.': 8,
        'backbone.norm3.': 8,
        'neck.': 8,
    }
    for prefix, layer in expected.items():
        rates = {lr for name, (lr, _) in found.items() if name.startswith(prefix)}
        assert rates == {0.5 ** (8 - layer)}, prefix
    assert found['backbone.norm0.weight'][1] == 0.0  # the usual keys rule weight decay
    assert found['neck.weight'][1] == 0.05
    # One group per learning rate and weight decay, not one per parameter.
    assert len(wrapper.optimizer.param_groups) == len(set(found.values()))
    assert {p for g in wrapper.optimizer.param_groups for p in g['params']} == {*model.parameters()}


def test_each_stage_is_a_layer():
    model = Detector()
    found = settings(model, build(model, decay_rate=0.5, decay_type='stage_wise'))
    for prefix, layer in {
        'backbone.stem.': 0,
        'backbone.stages.0.': 1,
        'backbone.downsamples.0.': 2,
        'backbone.stages.2.': 3,
        'backbone.stages.3.': 4,
        'backbone.norm2.': 5,
        'neck.': 5,
    }.items():
        rates = {lr for name, (lr, _) in found.items() if name.startswith(prefix)}
        assert rates == {0.5 ** (5 - layer)}, prefix


def test_follows_custom_keys_frozen_stages_and_missing_stages():
    model = Detector(frozen_stages=1, out_indices=(2,))
    wrapper = build(model, decay_rate=0.5, custom_keys={'neck': dict(lr_mult=10.0, decay_mult=0.0)})
    groups = {p: g for g in wrapper.optimizer.param_groups for p in g['params']}
    assert groups[model.neck.weight]['lr'] == 10.0
    assert groups[model.neck.weight]['weight_decay'] == 0.0
    # Three stages are built: stem, 1 + 2 + 3 blocks, heads: the last block is layer 6 of 7.
    assert groups[next(model.backbone.stages[2][2].parameters())]['lr'] == 0.5
    assert {*groups} == {p for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ('paramwise', 'named'),
    [
        (dict(norm_decay_mult=0.0), 'decay_rate'),
        (dict(decay_rate=1.5), '1.5'),
        (dict(decay_rate=0.9, decay_type='block'), "'stage_wise'"),
        (dict(decay_rate=0.9, num_layers=12), 'num_layers'),
    ],
)
def test_refuses(paramwise, named):
    with pytest.raises(ValueError, match=named):
        build(Detector(), **paramwise)


def test_refuses_other_backbones():
    with pytest.raises(ValueError, match='got Conv2d'):
        build(nn.Conv2d(3, 3, 1), decay_rate=0.9)
