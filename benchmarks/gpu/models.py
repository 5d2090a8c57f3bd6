"""Whole backbones, through ``benchmarks.models`` and ``benchmarks.training``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path


def backbones(program: str, arguments: list[str]) -> Iterator[dict]:
    """The rows of one of the two commands.

    Args:
        program (str): ``'models'`` or ``'training'``.
        arguments (list[str]): Its command line.
    """
    import importlib
    import json

    main = importlib.import_module(f'benchmarks.{program}').main
    with tempfile.TemporaryDirectory() as folder:
        main([*arguments, '--out', folder])
        for file in sorted(Path(folder).glob('*.json')):
            found = json.loads(file.read_text())
            common = {key: found[key] for key in ('title', 'command', 'batch') if key in found}
            for row in found['rows']:
                row.pop('times', None)
                yield common | {'program': program} | row


def tests(arguments: list[str]) -> Iterator[dict]:
    """pytest's verdict on the tests that run on this device."""
    import subprocess
    import sys

    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-25:]
    yield {'command': ' '.join(command[1:]), 'status': done.returncode, 'end': last}
