"""Trains a detector, segmentor or classifier."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from mmengine.config import Config
from mmengine.logging import print_log

from mala_mm.checkpoint import load_checkpoint
from mala_mm.errors import InvalidLossError, UserError

from . import arguments
from .config import set_precision
from .runner import Runner


def main(argv: Sequence[str] | None = None) -> None:
    """Train from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If the config, an option, the data or a checkpoint is wrong.
    """
    parser = arguments.run_parser(__doc__)
    parser.add_argument(
        '--amp', action='store_true', help='mixed precision (float16 on a GPU, bfloat16 on a CPU)'
    )
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help="scale the learning rate by the batch over all processes, relative to the config's "
        'auto_scale_lr.base_batch_size',
    )
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='continue from this checkpoint, or from the latest one in the work dir',
    )
    args = parser.parse_args(argv)
    cfg = arguments.read_config(args)
    set_precision(cfg, args.amp)
    if args.auto_scale_lr:
        _enable_auto_scale_lr(cfg)
    if args.resume is not None:
        resume_from = latest_checkpoint(cfg.work_dir) if args.resume == 'auto' else args.resume
        if resume_from is None:
            print_log(f'Nothing to resume in {cfg.work_dir}: training starts anew.', 'current')
        else:
            cfg.resume, cfg.load_from = True, resume_from
    arguments.check_checkpoint(cfg.get('load_from'))
    arguments.check_data(cfg, 'train', 'val')
    runner = Runner.from_cfg(cfg)
    try:
        runner.train()
    except Exception as error:
        if runner.iter == 0 and not isinstance(error, InvalidLossError):
            runner.discard_outputs()
        raise


def latest_checkpoint(work_dir: str | os.PathLike) -> str | None:
    """Find the latest checkpoint that can be read.

    ``last_checkpoint``, which mmengine trusts, may name a file that was moved or damaged.

    Args:
        work_dir (str | os.PathLike): The work dir of the run.

    Returns:
        str | None: The path, or None if there is no checkpoint.

    Raises:
        UserError: If there are checkpoints but none can be read.
    """
    numbered = {
        path: int(found[1])
        for path in Path(work_dir).glob('*.pth')
        if (found := re.fullmatch(r'(?:epoch|iter)_(\d+)\.pth', path.name))
    }
    damage = None
    for path in sorted(numbered, key=numbered.__getitem__, reverse=True):
        try:
            load_checkpoint(path)
        except UserError as error:
            damage = error
            print_log(f'Not resuming from {path}: {error}', 'current', logging.WARNING)
        else:
            return str(path)
    if damage is not None:
        raise damage
    return None


def _enable_auto_scale_lr(cfg: Config) -> None:
    if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
        raise UserError(
            f'--auto-scale-lr needs auto_scale_lr.base_batch_size in {cfg.filename}; add the total '
            'batch that the learning rate was chosen for, '
            'for example auto_scale_lr = dict(base_batch_size=16).'
        )
    cfg.auto_scale_lr.enable = True
