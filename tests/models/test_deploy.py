"""Deployed backbones compute the same and say what they cannot do."""

import copy

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn

from mala_mm.models import RAVLT, MAViT

ARCH = dict(
    embed_dims=(16, 32, 32, 64),
    depths=(1, 2, 1, 1),
    num_heads=(1, 2, 2, 4),
    layer_scale_init_values=(1.0, 1.0, 1e-6, 1e-6),
)


def build(cls=MAViT, **kwargs):
    torch.manual_seed(0)
    model = cls(ARCH, **kwargs)
    model.train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if 'gamma' not in name:
                p.add_(0.3 * torch.randn_like(p))
        for _ in range(3):  # statistics of their own
            model(torch.randn(4, 3, 64, 64) + 1)
    return model.eval()


@pytest.mark.parametrize('cls', [MAViT, RAVLT])
def test_outputs_stay_and_norms_and_scales_go(cls):
    model = build(cls)
    x = torch.randn(2, 3, 70, 93)
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)
        outputs = model.deploy()(x)
    for a, b in zip(outputs, expected):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    assert not [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert not [name for name, _ in model.named_parameters() if 'gamma' in name]
    state = copy.deepcopy(model.state_dict())
    model.deploy()  # once is enough
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_one_option_deploys_before_the_first_image(tmp_path):
    model = build()
    config = dict(type='mala_mm.MAViT', arch=ARCH, deploy=True)
    deployed = MODELS.build(config)
    deployed.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for a, b in zip(deployed.eval()(x), model(x)):
            assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    assert not [name for name, _ in deployed.named_parameters() if 'gamma' in name]


def test_what_cannot_be_done_is_refused():
    with pytest.raises(RuntimeError, match='in training mode cannot be deployed'):
        MAViT(ARCH).train().deploy()
    with pytest.raises(RuntimeError, match='set no deploy=True in a config for training'):
        MAViT(ARCH, deploy=True).train()(torch.randn(2, 3, 64, 64))
    model = build()
    state = model.state_dict()
    model.deploy()
    with pytest.raises(RuntimeError, match='a deployed backbone cannot be trained'):
        model.train()
    with pytest.raises(RuntimeError, match='a deployed backbone takes no checkpoint'):
        model.load_state_dict(state)
