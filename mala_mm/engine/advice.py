"""What is allowed and yet seldom meant: said in one line each before a training begins."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.hooks import CheckpointHook
from mmengine.runner import Runner

# A checkpoint holds a weight and AdamW's two moments of it, four bytes each.
BYTES_PER_PARAMETER = 12


def advise(runner: Runner) -> list[str]:
    """Return what to think over before a training.

    Args:
        runner (Runner): Built, not yet trained.
    """
    cfg = runner.cfg
    runner.train_loop  # noqa: B018, builds it, so that its length is known
    return [*_warmup(runner), *_batch(cfg, runner.world_size), *_start(cfg), *_disk(runner)]


def _warmup(runner: Runner) -> Iterator[str]:
    schedulers = runner.cfg.get('param_scheduler') or []
    for scheduler in [schedulers] if isinstance(schedulers, Mapping) else schedulers:
        if not str(scheduler['type']).startswith(('Linear', 'ConstantLR')):
            continue
        by_epoch = scheduler.get('by_epoch', True) and not scheduler.get('convert_to_iter_based')
        length = runner.max_epochs if by_epoch else runner.max_iters
        if scheduler.get('end') is not None and scheduler['end'] >= length:
            unit = 'epochs' if by_epoch else 'iterations'
            yield (
                f'The warm-up takes {scheduler["end"]} of {length} {unit}, so that the learning '
                'rate is never reached; shorten it (end of the first param_scheduler).'
            )


def _batch(cfg: Config, processes: int) -> Iterator[str]:
    scaling = cfg.get('auto_scale_lr') or {}
    base, single = scaling.get('base_batch_size'), cfg.train_dataloader.get('batch_size')
    if not base or not single or scaling.get('enable'):
        return
    batch = single * processes * cfg.optim_wrapper.get('accumulative_counts', 1)
    if batch != base:
        yield (
            f'The batch is {batch}, but the learning rate belongs to one of {base}; '
            '--auto-scale-lr fits it.'
        )


def _start(cfg: Config) -> Iterator[str]:
    model = cfg.model
    if (
        cfg.get('default_scope') not in ('mmdet', 'mmseg')
        or cfg.get('load_from')
        or cfg.get('resume')
    ):
        return
    given = [model.get('init_cfg'), model.get('backbone', {}).get('init_cfg')]
    named = model.get('pretrained') or model.get('backbone', {}).get('pretrained')
    if not named and not any(map(_loads, given)):
        yield (
            'The backbone starts from random weights; name a pretrained one '
            '(model.backbone.init_cfg, docs/weights.md), unless this is meant.'
        )


def _loads(init_cfg: Any) -> bool:
    """Whether an ``init_cfg`` reads a file."""
    if isinstance(init_cfg, Sequence) and not isinstance(init_cfg, str):
        return any(map(_loads, init_cfg))
    return isinstance(init_cfg, Mapping) and 'checkpoint' in init_cfg


def _disk(runner: Runner) -> Iterator[str]:
    parameters = sum(p.numel() for p in runner.model.parameters())
    size = parameters * BYTES_PER_PARAMETER
    for hook in runner.hooks:
        if not isinstance(hook, CheckpointHook) or hook.interval < 1:
            continue
        length = runner.max_epochs if hook.by_epoch else runner.max_iters
        count = length // hook.interval
        if hook.max_keep_ckpts > 0:  # one more is there while it is written
            count = min(count, hook.max_keep_ckpts + 1)
        folder = Path(hook.out_dir or runner.work_dir)
        if '://' in str(folder) or not folder.is_dir():
            continue
        free = shutil.disk_usage(folder).free
        if count * size > free:
            yield (
                f'{count} checkpoint(s) of {size / 1e6:.0f} MB are more than the '
                f'{free / 1e9:.1f} GB free in {folder}; set '
                'default_hooks.checkpoint.max_keep_ckpts or a larger interval.'
            )
