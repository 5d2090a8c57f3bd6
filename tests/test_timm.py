"""The backbones as timm's users call them."""

import subprocess
import sys

import pytest
import torch

timm = pytest.importorskip('timm', reason='timm is optional')

from mala_mm.errors import UserError  # noqa: E402
from mala_mm.models import ARCHS, FAMILIES, RAVLT, MAViT  # noqa: E402

NAMES = [f'{family}_{arch}' for family in FAMILIES for arch in ARCHS]


@pytest.fixture(autouse=True)
def entries():
    import mala_mm.timm  # noqa: F401


def test_all_models_are_listed_with_their_configs():
    assert set(NAMES) <= set(timm.list_models('*'))
    for name in NAMES:
        cfg = timm.get_pretrained_cfg(name)
        assert cfg.input_size == (3, 224, 224) and not cfg.url and not cfg.hf_hub_id


@pytest.mark.parametrize('name', ['mavit_tiny', 'ravlt_tiny'])
def test_parameters_are_those_of_the_published_classifier(name):
    from mala_mm.checkpoint.weights import PUBLISHED

    model = timm.create_model(name)
    count = sum(p.numel() for p in model.parameters())
    assert count == PUBLISHED[name.replace('_', '-')].parameters


def test_classifier():
    model = timm.create_model('mavit_tiny', num_classes=7, in_chans=1, drop_path_rate=0.2).eval()
    image = torch.rand(2, 1, 64, 96)
    features = model.forward_features(image)
    assert features.shape == (2, 512, 2, 3)
    assert torch.equal(model(image), model.forward_head(features))
    assert model(image).shape == (2, 7)
    assert model.forward_head(features, pre_logits=True).shape == (2, model.head_hidden_size)
    model.reset_classifier(3)
    assert model(image).shape == (2, 3) and model.get_classifier().out_features == 3
    assert timm.data.resolve_model_data_config(model)['input_size'] == (3, 224, 224)


def test_features_only_are_the_maps_of_the_stages():
    model = timm.create_model('ravlt_tiny', features_only=True, out_indices=(1, -1)).eval()
    assert model.feature_info.channels() == [128, 512]
    assert model.feature_info.reduction() == [8, 32]
    image = torch.rand(1, 3, 70, 50)
    maps = model(image)
    backbone = RAVLT('tiny', output_norm=False).eval()
    backbone.load_state_dict(model.model.backbone.state_dict())
    expected = backbone(image)
    for found, index in zip(maps, (1, 3), strict=True):
        assert torch.equal(found, expected[index])
    assert not hasattr(model.model.neck, 'proj')  # what is not used is not there


def test_gradients_reach_everything():
    model = timm.create_model('mavit_tiny', num_classes=2)
    model.set_grad_checkpointing()
    model(torch.rand(2, 3, 64, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_pretrained_are_the_weights_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('MALA_MM_WEIGHTS', str(tmp_path))
    with pytest.raises(UserError, match='no weights mavit-tiny in'):
        timm.create_model('mavit_tiny', pretrained=True)
    trained = timm.create_model('mavit_tiny')
    torch.save(trained.state_dict(), tmp_path / 'mavit-tiny.pth')
    model = timm.create_model('mavit_tiny', pretrained=True)
    for name, value in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    other = timm.create_model('mavit_tiny', pretrained=True, num_classes=5)
    features = timm.create_model('mavit_tiny', pretrained=True, features_only=True).model
    for found in (other.backbone, features.backbone):
        assert torch.equal(found.stem[0].weight, trained.backbone.stem[0].weight)
    backbone = MAViT('tiny', pretrained=str(tmp_path / 'mavit-tiny.pth'))
    assert torch.equal(backbone.stem[0].weight, trained.backbone.stem[0].weight)


def test_the_package_does_not_need_timm():
    code = 'import sys, mala_mm.models; assert "timm" not in sys.modules'
    subprocess.run([sys.executable, '-c', code], check=True)
