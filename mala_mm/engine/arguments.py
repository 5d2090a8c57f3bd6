"""The options that the commands share, and what they say about a run."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mmengine.config import Config, DictAction

from mala_mm.checkpoint import enforce_safe_loading
from mala_mm.checkpoint.weights import resolve
from mala_mm.data.checks import check_dataset, check_evaluator, check_num_classes
from mala_mm.errors import UserError

from .cli import is_first_process
from .config import load_config, set_data_root
from .validation import check_values


class CfgOptions(DictAction):
    """``DictAction`` whose complaint about a missing ``=`` is a sentence."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # noqa: ANN001
        """Refuse values without a ``=``, then parse as mmengine does."""
        wrong = [value for value in values if '=' not in value]
        if wrong:
            parser.error(f'{option_string} takes key=value pairs, got {wrong[0]!r}')
        super().__call__(parser, namespace, values, option_string)


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make a parser that shows a description as it is written.

    Args:
        description (str): What the command does, with examples.
    """
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_config_options(parser: argparse.ArgumentParser, data_root: bool = True) -> None:
    """Add the options that change what is read from a config.

    Args:
        parser (argparse.ArgumentParser): Changed in place.
        data_root (bool): Whether the command reads the data set.
    """
    if data_root:
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


def run_parser(description: str) -> argparse.ArgumentParser:
    """Make a parser with the options of every run.

    Args:
        description (str): What the command does.
    """
    parser = make_parser(description)
    parser.add_argument('config', help='config file')
    parser.add_argument(
        '--work-dir', help='folder for logs and models (default: work_dirs/NAME_OF_CONFIG)'
    )
    add_config_options(parser)
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
    """Return the config of a run, with the options of :func:`run_parser` applied.

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
    check_values(cfg)
    return cfg


def check_checkpoint(path: str | None) -> None:
    """Check that a checkpoint is there, before anything is built.

    Args:
        path (str, optional): A file, a name of published weights, or a URL, which is not looked
            at.

    Raises:
        UserError: If there is no such file.
    """
    if path is None or '://' in path:
        return
    if not os.path.isfile(resolve(os.path.expanduser(path))):
        raise UserError(f'Checkpoint {path} does not exist; give the path of a checkpoint file')


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
        if cfg.get(f'{split}_evaluator'):
            check_evaluator(cfg[f'{split}_evaluator'])
