"""Set up the environment of one dependency line; ``make env`` calls it.

Every step looks first at what is there, so an interrupted run goes on where it stopped, and a run
after which nothing changed ends at once. Needs nothing but Python's standard library.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mmcv_wheel
from environment import REQUIREMENTS, ROOT, Environment, Progress, SetupError, clock, locked, pins
from machine import PYTHONS, check_compiler, check_python, check_space

LINES = {'onedl': ROOT / '.venv', 'upstream': ROOT / '.venv-upstream'}
TORCHVISION_CPU = Path(__file__).with_name('torchvision_cpu')
BUILD_TOOLS = ('setuptools', 'wheel', 'ninja', 'psutil', 'packaging', 'click', 'numpy')


def check_machine(env: Environment) -> None:
    """Refuse a machine without Python, space or compiler, before anything is written."""
    check_python()
    check_space(env, mmcv_wheel.cache_root())
    if not mmcv_wheel.ready_made(env.line):
        check_compiler()


def create(env: Environment) -> None:
    """Create the environment unless a working one is there."""
    version = ''
    if env.python.exists():
        version = env.ask('import sys; print("%d.%d" % sys.version_info[:2])').stdout.strip()
    if version:
        if not (env.path / 'pyvenv.cfg').exists() and not (env.path / 'conda-meta').exists():
            raise SetupError(
                f'{env.path} is a Python installation and no environment: create one with '
                f'{env.python} -m venv PATH and give VENV=PATH'
            )
        if version not in PYTHONS:
            raise SetupError(
                f'{env.path} has Python {version}, and it has to be one of {", ".join(PYTHONS)}: '
                'remove the environment or name another with VENV=path'
            )
        env.progress.note(f'it is there, with Python {version}')
        if env.ask('import pip._internal.cli.main').returncode:
            env.run(env.python, '-m', 'ensurepip', what='installing pip')
        return
    half_made = env.path in LINES.values() and (env.path / 'pyvenv.cfg').exists()
    if env.path.exists() and any(env.path.iterdir()) and not half_made:
        raise SetupError(
            f'{env.path} exists and is no working Python environment: remove it or name another '
            'with VENV=path'
        )
    command = [sys.executable, '-m', 'venv', '--clear', str(env.path)]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        cause = (result.stderr or result.stdout).strip().splitlines()[-1]
        raise SetupError(f'{" ".join(command)} failed: {cause}')


def refuse_other_line(env: Environment, installed: dict) -> None:
    """Return the two lines install the same modules, one over the other."""
    ours = pins(f'{env.line}.txt')
    for line in LINES:
        for name in pins(f'{line}.txt').keys() - ours.keys():
            if name in installed:
                raise SetupError(
                    f'{env.path} holds {name} {installed[name]} of the {line} line, and the lines '
                    f'cannot share an environment: use LINE={line} or another VENV=path'
                )


def write_constraints(env: Environment) -> None:
    """Return the pins, with the torch and torchvision that are installed in the place of ours."""
    installed = env.installed()
    text = (REQUIREMENTS / 'constraints.txt').read_text()
    if 'torch' in installed:
        # Another torch than ours needs another torchvision too; pip knows which.
        other = installed['torch'].split('+')[0] != pins('constraints.txt')['torch']
        for name in ('torch', 'torchvision'):
            if name in installed or other:
                pin = f'{name}=={installed[name]}' if name in installed else ''
                text = re.sub(rf'^{name}==.*$', pin, text, flags=re.MULTILINE)
    env.constraints.write_text(text)


def install_torch(env: Environment) -> None:
    """Install torch and the build tools; a torch that is there stays."""
    installed = env.installed()
    refuse_other_line(env, installed)
    if 'torch' in installed:
        env.progress.note(f'torch {installed["torch"]} is there and stays')
    write_constraints(env)
    env.pip(
        'install', '-c', env.constraints, 'torch', *BUILD_TOOLS, what='installing torch and tools'
    )
    write_constraints(env)


def install_packages(env: Environment) -> None:
    """mala_mm as a link to the checkout, with its line and what the tests need."""
    triton = () if 'triton' in env.installed() else ('-r', REQUIREMENTS / 'triton.txt')
    env.pip(
        *('install', '-c', env.constraints, '--no-build-isolation', 'torchvision', *triton),
        *('-e', f'.[{env.line},test]'),
        what='installing the packages',
    )


def fix_torchvision(env: Environment) -> None:
    """Make a CUDA build of torchvision importable beside a CPU build of torch."""
    code = 'import torch, torchvision'
    result = env.ask(code)
    if 'operator torchvision::nms does not exist' in result.stderr:
        env.progress.note('it is a CUDA build beside a CPU build of torch: declaring its operators')
        with tempfile.TemporaryDirectory() as folder:  # because setuptools builds in the source
            source = shutil.copytree(TORCHVISION_CPU, Path(folder, 'source'))
            env.pip(
                *('install', '--no-deps', '--no-build-isolation', source),
                what='installing torchvision-cpu-schemas',
            )
        result = env.ask(code)
    if result.returncode:
        cause = result.stderr.strip().splitlines()[-1]
        raise SetupError(
            f'torchvision cannot be imported ({cause}): install the one that was built for the '
            f'torch in {env.path}, then run the same command again'
        )


def verify(env: Environment) -> None:
    """Look for conflicts of versions, then let the doctor look."""
    env.pip('check', what='pip check')
    env.run(env.python, '-m', 'mala_mm.doctor', what='python -m mala_mm.doctor')


def fingerprint(env: Environment) -> str:
    """Change with the pins, with the set-up, with a move, and with what it has installed."""
    files = [ROOT / 'pyproject.toml', ROOT / 'setup.py', *sorted(REQUIREMENTS.glob('*.txt'))]
    files += sorted(p for p in Path(__file__).parent.rglob('*') if p.suffix in ('.py', '.toml'))
    packages = (p.name for p in env.path.glob('lib/python3*/site-packages/*.dist-info'))
    digest = hashlib.sha256(f'{env.line} {env.path} {ROOT} {sorted(packages)}'.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def set_up(line: str, path: Path) -> None:
    """Bring an environment to the state of the pins; at once if it is there already."""
    if line not in LINES:
        raise SetupError(f'LINE={line} is unknown, it has to be one of {", ".join(LINES)}')
    # Made absolute without following links, because bin/python is one.
    env = Environment(Path(os.path.abspath(path)), line, Progress(steps=7))
    # For the whole checkout, because both lines build mala_mm in it.
    with locked(ROOT / '.venv.lock', env.progress):
        if env.python.exists() and env.stamp.exists():
            if env.stamp.read_text() == fingerprint(env):
                print(f'{path} is ready ({line} line)', flush=True)
                return
            env.stamp.unlink()
        print(f'setting up {path} ({line} line) with Python {platform.python_version()}')
        steps = {
            'checking the machine': check_machine,
            'creating the environment': create,
            'torch and build tools': install_torch,
            'mmcv with compiled operators': mmcv_wheel.provide,
            'OpenMMLab packages and mala_mm': install_packages,
            'torchvision': fix_torchvision,
            'checking the environment': verify,
        }
        for title, step in steps.items():
            env.progress.start(title)
            step(env)
        env.stamp.write_text(fingerprint(env))
        print(f'{path} is ready after {clock(time.monotonic() - env.progress.began)}', flush=True)


def main() -> int:
    """Set up from the command line."""
    parser = argparse.ArgumentParser(prog='setup_env', description=__doc__.splitlines()[0])
    parser.add_argument('--line', default='onedl', help='onedl (default) or upstream')
    parser.add_argument('--venv', type=Path, default=ROOT / '.venv', help='the environment')
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        set_up(arguments.line, arguments.venv)
    except (SetupError, OSError) as error:  # such as a cache that cannot be written
        print(f'error: {error}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print('\ninterrupted: the same command goes on from here', file=sys.stderr)
        return 130
    return 0


if __name__ == '__main__':
    sys.exit(main())
