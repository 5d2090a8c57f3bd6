"""The public functions: what they refuse, which backend they choose, what the packed mixer is."""

import functools

import pytest
import torch

from mala_mm import ops
from mala_mm.ops.fused import library, triton
from mala_mm.ops.fused.dispatch import eager

OPERATORS = [ops.mala_attention, ops.rala_attention, ops.linear_attention, ops.softmax_attention]


def inputs(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize('operator', OPERATORS)
@pytest.mark.parametrize(
    'change, error, message',
    [
        (dict(size=(2, 3)), ValueError, r'H \* W = N, got size \(2, 3\) for N = 15'),
        (dict(backend='cuda'), ValueError, r"backend must be one of .*'triton'.*, got 'cuda'"),
        (dict(q=None), TypeError, 'q must be a Tensor, got NoneType'),
        (dict(v=torch.zeros(1, 2, 15, 4)), ValueError, r'share one shape .* \(1, 2, 15, 4\)'),
        (dict(k=torch.zeros(1, 2, 15, 8).half()), ValueError, 'one dtype, got .*float16'),
        (dict(q=torch.zeros(1, 2, 15, 8, device='meta')), ValueError, 'one device, got meta'),
    ],
)
def test_bad_input_is_named(operator, change, error, message):
    q, k, v = inputs(1, 2, 15, 8)
    arguments = {'q': q, 'k': k, 'v': v, 'size': (3, 5), **change}
    with pytest.raises(error, match=message):
        operator(**arguments)


@pytest.mark.parametrize('operator', OPERATORS)
def test_bad_width_and_type_are_named(operator):
    with pytest.raises(ValueError, match='divisible by 4, got 6'):
        operator(*inputs(1, 1, 15, 6), size=(3, 5))
    with pytest.raises(TypeError, match='floating point, got torch.int64'):
        operator(*inputs(1, 1, 15, 8, dtype=torch.int64), size=(3, 5))


def test_unknown_form_is_named():
    with pytest.raises(ValueError, match="form must be one of .*'paper'.*, got 'exact'"):
        ops.mala_attention(*inputs(1, 1, 15, 8), size=(3, 5), form='exact')


@pytest.mark.parametrize(
    'change, error, message',
    [
        (dict(kind='softmax'), ValueError, "kind must be one of .*, got 'softmax'"),
        (dict(form='exact'), ValueError, "form must be one of .*, got 'exact'"),
        (dict(qkvo=torch.zeros(1, 30, 3, 5)), ValueError, r'shape \(B, 4C, H, W\), got \(1, 30'),
        (
            dict(lepe=torch.zeros(1, 16, 5, 3)),
            ValueError,
            r'= \(1, 16, 3, 5\), got \(1, 16, 5, 3\)',
        ),
        (dict(lepe=torch.zeros(1, 16, 3, 5).half()), ValueError, 'got torch.float16 on cpu'),
        (
            dict(lepe=None),
            TypeError,
            'lepe must be a Tensor or a function .*, got NoneType',
        ),
        (dict(num_heads=3), ValueError, 'num_heads must divide C = 16, got 3'),
        (dict(backend='cuda'), ValueError, "backend must be one of .*, got 'cuda'"),
    ],
)
def test_bad_input_of_the_packed_mixer_is_named(change, error, message):
    arguments = {
        'qkvo': torch.zeros(1, 64, 3, 5),
        'lepe': torch.zeros(1, 16, 3, 5),
        'num_heads': 2,
        **change,
    }
    with pytest.raises(error, match=message):
        ops.gated_attention(**arguments)


@pytest.mark.parametrize('kind', library.KINDS)
@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('backend', ['reference', 'auto'])
def test_packed_mixer_is_the_written_out_one(kind, memory_format, backend):
    """Section by section: split, heads, attention, local position, gate."""
    batch, heads, head_dim, height, width = 2, 2, 8, 3, 5
    channels = heads * head_dim
    generator = torch.Generator().manual_seed(0)
    qkvo = torch.randn(batch, 4 * channels, height, width, generator=generator)
    lepe = torch.randn(batch, channels, height, width, generator=generator)
    q, k, v, gate = qkvo.double().split(channels, 1)
    q, k, v = (x.reshape(batch, heads, head_dim, height * width).transpose(2, 3) for x in (q, k, v))
    y = eager(kind, q, k, v, (height, width))
    y = y.transpose(2, 3).reshape(batch, channels, height, width)
    expected = (y + lepe) * gate
    out = ops.gated_attention(
        qkvo.to(memory_format=memory_format), lepe, heads, kind=kind, backend=backend
    )
    # 15 sums of 8 products in float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def explicit(name, q, k, v, size, scale=None, eps=1e-6, rotary=True, form='published'):
    """Each operator as a matrix of N x N scores."""

    def turn(x):
        return ops.apply_rotary(x, size) if rotary else x

    num_tokens, head_dim = q.shape[-2:]
    if scale is None:
        scale = 1.0 if form == 'paper' else head_dim**-0.5
    if name == 'softmax':
        return (scale * turn(q) @ turn(k).mT).softmax(-1) @ v
    q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    if name == 'mala':
        k = k * (scale / num_tokens if form == 'published' else scale)
    elif name == 'rala':
        k = k * (scale * k @ q.mean(2, keepdim=True).mT).softmax(2)
    z = q @ k.sum(2, keepdim=True).mT
    scores = turn(q) @ turn(k).mT
    if name == 'mala':
        return ((1 + 1 / (z + eps)) * scores - z / num_tokens) @ v
    return scores / (z + eps) @ v


OPTIONS = [dict(), dict(scale=0.7), dict(eps=0.5), dict(rotary=False)]
CASES = [
    *((name, options) for name in ('mala', 'rala', 'linear', 'softmax') for options in OPTIONS),
    ('mala', dict(form='paper')),
    ('mala', dict(form='paper', scale=0.1)),
]


@pytest.mark.parametrize('name, options', CASES)
@pytest.mark.parametrize('backend', ['reference', 'auto'])
def test_every_option_reaches_the_operator(name, options, backend):
    q, k, v = inputs(1, 2, 15, 8)
    expected = explicit(name, *(x.double() for x in (q, k, v)), (3, 5), **options)
    out = getattr(ops, f'{name}_attention')(q, k, v, size=(3, 5), backend=backend, **options)
    # sums of 15 and 8 products in float32, each rounded by 6e-8 of at most 10
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name, options', [case for case in CASES if case[0] != 'softmax'])
@pytest.mark.parametrize('backend', ['reference', 'auto'])
def test_every_option_reaches_the_packed_mixer(name, options, backend):
    generator = torch.Generator().manual_seed(0)
    qkvo = torch.randn(1, 64, 3, 5, generator=generator)
    lepe = torch.randn(1, 16, 3, 5, generator=generator)
    q, k, v, gate, position = (
        x.double().reshape(1, 2, 8, 15).mT for x in (*qkvo.chunk(4, 1), lepe)
    )
    expected = (explicit(name, q, k, v, (3, 5), **options) + position) * gate
    out = ops.gated_attention(qkvo, lepe, 2, kind=name, backend=backend, **options)
    # as above
    torch.testing.assert_close(out.double(), expected.mT.reshape(lepe.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name, options', CASES)
def test_every_option_reaches_the_layer(name, options):
    """The registered operator: alone, as its equations, and between the convolutions."""
    options = {key: x for key, x in options.items() if key in ops.OPERATORS[name].option_names()}
    operator = ops.build_operator(name, 2, 8, **options)
    generator = torch.Generator().manual_seed(0)
    qkvo = torch.randn(1, 64, 3, 5, generator=generator)
    q, k, v, gate = (x.reshape(1, 2, 8, 15).mT for x in qkvo.chunk(4, 1))
    expected = explicit(name, q.double(), k.double(), v.double(), (3, 5), **options)
    # as above
    near = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    near(operator(q, k, v, (3, 5)).double(), expected)
    near(operator.equations(q, k, v, (3, 5)).double(), expected)
    mixed = ((expected + 2 * v) * gate).mT.reshape(1, 16, 3, 5)
    near(operator.gated(qkvo, lambda v: 2 * v).double(), mixed)


@pytest.mark.parametrize('operator', OPERATORS[:3])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_types_lose_no_more_than_their_rounding(operator, dtype):
    """Sums are float32 at least: what is lost is the rounding of the output."""
    q, k, v = inputs(1, 2, 63, 32, dtype=dtype)
    v = v + 1
    expected = operator(q.double(), k.double(), v.double(), size=(7, 9), backend='reference')
    for backend in ('auto', 'reference'):
        out = operator(q, k, v, size=(7, 9), backend=backend)
        assert out.dtype == dtype
        error = (out.double() - expected).norm() / expected.norm()
        assert error < torch.finfo(dtype).eps / 2, backend


def test_autocast_does_not_reach_into_the_operators():
    q, k, v = inputs(1, 1, 15, 8)
    expected = ops.mala_attention(q, k, v, size=(3, 5))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = ops.mala_attention(q, k, v, size=(3, 5))
        other = ops.mala_attention(q, k, v, size=(3, 5), backend='reference')
    assert out.dtype == other.dtype == torch.float32
    assert torch.equal(out, expected)
    torch.testing.assert_close(other, expected)


def test_auto_falls_back_to_the_reference():
    q = torch.zeros(1, 1, 15, 8)
    assert ops.choose_backend('auto', q.double()) == 'reference'
    assert ops.choose_backend('auto', torch.zeros(1, 1, 15, 8, device='meta')) == 'reference'
    assert ops.choose_backend('reference', q) == 'reference'
    torch.func.vmap(lambda x: _is_reference(x))(q)
    torch.func.grad(lambda x: _is_reference(x).sum())(q)


@pytest.mark.parametrize('name', ['mala', 'rala', 'linear', 'softmax'])
def test_shapes_are_known_without_memory(name):
    """On the meta device, where tools count operations or build models before they load them."""
    q = torch.zeros(1, 2, 15, 8, device='meta')
    out = getattr(ops, f'{name}_attention')(q, q, q, size=(3, 5))
    assert out.shape == q.shape and out.device.type == 'meta'


def _is_reference(x):
    assert ops.choose_backend('auto', x) == 'reference'
    return x


def test_function_transforms_work_with_auto():
    q, k, v = inputs(4, 1, 2, 15, 8)  # a leading axis to map over
    out = torch.func.vmap(lambda *x: ops.mala_attention(*x, size=(3, 5)))(q, k, v)
    for i in range(3):
        expected = ops.mala_attention(q[i], k[i], v[i], size=(3, 5), backend='reference')
        torch.testing.assert_close(out[i], expected)
    _, tangent = torch.func.jvp(
        lambda x: ops.mala_attention(x, k[0], v[0], size=(3, 5)), (q[0],), (torch.ones_like(q[0]),)
    )
    assert tangent.isfinite().all() and tangent.abs().max() > 0


@pytest.mark.parametrize(
    'tensor, message',
    [
        (torch.zeros(1, 1, 15, 32), 'needs tensors on a CUDA device, got cpu'),
        (torch.zeros(1, 1, 15, 32, device='meta'), 'needs tensors on a CUDA device, got meta'),
    ],
)
def test_triton_says_why_not(tensor, message, monkeypatch):
    monkeypatch.setattr(triton, '_INTERPRETED', False)
    with pytest.raises(ValueError, match=f"backend 'triton' {message}"):
        ops.mala_attention(tensor, tensor, tensor, size=(3, 5), backend='triton')


def test_triton_names_width_and_type(monkeypatch):
    """As on a device: only width and type are left to refuse."""
    if not triton._INSTALLED:
        pytest.skip('triton is not installed: its own refusal comes first')
    monkeypatch.setattr(triton, '_INTERPRETED', True)
    assert triton.why_not(None, torch.zeros(1, 1, 15, 64)) is None
    assert triton.why_not(None, torch.zeros(1, 1, 15, 48)).endswith('(32, 64, 96, 128), got d = 48')
    assert triton.why_not(None, torch.zeros(1, 1, 1, 64).double()).endswith('got torch.float64')
    monkeypatch.setattr(triton, '_VERSION', (3, 2))
    reason = triton.why_not(None, torch.zeros(1, 1, 15, 64))
    assert reason == 'needs Triton 3.3 or higher, got 3.2'
    monkeypatch.setattr(triton, '_INSTALLED', False)
    assert 'not installed' in triton.why_not(None, torch.zeros(1, 1, 15, 64))
