"""What the benchmarks compare with computes the published models."""

import pytest
import torch

from benchmarks.published import ARCHS, Backbone
from tests.checkpoint import published


def test_the_sizes_are_those_of_the_published_files():
    assert {name: tuple(arch) for name, arch in published.ARCHS.items()} == ARCHS


@pytest.mark.parametrize('attention', ['mala', 'rala'])
def test_equals_the_definition(attention):
    arch = published.ARCHS['tiny']
    weights = published.random_weights(arch, norms=(0, 1, 2, 3))
    image = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(7))
    expected, _ = published.evaluate(weights, arch, attention, image)
    backbone = Backbone('tiny', attention).eval()
    backbone.load_state_dict(weights)
    with torch.no_grad():
        maps = backbone(image)
    for ours, exact in zip(maps, expected, strict=True):
        # 1e-5 of the largest value: some eighty roundings of 2 ** -23 in float32
        assert (ours - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_drops_paths_in_training_alone():
    backbone = Backbone('tiny', drop_path_rate=0.9)
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, two = (backbone.eval()(image)[-1] for _ in range(2))
        assert torch.equal(one, two)
        backbone.train()
        torch.manual_seed(0)
        one = backbone(image)[-1]
        torch.manual_seed(1)
        assert not torch.equal(one, backbone(image)[-1])
