"""Runs a command: bad input ends in one sentence, bugs in a traceback.

Nothing of OpenMMLab is imported before a command asks for it, so that what is missing can be named.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from mala_mm.doctor import how_to_install
from mala_mm.errors import UserError

# What classes raise that a config hands wrong values to.
MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError),
    *(TypeError, ValueError),
)
LAUNCHED = 'MALA_MM_LAUNCH'  # set by mala_mm.engine.launch
PEER_ENDED = 'another process of this run has ended; its own message says why.'


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
        if os.environ.get('MALA_MM_TRACEBACK') == '1':
            traceback.print_exc()
        _tell(sentence)
        return 1
    return 0


def _tell(sentence: str) -> None:
    """Print an error once, though several processes may meet it."""
    record = os.environ.get('TORCHELASTIC_ERROR_FILE')
    if record:
        # Another process that has ended is never the first cause.
        late = 60 if sentence == PEER_ENDED else 0
        message = dict(message=sentence, timestamp=int(time.time()) + late)
        Path(record).write_text(json.dumps(message))
        if os.environ.get(LAUNCHED):
            return  # mala_mm.engine.launch prints the first of all
    if not is_first_process():
        time.sleep(2)  # where the first process has the same to say, this one is ended meanwhile
    print(f'{Path(sys.argv[0]).name}: error: {sentence}', file=sys.stderr)


def explain(error: Exception) -> str | None:
    """Return the sentence that tells a user what to fix, or None for a bug.

    Besides :class:`UserError`, these are packages that are not installed, and mistakes in a config
    that show when mmengine builds a part from it: an unknown type, an argument that a class does
    not take, a value that it refuses or breaks on. ``MALA_MM_TRACEBACK=1`` prints the traceback
    as well.

    Args:
        error (Exception): What was raised.
    """
    message = str(error.args[0]) if error.args else str(error)
    if isinstance(error, UserError):
        if message.startswith('Caught '):  # in a worker process, with its traceback before it
            message = re.split(r'^\S+Error: ', message.rstrip(), flags=re.M)[-1]
        return message
    if isinstance(error, ModuleNotFoundError) and (command := how_to_install(error.name or '')):
        return f'The module {error.name.split(".")[0]} is not installed; run {command}'
    if isinstance(error, RuntimeError) and re.search(
        'Connection closed by peer|Connection reset by peer', message
    ):
        return PEER_ENDED
    from mmengine.registry import build_from_cfg

    from .validation import similar_types

    classes, registry, kind = [], None, None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is build_from_cfg.__code__:
            names = frame.f_locals
            classes.append(getattr(names.get('obj_cls'), '__name__', '?'))
            registry, kind = names.get('registry'), names.get('obj_type')
    if isinstance(error, KeyError) and 'registry. Please check' in message:
        advice = similar_types(kind, registry) if isinstance(kind, str) else 'correct the type.'
        return f'{message.split(". Please check")[0]}; {advice}'
    if not classes or not isinstance(error, MISTAKES):
        return None
    if not isinstance(error, ValueError) or not message:
        # Assertions often say nothing: then their text does.
        line = traceback.extract_tb(error.__traceback__)[-1].line
        message = f'{type(error).__name__}: {message or line}'
    return f'The config does not fit {" > ".join(classes)}: {" ".join(message.split())}'
