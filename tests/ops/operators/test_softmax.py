"""Softmax attention: the N x N matrix that is never built."""

import torch

from mala_mm.ops import apply_rotary, softmax_attention

from .explicit import HEAD_DIM, SIZE, assert_rows


def test_softmax_is_its_score_matrix(qkv):
    q, k, v = qkv
    turned = [apply_rotary(x, SIZE) for x in (q, k)]
    scores = (HEAD_DIM**-0.5 * torch.einsum('bhid,bhjd->bhij', *turned)).softmax(-1)
    torch.testing.assert_close(softmax_attention(q, k, v, size=SIZE), scores @ v)
    assert_rows('softmax', q, k, scores)
