"""The short cuts of inference on the CPU: the same results, and none where somebody looks on."""

import copy

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mala_mm.models.layers import AttentionMixer, Block, ConvStem, PointwiseConv2d, inference

# Float32 results of some hundred roundings of 6e-8, relative to the largest value.
CLOSE = 100 * 6e-8


def close(x, y):
    return x.shape == y.shape and (x - y).abs().max() <= CLOSE * y.abs().max()


def randomised(module):
    """Statistics, weights and biases away from where they start; in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            positive = name.endswith('var') or 'norm' in name
            tensor.uniform_(
                0.5 if positive else -0.5, 1.5 if positive else 0.5, generator=generator
            )
    return module.eval()


@pytest.fixture(params=[None, 1, 700], ids=['whole', 'smallest-bands', 'bands'])
def band(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(inference, 'BAND_ELEMENTS', request.param)


@pytest.mark.parametrize('size', [(1, 1), (33, 6), (70, 41), (64, 4)], ids=str)
def test_stem_equals_its_layers(size, band):
    stem = randomised(ConvStem(3, 8, dict(type='BN')))
    x = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(1))
    expected = copy.deepcopy(stem).double()(x.double())
    with torch.no_grad():
        assert inference.can_convolve_all(stem, x)
        assert close(stem(x), expected)
    assert not inference.can_convolve_all(stem.train(), x)


@pytest.mark.parametrize('attn_type', ['mala', 'rala', 'softmax'])
@pytest.mark.parametrize('size', [(1, 1), (9, 17)], ids=str)
def test_block_adds_in_its_own_memory(attn_type, size, band):
    block = randomised(Block(64, 2, 100, attn_type))
    x = torch.randn(2, 64, *size).contiguous(memory_format=torch.channels_last)
    kept = x.clone()
    expected = block(x).detach()  # with gradients: no short cuts
    with torch.no_grad():
        assert close(block(x), expected)
    assert torch.equal(x, kept)


@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last], ids=str)
def test_sum_may_come_back_in_the_memory_of_the_residual(memory_format):
    conv = randomised(PointwiseConv2d(6, 4))
    x, residual = torch.randn(2, 6, 3, 5), torch.randn(2, 4, 3, 5)
    x, residual = (t.contiguous(memory_format=memory_format) for t in (x, residual))
    expected = (residual + conv(x)).detach()
    with torch.no_grad():
        assert close(conv.add_to(residual, x), expected)


@pytest.mark.parametrize('place', ['attn', 'attn.qkvo', 'attn.proj', 'ffn', 'ffn.fc2'])
def test_hooks_see_what_they_saw(place):
    """A hook on a branch gets the branch alone, and gets it always."""
    block, x = randomised(Block(8, 2, 12, 'mala')), torch.randn(1, 8, 5, 6)
    seen = []
    block.get_submodule(place).register_forward_hook(lambda _, __, out: seen.append(out.detach()))
    block(x)
    with torch.no_grad():
        block(x)
    assert len(seen) == 2 and close(seen[1], seen[0])


def test_a_dispatch_mode_sees_plain_convolutions():
    stem = randomised(ConvStem(3, 8, dict(type='BN')))
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        stem(x)
    multiplications = 4 * 27 * 16 * 16 + 2 * 4 * 36 * 16 * 16 + 8 * 36 * 8 * 8
    assert counter.get_total_flops() == 2 * multiplications


@pytest.mark.parametrize('grad', [True, False])
def test_types_are_those_of_the_plain_way(grad):
    """Under autocast with bfloat16 as without, with and without short cuts."""
    mixer = randomised(AttentionMixer(8, 2, 'mala'))
    x, residual = torch.randn(1, 8, 4, 4), torch.randn(1, 8, 4, 4)
    with torch.set_grad_enabled(grad):
        assert mixer.add_to(residual, x).dtype == torch.float32
        with torch.autocast('cpu', torch.bfloat16):
            assert mixer(x).dtype == torch.bfloat16
            assert mixer.add_to(residual, x).dtype == torch.float32
            assert mixer.add_to(residual.bfloat16(), x).dtype == torch.bfloat16
    assert not inference.takes_short_cuts(x.double())


def test_other_norms_and_layers_go_the_plain_way():
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        stem = randomised(ConvStem(3, 8, dict(type='BN')))
        assert not inference.can_convolve_all(nn.Sequential(*stem, nn.Dropout()), x)
        stem[1] = MODELS.build(dict(type='GN', num_channels=4, num_groups=2))
        assert not inference.can_convolve_all(stem.eval(), x)
        assert stem(x).shape == (1, 8, 4, 4)
