"""Trains a detector, segmentor or classifier."""

from __future__ import annotations

from collections.abc import Sequence

from mmengine.config import Config

from mala_mm.errors import InvalidLossError, UserError

from . import arguments
from .advice import advise
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
        cfg.resume, cfg.load_from = True, None if args.resume == 'auto' else args.resume
    arguments.check_checkpoint(cfg.get('load_from'))
    arguments.check_data(cfg, 'train', 'val')
    runner = Runner.from_cfg(cfg)
    try:
        for advice in advise(runner):
            runner.logger.warning(advice)
        runner.train()
    except Exception as error:
        if runner.iter == 0 and not isinstance(error, InvalidLossError):
            runner.discard_outputs()
        raise


def _enable_auto_scale_lr(cfg: Config) -> None:
    if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
        raise UserError(
            f'--auto-scale-lr needs auto_scale_lr.base_batch_size in {cfg.filename}; add the total '
            'batch that the learning rate was chosen for, '
            'for example auto_scale_lr = dict(base_batch_size=16)'
        )
    cfg.auto_scale_lr.enable = True
