"""The runner: whole checkpoints or none, nothing left behind, checks that are always on."""

import os
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from torch import nn

from mala_mm.engine.hooks import CheckInvalidLossHook, CheckpointGuard
from mala_mm.engine.runner import Runner
from mala_mm.engine.train import latest_checkpoint
from mala_mm.errors import UserError


class Toy(BaseModel):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(1, 1)

    def forward(self, x, mode='tensor'):
        return dict(loss=self.backbone(x).square().mean())


def make_runner(work_dir, **changes):
    cfg = dict(
        model=Toy(),
        work_dir=str(work_dir),
        train_dataloader=dict(
            dataset=[torch.ones(1)] * 2, batch_size=1, sampler=dict(type='DefaultSampler')
        ),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        default_scope='mmengine',
        experiment_name=Path(work_dir).name,
        log_level='ERROR',
        cfg=Config({}, cfg_text='#', filename='toy.py'),
    )
    return Runner(**{**cfg, **changes})


def test_checkpoint_appears_only_when_it_is_whole(tmp_path, monkeypatch):
    target = tmp_path / 'epoch_1.pth'
    seen = []
    save = torch.save

    def watched(*args, **kwargs):
        seen.append(target.exists())
        save(*args, **kwargs)

    monkeypatch.setattr(torch, 'save', watched)
    runner = make_runner(tmp_path)
    runner.train()
    assert seen == [False]
    before = target.read_bytes()
    assert torch.load(target, weights_only=False)['meta']['iter'] == 2

    def disk_full(checkpoint, filename, **kwargs):
        Path(filename).write_bytes(before[: len(before) // 2])
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr('mmengine.runner.runner.save_checkpoint', disk_full)
    with pytest.raises(UserError, match='epoch_1.pth could not be written .*No space left'):
        runner.save_checkpoint(str(tmp_path), 'epoch_1.pth')
    assert target.read_bytes() == before
    files = {p.name for p in tmp_path.iterdir() if p.is_file()}
    assert files == {'epoch_1.pth', 'last_checkpoint', 'toy.py'}


def test_latest_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    content = dict(state_dict={}, meta={})
    for name in ('iter_9.pth', 'iter_10.pth', 'best_coco_bbox_mAP_epoch_12.pth'):
        torch.save(content, tmp_path / name)
    (tmp_path / 'iter_11.pth').write_bytes((tmp_path / 'iter_10.pth').read_bytes()[:100])
    assert latest_checkpoint(tmp_path) == str(tmp_path / 'iter_10.pth')
    for name in ('iter_9.pth', 'iter_10.pth'):
        (tmp_path / name).write_bytes(b'')
    with pytest.raises(UserError, match='iter_9.pth'):
        latest_checkpoint(tmp_path)


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
