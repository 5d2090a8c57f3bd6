"""Whole backbones under autocast against float64, beside the published form under autocast."""

import copy

import pytest
import torch

from benchmarks import accuracy, models, published
from mala_mm.checkpoint.convert import convert
from mala_mm.models import ARCHS, MAViT

PARTS = {
    'layer scales': lambda name: 'gamma' in name,
    'projections before them': lambda name: '.attn.proj.' in name or '.ffn.fc2.' in name,
    'other weights': lambda name: True,
}


def build(arch):
    """The published form and ours with the same weights, and the layer scales of that size."""
    torch.manual_seed(0)
    plain = published.Backbone(arch)
    models.randomise(plain)
    with torch.no_grad():
        scales = ARCHS[arch].get('layer_scale_init_values', (1.0,) * 4)
        for stage, scale in zip(plain.layers, scales):
            for block in stage['blocks']:
                block.gamma_1 *= scale
                block.gamma_2 *= scale
    ours = MAViT(arch)
    weights = converted(plain.state_dict(), arch)
    ours.load_state_dict(weights)
    return plain.eval(), ours.eval()


def converted(state, arch):
    return convert(dict(model=state), 'published', 'mavit', arch).state_dict


def outcomes(model, images, directions, dtype):
    """Maps, the gradient of the images, and those of the weights by their names."""
    images = images.clone().requires_grad_()
    with torch.autocast('cpu', dtype or torch.bfloat16, enabled=dtype is not None):
        maps = model(images)
    grads = [d.to(y.dtype) for d, y in zip(directions, maps)]
    torch.autograd.backward(maps, grads)
    weights = {name: p.grad.double() for name, p in model.named_parameters()}
    return [y.detach() for y in maps], images.grad, weights


def by_part(weights):
    """The gradients of all weights of a kind in one vector."""
    vectors = {part: [] for part in PARTS}
    for name in sorted(weights):
        part = next(part for part, holds in PARTS.items() if holds(name))
        vectors[part].append(weights[name].flatten())
    return {part: torch.cat(parts) for part, parts in vectors.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('arch', 'dtype'),
    [
        *((arch, torch.bfloat16) for arch in ('tiny', 'small', 'base', 'large')),
        # With these weights the published form of the large one leaves float16's range.
        *((arch, torch.float16) for arch in ('tiny', 'small', 'base')),
    ],
    ids=str,
)
def test_backbones_lose_no_more_than_the_published_form(arch, dtype):
    """By the policy, 1.5 times: maps, and gradients of images and weights, scales of 1e-6 too."""
    plain, ours = build(arch)
    trained = [name for name, _ in ours.named_parameters()]
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(1, 3, 64, 96, generator=generator)
    with torch.no_grad():
        directions = [torch.randn(y.shape, generator=generator) for y in ours(images)]
    exact = outcomes(
        copy.deepcopy(plain).double(),
        images.double(),
        [d.double() for d in directions],
        None,
    )
    results = []
    for model in (ours, plain):
        maps, grad, weights = outcomes(model, images, directions, dtype)
        if model is plain:
            weights = fill(weights, plain, arch, trained)
        results.append([*maps, grad, *by_part(weights).values()])
    expected = [*exact[0], exact[1], *by_part(fill(exact[2], plain, arch, trained)).values()]
    names = [*(f'map {i}' for i in range(4)), 'gradient of the images', *PARTS]
    for name, x, y, z in zip(names, *results, expected, strict=True):
        measured = accuracy.measure(x, y, z, dtype)
        print(f'{arch} {dtype} {name}: {measured}')
        assert measured.passed, (name, str(measured))


def fill(gradients, plain, arch, names):
    """The gradients under our names; a checkpoint has buffers, too."""
    state = {**plain.state_dict(), **gradients}
    ours = converted(state, arch)
    return {name: ours[name].double() for name in names}
