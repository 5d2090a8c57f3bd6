"""The runner: nothing left behind, checks and safe parts that are always there."""

import os

import pytest
from mmengine.hooks import Hook

from mala_mm.engine.hooks import CheckInvalidLossHook, CheckpointGuard, CheckpointHook
from mala_mm.engine.loops import EpochBasedTrainLoop, IterBasedTrainLoop

from .toy import Toy, make_runner


def test_failed_start_leaves_nothing(tmp_path):
    work_dir = tmp_path / 'a' / 'b'
    with pytest.raises(KeyError, match='NoSuchHook'):
        make_runner(work_dir, custom_hooks=[dict(type='NoSuchHook')])
    assert os.listdir(tmp_path) == []

    work_dir.mkdir(parents=True)  # what was there before stays
    (work_dir / 'toy.py').write_text('old')
    with pytest.raises(KeyError, match='NoSuchHook'):
        make_runner(work_dir, custom_hooks=[dict(type='NoSuchHook')], experiment_name='again')
    assert os.listdir(work_dir) == ['toy.py']


def test_losses_are_always_checked(tmp_path):
    def checks(runner):
        return [hook.interval for hook in runner._hooks if isinstance(hook, CheckInvalidLossHook)]

    assert checks(make_runner(tmp_path / 'default')) == [1]
    own = dict(type='mala_mm.CheckInvalidLossHook', interval=50)
    assert checks(make_runner(tmp_path / 'own', custom_hooks=[own])) == [50]


def test_only_a_new_training_may_start_from_other_heads(tmp_path):
    def other_heads(name, **changes):
        runner = make_runner(tmp_path / name, **changes)
        return [hook.other_heads for hook in runner._hooks if isinstance(hook, CheckpointGuard)]

    assert other_heads('fine_tuning') == [True]
    assert other_heads('resumed', resume=True) == [False]
    nothing = dict.fromkeys(('train_dataloader', 'train_cfg', 'optim_wrapper'))
    assert other_heads('tested', **nothing) == [False]


@pytest.mark.parametrize(
    'train_cfg, ours',
    [
        (dict(by_epoch=True, max_epochs=1), EpochBasedTrainLoop),
        (dict(by_epoch=False, max_iters=1), IterBasedTrainLoop),
        (dict(type='EpochBasedTrainLoop', max_epochs=1), EpochBasedTrainLoop),
        (dict(type='IterBasedTrainLoop', max_iters=1), IterBasedTrainLoop),
    ],
)
def test_safe_parts_take_the_place_of_mmengines(tmp_path, train_cfg, ours):
    """Configs of users name mmengine's hook and loops."""
    runner = make_runner(tmp_path, train_cfg=train_cfg)
    hooks = [hook for hook in runner._hooks if type(hook).__name__ == 'CheckpointHook']
    assert [type(hook) for hook in hooks] == [CheckpointHook]
    assert type(runner.build_train_loop(runner._train_loop)) is ours


def test_default_hooks_need_not_be_named(tmp_path):
    runner = make_runner(tmp_path, default_hooks=None)
    assert CheckpointHook in {type(hook) for hook in runner._hooks}


class Noting(Hook):
    """Notes the loss of every iteration."""

    def __init__(self):
        self.losses = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append(outputs['loss'].item())


def test_the_same_seed_twice_gives_the_same_losses_bit_for_bit(tmp_path):
    """Weights, order, augmentation and drop path, with workers and without."""

    def losses(name, seed, workers=0):
        hook = Noting()
        make_runner(
            tmp_path / name,
            workers=workers,
            model=dict(type=Toy),
            randomness=dict(seed=seed),
            custom_hooks=[hook],
            train_cfg=dict(by_epoch=True, max_epochs=2),
        ).train()
        assert len(hook.losses) == 8
        return hook.losses

    first = losses('first', 4)
    assert losses('again', 4) == losses('workers', 4, workers=2) == first
    assert not set(losses('other', 5)) & set(first)
