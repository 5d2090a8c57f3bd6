"""Converted files compute what the published models are defined to compute."""

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from mala_mm.checkpoint.convert import convert
from mala_mm.models import RAVLT, MAViT

from .published import ARCHS, PROJECTIONS, evaluate, random_weights

BACKBONES = dict(mavit=MAViT, ravlt=RAVLT)
ATTENTION = dict(mavit='mala', ravlt='rala')
CLASSES = 10
# The published models are defined in float64 here and run in float32: 1e-5 of the largest value
# leaves room for some eighty roundings of 2 ** -23.
TOLERANCE = 1e-5

GRID = [
    pytest.param(family, arch, marks=[] if arch in ('tiny', 'small') else pytest.mark.slow)
    for arch in ARCHS
    for family in BACKBONES
]


@pytest.fixture(scope='module')
def image():
    return torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope='module')
def tiny(image):
    weights = random_weights(ARCHS['tiny'], norms=(0, 1, 2, 3))
    return weights, evaluate(weights, ARCHS['tiny'], 'mala', image)[0]


def relative_error(output, expected):
    return ((output.double() - expected).abs().max() / expected.abs().max()).item()


def build_classifier(repo, family, arch):
    cfg = Config.fromfile(repo / f'configs/cls/{family}/{family}-{arch[0]}_8xb128_in1k.py')
    cfg.model.head.num_classes = CLASSES
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        return MODELS.build(cfg.model).eval()


@pytest.mark.parametrize('family, arch', GRID)
def test_equals_the_published_definition(repo, image, family, arch):
    weights = random_weights(
        ARCHS[arch], PROJECTIONS[family][arch], classes=CLASSES, norms=(0, 1, 2, 3)
    )
    maps, logits = evaluate(weights, ARCHS[arch], ATTENTION[family], image)

    backbone = BACKBONES[family](arch).eval()
    conversion = convert({'model': weights}, 'weights.pth', family, arch)
    backbone.load_state_dict(conversion.state_dict)
    with torch.no_grad():
        outputs = backbone(image)
    errors = [relative_error(*pair) for pair in zip(outputs, maps, strict=True)]
    assert max(errors) < TOLERANCE, errors

    classifier = build_classifier(repo, family, arch)
    conversion = convert({'model': weights}, 'weights.pth', family, arch, to='classifier')
    classifier.load_state_dict(conversion.state_dict)
    with torch.no_grad():
        error = relative_error(classifier(image, mode='tensor'), logits)
    assert error < TOLERANCE


@pytest.mark.parametrize(
    'attn_types',
    [
        ('rala', 'rala', 'softmax', 'softmax'),
        ('mala', 'rala', 'softmax', 'softmax'),
        ('mala', 'mala', 'mala', 'softmax'),
        ('mala', 'mala', 'softmax', 'mala'),
        ('softmax', 'mala', 'softmax', 'softmax'),
    ],
)
@pytest.mark.filterwarnings('ignore:These weights are of')
def test_the_wrong_attention_in_one_stage_is_far_off(image, tiny, attn_types):
    """The comparison above tells the operators apart, by three orders of magnitude and more."""
    weights, maps = tiny
    conversion = convert(weights, 'weights.pth', 'mavit', 'tiny', attn_types=attn_types)
    assert conversion.meta['mala_mm']['attn_types'] == list(attn_types)
    backbone = MAViT('tiny', attn_types=attn_types).eval()
    backbone.load_state_dict(conversion.state_dict)
    with torch.no_grad():
        outputs = backbone(image)
    first = next(i for i in range(4) if attn_types[i] != MAViT.default_attn_types[i])
    errors = [relative_error(*pair) for pair in zip(outputs, maps, strict=True)]
    assert max([0, *errors[:first]]) < TOLERANCE
    assert min(errors[first:]) > 0.01
