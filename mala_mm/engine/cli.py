"""What the command lines have in common."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from mmengine.config import Config, DictAction
from mmengine.registry import build_from_cfg

from mala_mm.checkpoint import enforce_safe_loading
from mala_mm.data.checks import check_dataset, check_num_classes
from mala_mm.errors import UserError

from .config import load_config, set_data_root


class CfgOptions(DictAction):
    """``DictAction`` whose complaint about a missing ``=`` is a sentence."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # noqa: ANN001
        wrong = [value for value in values if '=' not in value]
        if wrong:
            parser.error(f'{option_string} takes key=value pairs, got {wrong[0]!r}')
        super().__call__(parser, namespace, values, option_string)


def common_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options of every run.

    Args:
        description (str): What the command does.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='config file')
    parser.add_argument(
        '--work-dir', help='folder for logs and models (default: work_dirs/NAME_OF_CONFIG)'
    )
    parser.add_argument(
        '--data-root',
        metavar='DIR',
        help="folder of the data set, in place of the config's (data/coco, data/ade/..., ...)",
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=CfgOptions,
        metavar='KEY=VALUE',
        help='override entries of the config, for example optim_wrapper.optimizer.lr=2e-4; lists '
        'as key="[a,b]" or key=a,b',
    )
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='job launcher',
    )
    parser.add_argument(
        '--local_rank', '--local-rank', type=int, default=0, help='set by launchers'
    )
    return parser


def read_config(args: argparse.Namespace) -> Config:
    """The config of a run, with the options of :func:`common_parser` applied.

    Args:
        args (argparse.Namespace): The parsed options.

    Raises:
        UserError: If the config or an option of it is wrong.
    """
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    enforce_safe_loading()
    cfg = load_config(args.config, args.cfg_options)
    cfg.launcher = args.launcher
    # A run writes its config into the work dir, without the files that this one inherits from.
    modules = {*cfg.get('custom_imports', {}).get('imports', []), 'mala_mm'}
    cfg.custom_imports = dict(imports=sorted(modules), allow_failed_imports=False)
    if args.data_root is not None:
        set_data_root(cfg, args.data_root)
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = os.path.join('work_dirs', Path(args.config).stem)
    return cfg


def check_checkpoint(path: str | None) -> None:
    """Check that a checkpoint is there, before anything is built.

    Args:
        path (str, optional): A file, or a URL, which is not looked at.

    Raises:
        UserError: If there is no such file.
    """
    if path is not None and '://' not in path and not os.path.isfile(os.path.expanduser(path)):
        raise UserError(f'Checkpoint {path} does not exist; give the path of a checkpoint file.')


def check_data(cfg: Config, *splits: str) -> None:
    """Check that the data sets of a run are there and fit the config and the model.

    Args:
        cfg (Config): The config.
        *splits (str): Some of ``'train'``, ``'val'``, ``'test'``.

    Raises:
        UserError: If something is missing or does not fit.
    """
    if not is_first_process():
        return
    scope = cfg.get('default_scope')
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        if loader:
            check_dataset(loader.dataset, scope)
            check_num_classes(cfg.model, loader.dataset, scope)


def is_first_process() -> bool:
    """Whether this process speaks for all (also before the process group stands)."""
    return int(os.environ.get('RANK', os.environ.get('SLURM_PROCID', 0))) == 0


def run(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Run a command line: bad input ends in one sentence, bugs in a traceback.

    Args:
        main (Callable): The command.
        argv (Sequence[str], optional): Its arguments; those of the process by default.

    Returns:
        int: The exit code.
    """
    # Noise of one line of packages or the other, about what no recipe here uses.
    for noise in ('pkg_resources is deprecated', 'faster_coco_eval is not installed'):
        warnings.filterwarnings('ignore', noise)
    try:
        main(argv)
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        if is_first_process():
            print(f'{Path(sys.argv[0]).name}: error: {sentence}', file=sys.stderr)
        return 1
    return 0


def explain(error: Exception) -> str | None:
    """The sentence that tells a user what to mend, or None for a bug.

    Besides :class:`UserError`, these are images that cannot be decoded, and mistakes in a config
    that show when mmengine builds a part from it: an unknown type, an argument that a class does
    not take, a value that it refuses.

    Args:
        error (Exception): What was raised.
    """
    message = str(error.args[0]) if error.args else str(error)
    if isinstance(error, UserError):
        return message
    # From mmcv, at times with the traceback of a worker process before it.
    unreadable = re.findall('failed to load image: (.+)', message)
    if isinstance(error, AssertionError) and unreadable:
        return f'The image {unreadable[-1]} cannot be read; replace it, or take it out of the data.'
    if isinstance(error, KeyError) and 'registry. Please check' in message:
        return message.split('. Please check')[0] + '; correct the type in the config.'
    classes, ours = [], False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is build_from_cfg.__code__:
            classes.append(getattr(frame.f_locals.get('obj_cls'), '__name__', '?'))
        ours = frame.f_globals.get('__name__', '').startswith('mala_mm.')
    refused = isinstance(error, ValueError) or (isinstance(error, TypeError) and ours)
    bad_argument = isinstance(error, TypeError) and re.search(
        'unexpected keyword argument|required positional argument', message
    )
    if classes and (refused or bad_argument):
        return f'The config does not fit {" > ".join(classes)}: {message}'
    return None
