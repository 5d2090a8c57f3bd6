"""The options that the commands which look inside of models share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from mala_mm.engine.arguments import add_config_options
from mala_mm.errors import UserError

from .inside import load_model


def add_model_options(parser: argparse.ArgumentParser, many: bool = True) -> None:
    """Add config, checkpoints, size and config options.

    Args:
        parser (ArgumentParser): Changed in place.
        many (bool): Whether several checkpoints may be named.
    """
    parser.add_argument('config', help='config with a model, or a backbone fragment')
    parser.add_argument(
        'checkpoints' if many else 'checkpoint',
        nargs='*' if many else '?',
        metavar='CHECKPOINT',
        help='weights, with the operators that they were trained with (default: random weights)',
    )
    parser.add_argument(
        '--size',
        type=int,
        default=512,
        metavar='PIXELS',
        help='longer side of the image that the model gets (default: 512)',
    )
    add_config_options(parser, data_root=False)


def add_image_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name images.

    Args:
        parser (ArgumentParser): Changed in place.
    """
    parser.add_argument(
        '--images', nargs='+', required=True, metavar='PATH', help='image files and folders'
    )
    parser.add_argument('--limit', type=int, help='how many of them (default: all)')


def add_layer_options(parser: argparse.ArgumentParser, block: int | None = None) -> None:
    """Add the options that name layers, and operators to put in place of theirs.

    Args:
        parser (ArgumentParser): Changed in place.
        block (int, optional): The block where none is given; all by default.
    """
    parser.add_argument('--stage', type=int, help='stage, from 1 (default: all)')
    which = 'all' if block is None else block
    parser.add_argument(
        '--block',
        type=int,
        default=block,
        help=f'block, from 1; -1: the last (default: {which})',
    )
    parser.add_argument(
        '--operators',
        nargs='+',
        metavar='NAME',
        help="operators for what each checkpoint's layers hold (default: its own)",
    )


def load_models(args: argparse.Namespace) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the model of each checkpoint, or one with random weights.

    The name is the part of the path in which the checkpoints differ; '' if there is one.

    Args:
        args (Namespace): Options of :func:`add_model_options`.

    Raises:
        UserError: If the config or a checkpoint is wrong.
    """
    checkpoints = args.checkpoints or [None]
    for checkpoint, name in zip(checkpoints, _names(checkpoints)):
        yield name, load_model(args.config, checkpoint, args.cfg_options)


def _names(checkpoints: list[str | None]) -> list[str]:
    if checkpoints == [None]:
        return ['random weights']
    if len(checkpoints) == 1:
        return ['']
    parts = [Path(c).with_suffix('').parts for c in checkpoints]
    for level in range(1, min(map(len, parts)) + 1):
        names = [p[-level] for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(c) for c in checkpoints]


def check_out(path: str) -> None:
    """Refuse a file to write that is no image.

    Raises:
        UserError: If it ends neither in ``.png`` nor in ``.jpg``.
    """
    if not path.endswith(('.png', '.jpg')):
        raise UserError(f'--out must end in .png or .jpg, got {path}')
