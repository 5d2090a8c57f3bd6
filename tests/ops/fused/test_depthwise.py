"""The fused depthwise convolution of blocks and feed-forward networks against its equation."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mala_mm.ops.fused import depthwise
from mala_mm.ops.fused.cpu import depthwise as cpu

_REASON = cpu.why_not(torch.zeros(1, 1, 1, 1))
compiled = pytest.mark.skipif(_REASON is not None, reason=f'the C code {_REASON}')

# One row, one column, one pixel; strips of 32 columns and blocks of 64 channels, cut and whole.
SHAPES = [(1, 3, 1, 1), (2, 5, 1, 4), (1, 64, 4, 1), (2, 70, 5, 33), (1, 129, 3, 64)]


def inputs(shape, dtype=torch.float32, channels_last=True):
    generator = torch.Generator().manual_seed(0)
    x, grad = (3 * torch.randn(2, *shape, generator=generator)).to(dtype)
    if channels_last:
        x, grad = (t.contiguous(memory_format=torch.channels_last) for t in (x, grad))
    weight = torch.randn(shape[1], 1, 3, 3, generator=generator)
    bias = torch.randn(shape[1], generator=generator)
    return [t.requires_grad_() for t in (x, weight, bias)], grad


def outcomes(function, tensors, grad, gelu, dtype=None):
    if dtype is not None:
        tensors = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out = function(*tensors, gelu)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad.to(out.dtype))]


def relative_error(x, exact):
    return ((x.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize('gelu', [False, True])
def test_the_equation_agrees_with_finite_differences(gelu):
    tensors, _ = inputs((1, 3, 3, 2), torch.float64)
    tensors = [t.detach().double().requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda *t: depthwise.depthwise_residual(*t, gelu=gelu), tensors)


@compiled
@pytest.mark.parametrize('dtype', cpu.DTYPES, ids=str)
@pytest.mark.parametrize('gelu', [False, True])
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_loses_no_more_than_plain_pytorch(shape, gelu, dtype):
    tensors, grad = inputs(shape, dtype)
    exact = outcomes(depthwise.reference, tensors, grad, gelu, torch.float64)
    plain = outcomes(depthwise.reference, tensors, grad, gelu)
    fused = outcomes(depthwise.depthwise_residual, tensors, grad, gelu)
    for name, x, y, z in zip(('out', 'dx', 'dweight', 'dbias'), fused, plain, exact):
        assert x.dtype == y.dtype and x.shape == y.shape
        # 1.5 times what PyTorch loses, or a unit in the last place where that is less.
        allowed = max(1.5 * relative_error(y, z), torch.finfo(x.dtype).eps)
        assert relative_error(x, z) <= allowed, name


@compiled
def test_any_memory_format_comes_in_and_channels_last_comes_out():
    tensors, grad = inputs((2, 6, 4, 5), channels_last=False)
    expected = outcomes(depthwise.reference, tensors, grad, True)
    results = outcomes(depthwise.depthwise_residual, tensors, grad, True)
    for x, y in zip(results, expected):
        torch.testing.assert_close(x, y)
    assert results[0].is_contiguous(memory_format=torch.channels_last)


@compiled
def test_extreme_values():
    """Far from zero the GELU is 0 or x, its slope 0 or 1; what is no number stays none."""
    x = torch.tensor([-1e30, -200.0, -13.0, 0.0, 13.0, 200.0, 1e30]).view(1, -1, 1, 1)
    x.requires_grad_()
    zero = torch.zeros(7, 1, 3, 3), torch.zeros(7)
    out = depthwise.depthwise_residual(x, *zero, gelu=True)
    (slope,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(out, x.clamp(min=0), atol=1e-30, rtol=0)
    torch.testing.assert_close(slope.flatten(), torch.tensor([0, 0, 0, 0.5, 1, 1, 1]))
    out = depthwise.depthwise_residual(torch.full((1, 7, 2, 2), float('nan')), *zero, gelu=True)
    assert out.isnan().all()


@compiled
def test_results_repeat_whatever_the_number_of_threads():
    tensors, grad = inputs((2, 70, 9, 40))
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(outcomes(depthwise.depthwise_residual, tensors, grad, True))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@compiled
def test_is_a_proper_operator():
    (x, weight, bias), _ = inputs((1, 5, 4, 3))
    for gelu in (False, True):
        torch.library.opcheck(torch.ops.mala_mm.depthwise, (x, weight, bias, gelu, True, 'cpu'))


@compiled
def test_the_linear_layer_behind_it_keeps_nothing_but_the_input():
    (x, weight, bias), grad = inputs((2, 6, 5, 7))
    last = torch.nn.Conv2d(6, 4, 1)
    tensors = (x, weight, bias, last.weight, last.bias)
    grad = grad[:, :4]
    expected = last(depthwise.reference(x, weight, bias, gelu=True))
    kept = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.add(t.data_ptr()) or t, lambda t: t
    ):
        out = depthwise.gelu_depthwise_linear(*tensors)
    assert kept == {t.data_ptr() for t in (x, weight, bias, last.weight)}
    torch.testing.assert_close(out, expected)
    for x, y in zip(
        torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, tensors, grad)
    ):
        # sums of 70 products of size 10, rounded to 6e-8 each
        torch.testing.assert_close(x, y, rtol=1e-5, atol=70 * 10 * 6e-8)


@compiled
def test_refuses_a_second_derivative():
    tensors, grad = inputs((1, 2, 3, 3))
    out = depthwise.depthwise_residual(*tensors)
    (dx,) = torch.autograd.grad(out, tensors[0], grad, create_graph=True)
    with pytest.raises(RuntimeError, match='no second derivative: set MALA_MM_CPU_KERNELS=0'):
        torch.autograd.grad(dx.sum(), tensors[1])


def test_without_compiled_code_plain_pytorch_computes(monkeypatch):
    monkeypatch.setenv('MALA_MM_CPU_KERNELS', '0')
    monkeypatch.setattr(cpu, '_library', cpu._library.__wrapped__)
    tensors, grad = inputs((1, 4, 3, 3))
    assert cpu.why_not(tensors[0]).startswith('is switched off')
    out = depthwise.depthwise_residual(*tensors, gelu=True)
    assert torch.equal(out, depthwise.reference(*tensors, gelu=True))


@compiled
def test_counts_as_the_convolution_that_it_is():
    (x, weight, bias), _ = inputs((2, 6, 5, 7))
    counts = []
    for function in (depthwise.depthwise_residual, depthwise.reference):
        with FlopCounterMode(display=False) as counter:
            function(x, weight, bias, True)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
