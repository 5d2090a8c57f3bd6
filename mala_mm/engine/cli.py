"""Runs a command: bad input ends in one sentence, bugs in a traceback.

Nothing of OpenMMLab is imported before a command asks for it, so that what is missing can be named.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from mala_mm.doctor import how_to_install
from mala_mm.errors import UserError


def is_first_process() -> bool:
    """Whether this process speaks for all (also before the process group stands)."""
    return int(os.environ.get('RANK', os.environ.get('SLURM_PROCID', 0))) == 0


def run(command: str, argv: Sequence[str] | None = None) -> int:
    """Run the ``main`` of a module as a command.

    Args:
        command (str): The module, such as ``'mala_mm.engine.train'``.
        argv (Sequence[str], optional): Its arguments; those of the process by default.

    Returns:
        int: The exit code.
    """
    # Noise of one line of packages or the other, about what no recipe here uses.
    for noise in ('pkg_resources is deprecated', 'faster_coco_eval is not installed'):
        warnings.filterwarnings('ignore', noise)
    try:
        importlib.import_module(command).main(argv)
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        if is_first_process():
            print(f'{Path(sys.argv[0]).name}: error: {sentence}', file=sys.stderr)
        return 1
    return 0


def explain(error: Exception) -> str | None:
    """The sentence that tells a user what to fix, or None for a bug.

    Besides :class:`UserError`, these are packages that are not installed, images that cannot be
    decoded, and mistakes in a config that show when mmengine builds a part from it: an unknown
    type, an argument that a class does not take, a value that it refuses.

    Args:
        error (Exception): What was raised.
    """
    message = str(error.args[0]) if error.args else str(error)
    if isinstance(error, UserError):
        return message
    if isinstance(error, ModuleNotFoundError) and (command := how_to_install(error.name or '')):
        return f'The module {error.name.split(".")[0]} is not installed; run {command}'
    # From mmcv, at times with the traceback of a worker process before it.
    unreadable = re.findall('failed to load image: (.+)', message)
    if isinstance(error, AssertionError) and unreadable:
        return f'The image {unreadable[-1]} cannot be read; replace it, or take it out of the data.'
    if isinstance(error, KeyError) and 'registry. Please check' in message:
        return message.split('. Please check')[0] + '; correct the type in the config.'
    from mmengine.registry import build_from_cfg

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
