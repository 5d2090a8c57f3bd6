"""What the compiler makes of the kernels, in a process that compiles: no device is needed."""

import inspect
import json
import os
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip('triton', reason='the Triton backend is optional')

import triton

from benchmarks import aot, aot_block
from mala_mm.ops.fused.triton import kernels, tiling

# Each pass once, as the published models run it, and the fullest kernels of the others.
FEW = [
    'reduce_keys d64 bf16 sm_90 mala',
    'apply_queries d64 bf16 sm_90 mala gated',
    'backward_gate d64 fp16 sm_90 mala',
    'backward_queries d64 bf16 sm_90 mala',
    'backward_keys d64 bf16 sm_80 mala',
    'backward_queries d96 bf16 sm_90 mala',
    'backward_keys d96 fp16 sm_90 rala',
]
SPILLS = 24 * 4  # a few registers of 4 bytes; their stores and loads are counted with the loop
UNALIGNED = 'reduce_keys d32 bf16 sm_90 mala unaligned'


def compiled(repo, tmp_path, *arguments):
    """The reports by case, as ``python -m benchmarks.aot`` makes them."""
    environment = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'}
    command = [sys.executable, '-m', 'benchmarks.aot', '--json', str(tmp_path / 'aot.json')]
    command += ['--out', str(tmp_path / 'aot.md'), *arguments]
    subprocess.run(command, env=environment, cwd=repo, check=True, capture_output=True)
    lines = (tmp_path / 'aot.json').read_text().splitlines()
    return {report['case']: report for report in map(json.loads, lines)}


@pytest.fixture(scope='module')
def few(repo, tmp_path_factory):
    return compiled(repo, tmp_path_factory.mktemp('aot'), '--case', *FEW, UNALIGNED)


def check(name, report):
    """A kernel fits, and is as it should be."""
    case, line = aot.Case.parse(name), report['line']
    assert str(case) == name
    dtype = aot.DTYPES[case.dtype]
    assert report['spills'] <= SPILLS, line
    assert report['shared'] <= 1024 * tiling.shared_memory(case.arch), line
    if case.arch == 80:  # its tiles serve consumer devices too, whose programs have less
        refused = tiling.lacks_memory(case.head_dim, dtype, 89)
        assert report['shared'] <= 1024 * (104 if refused else tiling.shared_memory(89)), line
    assert report['tensor_core'] >= report['dots'], line
    assert report['loads'].get('16', 0) > 0, line
    assert report['bare'] == 0, line
    least = tiling.default_tiling(case.name, case.head_dim, dtype, case.arch)
    assert report['resident'] >= least.residency, line
    # aligned memory: nothing is loaded in single elements of 2 bytes
    assert '2' not in report['loads'], line
    # A NaN goes through every minimum and maximum; where a maximum only chooses a scale, or RALA's
    # exponentials are taken relative to it, the numbers that it is chosen for keep theirs.
    if case.dtype == 'bf16' and case.kind == 'mala':
        assert report['swallows'] == 0, line


@pytest.mark.parametrize('name', FEW)
def test_kernels_fit(few, name):
    check(name, few[name])


def test_unaligned_memory_takes_another_way(few):
    """Strides that 16 bytes do not divide: narrower loads, the same kernel."""
    assert few[UNALIGNED]['spills'] <= SPILLS
    assert few[UNALIGNED]['loads'].get('2', 0) > 0


def test_the_tables_are_of_the_pinned_triton(repo):
    """Otherwise nothing would be compared where the pins are installed."""
    (pin,) = re.findall(r'^triton==(\S+)', (repo / 'requirements/triton.txt').read_text(), re.M)
    for table in (aot.RESULTS, aot_block.RESULTS):
        assert f'with Triton {pin};' in table.read_text(), table


@pytest.mark.slow
@pytest.mark.parametrize('head_dim', [64, 96])
@pytest.mark.parametrize('dtype', ['bf16', 'fp16'])
def test_what_the_published_models_run_fits(repo, tmp_path, dtype, head_dim):
    """``benchmarks/results/aot.md`` is the table of the Triton that it names."""
    table = aot.RESULTS.read_text().splitlines()
    comparable = any(f'with Triton {triton.__version__};' in line for line in table)
    reports = compiled(repo, tmp_path, '--head-dim', str(head_dim), '--dtype', dtype)
    for name, report in reports.items():
        check(name, report)
        line = report['line']
        assert line in table or not comparable, f'run python -m benchmarks.aot, this is new: {line}'


@pytest.mark.parametrize('capability, refused', [(80, False), (86, True), (90, False), (120, True)])
def test_a_device_with_little_shared_memory_is_told(capability, refused):
    reason = tiling.lacks_memory(96, torch.float32, capability)
    assert (reason is not None) == refused
    if refused:
        assert f'float32 at d > 64, got compute capability {capability / 10}' in reason
    assert tiling.lacks_memory(64, torch.float32, capability) is None
    assert tiling.lacks_memory(128, torch.bfloat16, capability) is None


def test_no_run_time_integer_specialises():
    """A new H x W must find its kernel compiled: only alignment and types make another one."""
    for name in (*tiling.PASSES, 'combine'):
        for parameter in inspect.signature(getattr(kernels, name).fn).parameters:
            pointer = parameter in aot.FLOAT32_POINTERS or parameter in aot.MAPS
            if parameter.isupper() or parameter in aot.FLOATS or pointer:
                continue
            assert parameter in kernels.RUNTIME_INTEGERS, f'{name}: {parameter}'
