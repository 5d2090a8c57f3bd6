"""The comparison of mechanisms in mmpretrain's backbones: every parameter, and one step."""

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from mala_mm.analysis.linear_attention import read_table
from mala_mm.models.hosts import TokenAttention

from .recipe_grid import CONFIGS, scope_of

# Derived from the definitions, by nobody's code: DeiT-T, Swin-T, Swin-S.
PARAMS = {
    'softmax': (5717416, 28288354, 49606258),
    'hydra': (5717416, 28285312, 49603216),
    'efficient': (5717416, 28285312, 49603216),
    'angular': (5717740, 28285474, 49603378),
    'enhanced': (5809576, 28308352, 49626256),
    'focused': (6191272, 29192384, 50510288),
    'inline': (6477736, 29223544, 49793296),
    'mala': (5717416, 28285312, 49603216),
    'mala-lepe': (5777320,),
    'mala-lepe-gate': (6221992,),
}
HOSTS = {'deit-t': 'VisionTransformer', 'swin-t': 'SwinTransformer', 'swin-s': 'SwinTransformer'}
GRID = {
    f'{host}_{mechanism}': count
    for mechanism, counts in PARAMS.items()
    for host, count in zip(HOSTS, counts)
}


def load(name):
    return Config.fromfile(CONFIGS / f'cls/linear_attention/{name}_8xb128_in1k.py')


def test_the_table_is_the_grid(repo):
    _, comparisons = read_table(repo)
    assert {c.name.removesuffix('_8xb128_in1k'): c.params for c in comparisons} == GRID


@pytest.mark.parametrize('name', GRID)
def test_parameters_and_recipe(name):
    """The count of the specification, and the recipe that all of them share."""
    cfg = load(name)
    host, mechanism = name.split('_')
    with scope_of(cfg):
        model = MODELS.build(cfg.model)
    backbone = model.backbone
    assert sum(p.numel() for p in model.parameters()) == GRID[name]
    assert type(backbone).__name__ == HOSTS[host]
    assert type(backbone).__module__.startswith('mmpretrain.')

    attention = [m for m in backbone.modules() if isinstance(m, TokenAttention)]
    if mechanism == 'softmax':
        assert not attention
    else:
        stages = {'deit-t': 12, 'swin-t': 10 if mechanism == 'inline' else 4, 'swin-s': 4}
        assert len(attention) == stages[host]
        assert {m.operator.name for m in attention} == {mechanism.split('-')[0]}
        assert not any(getattr(m.operator, 'rotary', False) for m in attention)

    assert cfg.train_dataloader.batch_size == 128 and cfg.auto_scale_lr.base_batch_size == 1024
    assert cfg.optim_wrapper.optimizer.lr == 1e-3 and cfg.train_cfg.max_epochs == 300
    assert cfg.optim_wrapper.clip_grad.max_norm == 5.0 and cfg.param_scheduler[0].end == 20
    rates = {'deit-t': 0.1, 'swin-t': 0.2, 'swin-s': 0.3}
    assert cfg.model.backbone.drop_path_rate == rates[host]
    assert cfg.default_hooks.checkpoint.type == 'mala_mm.CheckpointHook'


@pytest.mark.parametrize('name', ['deit-t_mala-lepe-gate', 'swin-t_inline'])
def test_a_classifier_takes_a_step(name):
    from mmpretrain.structures import DataSample

    cfg = load(name)
    torch.manual_seed(0)
    with scope_of(cfg):
        model = MODELS.build(cfg.model)
    model.init_weights()
    model.train()
    samples = [DataSample().set_gt_label(i) for i in range(2)]
    loss = model(torch.randn(2, 3, 224, 224), samples, mode='loss')['loss']
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
    weight = next(m for m in model.modules() if isinstance(m, TokenAttention)).qkv.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)  # the recipe's initialisation
