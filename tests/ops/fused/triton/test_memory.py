"""Tensors anywhere in memory: strides, layouts, slices, offsets."""

import ctypes
import mmap

import pytest
import torch

from mala_mm import ops
from mala_mm.ops.fused import library
from mala_mm.ops.fused.triton import launch


def operator_results(kind, q, k, v, grad, size, backend):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    function = getattr(ops, f'{kind}_attention')
    out = function(*leaves, size=size, backend=backend)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def poisoned(device, shape, strides, start=0, dtype=torch.float32):
    """A view with the given strides into memory that is NaN elsewhere."""
    length = start + sum((n - 1) * abs(s) for n, s in zip(shape, strides)) + 1
    memory = torch.full((length,), float('nan'), dtype=dtype, device=device)
    view = memory.as_strided(shape, strides, start)
    view.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(start)))
    return view


LAYOUTS = {
    'contiguous': (0, lambda h, n, d: (h * n * d, n * d, d, 1)),
    'token-major slice': (32, lambda h, n, d: (n * 4 * h * d, d, 4 * h * d, 1)),
    'token-major unaligned': (3, lambda h, n, d: (n * (h * d + 1), d, h * d + 1, 1)),
    'channel-first slice': (0, lambda h, n, d: (4 * h * d * n, d * n, 1, n)),
    'channel-first unaligned': (1, lambda h, n, d: (h * d * (n + 3), d * (n + 3), 1, n + 3)),
    'every other token and channel': (0, lambda h, n, d: (4 * h * n * d, 4 * n * d, 4 * d, 2)),
}


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('kind', library.KINDS)
def test_any_strides(device, kind, layout):
    shape = (2, 2, 36, 32)
    start, strides = LAYOUTS[layout]
    q, k, v = (poisoned(device, shape, strides(*shape[1:]), start + 32 * i) for i in range(3))
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(device)
    ours = operator_results(kind, q, k, v, grad, (4, 9), 'triton')
    dense = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
    plain = operator_results(kind, *dense, grad, (4, 9), 'reference')
    for name, a, b in zip(('out', 'dq', 'dk', 'dv'), ours, plain):
        assert a.isfinite().all(), name
        # 36 + 32 products in float32 on either side, each rounded by 6e-8, amplified by 1 + z < 10
        assert (a - b).norm() <= 2e-6 * b.norm(), name
    if layout != 'every other token and channel':
        orders = [sorted(range(4), key=lambda axis: -x.stride(axis)) for x in (ours[0], q)]
        assert orders[0] == orders[1], 'the layout of the output is not that of q'


def test_mixed_strides_and_an_expanded_gradient(device):
    """q token-major, k channel-first, v contiguous, the gradient of a sum (all strides 0)."""
    shape = (2, 2, 36, 32)
    layouts = ('token-major slice', 'channel-first slice', 'contiguous')
    q, k, v = (
        poisoned(device, shape, LAYOUTS[name][1](*shape[1:]), LAYOUTS[name][0] + i)
        for i, name in enumerate(layouts)
    )
    grad = torch.ones((), device=device).expand(shape)
    ours = operator_results('mala', q, k, v, grad, (4, 9), 'triton')
    plain = operator_results('mala', q, k, v, grad, (4, 9), 'reference')
    for name, a, b in zip(('out', 'dq', 'dk', 'dv'), ours, plain):
        # the gradient of a sum nearly cancels in dq and dk: compare with the size of v's
        assert (a - b).norm() <= 1e-5 * max(b.norm(), 1), name


def test_offsets_beyond_32_bits(device):
    """Tokens 2^28 elements apart and images 2^32: nearly all of it memory that is never touched."""
    if device == 'cuda':
        pytest.skip('16 GiB of addresses: only the interpreter has them without memory')
    no_reserve = 0x4000  # MAP_NORESERVE: address space alone
    tokens, token_stride, image_stride = 15, 2**28, 2**32 + 64
    length = image_stride + tokens * token_stride
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    with mmap.mmap(-1, 2 * length, flags=flags) as memory:
        address = (ctypes.c_char * 1).from_buffer(memory)
        huge = torch.frombuffer(memory, dtype=torch.float16)
        del address
        views = [
            huge.as_strided((2, 1, tokens, 32), (image_stride, 32, token_stride, 1), 32 * i)
            for i in range(8)
        ]
        generator = torch.Generator().manual_seed(0)
        for view in views[:4]:
            view.copy_(torch.randn(view.shape, generator=generator))
        q, k, v, grad, out, dq, dk, dv = views
        problem = library.Problem('mala', 'published', 3, 5, 32**-0.5, 1e-6, True)
        states = torch.empty(2, 1, 34, 32)
        launch.forward(problem, (q, k, v), out, states)
        launch.backward(problem, grad, (q, k, v), states, (dq, dk, dv))
        plain = operator_results('mala', *(x.clone() for x in (q, k, v, grad)), (3, 5), 'reference')
        for name, a, b in zip(('out', 'dq', 'dk', 'dv'), (out, dq, dk, dv), plain):
            # Half a unit of fp16, 2^-11, for each rounding: of a result here and in the reference,
            # and on the way to a gradient of four factors of two products.
            assert (a.float() - b.float()).norm() <= 6 * 2.0**-11 * b.float().norm(), name
        del views, view, huge, q, k, v, grad, out, dq, dk, dv, a
