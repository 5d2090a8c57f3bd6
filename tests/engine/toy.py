"""A model of five numbers, data that are random numbers, and a runner for them."""

import random
from pathlib import Path

import numpy as np
import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from torch import nn

from mala_mm.engine.runner import Runner


class RandomNumbers(torch.utils.data.Dataset):
    """Seven samples that are augmented by every generator there is."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        numbers = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return dict(x=torch.tensor([float(index), *numbers]))


class Toy(BaseModel):
    """Its loss is scaled at random, as drop path would."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(4, 1)

    def forward(self, x, mode='tensor'):
        return dict(loss=(self.backbone(x) * torch.rand(())).square().mean())


def make_runner(work_dir, checkpoint=None, workers=0, **changes):
    hook = dict(type='CheckpointHook', **{'interval': 1, **(checkpoint or {})})
    cfg = dict(
        model=Toy(),
        work_dir=str(work_dir),
        train_dataloader=dict(
            dataset=RandomNumbers(),
            batch_size=2,
            num_workers=workers,
            persistent_workers=workers > 0,
            sampler=dict(type='DefaultSampler', shuffle=True),
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.1)),
        default_hooks=dict(checkpoint=hook),
        default_scope='mmengine',
        experiment_name=str(work_dir),
        log_level='ERROR',
        cfg=Config({}, cfg_text='#', filename='toy.py'),
    )
    return Runner(**{**cfg, **changes})


def files(folder):
    """The names of the files, without the logs."""
    return {p.name for p in Path(folder).iterdir() if p.is_file()}
