"""MALA: what its equations promise, on explicit N x N score matrices."""

import pytest
import torch

from mala_mm.ops import apply_rotary
from mala_mm.ops.fused.dispatch import eager

from .explicit import HEAD_DIM, SIZE, assert_rows, phi


def mala_scores(q, k, coefficient, rotary, eps=1e-6):
    """The N x N matrix that the linear form never builds."""
    q, k = phi(q), phi(k)
    z = coefficient * torch.einsum('bhid,bhjd->bhi', q, k)[..., None]
    turned = [apply_rotary(x, SIZE) if rotary else x for x in (q, k)]
    product = coefficient * torch.einsum('bhid,bhjd->bhij', *turned)
    return (1 + 1 / (z + eps)) * product - z / k.shape[2]


@pytest.mark.parametrize('rotary', [True, False])
@pytest.mark.parametrize('form, coefficient', [('published', HEAD_DIM**-0.5 / 15), ('paper', 1.0)])
def test_mala_is_its_score_matrix(qkv, form, coefficient, rotary):
    q, k, v = qkv
    scores = mala_scores(q, k, coefficient, rotary)
    out = eager('mala', q, k, v, SIZE, rotary=rotary, form=form)
    torch.testing.assert_close(out, scores @ v)
    assert_rows('mala', q, k, scores, rotary=rotary, form=form)


@pytest.mark.parametrize('form', ['published', 'paper'])
def test_mala_scores_sum_to_one(qkv, form):
    """A row of scores is what values of 1 give back; eps takes ``eps / (z + eps)`` of it."""
    q, k, _ = qkv
    ones = torch.ones_like(q)
    out = eager('mala', q, k, ones, SIZE, rotary=False, form=form, eps=0.0)
    torch.testing.assert_close(out, ones)
    coefficient = HEAD_DIM**-0.5 / 15 if form == 'published' else 1.0
    z = coefficient * (phi(q) @ phi(k).sum(2, keepdim=True).mT)
    out = eager('mala', q, k, ones, SIZE, rotary=False, form=form, eps=0.1)
    torch.testing.assert_close(out, (1 - 0.1 / (z + 0.1)).expand_as(out))


def test_rotation_breaks_the_sum_of_mala_scores(qkv):
    """The published models' z does not see the rotation: their rows do not sum to 1."""
    q, k, _ = qkv
    out = eager('mala', q, k, torch.ones_like(q), SIZE)
    assert (out - 1).abs().max() > 1e-2


def test_mala_follows_the_magnitude_of_the_query():
    """The direction of phi(q) fixed, its length times a: beta, gamma and the scores' ratio."""
    generator = torch.Generator().manual_seed(1)
    direction = 1 + torch.rand(HEAD_DIM, generator=generator, dtype=torch.float64)
    keys = 1 + torch.rand(2, HEAD_DIM, generator=generator, dtype=torch.float64)
    ratios = []
    for a in (1.0, 1.5, 3.0):
        q = (a * direction - 1).expand(1, 1, 2, -1)  # phi(x) = x + 1 for positive x
        k = (keys - 1)[None, None]
        # with the identity as values the output is the row of scores
        values = torch.zeros(1, 1, 2, HEAD_DIM, dtype=torch.float64)
        values[0, 0, :, :2] = torch.eye(2, dtype=torch.float64)
        scores = eager('mala', q, k, values, (1, 2), scale=0.01, rotary=False, form='paper', eps=0)
        z = 0.01 * a * (direction @ keys.sum(0))
        z_1 = z / a
        beta, beta_1 = 1 + 1 / z, 1 + 1 / z_1
        torch.testing.assert_close(beta, (beta_1 + a - 1) / a)
        expected = beta * 0.01 * a * (keys @ direction) - a * z_1 / 2
        torch.testing.assert_close(scores[0, 0, 0, :2], expected)
        assert (expected > 0).all()
        ratios.append((expected.max() / expected.min()).item())
    assert ratios == sorted(ratios) and ratios[2] > ratios[0] * 1.001
