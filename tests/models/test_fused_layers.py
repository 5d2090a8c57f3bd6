"""Layers computed together give what they give one by one, and keep little for training."""

import copy

import pytest
import torch
import torch.nn.functional as F

from mala_mm.models.layers import Block, ConvFFN, PointwiseConv2d
from mala_mm.ops.fused import depthwise
from mala_mm.ops.fused.cpu import depthwise as cpu

_REASON = cpu.why_not(torch.zeros(1, 1, 1, 1))
compiled = pytest.mark.skipif(_REASON is not None, reason=f'the C code {_REASON}')
# Float32 results of some hundred roundings of 6e-8, relative to the largest value.
CLOSE = 100 * 6e-8


def close(x, y):
    return (x - y).abs().max() <= CLOSE * y.abs().max()


def by_the_book(block, x):
    """The block's definition, module by module, in float64."""
    block = copy.deepcopy(block).double()
    x = x.double()
    x = x + F.conv2d(x, block.pos.weight, block.pos.bias, padding=1, groups=x.shape[1])
    x = x + block.gamma1(block.attn(block.norm1(x)))
    hidden = F.gelu(block.ffn.fc1(block.norm2(x)))
    dwconv = block.ffn.dwconv
    hidden = hidden + F.conv2d(
        hidden, dwconv.weight, dwconv.bias, padding=1, groups=hidden.shape[1]
    )
    return x + block.gamma2(block.ffn.fc2(hidden)), block


@pytest.mark.parametrize('attn_type', ['mala', 'softmax'])
@pytest.mark.parametrize('scale', [1.0, 1e-6])
def test_block_equals_its_definition(attn_type, scale):
    torch.manual_seed(0)
    block = Block(64, 2, 100, attn_type, layer_scale_init_value=scale)
    x = torch.randn(2, 64, 9, 11).contiguous(memory_format=torch.channels_last)
    grad = torch.randn(2, 64, 9, 11)
    expected, exact = by_the_book(block, x)
    expected.backward(grad.double())
    with torch.no_grad():
        assert close(block(x), expected)
    out = block(x)
    out.backward(grad)
    assert close(out, expected)
    for (name, p), q in zip(block.named_parameters(), exact.parameters()):
        assert close(p.grad, q.grad), name


@pytest.mark.parametrize('rows', [1, 3, 8])
def test_bands_of_rows_make_no_difference(rows, monkeypatch):
    torch.manual_seed(0)
    ffn = ConvFFN(8, 20)
    x = torch.randn(2, 8, 17, 5)
    expected = ffn(x).detach()  # with gradients the map is taken whole
    monkeypatch.setattr('mala_mm.models.layers.inference.BAND_ELEMENTS', rows * 20 * 5)
    with torch.no_grad():
        assert close(ffn(x), expected)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_tiny_scales_keep_their_gradients_in_half_types(dtype):
    """1e-6 times a weight is no float16 number; gradients of weight and scale must not know."""
    torch.manual_seed(0)
    conv = PointwiseConv2d(16, 8)
    scale = torch.full((8,), 1e-6, requires_grad=True)
    x, grad = torch.randn(2, 16, 6, 6), 1e4 * torch.randn(2, 8, 6, 6)
    with torch.autocast('cpu', dtype):
        out = conv(x, scale)
    out.backward(grad.to(out.dtype))
    weight, bias = conv.weight.detach().double(), conv.bias.detach().double()
    plain = F.conv2d(x.double(), weight, bias)
    exact_scale = (plain * grad.double()).sum((0, 2, 3))
    exact_weight = 1e-6 * torch.einsum('bdhw,bchw->dc', grad.double(), x.double())
    # Three roundings of the half type, in sums of numbers of either sign.
    tolerance = 4 * torch.finfo(dtype).eps
    for x, y in ((scale.grad, exact_scale), (conv.weight.grad[:, :, 0, 0], exact_weight)):
        assert (x - y).norm() <= tolerance * y.norm()


@pytest.mark.parametrize(
    ('kind', 'dtype'),
    # A model cast to float16 has no scale of 1e-6 to begin with.
    [('autocast', torch.bfloat16), ('autocast', torch.float16), ('cast', torch.bfloat16)],
)
@pytest.mark.parametrize('grad', [True, False])
def test_half_types_lose_little_at_any_scale(kind, grad, dtype):
    torch.manual_seed(0)
    ffn = ConvFFN(32, 100)
    x, scale = torch.randn(2, 32, 7, 9), torch.full((32,), 1e-6)
    exact = copy.deepcopy(ffn).double()(x.double(), scale.double())
    with torch.set_grad_enabled(grad):
        if kind == 'autocast':
            with torch.autocast('cpu', dtype):
                out = ffn(x, scale)
        else:
            out = ffn.to(dtype)(x.to(dtype), scale.to(dtype))
    # Some six roundings in sequence: input, weights, scale, hidden map, its convolution, output.
    assert (out - exact).norm() <= 6 * torch.finfo(dtype).eps * exact.norm()


@compiled
def test_training_keeps_the_hidden_map_once():
    """Of the feed-forward network: its input, and the hidden map before the GELU."""
    ffn = ConvFFN(8, 28)
    x = torch.randn(2, 8, 6, 7, requires_grad=True)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        ffn(x, torch.ones(8, requires_grad=True))
    weights = {p.untyped_storage().data_ptr() for p in ffn.parameters()}
    maps = [t for key, t in kept.items() if key not in weights and t.dim() == 4 and len(t) == 2]
    assert sorted(t.shape[1] for t in maps) == [8, 28]


@compiled
@pytest.mark.parametrize('name', ['fc1', 'dwconv', 'fc2'])
def test_hooks_and_adapters_are_called(name, monkeypatch):
    ffn = ConvFFN(4, 12)
    x = torch.randn(1, 4, 3, 3)
    calls = []
    getattr(ffn, name).register_forward_hook(lambda *_: calls.append(name))
    expected = ffn(x)
    assert calls == [name]

    class Adapter(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.weight, self.bias, self.layer = layer.weight, layer.bias, layer

        def forward(self, x, *args):
            return 2 * self.layer(x, *args)

    other = ConvFFN(4, 12)
    other.load_state_dict(ffn.state_dict())
    assert close(other(x), expected)
    setattr(other, name, Adapter(getattr(other, name)))
    assert not close(other(x), expected)


def test_every_path_gives_the_same_gradients(monkeypatch):
    torch.manual_seed(0)
    block = Block(8, 2, 28, 'mala', drop_path_rate=0.5).train()
    x = torch.randn(4, 8, 6, 5)
    results = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(cpu, '_library', lambda dtype: 'is switched off')
            assert not depthwise.can_fuse_depthwise(x)
        torch.manual_seed(1)
        block.zero_grad()
        block(x).square().sum().backward()
        results.append([p.grad.clone() for p in block.parameters()])
    assert all(map(close, *results))
