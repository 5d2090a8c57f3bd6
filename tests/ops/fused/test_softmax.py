"""The fused softmax attention of the CPU against its equation."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mala_mm import ops
from mala_mm.ops.fused import softmax
from mala_mm.ops.fused.cpu import softmax as cpu
from mala_mm.ops.operators.softmax import _equations

_REASON = cpu.why_not(torch.zeros(1, 1, 1, 32))
compiled = pytest.mark.skipif(_REASON is not None, reason=f'the C code {_REASON}')

# Blocks of 64 queries and d keys, cut and whole; (B, heads, H, W, d).
SHAPES = [(1, 1, 1, 1, 32), (2, 2, 7, 7, 64), (1, 3, 13, 21, 96), (1, 2, 16, 16, 128)]


def inputs(shape, dtype, token_major=True):
    batch, heads, height, width, d = shape
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4, batch, heads, height * width, d, generator=generator).to(dtype)
    q, k, v, grad = parts.unbind()
    if token_major:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (2 * q, k, v))
    return [t.detach().requires_grad_() for t in (q, k, v)], grad, (height, width)


def outcomes(function, tensors, grad, size, rotary, dtype=None):
    dtype = dtype or tensors[0].dtype
    tensors = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out = function(*tensors, size, tensors[0].shape[-1] ** -0.5, rotary)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad.to(dtype))]


def error(x, exact):
    return (x.double() - exact).norm().item()


@compiled
@pytest.mark.parametrize('dtype', cpu.DTYPES, ids=str)
@pytest.mark.parametrize('rotary', [True, False])
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_loses_no_more_than_plain_pytorch(shape, rotary, dtype):
    tensors, grad, size = inputs(shape, dtype)
    exact = outcomes(_equations, tensors, grad, size, rotary, torch.float64)
    plain = outcomes(_equations, tensors, grad, size, rotary)
    fused = outcomes(softmax.softmax_attention, tensors, grad, size, rotary)
    for name, x, y, z in zip(('out', 'dq', 'dk', 'dv'), fused, plain, exact):
        assert x.dtype == dtype
        # 1.5 times what PyTorch loses, or two units in the last place of the gradient that comes
        # in where that is less: with one token dq and dk are differences of two such numbers.
        allowed = max(1.5 * error(y, z), 2 * torch.finfo(dtype).eps * grad.double().norm().item())
        assert error(x, z) <= allowed, name


def gated_inputs(shape, dtype, memory_format):
    batch, heads, height, width, d = shape
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(batch, 6 * heads * d, height, width, generator=generator).to(dtype)
    qkvo, lepe, grad = parts.split((4 * heads * d, heads * d, heads * d), 1)
    return [t.clone(memory_format=memory_format).requires_grad_() for t in (qkvo, lepe)], grad


def gated_outcomes(function, tensors, grad, heads, dtype=None):
    tensors = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    out = function(*tensors, heads)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad.to(out.dtype))]


def by_the_book(qkvo, lepe, heads):
    """The equations of the mixer."""
    q, k, v, o = (ops.registry.split_heads(x, heads) for x in qkvo.chunk(4, 1))
    y = _equations(q, k, v, qkvo.shape[2:], 0.125, True)
    return (y.transpose(2, 3).reshape(lepe.shape) + lepe) * qkvo.chunk(4, 1)[3]


@compiled
@pytest.mark.parametrize('dtype', cpu.DTYPES, ids=str)
@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_gated_form_loses_no_more_than_plain_pytorch(shape, memory_format, dtype):
    tensors, grad = gated_inputs(shape, dtype, memory_format)
    heads = shape[1]

    def fused(qkvo, lepe, heads):
        return softmax.gated_softmax_attention(qkvo, lepe, heads, 0.125, True)

    exact = gated_outcomes(by_the_book, tensors, grad, heads, torch.float64)
    plain = gated_outcomes(by_the_book, tensors, grad, heads)
    results = gated_outcomes(fused, tensors, grad, heads)
    with torch.no_grad():
        assert torch.equal(fused(*tensors, heads), results[0])
    for name, x, y, z in zip(('out', 'dqkvo', 'dlepe'), results, plain, exact):
        assert x.dtype == dtype and x.shape == z.shape
        assert x.is_contiguous(memory_format=memory_format) or x.shape[2:] == (1, 1)
        # As above.
        allowed = max(1.5 * error(y, z), 2 * torch.finfo(dtype).eps * z.norm().item())
        assert error(x, z) <= allowed, name


@compiled
def test_mixers_take_the_gated_form_and_keep_little():
    """Kept: the packed projection, the local position, y, and the sums of exponentials."""
    operator = ops.build_operator('softmax', 2, 32)
    tensors, grad = gated_inputs((2, 2, 5, 6, 32), torch.float32, torch.channels_last)
    qkvo, lepe = tensors
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        out = operator.gated(qkvo, lambda v: lepe + v)
    assert sorted(t.numel() for t in kept.values()) == [2 * 2 * 30, *2 * [2 * 64 * 30], 4 * 3840]
    expected = by_the_book(qkvo.double(), (lepe + qkvo.chunk(4, 1)[2]).double(), 2)
    # scale 32 ** -0.5 rather than 0.125
    assert out.shape == expected.shape
    results = torch.autograd.grad(out, tensors, grad)
    plain = super(type(operator), operator).gated(qkvo, lambda v: lepe + v)
    for x, y in zip((out, *results), (plain, *torch.autograd.grad(plain, tensors, grad))):
        assert (x - y).norm() <= 1e-5 * y.norm()  # some thirty terms, roundings of 6e-8


@compiled
@pytest.mark.parametrize('batch', [1, 3])
def test_gradients_repeat_whatever_the_number_of_threads(batch):
    tensors, grad = gated_inputs((batch, 2, 19, 17, 32), torch.float32, torch.channels_last)
    threads = torch.get_num_threads()

    def fused(qkvo, lepe, heads):
        return softmax.gated_softmax_attention(qkvo, lepe, heads, 0.125, True)

    try:
        results = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            results.append(gated_outcomes(fused, tensors, grad, 2))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@compiled
def test_large_scores_and_a_growing_maximum():
    """The largest score comes last, far above the others: what was summed before fades away."""
    q = torch.ones(1, 1, 100, 32)
    k = torch.linspace(0, 20, 100).view(1, 1, 100, 1).expand(-1, -1, -1, 32).contiguous()
    v = torch.arange(100.0).view(1, 1, 100, 1).expand(-1, -1, -1, 32).contiguous()
    out = softmax.softmax_attention(q, k, v, (10, 10), 1.0, False)
    exact = _equations(q.double(), k.double(), v.double(), (10, 10), 1.0, False)
    # scores up to 640 are rounded to 640 * 6e-8, their exponentials to as much
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=0)
    q[0, 0, 3] = float('nan')
    out = softmax.softmax_attention(q, k, v, (10, 10), 1.0, False)
    assert out[0, 0, 3].isnan().all() and out[0, 0, 4:].isfinite().all()


@compiled
def test_results_repeat_whatever_the_number_of_threads():
    tensors, grad, size = inputs((2, 2, 9, 17, 64), torch.float32)
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(softmax.softmax_attention(*tensors, size, 0.125, True))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@compiled
def test_the_public_operator_uses_it_for_any_strides():
    for token_major in (True, False):
        tensors, _, size = inputs((2, 2, 5, 6, 32), torch.float32, token_major)
        expected = softmax.softmax_attention(*tensors, size, 32**-0.5, True)
        assert torch.equal(ops.softmax_attention(*tensors, size=size), expected)
    tensors[0].data = tensors[0].data.mT.contiguous().mT  # channels apart
    assert torch.equal(ops.softmax_attention(*tensors, size=size), expected)


@compiled
def test_is_a_proper_operator():
    tensors, _, _ = inputs((1, 2, 3, 4, 32), torch.float32)
    tests = ('test_schema', 'test_autograd_registration', 'test_faketensor')
    arguments = (*tensors, 3, 4, 0.125, True)
    torch.library.opcheck(torch.ops.mala_mm.softmax_attention, arguments, test_utils=tests)
    packed, _ = gated_inputs((1, 2, 3, 4, 32), torch.float32, torch.channels_last)
    op = torch.ops.mala_mm.gated_softmax_attention
    for keep in (True, False):
        tests = tests if keep else tests[::2]
        torch.library.opcheck(op, (*packed, 2, 0.125, True, keep), test_utils=tests)


@compiled
def test_counts_as_the_products_that_it_is():
    tensors, _, size = inputs((2, 3, 4, 5, 32), torch.float32)
    with FlopCounterMode(display=False) as counter:
        softmax.softmax_attention(*tensors, size, 1.0, True)
        packed, _ = gated_inputs((2, 3, 4, 5, 32), torch.float32, torch.channels_last)
        softmax.gated_softmax_attention(*packed, 3, 1.0, True)
    assert counter.get_total_flops() == 2 * 2 * 2 * (4 * 5) ** 2 * 32 * 2 * 3  # B = 2, three heads
