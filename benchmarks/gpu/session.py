"""Jobs in processes of their own, under one budget of time, and their results as they come.

    python -m benchmarks.gpu.session MODULE:FUNCTION KEYWORDS ROWS    # what runs in such a process

A job is a generator of rows (dictionaries of plain numbers and words). Its process appends each to
a file; the session collects them while the process runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mala_mm.files import write_bytes

REPO = Path(__file__).resolve().parents[2]


class Job(NamedTuple):
    """Something to do in a process of its own.

    Attributes:
        function (str): ``module:function``, a generator of rows.
        keywords (dict): Its arguments.
        seconds (float): After how long it is ended.
    """

    function: str
    keywords: dict
    seconds: float = 120.0

    def __str__(self) -> str:
        words = ', '.join(f'{key}={value}' for key, value in self.keywords.items())
        return f'{self.function.partition(":")[2]}({words})'

    def rows(self) -> Iterable[dict]:
        """Run here and now."""
        module, _, name = self.function.partition(':')
        return getattr(importlib.import_module(module), name)(**self.keywords)


class Session:
    """The results of one machine, and the clock.

    Args:
        out (Path): Folder of ``session.json``; what other parts lie there already are kept.
        seconds (float): Budget of all jobs together.
        workers (int): How many jobs may run at a time where several may.
        in_process (bool): Whether to run jobs here, one by one, for a dry run.
    """

    def __init__(self, out: Path, seconds: float, workers: int, in_process: bool = False) -> None:
        self.file = out / 'session.json'
        self.end = time.monotonic() + seconds
        self.workers, self.in_process = workers, in_process
        self.results: dict = {'parts': {}, 'left out': {}}
        if self.file.exists():
            self.results = json.loads(self.file.read_text())
        out.mkdir(parents=True, exist_ok=True)

    def describe(self, dry_run: bool) -> None:
        """Note where and with what all of this runs."""
        from importlib.metadata import PackageNotFoundError, version

        import torch

        def of(name: str) -> str | None:
            try:
                return version(name)
            except PackageNotFoundError:
                return None

        def output(*command: str) -> str | None:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                found = subprocess.run(
                    command, cwd=REPO, capture_output=True, text=True, check=True
                )
                return found.stdout.strip()

        query = ('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader')
        self.results['machine'] = {
            'device': 'interpreter' if dry_run else torch.cuda.get_device_name(),
            'driver': None if dry_run else output(*query),
            'cuda': torch.version.cuda,
            'python': platform.python_version(),
            'processor': platform.processor() or platform.machine(),
            'commit': output('git', 'rev-parse', 'HEAD'),
            'changed files': output('git', 'status', '--porcelain', '--untracked-files=no'),
            **{name: of(name) for name in ('torch', 'triton', 'mmengine', 'mmcv', 'mmcv-lite')},
            'date': time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime()),
        }
        self.write()

    def rows(self, part: str) -> list[dict]:
        """What a part has found so far."""
        return self.results['parts'].get(part, [])

    def write(self) -> None:
        write_bytes(self.file, (json.dumps(self.results, indent=1) + '\n').encode())

    def leave_out(self, part: str, job: Job, reason: str) -> None:
        """Note why something was not, or not wholly, done."""
        self.results['left out'].setdefault(part, []).append(f'{job}: {reason}'[:600])

    def run(self, part: str, todo: Iterable[Job], alone: bool) -> None:
        """Run the jobs of one part, in their order, one at a time or as many as may."""
        self.results['parts'][part] = []
        waiting, running = list(todo), []
        if self.in_process:
            for job in waiting:
                self._here(part, job)
            return
        while waiting or running:
            while waiting and len(running) < (1 if alone else self.workers):
                job = waiting.pop(0)
                if time.monotonic() > self.end:
                    self.leave_out(part, job, 'no time left')
                    continue
                running.append(_Process(job, min(job.seconds, self.end - time.monotonic())))
            for process in list(running):
                self.results['parts'][part] += process.new_rows()
                if process.ended():
                    self.results['parts'][part] += process.new_rows()
                    if process.reason is not None:
                        self.leave_out(part, process.job, process.reason)
                    running.remove(process)
            self.write()
            time.sleep(0.5)
        self.write()

    def _here(self, part: str, job: Job) -> None:
        try:
            for row in job.rows():
                self.results['parts'][part].append(json.loads(json.dumps(row)))
        except Exception as error:
            self.leave_out(part, job, f'{type(error).__name__}: {error}')
        self.write()


class _Process:
    """A job's process, its rows so far, and why it ended before its end."""

    def __init__(self, job: Job, seconds: float) -> None:
        self.job, self.end = job, time.monotonic() + seconds
        self.folder = tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name, 'rows')
        self.file.touch()
        self.errors = Path(self.folder.name, 'errors')
        self.read, self.reason = 0, None
        with self.errors.open('w') as errors:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'benchmarks.gpu.session', job.function]
                + [json.dumps(job.keywords), str(self.file)],
                cwd=REPO,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )

    def new_rows(self) -> list[dict]:
        """The whole lines that were written since the last time."""
        with self.file.open() as file:
            file.seek(self.read)
            text = file.read()
        whole = text.rpartition('\n')[0]
        self.read += len(whole.encode()) + bool(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def ended(self) -> bool:
        """Whether the process is over, by itself or because its time is."""
        code = self.process.poll()
        if code is None and time.monotonic() > self.end:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait()
            self.reason = 'ended after its time'
        elif code is None:
            return False
        elif code != 0:
            last = self.errors.read_text(errors='replace').strip().splitlines()[-3:]
            self.reason = f'exit status {code}: {" / ".join(last)}'[:500]
        return True


def main() -> None:
    function, keywords, rows = sys.argv[1:]
    with open(rows, 'a') as file:
        for row in Job(function, json.loads(keywords)).rows():
            file.write(json.dumps(row) + '\n')
            file.flush()


if __name__ == '__main__':
    main()
