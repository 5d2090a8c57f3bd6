"""What the compiler makes of the kernels around the attention: no device is needed."""

import os

import pytest

pytest.importorskip('triton', reason='the Triton backend is optional')
if os.environ.get('TRITON_INTERPRET') == '1':
    pytest.skip('with TRITON_INTERPRET=1 nothing is compiled', allow_module_level=True)

from benchmarks import aot_block

FEW = [
    aot_block.Case('feed-forward', False, 'bf16', 90),
    aot_block.Case('local position', True, 'fp16', 80),
    aot_block.Case(aot_block.NORM, True, 'bf16', 90),
]


def check(case):
    """The line of a kernel in the table, if it is as it should be."""
    report, issue, moved, sums = aot_block.compile_case(case)
    line = aot_block.row(case, report, issue, moved, sums)
    assert report.spills == 0, line
    # the maps: as wide as a thread's share of a tile, never single elements
    assert report.loop > 0 and max(report.loads) >= 4, line
    wide = case.layer == aot_block.NORM or (case.layer == 'feed-forward' and not case.backward)
    assert not wide or report.loads.get(16, 0) > 0, line
    assert sums < moved / 20, line  # shares of the weights' gradients are little beside the maps
    return line


@pytest.mark.parametrize('case', FEW, ids=str)
def test_kernels_fit(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['bf16', 'fp16', 'fp32'])
def test_the_table_is_what_is_compiled(dtype):
    table = aot_block.RESULTS.read_text().splitlines()
    for case in aot_block.cases(dtypes=[dtype]):
        line = check(case)
        assert line in table, f'run python -m benchmarks.aot_block, this is new: {line}'


def test_no_run_time_integer_specialises():
    """A new H x W must find its kernel compiled."""
    from mala_mm.ops.fused.triton import rows, stencil

    for module, names in (
        (stencil, ('convolve', 'backward')),
        (rows, ('residual_norm', 'backward_norm')),
    ):
        for name in names:
            free = {p.name for p in getattr(module, name).params if not p.is_constexpr}
            numbers = free & set(module.RUNTIME_INTEGERS)
            assert all(
                p.do_not_specialize for p in getattr(module, name).params if p.name in numbers
            )
            # whatever else is not a constant is a tensor, or the norm's epsilon
            tensors = {'x', 'y', 'g', 'dx', 'weight', 'bias', 'part', 'branch', 'keep', 'total'}
            assert free - numbers <= tensors | {'dtotal', 'dy', 'dbranch', 'eps'}, name
