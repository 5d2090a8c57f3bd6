"""Focused linear attention: the N x N matrix that is never built."""

import pytest
import torch
import torch.nn.functional as F

from mala_mm.ops import build_operator

from .explicit import HEAD_DIM, SIZE, randomised, stencil


def focus(x, sigma):
    """As printed, on rows of all C channels."""
    a = (x.clamp(min=0) + 1e-6) / (1 + sigma.exp()).log()
    length = (a**2).sum(-1, keepdim=True).sqrt()
    return length * a**3 / (a**6).sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize('grid', [SIZE, (4, 4)])
def test_focused_is_its_score_matrix(extra_qkv, grid):
    extra, q, k, v = extra_qkv
    operator = randomised(build_operator('focused', 3, HEAD_DIM, grid=grid))
    operator.expect_extra_tokens(extra)
    q_rows, k_rows = (x.transpose(1, 2).flatten(2) for x in (q, k))  # (B, N, C)
    positions = operator.positions
    assert positions.numel() == grid[0] * grid[1] * 3 * HEAD_DIM
    if grid != SIZE:
        positions = F.interpolate(positions, SIZE, mode='bicubic')
    k_rows = torch.cat([k_rows[:, :extra], k_rows[:, extra:] + positions.flatten(2).mT], 1)
    fq, fk = (
        focus(x, operator.sigma).unflatten(2, (3, HEAD_DIM)).transpose(1, 2)
        for x in (q_rows, k_rows)
    )
    n = q.shape[2]
    scores = torch.einsum('bhid,bhjd->bhij', fq, fk) / n
    scores = scores / (scores.sum(-1, keepdim=True) + 1e-6)
    local = stencil(operator.local.weight[:, 0], SIZE, extra)
    bias = torch.zeros(n, 1, dtype=q.dtype)
    bias[extra:] = 1
    expected = scores @ v + torch.einsum('dij,bhjd->bhid', local, v) + bias * operator.local.bias
    torch.testing.assert_close(operator(q, k, v, SIZE), expected)


@pytest.mark.parametrize('grid', [14, (14,), (14, 0), (14, 14.0), None])
def test_a_wrong_grid_is_named(grid):
    with pytest.raises(ValueError, match='grid must be a height and a width in tokens, got'):
        build_operator('focused', 3, HEAD_DIM, grid=grid)
