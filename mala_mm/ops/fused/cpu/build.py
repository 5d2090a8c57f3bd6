"""C files of this package, compiled for this machine when first needed, kept in the user's cache.

Half a second each. Where that cannot be, the callers compute in plain PyTorch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from . import cache

DTYPES = {torch.float32: 'FLOAT32', torch.bfloat16: 'BFLOAT16', torch.float16: 'FLOAT16'}
_FOLDER = Path(__file__).parent
_FLAGS = (
    *('-O3', '-march=native', '-fopenmp', '-shared', '-fPIC', f'-I{_FOLDER}'),
    # What vector code needs; sums are reordered only where the source asks for it.
    *('-ffp-contract=fast', '-fno-math-errno', '-fno-trapping-math'),
)


def compile_library(source: Path, *defines: str) -> ctypes.CDLL | str:
    """Return the compiled form of a C file, or the reason why there is none.

    Args:
        source (Path): The file.
        *defines (str): What it is compiled with, such as ``'WIDTH=64'`` or ``'FLOAT32'``.
    """
    if os.environ.get('MALA_MM_CPU_KERNELS') == '0':
        return 'is switched off by MALA_MM_CPU_KERNELS=0'
    compiler = shutil.which(os.environ.get('CC', 'cc'))
    if compiler is None:
        return 'needs a C compiler, found none'
    command = [compiler, *_FLAGS, *(f'-D{name}' for name in defines), str(source)]
    texts = [file.read_bytes() for file in (source, *sorted(_FOLDER.glob('*.h')))]
    key = hashlib.sha256(repr((command, texts, _processor())).encode()).hexdigest()
    title = '_'.join([source.stem, *(name.rpartition('=')[2].lower() for name in defines)])

    def compile_it() -> bytes:
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch, 'library.so')
            subprocess.run(
                [*command, '-o', str(made), '-lm'],
                check=True,
                capture_output=True,
                text=True,
                timeout=120,
            )
            return made.read_bytes()

    try:
        return cache.load(f'{title}_{key[:16]}.so', compile_it)
    except cache.CacheError as error:
        return f'cannot be kept: {error}'
    except subprocess.CalledProcessError as error:
        return f'cannot be compiled: {(error.stderr.strip() or str(error)).splitlines()[0]}'
    except (OSError, subprocess.TimeoutExpired) as error:
        return f'cannot be compiled: {error}'


def _processor() -> str:
    """Return what code for "this machine" depends on; a home folder may be shared by several."""
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        return platform.platform()
    return '\n'.join(
        sorted({x for x in lines if x.startswith(('flags', 'Features', 'model name'))})
    )
