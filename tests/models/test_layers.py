import pytest
import torch
import torch.nn.functional as F

from mala_mm.models.layers import AttentionMixer, Block, ConvFFN, ConvStem, LayerNorm2d
from mala_mm.ops import OPERATORS, mala_attention


def test_layer_norm_normalises_over_channels_and_keeps_the_layout():
    x = torch.randn(2, 6, 3, 5).contiguous(memory_format=torch.channels_last)
    norm = LayerNorm2d(6)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    mean = x.mean(1, keepdim=True)
    var = x.var(1, unbiased=False, keepdim=True)
    expected = (x - mean) / (var + 1e-6).sqrt()
    expected = expected * norm.weight[:, None, None] + norm.bias[:, None, None]
    y = norm(x)
    torch.testing.assert_close(y, expected)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(norm(x.contiguous()), expected)


def test_stem_has_stride_four_and_ends_in_a_norm():
    stem = ConvStem(3, 16, dict(type='BN'))
    assert stem(torch.randn(2, 3, 37, 64)).shape == (2, 16, 10, 16)
    assert isinstance(stem[-1], torch.nn.BatchNorm2d)
    assert all(conv.bias is not None for conv in stem if isinstance(conv, torch.nn.Conv2d))


def test_ffn_adds_its_depthwise_convolution_to_the_hidden_features():
    ffn = ConvFFN(4, 14)
    x = torch.randn(1, 4, 3, 3)
    hidden = F.gelu(ffn.fc1(x))
    torch.testing.assert_close(ffn(x), ffn.fc2(hidden + ffn.dwconv(hidden)))


@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
def test_mixer_follows_its_definition(memory_format):
    """Heads are consecutive channel groups; tokens are taken row by row."""
    mixer = AttentionMixer(16, num_heads=2, attn_type='mala').double()
    x = torch.randn(2, 16, 3, 5, dtype=torch.float64).contiguous(memory_format=memory_format)
    q, k, v, o = mixer.qkvo(x).split(16, dim=1)

    def heads(t):
        return torch.stack([t[:, :8], t[:, 8:]], 1).reshape(2, 2, 8, 15).transpose(2, 3)

    y = mala_attention(heads(q), heads(k), heads(v), size=(3, 5), backend='reference')
    y = torch.cat([y[:, 0], y[:, 1]], -1).transpose(1, 2).reshape(2, 16, 3, 5)
    expected = mixer.proj((y + mixer.lepe(v)) * o)
    torch.testing.assert_close(mixer(x), expected)


@pytest.mark.parametrize('attn_type', OPERATORS)
def test_mixer_gradients_agree_with_finite_differences(attn_type):
    torch.manual_seed(0)
    mixer = AttentionMixer(8, num_heads=2, attn_type=attn_type).double()
    x = torch.randn(1, 8, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mixer, x)


def _own(mixer):
    """The parameters that an operator has beyond those of the mixer."""
    return {k: v for k, v in mixer.state_dict().items() if k.startswith('operator.')}


def test_operators_of_a_mixer_differ():
    x = torch.randn(1, 16, 4, 4)
    torch.manual_seed(0)
    mixer = AttentionMixer(16, 2)
    outputs = []
    for attn_type in OPERATORS:
        other = AttentionMixer(16, 2, attn_type)
        other.load_state_dict(mixer.state_dict() | _own(other))
        outputs.append(other(x))
    for i in range(len(outputs)):
        for j in range(i):
            assert not torch.allclose(outputs[i], outputs[j], rtol=1e-3)


def test_attn_cfg_reaches_the_operator():
    x = torch.randn(1, 16, 4, 4)
    torch.manual_seed(0)
    mixer = AttentionMixer(16, 2)
    other = AttentionMixer(16, 2, attn_cfg=dict(rotary=False))
    other.load_state_dict(mixer.state_dict())
    assert not torch.allclose(mixer(x), other(x))


def test_drop_path_takes_each_branch_by_itself():
    """Of many copies of an image some lose the mixer, some the network, some both or none."""
    torch.manual_seed(0)
    block = Block(8, 2, 28, 'mala', drop_path_rate=0.5).train()
    x = torch.randn(1, 8, 3, 3)
    out = block(x.expand(64, -1, -1, -1))
    kinds = []
    for mixer in (0, 2):  # 0, or 1 / (1 - 0.5)
        for network in (0, 2):
            y = x + block.pos(x)
            y = y + mixer * block.gamma1(block.attn(block.norm1(y)))
            y = y + network * block.gamma2(block.ffn(block.norm2(y)))
            # some 30 roundings of 6e-8, of values below 10
            kinds.append((out - y).abs().amax((1, 2, 3)) < 30 * 6e-8 * 10)
    kinds = torch.stack(kinds)
    assert (kinds.sum(0) == 1).all()
    assert (kinds.sum(1) > 4).all()  # 16 each on average


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"'softmax'.*got 'sofmax'"):
        AttentionMixer(16, 2, 'sofmax')
    with pytest.raises(ValueError, match='embed_dims=16, num_heads=3'):
        AttentionMixer(16, 3)
    with pytest.raises(ValueError, match='embed_dims=12, num_heads=2'):
        AttentionMixer(12, 2)
