"""Runs a command: bad input ends in one sentence, bugs in a traceback.

Nothing of OpenMMLab is imported before a command asks for it, so that what is missing can be named.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from .explain import PEER_ENDED, explain

LAUNCHED = 'MALA_MM_LAUNCH'  # set by mala_mm.engine.launch


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
