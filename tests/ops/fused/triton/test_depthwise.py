"""The Triton kernels of depthwise convolutions against the equation."""

import pytest
import torch

from benchmarks import accuracy
from benchmarks.gpu.checks import DTYPES
from mala_mm.ops.fused import depthwise
from mala_mm.ops.fused.triton import depthwise as launches
from mala_mm.ops.fused.triton import stencil

NAMES = ('out', 'dx', 'dweight', 'dbias')
# What the block has of them: kernel, GELU, residual.
FORMS = {'ffn': (3, True, True), 'position': (3, False, True), 'local position': (5, False, False)}


def inputs(device, shape, taps, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, grad = (2 * torch.randn(2, *shape, generator=generator)).to(dtype)
    x, grad = (t.contiguous(memory_format=torch.channels_last) for t in (x, grad))
    weight = torch.randn(shape[1], 1, taps, taps, generator=generator)
    bias = torch.randn(shape[1], generator=generator)
    return tuple(t.to(device) for t in (x, weight, bias, grad))


def outcomes(x, weight, bias, grad, form, dtype, backend='triton'):
    """Output and gradients; the weights stay in float32, as under autocast."""
    leaves = [x.detach().to(dtype), weight, bias]
    if dtype == torch.float64:
        leaves = [t.double() for t in leaves]
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = depthwise.depthwise(*leaves, *form[1:], backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def check(device, shape, form, dtype):
    tensors = inputs(device, shape, form[0], dtype)
    exact = outcomes(*tensors, form, torch.float64, 'reference')
    plain = outcomes(*tensors, form, dtype, 'reference')
    ours = outcomes(*tensors, form, dtype)
    for name, a, b, c in zip(NAMES, ours, plain, exact):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if name in ('out', 'dx') and dtype == torch.bfloat16 and device == 'cpu':
            # the interpreter cuts off the bits that bfloat16 has not: a whole unit, twice as much
            assert accuracy.relative_error(a, c) <= torch.finfo(dtype).eps, name
            continue
        found = accuracy.measure(a, b, c, dtype)
        assert found.passed, f'{name}: {found}'


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('form', FORMS)
def test_every_form_and_type(device, form, dtype):
    """A block of channels whole and one cut; strips of four columns, the last one cut."""
    check(device, (2, 40, 9, 11), FORMS[form], DTYPES[dtype])


@pytest.mark.parametrize('shape', [(1, 1, 1, 1), (3, 8, 1, 5), (1, 33, 37, 2)], ids=str)
@pytest.mark.parametrize('form', ['ffn', 'local position'])
def test_every_size(device, form, shape):
    """Less than a tile, several images in one, and columns in pieces."""
    if shape[2] == 37:
        assert launches.cut(launches.tile('convolve', 3, torch.float32), shape, 4)[2] > 1
    check(device, shape, FORMS[form], torch.float32)


@pytest.mark.parametrize('layout', ['slice', 'shifted slice', 'crop', 'channel-first', 'expanded'])
def test_any_strides(device, layout):
    x, weight, bias, grad = inputs(device, (2, 16, 6, 7), 5, torch.float32)
    memory = torch.full((2, 12, 13, 67), float('nan'), device=device).permute(0, 3, 1, 2)
    if layout == 'slice':  # as v lies in qkvo
        x = memory[:, 32:48, :6, :7].copy_(x)
    elif layout == 'shifted slice':  # nothing is aligned
        x = memory[:, 3:19, :6, :7].copy_(x)
    elif layout == 'crop':
        x = memory[:, :16, 5:11, 4:11].copy_(x)
    elif layout == 'channel-first':
        x, grad = x.contiguous(), grad.contiguous()
    else:
        grad = torch.ones((), device=device).expand(x.shape)
    leaf = x.detach().requires_grad_()
    out = depthwise.depthwise(leaf, weight, bias, backend='triton')
    assert out.is_contiguous(memory_format=torch.channels_last)
    (dx,) = torch.autograd.grad(out, leaf, grad)
    form, exact = (5, False, False), torch.float64
    expected = outcomes(x.clone(), weight, bias, grad, form, exact, 'reference')
    for name, a, b in zip(NAMES, (out, dx), expected):
        # sums of 26 terms in float32, each rounded by 6e-8
        assert (a - b).norm() <= 26 * 6e-8 * b.norm(), name


def test_two_runs_are_bitwise_equal(device):
    tensors = inputs(device, (2, 33, 20, 9), 3, torch.float32)
    tile = launches.tile('backward', 3, torch.float32)
    assert launches.cut(tile, tensors[0].shape, 4)[-1] > 1  # shares
    first, second = (outcomes(*tensors, FORMS['ffn'], torch.float32) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize('dtype', DTYPES)
def test_gelu_far_from_zero_and_nan(device, dtype):
    """0 or x, its slope 0 or 1; what is no number stays none."""
    x = torch.tensor(
        [-6e4, -200.0, -13.0, 0.0, 13.0, 200.0, 6e4], dtype=DTYPES[dtype], device=device
    )
    leaf = x.view(1, -1, 1, 1).requires_grad_()
    zero = torch.zeros(7, 1, 3, 3, device=device), torch.zeros(7, device=device)
    out = depthwise.depthwise(leaf, *zero, gelu=True, residual=True, backend='triton')
    (slope,) = torch.autograd.grad(out.sum(), leaf)
    # the tail at 13 is below the smallest number of every type but float32's
    torch.testing.assert_close(out.flatten(), x.clamp(min=0), atol=1e-30, rtol=0)
    slopes = torch.tensor([0, 0, 0, 0.5, 1, 1, 1], device=device)
    # 1/2 by 2 ** -1.000221
    torch.testing.assert_close(slope.flatten().float(), slopes, atol=1.1e-4, rtol=0)
    leaf = torch.full((1, 7, 2, 2), float('nan'), dtype=DTYPES[dtype], device=device)
    leaf.requires_grad_()
    out = depthwise.depthwise(leaf, *zero, gelu=True, residual=True, backend='triton')
    assert out.isnan().all() and torch.autograd.grad(out.sum(), leaf)[0].isnan().all()


def test_gelu_of_half_types(device):
    """The tail's polynomial: 8e-6 in the result, 4.5e-4 of the tail up to 4, as it says."""
    import triton
    import triton.language as tl

    @triton.jit
    def probe(x, h, tail, N: tl.constexpr):
        place = tl.arange(0, N)
        value, rest = stencil.gelu(tl.load(x + place), False)
        tl.store(h + place, value)
        tl.store(tail + place, rest)

    x = torch.linspace(-8, 8, 4096, device=device)
    h, tail = torch.empty(2, 4096, device=device)
    probe[(1,)](x, h, tail, 4096)
    exact = torch.nn.functional.gelu(x.double())
    assert (h - exact).abs().max() < 8.5e-6
    near = x.abs() <= 4
    exact = torch.special.ndtr(-x.double().abs())
    assert (tail / exact - 1)[near].abs().max() < 4.6e-4


def test_opcheck(device):
    x, weight, bias, _ = inputs(device, (1, 5, 4, 3), 3, torch.float32)
    torch.use_deterministic_algorithms(False)
    args = (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_())
    torch.library.opcheck(torch.ops.mala_mm.depthwise, (*args, True, True, 'triton'))


def test_a_block_with_kernels_is_the_block(device, monkeypatch):
    """What the layers call on a GPU, beside what they call without kernels."""
    from mala_mm.models.layers import Block
    from mala_mm.ops.fused import dispatch

    torch.manual_seed(0)
    block = Block(32, 1, 112, 'mala').to(device)
    x = torch.randn(2, 32, 5, 7).to(device).contiguous(memory_format=torch.channels_last)
    grad = torch.randn(2, 32, 5, 7).to(device)
    found = []
    for backend in ('triton', None):
        monkeypatch.setitem(dispatch._OF_DEVICE, device, backend)
        block.zero_grad()
        leaf = x.clone(memory_format=torch.channels_last).requires_grad_()
        out = block(leaf)
        out.backward(grad)
        found.append([out.detach(), leaf.grad, *(p.grad.clone() for p in block.parameters())])
    names = ['out', 'dx', *(name for name, _ in block.named_parameters())]
    for name, a, b in zip(names, *found):
        # some hundred roundings of 6e-8 in sequence, relative to the largest value
        assert (a - b).abs().max() <= 100 * 6e-8 * b.abs().max(), name
