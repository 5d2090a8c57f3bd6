"""An environment, the commands that run in it, and what the user sees meanwhile."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / 'requirements'
INDENT = ' ' * 12


class SetupError(Exception):
    """Ends the set-up with one sentence for the user."""


def clock(seconds: float) -> str:
    """Minutes and seconds, as in `` 1:05``."""
    return f'{int(seconds) // 60:2d}:{int(seconds) % 60:02d}'


def pins(name: str) -> dict:
    """Names and versions of the ``name==version`` lines of a requirements file."""
    text = (REQUIREMENTS / name).read_text()
    return dict(re.findall(r'^([\w.-]+)==([\w.+-]+)', text, re.MULTILINE))


class Progress:
    """Numbered steps with the elapsed time, and a sign of life while a command runs."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.step = 0
        self.began = time.monotonic()
        self.terminal = sys.stdout.isatty()
        self.interval = 1 if self.terminal else 30

    def start(self, title: str) -> None:
        """Announce the next step."""
        self.step += 1
        elapsed = clock(time.monotonic() - self.began)
        print(f'[{self.step}/{self.steps}] {elapsed} {title}', flush=True)

    def note(self, text: str) -> None:
        """Print a line below the step."""
        self.clear()
        print(f'{INDENT}{text}', flush=True)

    def beat(self, text: str) -> None:
        """Show that a long step lives: in place on a terminal, as a line elsewhere."""
        if self.terminal:
            line = f'{INDENT}{text}'[: shutil.get_terminal_size().columns - 1]
            print(f'\r\033[K{line}', end='', flush=True)
        else:
            self.note(text)

    def clear(self) -> None:
        """Take the last beat off the terminal."""
        if self.terminal:
            print('\r\033[K', end='', flush=True)


@contextlib.contextmanager
def locked(file: Path, progress: Progress):
    """Hold the lock of a file; it goes with the process."""
    with file.open('w') as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note(f'another set-up holds {file}, waiting for it')
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class Environment:
    """A virtual or conda environment for one dependency line."""

    def __init__(self, path: Path, line: str, progress: Progress) -> None:
        self.path = path
        self.line = line
        self.progress = progress
        self.python = path / 'bin' / 'python'
        self.log = path / 'setup.log'
        self.stamp = path / 'mala_mm.stamp'
        self.constraints = path / 'constraints.txt'

    def variables(self, **extra: str) -> dict:
        """Return the process environment of the commands that run here."""
        drop = ('PYTHONPATH', 'PYTHONHOME', 'PIP_TARGET', 'PIP_PREFIX', 'PIP_USER')
        variables = {k: v for k, v in os.environ.items() if k not in drop}
        variables.update(
            PATH=f'{self.path / "bin"}{os.pathsep}{os.environ.get("PATH", "")}',
            PYTHONNOUSERSITE='1',
            PYTHONUNBUFFERED='1',
            PIP_DISABLE_PIP_VERSION_CHECK='1',
            PIP_NO_INPUT='1',
            PIP_PROGRESS_BAR='off',
        )
        if (self.path / 'pyvenv.cfg').exists():
            variables.update(VIRTUAL_ENV=str(self.path), PIP_REQUIRE_VIRTUALENV='1')
        return {**variables, **extra}

    def ask(self, code: str) -> subprocess.CompletedProcess:
        """Run a few lines of Python here and capture what they print."""
        return subprocess.run(
            [self.python, '-W', 'ignore', '-c', code],
            env=self.variables(),
            cwd=self.path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def installed(self) -> dict:
        """Versions of the installed distributions by normalised name."""
        code = (
            'import importlib.metadata as m, json\n'
            'print(json.dumps({d.metadata["Name"]: d.version for d in m.distributions()}))'
        )
        found = json.loads(self.ask(code).stdout)
        return {re.sub(r'[-_.]+', '-', name).lower(): found[name] for name in found}

    def pip(self, *arguments, what: str, check: bool = True, **variables: str) -> bool:
        """Run the environment's pip."""
        return self.run(self.python, '-m', 'pip', *arguments, what=what, check=check, **variables)

    def run(self, *command, what: str, check: bool = True, **variables: str) -> bool:
        """Run a command whose output goes to the log, and say meanwhile that it lives.

        Returns:
            bool: Whether it succeeded.

        Raises:
            SetupError: If it failed and ``check`` is set.
        """
        command = [str(part) for part in command]
        began = beat = time.monotonic()
        with self.log.open('a') as log:
            log.write(f'\n$ {" ".join(command)}\n')
            log.flush()
            start = log.tell()
            # A session of its own, so that pip's compilers can be ended with it.
            process = subprocess.Popen(
                command,
                env=self.variables(**variables),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                if time.monotonic() - beat > self.progress.interval:
                    beat = time.monotonic()
                    doing = _doing(self._output(start))
                    self.progress.beat(f'{clock(beat - began)} {what}{doing}')
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
            self.progress.clear()
        if check and process.returncode:
            output = self._output(start)
            print(*output.splitlines()[-15:], sep='\n', file=sys.stderr)
            full = 'No space left on device' in output
            cause = 'the disk is full' if full else 'its last lines stand above'
            raise SetupError(f'{what} failed: {cause}, all of them in {self.log}')
        return process.returncode == 0

    def _output(self, start: int) -> str:
        with self.log.open('rb') as log:
            log.seek(start)
            return log.read().decode(errors='replace')


def _doing(output: str) -> str:
    """Return the state of ninja's counter, or what pip does at the moment."""
    counts = re.findall(r'^\s*\[(\d+)/(\d+)\]', output, re.MULTILINE)
    if counts:
        return f': {counts[-1][0]} of {counts[-1][1]} files'
    lines = re.findall(
        r'^\s*((?:Collecting|Downloading|Building|Installing) [^:\n]*)', output, re.M
    )
    return f': {lines[-1][:60]}' if lines else ''
