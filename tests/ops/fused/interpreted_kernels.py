"""The Triton kernels against the float64 reference, in Triton's interpreter.

Run by ``test_triton.py`` in a process of its own: whether kernels are interpreted is decided when
Triton is imported. By hand: ``TRITON_INTERPRET=1 pytest tests/ops/interpreted_kernels.py``.

The policy on accuracy: against float64 a kernel may lose what the eager formula loses in the same
type; 1.5 times that fails. Errors are relative to the norm of the tensor, and pooled over images
and heads. Where the eager formula is exact by luck, rounding the result alone is allowed: at most
half a unit in the last place.
"""

import ctypes
import dataclasses
import functools
import mmap
import os

import pytest
import torch
import torch._dynamo.testing
import triton
import triton.language as tl

if os.environ.get('TRITON_INTERPRET') != '1':
    pytest.skip('TRITON_INTERPRET=1 has to be set before Triton loads', allow_module_level=True)

from mala_mm import ops
from mala_mm.ops.fused import library
from mala_mm.ops.fused.dispatch import eager as formula
from mala_mm.ops.fused.triton import kernels, launch, plan
from mala_mm.ops.rotary import rotary_frequencies

NAMES = ('out', 'dq', 'dk', 'dv', 'do', 'dlepe')
KINDS = {
    'mala': dict(kind='mala'),
    'mala-paper': dict(kind='mala', form='paper'),
    'rala': dict(kind='rala'),
    'linear': dict(kind='linear'),
}
DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory is NaN: what a kernel leaves out or reads too early shows."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # which fills what torch.empty returns
    assert torch.zeros(1).new_empty(64).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def eager(qkvo, lepe, heads, kind, form='published', rotary=True):
    """The formula as it is written, in the type of its inputs."""
    q, k, v, gate = (library.split_heads(x, heads) for x in qkvo.chunk(4, 1))
    y = formula(kind, q, k, v, qkvo.shape[2:], rotary=rotary, form=form)
    y = (y + library.split_heads(lepe, heads)) * gate
    return y.transpose(2, 3).reshape(lepe.shape)


def fused(qkvo, lepe, heads, **spec):
    return ops.gated_attention(qkvo, lepe, heads, backend='triton', **spec)


def results(function, qkvo, lepe, grad, dtype):
    """Output and the gradients of q, k, v, o and lepe, in float64."""
    qkvo, lepe = (x.detach().to(dtype, copy=True).requires_grad_() for x in (qkvo, lepe))
    out = function(qkvo, lepe)
    out.backward(grad.to(dtype))
    return [x.detach().double() for x in (out, *qkvo.grad.chunk(4, 1), lepe.grad)]


def assert_accurate(ours, plain, exact, dtype, head_dim):
    one_token = exact[0].shape[2:].numel() == 1
    for name, a, b, c in zip(NAMES, ours, plain, exact):
        assert a.isfinite().all(), name
        size = c.norm()
        allowed = max(1.5 * (b - c).norm(), torch.finfo(dtype).eps / 2 * size)
        if one_token and name in ('dq', 'dk'):
            # the output is v, whatever q and k: terms of the size of dv, sums of d, cancel
            allowed = max(allowed, head_dim**0.5 * torch.finfo(dtype).eps * exact[3].norm())
        assert (a - c).norm() <= allowed, (
            f'{name}: error {(a - c).norm() / size:.2e}, eager {(b - c).norm() / size:.2e}'
        )


def make(batch, heads, head_dim, size, dtype, token_major=True, seed=0):
    """Packed projection, local position and gradient; v has mean 1, so that MALA cancels."""
    generator = torch.Generator().manual_seed(seed)
    channels = heads * head_dim
    qkvo = torch.randn(batch, 4 * channels, *size, generator=generator)
    qkvo[:, 2 * channels : 3 * channels] += 1
    lepe, grad = (torch.randn(batch, channels, *size, generator=generator) for _ in range(2))
    if token_major:
        qkvo, lepe, grad = (x.to(memory_format=torch.channels_last) for x in (qkvo, lepe, grad))
    return tuple(x.to(dtype) for x in (qkvo, lepe, grad))


def check_gated(batch, heads, head_dim, size, dtype, token_major=True, **spec):
    tensors = make(batch, heads, head_dim, size, dtype, token_major)
    kernels = functools.partial(fused, heads=heads, **spec)
    plain = functools.partial(eager, heads=heads, **spec)
    ours = results(kernels, *tensors, dtype)
    exact = results(plain, *tensors, torch.float64)
    assert_accurate(ours, results(plain, *tensors, dtype), exact, dtype, head_dim)


@pytest.mark.parametrize('rotary', [True, False])
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('kind', KINDS)
def test_every_variant(kind, dtype, rotary):
    check_gated(1, 2, 32, (5, 13), DTYPES[dtype], rotary=rotary, **KINDS[kind])


@pytest.mark.parametrize('token_major', [True, False], ids=['token-major', 'channel-first'])
@pytest.mark.parametrize('head_dim', [64, 96, 128])
@pytest.mark.parametrize('kind, dtype', [('mala', 'bf16'), ('rala', 'fp32')])
def test_every_head_width_and_layout(kind, dtype, head_dim, token_major):
    # RALA: the softmax' gradient takes one sum per image from all of its keys, whose rounding they
    # share, so that an image's error is one draw. Of two draws alike one exceeds 1.5 times the
    # other in 37 of 100 images, 1 - 2 / pi * atan(1.5); the roots of the mean squares of 12 draws
    # each are within 1 +- sqrt(1 / 12).
    images = 12 if kind == 'rala' else 3
    check_gated(images, 1, head_dim, (3, 11), DTYPES[dtype], token_major, **KINDS[kind])


@pytest.mark.parametrize('kind, dtype', [('mala', 'fp32'), ('mala', 'fp16'), ('rala', 'fp32')])
def test_backward_in_parts(kind, dtype, monkeypatch):
    """Where registers do not suffice, each launch of the backward holds one matrix."""
    whole = plan.default_config
    monkeypatch.setattr(
        plan, 'default_config', lambda *args: dataclasses.replace(whole(*args), fused=False)
    )
    launch.forget_plans()
    check_gated(12 if kind == 'rala' else 3, 1, 96, (3, 11), DTYPES[dtype], **KINDS[kind])
    launch.forget_plans()


@pytest.mark.parametrize('size', [(1, 1), (3, 5), (1, 17), (9, 7), (2, 65)])
@pytest.mark.parametrize('kind', ['mala', 'rala'])
def test_every_size(kind, size):
    """Fewer tokens than a tile, whole tiles, several programs; H and W never alike."""
    # many images for RALA, as above
    check_gated(12 if kind == 'rala' else 3, 1, 32, size, torch.float32, **KINDS[kind])


def operator_results(kind, q, k, v, grad, size, backend):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    function = getattr(ops, f'{kind}_attention')
    out = function(*leaves, size=size, backend=backend)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def poisoned(shape, strides, start=0, dtype=torch.float32):
    """A view with the given strides into memory that is NaN elsewhere."""
    length = start + sum((n - 1) * abs(s) for n, s in zip(shape, strides)) + 1
    memory = torch.full((length,), float('nan'), dtype=dtype)
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
def test_any_strides(kind, layout):
    shape = (2, 2, 36, 32)
    start, strides = LAYOUTS[layout]
    q, k, v = (poisoned(shape, strides(*shape[1:]), start + 32 * i) for i in range(3))
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(9))
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


def test_mixed_strides_and_an_expanded_gradient():
    """q token-major, k channel-first, v contiguous, the gradient of a sum (all strides 0)."""
    shape = (2, 2, 36, 32)
    layouts = ('token-major slice', 'channel-first slice', 'contiguous')
    q, k, v = (
        poisoned(shape, LAYOUTS[name][1](*shape[1:]), LAYOUTS[name][0] + i)
        for i, name in enumerate(layouts)
    )
    grad = torch.ones(()).expand(shape)
    ours = operator_results('mala', q, k, v, grad, (4, 9), 'triton')
    plain = operator_results('mala', q, k, v, grad, (4, 9), 'reference')
    for name, a, b in zip(('out', 'dq', 'dk', 'dv'), ours, plain):
        # the gradient of a sum nearly cancels in dq and dk: compare with the size of v's
        assert (a - b).norm() <= 1e-5 * max(b.norm(), 1), name


@pytest.mark.parametrize('kind', KINDS)
def test_two_runs_are_bitwise_equal(kind):
    kernels = functools.partial(fused, heads=1, **KINDS[kind])
    tensors = make(2, 1, 32, (2, 65), torch.float32)  # several partial sums per head
    first, second = (results(kernels, *tensors, torch.float32) for _ in range(2))
    for name, a, b in zip(NAMES, first, second):
        assert torch.equal(a, b), name


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('kind', KINDS)
def test_magnitudes_stay_finite(kind, dtype):
    """q and k from 1e-4 to 1e4, and q so low that phi(q) underflows."""
    dtype = DTYPES[dtype]
    largest = torch.finfo(dtype).max
    for factor_q, factor_k, shift in ((1e-4, 1e4, 0), (1e4, 1e-4, 0), (1e3, 1e3, 0), (1, 1, -200)):
        qkvo, lepe, grad = make(1, 1, 32, (3, 5), torch.float32)
        qkvo[:, :32] = qkvo[:, :32] * factor_q + shift
        qkvo[:, 32:64] *= factor_k
        tensors = [x.to(dtype) for x in (qkvo, lepe, grad)]
        plain = functools.partial(eager, heads=1, **KINDS[kind])
        ours = results(functools.partial(fused, heads=1, **KINDS[kind]), *tensors, dtype)
        exact = results(plain, *tensors, torch.float64)
        for name, a, b in zip(NAMES, ours, exact):
            assert not a.isnan().any(), (name, factor_q, factor_k, shift)
            # what the type can hold at all (with room for its rounding) has to be finite
            assert a[b.abs() < largest / 2].isfinite().all(), (name, factor_q, factor_k, shift)


@pytest.mark.parametrize('order', [1, -1], ids=['growing', 'falling'])
def test_weights_follow_the_largest_key_wherever_it_is(order):
    """RALA: exponentials relative to any but the maximum over all tiles and programs overflow."""
    q, k, v, grad = torch.randn(4, 1, 1, 300, 32, generator=torch.Generator().manual_seed(0))
    # A logit grows by about 32 * 32 ** -0.5 = 6 per unit: neighbouring tiles are e^120 apart.
    rank = torch.arange(300) // 32
    k = k + 20.0 * (rank if order > 0 else 9 - rank)[:, None]
    config = plan.config('reduce_keys', 32, torch.float32, True, 'interpreter', 90)
    strips, _, tiles = plan.cut(config, 1, (3, 100), 4)
    assert strips > 1 and tiles > 1
    ours = operator_results('rala', q, k, v, grad, (3, 100), 'triton')
    exact = [x.double() for x in (q, k, v, grad)]
    exact = operator_results('rala', *exact, (3, 100), 'reference')
    # Where one key has all the weight, dq and the part of dk through the softmax are differences
    # that vanish: they are compared with the size of dv.
    allowed = {name: x.norm() for name, x in zip(('out', 'dq', 'dk', 'dv'), exact)}
    allowed['dq'] = allowed['dk'] = torch.maximum(allowed['dk'], allowed['dv'])
    for (name, size), a, b in zip(allowed.items(), ours, exact):
        # A logit up to 1200, rounded by 6e-8 of it in each of some ten steps, is the exponent.
        assert (a - b).norm() <= 1200 * 10 * 6e-8 * size, name


def test_offsets_beyond_32_bits():
    """Tokens 2^28 elements apart and images 2^32: nearly all of it memory that is never touched."""
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
            # both round to fp16, half a unit in the last place each
            assert (a.float() - b.float()).norm() <= 2.0**-10 * b.float().norm(), name
        del views, view, huge, q, k, v, grad, out, dq, dk, dv, a


@pytest.mark.parametrize('head_dim', [32, 96])
def test_angles_at_any_position(head_dim):
    """Cosines and sines within float32's rounding of float64's, far beyond any feature map."""

    @triton.jit
    def probe(cos, sin, positions, D: tl.constexpr, P: tl.constexpr, N: tl.constexpr):
        position = tl.load(positions + tl.arange(0, N))
        c, s = kernels.turning(position, kernels.frequencies(D, P))
        place = tl.arange(0, N)[:, None] * (P // 4) + tl.arange(0, P // 4)[None, :]
        tl.store(cos + place, c)
        tl.store(sin + place, s)

    channels = plan.padded(head_dim)
    position = torch.tensor([0, 1, 2, 45, 333, 1025, 4095, 10**6], dtype=torch.int32)
    cos, sin = torch.empty(2, len(position), channels // 4)
    probe[(1,)](cos, sin, position, head_dim, channels, len(position))
    angle = position.double()[:, None] * rotary_frequencies(head_dim)
    for ours, exact in ((cos, angle.cos()), (sin, angle.sin())):
        # the remainder is rounded (2^-25 of a quarter turn), the polynomial is good to 2^-24, and
        # float64's own angle is rounded at 10^6 to 6e-11
        assert (ours[:, : head_dim // 4] - exact).abs().max() < 2.0**-22.5


@pytest.mark.parametrize('name', ['attention', 'gated_attention'])
def test_opcheck(name):
    spec = ('mala', 'published', 32**-0.5, 1e-6, True, 'triton')
    qkvo, lepe, _ = (x.requires_grad_() for x in make(1, 1, 32, (3, 5), torch.float32))
    q, k, v, _ = (library.split_heads(x, 1).detach() for x in qkvo.chunk(4, 1))
    args = (q, k, v, 3, 5, *spec) if name == 'attention' else (qkvo, lepe, 1, *spec)
    torch.use_deterministic_algorithms(False)  # it compares the states' unused memory too
    torch.library.opcheck(getattr(torch.ops.mala_mm, name).default, args)


def test_compiles_once_for_all_sizes():
    """``torch.compile`` sees one operator: no graph break, and one graph for every H x W."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend('aot_eager')

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def mixer(qkvo, lepe):
        return fused(qkvo, lepe, heads=1)

    frames = set()
    for size in ((3, 5), (4, 7), (6, 2)):
        qkvo, lepe, grad = make(1, 1, 32, size, torch.float32)
        out = results(mixer, qkvo, lepe, grad, torch.float32)
        plain = results(functools.partial(fused, heads=1), qkvo, lepe, grad, torch.float32)
        for name, a, b in zip(NAMES, out, plain):
            assert torch.equal(a, b), name
        frames.add(counter.frame_count)
    assert len(frames) == 1, 'compiled anew for another size'


def test_export_keeps_the_kernels_that_were_named():
    class Mixer(torch.nn.Module):
        def forward(self, qkvo, lepe):
            return fused(qkvo, lepe, heads=1)

    qkvo, lepe, _ = make(1, 1, 32, (3, 5), torch.float32)
    program = torch.export.export(Mixer(), (qkvo, lepe))
    assert 'mala_mm.gated_attention' in program.graph_module.code
    assert torch.equal(program.module()(qkvo, lepe), fused(qkvo, lepe, heads=1))
