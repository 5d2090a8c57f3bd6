"""The kernels against float64, by the policy of ``benchmarks/accuracy.py``."""

import dataclasses
import functools

import pytest
import torch

from benchmarks.gpu.checks import DTYPES, NAMES, accuracies, formula, fused, inputs, results
from mala_mm import ops
from mala_mm.ops.fused.triton import launch, tiling

KINDS = {
    'mala': dict(kind='mala'),
    'mala-paper': dict(kind='mala', form='paper'),
    'rala': dict(kind='rala'),
    'linear': dict(kind='linear'),
}


def check(batch, heads, head_dim, size, dtype, token_major=True, **spec):
    tensors = inputs(batch, heads, head_dim, size, dtype, token_major)
    ours = dict(zip(NAMES, results(fused, tensors, dtype, heads, **spec)))
    found = accuracies(ours.values(), tensors, dtype, heads, **spec)
    if size == (1, 1):
        # the output is v, whatever q and k: terms of the size of dv, sums of d, cancel
        most = head_dim**0.5 * torch.finfo(dtype).eps * ours['dv'].norm()
        for name in ('dq', 'dk'):
            assert ours[name].norm() <= most, name
            del found[name]
    for name, one in found.items():
        assert one.passed, f'{name}: {one}'


@pytest.mark.parametrize('rotary', [True, False])
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('kind', KINDS)
def test_every_variant(device, kind, dtype, rotary):
    check(1, 2, 32, (5, 13), DTYPES[dtype], rotary=rotary, **KINDS[kind])


# RALA: the softmax' gradient takes one sum per image from all of its keys, whose rounding they
# share, so that an image's error is one draw. Of two draws alike one exceeds 1.5 times the other
# in 37 of 100 images, 1 - 2 / pi * atan(1.5); the ratio of the roots of the mean squares of 12
# draws each is 1 +- sqrt(1 / 12).
IMAGES = {'mala': 3, 'rala': 12}


@pytest.mark.parametrize('token_major', [True, False], ids=['token-major', 'channel-first'])
@pytest.mark.parametrize('head_dim', [64, 96, 128])
@pytest.mark.parametrize('kind, dtype', [('mala', 'bf16'), ('mala', 'fp16'), ('rala', 'fp32')])
def test_every_head_width_and_layout(device, kind, dtype, head_dim, token_major):
    check(IMAGES[kind], 1, head_dim, (3, 11), DTYPES[dtype], token_major, kind=kind)


@pytest.mark.parametrize('kind, dtype', [('mala', 'fp32'), ('mala', 'fp16'), ('rala', 'fp32')])
def test_backward_in_parts(device, kind, dtype, monkeypatch):
    """Where registers do not suffice, each launch of the backward holds one matrix."""
    monkeypatch.setattr(
        'mala_mm.ops.fused.triton.passes.tiling',
        lambda *args: dataclasses.replace(tiling.tiling(*args), fused=False),
    )
    launch.forget_plans()
    check(IMAGES[kind], 1, 96, (3, 11), DTYPES[dtype], kind=kind)
    launch.forget_plans()


@pytest.mark.parametrize('size', [(1, 1), (3, 5), (1, 17), (9, 7), (2, 65)])
@pytest.mark.parametrize('kind', IMAGES)
def test_every_size(device, kind, size):
    """Fewer tokens than a tile, whole tiles, several programs; H and W never alike."""
    check(IMAGES[kind], 1, 32, size, torch.float32, kind=kind)


@pytest.mark.parametrize('kind', KINDS)
def test_two_runs_are_bitwise_equal(device, kind):
    run = functools.partial(results, fused, dtype=torch.float32, heads=1, **KINDS[kind])
    tensors = inputs(2, 1, 32, (2, 65), torch.float32)  # several partial sums per head
    for name, a, b in zip(NAMES, run(tensors), run(tensors)):
        assert torch.equal(a, b), name


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('kind', KINDS)
def test_magnitudes_stay_finite(device, kind, dtype):
    """q and k from 1e-4 to 1e4, and q so low that phi(q) underflows."""
    dtype = DTYPES[dtype]
    largest = torch.finfo(dtype).max
    for factor_q, factor_k, shift in ((1e-4, 1e4, 0), (1e4, 1e-4, 0), (1e3, 1e3, 0), (1, 1, -200)):
        qkvo, lepe, grad = inputs(1, 1, 32, (3, 5), torch.float32)
        qkvo[:, :32] = qkvo[:, :32] * factor_q + shift
        qkvo[:, 32:64] *= factor_k
        tensors = [x.to(dtype) for x in (qkvo, lepe, grad)]
        ours = results(fused, tensors, dtype, 1, **KINDS[kind])
        exact = results(formula, tensors, torch.float64, 1, **KINDS[kind])
        for name, a, b in zip(NAMES, ours, exact):
            assert not a.isnan().any(), (name, factor_q, factor_k, shift)
            # what the type can hold at all (with room for its rounding) has to be finite
            assert a[b.abs() < largest / 2].isfinite().all(), (name, factor_q, factor_k, shift)


@pytest.mark.parametrize('part', range(4), ids='qkvo')
@pytest.mark.parametrize('kind, dtype', [('mala', 'bf16'), ('mala', 'fp16'), ('rala', 'fp32')])
def test_nan_in_is_nan_out(device, kind, dtype, part):
    """Where the formula's results are NaN, so are the kernels'."""
    tensors = inputs(1, 1, 32, (3, 5), DTYPES[dtype])
    tensors[0][0, 32 * part, -1, 0] = float('nan')
    ours = results(fused, tensors, DTYPES[dtype], 1, kind=kind)
    exact = results(formula, tensors, torch.float64, 1, kind=kind)
    assert exact[0].isnan().any()
    for name, a, b in zip(NAMES, ours, exact):
        assert a[b.isnan()].isnan().all(), name


@pytest.mark.parametrize('order', [1, -1], ids=['growing', 'falling'])
def test_weights_follow_the_largest_key_wherever_it_is(device, order):
    """RALA: exponentials relative to any but the maximum over all tiles and programs overflow."""
    q, k, v, grad = torch.randn(4, 1, 1, 300, 32, generator=torch.Generator().manual_seed(0))
    # A logit grows by about 32 * 32 ** -0.5 = 6 per unit: neighbouring tiles are e^120 apart.
    rank = torch.arange(300) // 32
    k = k + 20.0 * (rank if order > 0 else 9 - rank)[:, None]
    chosen = tiling.tiling('reduce_keys', 32, torch.float32, True)
    strips, _, tiles = tiling.cut(chosen, 1, (3, 100), 4)
    assert strips > 1 and tiles > 1

    def run(dtype, backend):
        leaves = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
        out = ops.rala_attention(*leaves, size=(3, 100), backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(device, dtype))]

    exact = run(torch.float64, 'reference')
    # Where one key has all the weight, dq and the part of dk through the softmax are differences
    # that vanish: they are compared with the size of dv.
    allowed = {name: x.norm() for name, x in zip(NAMES, exact)}
    allowed['dq'] = allowed['dk'] = torch.maximum(allowed['dk'], allowed['dv'])
    for (name, size), a, b in zip(allowed.items(), run(torch.float32, 'triton'), exact):
        # A logit up to 1200, rounded by 6e-8 of it in each of some ten steps, is the exponent.
        assert (a - b).norm() <= 1200 * 10 * 6e-8 * size, name
