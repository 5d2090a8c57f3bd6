"""What the compiler makes of the kernels around the attention, in a process that compiles."""

import inspect
import os
import subprocess
import sys

import pytest

pytest.importorskip('triton', reason='the Triton backend is optional')

import triton

from benchmarks import aot, aot_block
from mala_mm.ops.fused.triton import rows, stencil


def compiled(repo, tmp_path, *arguments):
    """The lines of the table, as ``python -m benchmarks.aot_block`` makes them."""
    environment = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'}
    command = [sys.executable, '-m', 'benchmarks.aot_block', '--out', str(tmp_path / 'table.md')]
    subprocess.run(
        [*command, *arguments], env=environment, cwd=repo, check=True, capture_output=True
    )
    return [x for x in (tmp_path / 'table.md').read_text().splitlines() if 'sm_' in x]


def check(line):
    """A kernel is as it should be."""
    case, _, _, _, spills, _, loop, loads, sums, _, floor, _ = (
        cell.strip() for cell in line.strip('|').split('|')
    )
    # two registers of 4 bytes may be, in float32; their stores and loads are in the loop's count
    assert int(spills) <= (8 if 'fp32' in case else 0) and int(loop) > 0, line
    # the maps: as wide as a thread's share of a tile, never single elements
    widths = [int(load.split(' x ')[1].removesuffix(' B')) for load in loads.split(', ')]
    assert max(widths) >= 4, line
    wide = case.startswith(aot_block.NORM) or case.startswith('feed-forward, forward')
    assert not wide or 16 in widths, line
    # shares of the weights' gradients are little beside the maps
    assert float(sums) * 1024 < float(floor) * 1e-6 * aot.BANDWIDTH / 20, line


def test_kernels_fit(repo, tmp_path):
    lines = compiled(repo, tmp_path, '--arch', '90', '--dtype', 'bf16')
    assert len(lines) == 2 * (len(aot_block.CONVOLUTIONS) + 1)
    for line in lines:
        check(line)


@pytest.mark.slow
def test_the_table_is_what_is_compiled(repo, tmp_path):
    """It is of the Triton that it names; another makes other code."""
    table = aot_block.RESULTS.read_text()
    comparable = f'with Triton {triton.__version__};' in table
    for line in compiled(repo, tmp_path):
        check(line)
        assert line in table or not comparable, f'run python -m benchmarks.aot_block, new: {line}'


@pytest.mark.parametrize(
    ('module', 'names'),
    [(stencil, ('convolve', 'backward')), (rows, ('residual_norm', 'backward_norm'))],
    ids=['stencil', 'rows'],
)
def test_no_run_time_integer_specialises(module, names):
    """A new H x W must find its kernel compiled: what is no constant and no tensor is known."""
    tensors = {'x', 'y', 'g', 'dx', 'weight', 'bias', 'part', 'branch', 'keep', 'total'}
    others = tensors | {'dtotal', 'dy', 'dbranch', 'eps'}
    for name in names:
        for parameter in inspect.signature(getattr(module, name).fn).parameters:
            if parameter.isupper() or parameter in others:
                continue
            assert parameter in module.RUNTIME_INTEGERS, f'{name}: {parameter}'
