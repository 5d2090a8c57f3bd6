"""What the machine must have, asked before anything is downloaded."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from environment import Environment, SetupError

PYTHONS = ('3.10', '3.11', '3.12')
GB = 1024**3
# An environment with a CPU build of torch takes 2.6 GB; a CUDA build takes several more.
ENVIRONMENT_SPACE = 4 * GB
TORCH_PRESENT_SPACE = 2 * GB
THIS_PYTHON = f'{sys.version_info[0]}.{sys.version_info[1]}'


def check_python() -> None:
    """Check the Python that this script runs with; the environment gets the same."""
    if THIS_PYTHON not in PYTHONS:
        raise SetupError(
            f'Python {platform.python_version()} ({sys.executable}) is not supported, it has to '
            f'be one of {", ".join(PYTHONS)}: name it with PYTHON=path'
        )
    if sys.platform != 'linux':
        raise SetupError(f'the set-up is written for Linux, this is {sys.platform}')
    if importlib.util.find_spec('venv') is None or importlib.util.find_spec('ensurepip') is None:
        raise SetupError(
            f'{sys.executable} lacks the module venv or ensurepip and cannot create environments '
            f'(Debian and Ubuntu: apt install python{THIS_PYTHON}-venv)'
        )


def check_space(env: Environment, cache: Path) -> None:
    """Refuse disks with too little room, and name the setting that moves what goes there."""
    torch = any(env.path.glob('lib/python3*/site-packages/torch-*.dist-info'))
    needs = (
        (env.path, TORCH_PRESENT_SPACE if torch else ENVIRONMENT_SPACE, 'VENV=path'),
        (Path(tempfile.gettempdir()), GB, 'TMPDIR=path'),
        (cache, GB // 4, 'XDG_CACHE_HOME=path'),
    )
    for path, needed, setting in needs:
        there = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(there).free
        if free < needed:
            raise SetupError(
                f'{there} has {free / GB:.1f} GB free, and {needed / GB:.1f} GB are needed: free '
                f'some space or choose another disk with {setting}'
            )


def check_compiler() -> None:
    """Compile two lines of C++ that include Python's headers."""
    headers = sysconfig.get_path('include')
    if not Path(headers, 'Python.h').is_file():
        raise SetupError(
            f'mmcv has to be compiled, and the headers of Python are missing ({headers}/Python.h; '
            f'Debian and Ubuntu: apt install python{THIS_PYTHON}-dev)'
        )
    compiler = os.environ.get('CXX', 'c++')
    try:
        result = subprocess.run(
            [*compiler.split(), '-std=c++17', f'-I{headers}', '-x', 'c++', '-fsyntax-only', '-'],
            input='#include <Python.h>\n#include <vector>\n',
            capture_output=True,
            text=True,
        )
    except OSError as error:
        cause = error.strerror
    else:
        cause = result.stderr.strip().split('\n')[0] if result.returncode else None
    if cause is not None:
        raise SetupError(
            f'mmcv has to be compiled, and the C++ compiler {compiler!r} does not work ({cause}): '
            'install one (Debian and Ubuntu: apt install g++) or name another with CXX=path'
        )
