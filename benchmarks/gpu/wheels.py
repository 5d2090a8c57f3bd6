"""Bring the Python packages that a GPU machine without network lacks.

    python -m benchmarks.gpu.wheels --out .whl [--python 3.12]

Downloads pure-Python wheels of mmengine, mmcv's lite build and mmpretrain with what they import;
torch, Triton, NumPy, OpenCV, Pillow, PyYAML, rich, einops and matplotlib have to be there already.
On that machine, in the checkout::

    python3 -m pip install --no-index --no-deps --target /tmp/site .whl/*.whl
    PYTHONPATH=/tmp/site python3 -m benchmarks.gpu
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

WHEELS = (
    'mmengine==0.10.7',
    'mmcv-lite==2.1.0',
    'mmpretrain==1.2.0',
    # what these import
    *(
        'addict==2.4.0',
        'yapf==0.43.0',
        'platformdirs',
        'termcolor',
        'mat4py',
        'model-index==0.1.11',
    ),
    *('ordered-set', 'importlib-metadata==7.2.1', 'zipp'),
)
LIMIT = 64 * 2**20
"""Bytes that may be brought along."""


def main(argv: list[str] | None = None) -> int:
    """Download; 1 if the wheels are too many bytes."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.gpu.wheels',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--out', type=Path, default=Path('.whl'), metavar='DIR')
    parser.add_argument('--python', default='3.12', help="the other machine's version")
    args = parser.parse_args(argv)
    command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps']
    command += ['--only-binary=:all:', '--implementation', 'py', '--abi', 'none']
    command += ['--platform', 'any', '--python-version', args.python, '--dest', str(args.out)]
    subprocess.run([*command, *WHEELS], check=True)
    found = sorted(args.out.glob('*.whl'))
    total = sum(x.stat().st_size for x in found)
    print(f'{len(found)} wheels, {total / 2**20:.1f} MiB in {args.out}')
    return int(total > LIMIT)


if __name__ == '__main__':
    sys.exit(main())
