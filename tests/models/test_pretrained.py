"""Weights are loaded where they are asked for, and a model that lacks them says so."""

import pytest
import torch

from mala_mm.errors import UserError
from mala_mm.models import MAViT

ARCH = dict(embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(1)
    weights = MAViT(ARCH).state_dict()
    path = tmp_path / 'weights.pth'
    torch.save(weights, path)
    return path


def same(backbone, file):
    weights = torch.load(file)
    return all(torch.equal(value, weights[name]) for name, value in backbone.state_dict().items())


def test_pretrained_loads_at_once_and_stays(file):
    backbone = MAViT(ARCH, pretrained=str(file))
    assert same(backbone, file)
    backbone.init_weights()  # as a runner does
    assert same(backbone, file)


def test_pretrained_or_init_cfg():
    with pytest.raises(ValueError, match='not both'):
        MAViT(ARCH, pretrained='a.pth', init_cfg=dict(type='Pretrained', checkpoint='b.pth'))


def test_a_file_that_does_not_fit_is_refused(file):
    with pytest.raises(UserError, match='looks like a custom arch'):
        MAViT('tiny', pretrained=str(file))


def test_first_forward_without_init_weights_warns_once(file, recwarn):
    image = torch.rand(1, 3, 32, 32)
    backbone = MAViT(ARCH, init_cfg=dict(type='Pretrained', checkpoint=str(file))).eval()
    with pytest.warns(UserWarning, match='weights.pth, which was not loaded: call init_weights'):
        backbone(image)
    recwarn.clear()
    backbone(image)
    assert not recwarn


@pytest.mark.parametrize('given', ['init_weights', 'load_state_dict', 'pretrained', 'random'])
def test_no_warning_where_weights_were_given(given, file, recwarn):
    init_cfg = dict(type='Pretrained', checkpoint=str(file))
    if given == 'pretrained':
        backbone = MAViT(ARCH, pretrained=str(file))
    else:
        backbone = MAViT(ARCH, init_cfg=None if given == 'random' else init_cfg)
    if given == 'init_weights':
        backbone.init_weights()
    elif given == 'load_state_dict':
        backbone.load_state_dict(torch.load(file))
    recwarn.clear()
    backbone.eval()(torch.rand(1, 3, 32, 32))
    assert not [w for w in recwarn if 'init_cfg' in str(w.message)]


def test_fx_is_refused_in_a_sentence():
    with pytest.raises(TypeError, match='torch.fx cannot trace MAViT.*torch.export.export'):
        torch.fx.symbolic_trace(MAViT(ARCH).eval())


def test_torchvision_feature_extractor_is_refused_in_the_same_sentence():
    extraction = pytest.importorskip('torchvision.models.feature_extraction')
    with pytest.raises(TypeError, match='torch.fx cannot trace MAViT'):
        extraction.create_feature_extractor(MAViT(ARCH).eval(), ['stages.0'])
