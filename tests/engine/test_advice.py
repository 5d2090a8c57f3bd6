"""What is allowed and yet seldom meant is said in one line each."""

import shutil
from collections import namedtuple

import pytest
from mmengine.config import Config

from mala_mm.engine.advice import advise

from .toy import make_runner

RIGHT = dict(
    default_scope='mmdet',
    model=dict(backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='weights.pth'))),
    train_dataloader=dict(batch_size=2),
    optim_wrapper=dict(),
    auto_scale_lr=dict(base_batch_size=2, enable=False),
    param_scheduler=[dict(type='LinearLR', by_epoch=False, begin=0, end=3)],
)


@pytest.fixture
def advice(tmp_path):
    """Advice on the toy, which trains for one epoch of four iterations."""

    def give(checkpoint=None, **changes):
        cfg = Config({**RIGHT, **changes}, cfg_text='#', filename='toy.py')
        return advise(make_runner(tmp_path / 'run', checkpoint, cfg=cfg))

    return give


def test_nothing_is_said_where_nothing_is_odd(advice):
    assert advice() == []


@pytest.mark.parametrize(
    'change, line',
    [
        (
            dict(param_scheduler=[dict(type='LinearLR', by_epoch=False, end=500)]),
            'The warm-up takes 500 of 4 iterations',
        ),
        (dict(param_scheduler=dict(type='LinearLR', end=1)), 'The warm-up takes 1 of 1 epochs'),
        (
            dict(auto_scale_lr=dict(base_batch_size=16)),
            'The batch is 2, but the learning rate belongs to one of 16; --auto-scale-lr fits it.',
        ),
        (dict(model=dict(backbone=dict())), 'The backbone starts from random weights'),
        (
            dict(model=dict(backbone=dict(init_cfg=[dict(type='Kaiming')]))),
            'The backbone starts from random weights',
        ),
    ],
)
def test_one_line_each(change, line, advice):
    (said,) = advice(**change)
    assert said.startswith(line) and '\n' not in said


@pytest.mark.parametrize(
    'change',
    [
        dict(auto_scale_lr=dict(base_batch_size=16, enable=True)),
        dict(auto_scale_lr=dict(base_batch_size=8), optim_wrapper=dict(accumulative_counts=4)),
        dict(default_scope='mmpretrain', model=dict(backbone=dict())),  # begins so in its paper
        dict(model=dict(backbone=dict()), load_from='whole_model.pth'),
        dict(model=dict(backbone=dict(pretrained='weights.pth'))),
    ],
)
def test_what_is_meant_is_left_alone(change, advice):
    assert advice(**change) == []


def test_checkpoints_that_fill_the_disk(advice, monkeypatch):
    usage = namedtuple('usage', 'free')
    # Five parameters are 60 bytes; an epoch of one checkpoint.
    monkeypatch.setattr(shutil, 'disk_usage', lambda folder: usage(59))
    (said,) = advice()
    assert said.startswith('1 checkpoint(s) of 0 MB are more than the 0.0 GB free in')
    assert advice(dict(interval=-1)) == []
    monkeypatch.setattr(shutil, 'disk_usage', lambda folder: usage(60))
    assert advice() == []
