"""The Triton backend without a device: kernels interpreted, and what they promise the compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('triton', reason='the Triton backend is optional')


# The tests of ``interpreted_kernels.py`` in shares, so that several workers have some.
SHARES = ['every_variant', 'every_head_width_and_layout', 'every_size or any_strides or magnitudes']


@pytest.mark.parametrize(
    'file, share',
    [
        *(('interpreted_kernels.py', share) for share in SHARES),
        ('interpreted_kernels.py', f'not ({" or ".join(SHARES)})'),
        ('interpreted_depthwise.py', 'test'),
        ('interpreted_norm.py', 'test'),
    ],
)
def test_interpreted_kernels(file, share, tmp_path):
    """In a process that interprets."""
    environment = {**os.environ, 'TRITON_INTERPRET': '1', 'OMP_NUM_THREADS': '1'}
    command = [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', '-k', share]
    command += [str(Path(__file__).with_name(file))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert ' passed' in done.stdout and 'skipped' not in done.stdout
