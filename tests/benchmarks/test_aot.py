"""What the compiler makes of the kernels, for sm_80 and sm_90: no device is needed."""

import os
import re

import pytest
import torch

pytest.importorskip('triton', reason='the Triton backend is optional')
if os.environ.get('TRITON_INTERPRET') == '1':
    pytest.skip('with TRITON_INTERPRET=1 nothing is compiled', allow_module_level=True)

from benchmarks import aot
from mala_mm.ops.fused.triton import plan

# Each pass once, as the published models run it in bf16, and the fullest kernels of the others.
FEW = [
    aot.Case('reduce_keys', 64, 'bf16', 90),
    aot.Case('apply_queries', 64, 'bf16', 90, gated=True),
    aot.Case('backward_gate', 64, 'fp16', 90),
    aot.Case('backward_queries', 64, 'bf16', 90),
    aot.Case('backward_keys', 64, 'bf16', 80),
    aot.Case('backward_queries', 96, 'bf16', 90),
    aot.Case('backward_keys', 96, 'fp16', 90, kind='rala'),
]


def check(case):
    """The line of a kernel in the table, if it is as it should be."""
    report = aot.inspect(case, *aot.compile_case(case))
    line = aot.row(case, report)
    assert report.spills == 0, line
    assert report.shared <= 1024 * plan.shared_memory(case.arch), line
    if case.arch == 80:  # its configurations serve consumer devices too, whose programs have less
        refused = plan.lacks_memory(case.head_dim, aot.DTYPES[case.dtype], 89)
        assert report.shared <= 1024 * (104 if refused else plan.shared_memory(89)), line
    assert report.tensor_core >= report.dots, line
    assert report.loads.get(16, 0) > 0, line
    assert report.bare == 0, line
    least = plan.default_config(case.name, case.head_dim, aot.DTYPES[case.dtype], case.arch)
    assert report.resident >= least.residency, line
    # aligned memory: nothing is loaded in single elements of 2 bytes
    assert 2 not in report.loads, line
    return line


@pytest.mark.parametrize('case', FEW, ids=str)
def test_kernels_fit(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize('head_dim', [64, 96])
@pytest.mark.parametrize('dtype', ['bf16', 'fp16'])
def test_what_the_published_models_run_fits(dtype, head_dim):
    """``benchmarks/results/aot.md`` is the table."""
    table = aot.RESULTS.read_text().splitlines()
    for case in aot.published([90], [head_dim], [dtype]):
        line = check(case)
        assert line in table, f'run python -m benchmarks.aot, this is new: {line}'


def test_nan_is_not_swallowed():
    """PTX has a minimum and a maximum that return the number where one operand is NaN."""
    for name in ('reduce_keys', 'apply_queries'):
        ptx = aot.compile_case(aot.Case(name, 64, 'bf16', 90))[0].asm['ptx']
        assert 'ex2.approx.ftz.f32' in ptx
        assert not re.search(r'\b(min|max)\.(ftz\.)?f32', ptx), name


@pytest.mark.parametrize('capability, refused', [(80, False), (86, True), (90, False), (120, True)])
def test_a_device_with_little_shared_memory_is_told(capability, refused):
    reason = plan.lacks_memory(96, torch.float32, capability)
    assert (reason is not None) == refused
    if refused:
        assert f'float32 at d > 64, got compute capability {capability / 10}' in reason
    assert plan.lacks_memory(64, torch.float32, capability) is None
    assert plan.lacks_memory(128, torch.bfloat16, capability) is None


def test_no_run_time_integer_specialises():
    """A new H x W must find its kernel compiled: only alignment and types make another one."""
    from mala_mm.ops.fused.triton import kernels, plan

    for name in (*plan.PASSES, 'combine'):
        for parameter in getattr(kernels, name).params:
            pointer = parameter.name in aot.FLOAT32_POINTERS or len(parameter.name) <= 2
            if parameter.is_constexpr or parameter.name in aot.FLOATS or pointer:
                continue
            assert parameter.do_not_specialize, f'{name}: {parameter.name}'


def test_unaligned_memory_takes_another_way():
    """Strides that 16 bytes do not divide: narrower loads, the same kernel."""
    case = aot.Case('reduce_keys', 32, 'bf16', 90, aligned=False)
    report = aot.inspect(case, *aot.compile_case(case))
    assert report.spills == 0
    assert report.loads.get(2, 0) > 0
