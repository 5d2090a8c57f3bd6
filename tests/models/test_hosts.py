"""Other attention in mmpretrain's backbones."""

import copy
import pickle

import pytest
import torch
from torch import nn

from mala_mm.models import replace_attention
from mala_mm.models.hosts import HOSTS, TokenConv
from mala_mm.ops import OPERATORS

VIT = dict(
    arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32),
    img_size=32,
    patch_size=8,
)
SWIN = dict(arch=dict(embed_dims=16, depths=[2, 2], num_heads=[2, 4]), img_size=32, window_size=2)
SWIN |= dict(out_indices=(0, 1), drop_path_rate=0.0)
HOST_CFG = dict(VisionTransformer=VIT, SwinTransformer=SWIN)


def build(host, attn_types, **options):
    torch.manual_seed(0)
    model = replace_attention(host, attn_types, **{**HOST_CFG[host], **options})
    for parameter in model.parameters():  # nothing at its start value of 0 or 1
        nn.init.normal_(parameter, std=0.2)
    model.eval()  # which does not return the model
    return model


@pytest.mark.parametrize('name', OPERATORS)
@pytest.mark.parametrize('host', HOSTS)
def test_every_operator_takes_maps_of_any_size(host, name):
    """In every stage, with gradients to every parameter, Focused's positions interpolated."""
    # the class token alone would not see the last convolutions
    model = build(host, name, **(dict(out_type='raw') if host == 'VisionTransformer' else {}))
    for size in ((32, 32), (48, 40)):
        outs = model(torch.randn(2, 3, *size))
    if host == 'SwinTransformer':
        assert [out.shape for out in outs] == [(2, 16, 12, 10), (2, 32, 6, 5)]
    else:
        assert outs[0].shape == (2, 1 + 6 * 5, 16)
    sum(out.square().sum() for out in outs).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize('host', HOSTS)
def test_softmax_without_windows_is_the_host_s_own(host):
    """Where the host's own attention sees the whole map, nothing changes."""
    options = dict(window_size=8) if host == 'SwinTransformer' else {}
    if host == 'SwinTransformer':
        options['arch'] = dict(embed_dims=16, depths=[1], num_heads=[2])
        options['out_indices'] = (0,)
    own = build(host, [None] * (1 if options else 2), **options)
    other = build(host, 'softmax', **options)
    weights = {k.replace('.w_msa', ''): v for k, v in own.state_dict().items()}
    for key in [k for k in weights if 'relative_position' in k]:
        weights.pop(key)
    if host == 'SwinTransformer':
        own.stages[0].blocks[0].attn.w_msa.relative_position_bias_table.data.zero_()
    other.load_state_dict(weights)
    image = torch.randn(2, 3, 32, 32)
    for a, b in zip(own(image), other(image)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # sums of 16 to 64 in float32


def test_none_leaves_a_stage_as_it_is():
    model = build('SwinTransformer', ['hydra', None])
    kinds = [type(block.attn).__name__ for stage in model.stages for block in stage.blocks]
    assert kinds == ['TokenAttention'] * 2 + ['ShiftWindowMSA'] * 2
    assert model.stages[1].blocks[1].attn.shift_size == 1


def test_a_class_token_bypasses_convolutions_alone():
    conv = TokenConv(4, 3, grid := type('Grid', (), dict(size=(2, 3)))())
    x = torch.randn(1, 7, 4)
    out = conv(x)
    assert torch.equal(out[:, :1], x[:, :1])
    expected = nn.functional.conv2d(
        x[:, 1:].mT.unflatten(2, grid.size), conv.weight, conv.bias, padding=1, groups=4
    )
    torch.testing.assert_close(out[:, 1:], expected.flatten(2).mT)

    model = build('VisionTransformer', 'enhanced')
    image = torch.randn(1, 3, 32, 32)
    before = model(image)[0]
    model.cls_token.data += 1
    assert not torch.allclose(before, model(image)[0])
    # it sees the map: an operator with convolutions of the map alone would leave it blind
    image[:, :, 16:] += 1
    assert not torch.allclose(before, model(image)[0])


def test_local_position_gate_and_the_network_s_convolution():
    def count(**options):
        return sum(p.numel() for p in build('VisionTransformer', **options).parameters())

    core = count(attn_types='mala')
    assert count(attn_types='mala', lepe=True) == core + 2 * 16 * 26
    assert count(attn_types='mala', lepe=True, gate=True) == core + 2 * 16 * (26 + 17)
    assert count(attn_types='enhanced') == core + 2 * 32 * 10
    image = torch.randn(1, 3, 32, 32)
    with_lepe = build('VisionTransformer', 'mala', lepe=True)
    out = with_lepe(image)[0]
    with_lepe.layers[0].attn.lepe.weight.data.zero_()
    assert not torch.allclose(out, with_lepe(image)[0])


def test_rotation_where_every_token_has_a_place():
    off = build('SwinTransformer', ['mala', None])
    on = build('SwinTransformer', ['mala', None], attn_cfg=dict(rotary=True))
    image = torch.randn(1, 3, 32, 32)
    assert not torch.allclose(off(image)[0], on(image)[0])
    with pytest.raises(ValueError, match="'mala' turns tokens by their place.*set rotary=False"):
        build('VisionTransformer', 'mala', attn_cfg=dict(rotary=True))


@pytest.mark.parametrize('host', HOSTS)
def test_copies_keep_a_size_of_their_own(host):
    model = build(host, 'enhanced')
    image = torch.randn(1, 3, 32, 32)
    expected = model(image)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model(torch.randn(1, 3, 48, 40))
        torch.testing.assert_close(other(image)[0], expected)


@pytest.mark.parametrize(
    ('host', 'options', 'match'),
    [
        ('ResNet', dict(attn_types='mala'), "host must be one of .*'SwinTrans.*got 'ResNet'"),
        ('VisionTransformer', dict(attn_types='mela'), "one operator or 2, .*'mala'.*got 'mela'"),
        ('SwinTransformer', dict(attn_types=['mala']), r'one operator or 2, .*got \[.mala'),
        ('SwinTransformer', dict(attn_types=None), 'one operator or 2, .*got None'),
        (
            'VisionTransformer',
            dict(attn_types='hydra', attn_cfg=dict(eps=1)),
            r"option 'eps', which none of the operators \['hydra'",
        ),
        ('VisionTransformer', dict(attn_types='mala', lepe=1), 'lepe must be True or False'),
        (
            'VisionTransformer',
            dict(attn_types='mala', layer_cfgs=dict(attn_drop_rate=0.1)),
            "'mala' has no scores to drop, got attention dropout 0.1; set it to 0",
        ),
    ],
)
def test_what_does_not_fit_is_named(host, options, match):
    with pytest.raises(ValueError, match=match):
        replace_attention(host, **{**HOST_CFG.get(host, {}), **options})
