"""Finds the checkpoint to go on from."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mmengine.logging import print_log

from mala_mm.checkpoint import load_checkpoint
from mala_mm.checkpoint.files import non_finite
from mala_mm.errors import UserError

TRAINING_KEYS = ('meta', 'message_hub', 'optimizer')
"""What mmengine saves for resuming, besides the weights."""


def latest_checkpoint(work_dir: str | os.PathLike) -> str | None:
    """Find the latest checkpoint that training can go on from.

    The one that ``last_checkpoint`` names comes first, whatever its name and place. It may have
    been moved or damaged; then the others in the work dir follow, by the number in their names.
    A checkpoint that was written after ``last_checkpoint``, before a kill came, is ahead of it.

    Args:
        work_dir (str | os.PathLike): The work dir of the run.

    Returns:
        str | None: The path, or None if the run never had a checkpoint.

    Raises:
        UserError: If it has had checkpoints but none can be read.
    """
    first_problem = None
    for path in _candidates(Path(work_dir)):
        problem = _why_not(path)
        if problem is None:
            return path
        first_problem = first_problem or problem
        print_log(f'Not resuming from {path}: {problem}', 'current', logging.WARNING)
    if first_problem is not None:
        raise UserError(
            f'{work_dir} has had checkpoints, but training cannot go on from any: {first_problem}; '
            'name a checkpoint (--resume FILE), or empty the folder to start anew'
        )
    return None


def _candidates(work_dir: Path) -> Iterator[str]:
    mark = work_dir / 'last_checkpoint'
    named = ''
    if mark.is_file():
        named = mark.read_text(errors='replace').strip()
        # Written before the folder was moved, or from another working directory.
        beside = work_dir / Path(named).name
        if '://' not in named and not os.path.isfile(named) and beside.is_file():
            named = str(beside)
    numbered = {
        str(path): int(numbers[-1])
        for path in work_dir.glob('*.pth')
        if (numbers := re.findall(r'\d+', path.stem)) and not path.name.startswith('best_')
    }
    by_number = sorted(numbered, key=numbered.__getitem__, reverse=True)
    paths = by_number
    if mark.is_file():
        ahead = [path for path in by_number if _is_ahead(path, named, mark)]
        paths = [*ahead, named or str(mark), *by_number]  # a kill may have left it empty
    seen = set()
    for path in paths:
        if os.path.abspath(path) not in seen:
            seen.add(os.path.abspath(path))
            yield path


def _is_ahead(path: str, named: str, mark: Path) -> bool:
    """Whether a checkpoint follows the named one, and was written after its name was."""
    if os.path.dirname(os.path.abspath(path)) != os.path.dirname(os.path.abspath(named)):
        return False
    (kind, number), (of_kind, before) = (
        (re.sub(r'\d+', '', stem), [int(n) for n in re.findall(r'\d+', stem)])
        for stem in (Path(path).stem, Path(named).stem)
    )
    written = os.stat(path).st_mtime_ns
    return kind == of_kind and number > before and written > mark.stat().st_mtime_ns


def _why_not(path: str) -> str | None:
    """Why training cannot go on from a file, or None if it can."""
    if os.path.basename(path) == 'last_checkpoint':
        return f'{path} is empty'
    try:
        checkpoint = load_checkpoint(path)
    except UserError as error:
        return str(error)
    missing = [key for key in TRAINING_KEYS if key not in checkpoint]
    if missing:
        return f'{path} holds no {", ".join(missing)}'
    found = non_finite(checkpoint.get('state_dict', {}))
    if found:
        return f'{path} holds weights that are not finite, the first in {found[0]}'
    return None
