"""Softmax attention: the N x N matrix that is never built."""

import torch

from mala_mm.ops import apply_rotary, build_operator, softmax_attention

from .explicit import HEAD_DIM, SIZE, assert_rows


def test_softmax_is_its_score_matrix(qkv):
    q, k, v = qkv
    turned = [apply_rotary(x, SIZE) for x in (q, k)]
    scores = (HEAD_DIM**-0.5 * torch.einsum('bhid,bhjd->bhij', *turned)).softmax(-1)
    torch.testing.assert_close(softmax_attention(q, k, v, size=SIZE), scores @ v)
    assert_rows('softmax', q, k, scores)


def test_a_unit_query_keeps_its_direction_alone(extra_qkv):
    extra, q, k, v = extra_qkv
    operator = build_operator('softmax', 3, HEAD_DIM, rotary=False, unit_query=True)
    operator.expect_extra_tokens(extra)
    unit = q / (q**2).sum(-1, keepdim=True).sqrt()
    scores = (HEAD_DIM**-0.5 * torch.einsum('bhid,bhjd->bhij', unit, k)).softmax(-1)
    torch.testing.assert_close(operator(q, k, v, SIZE), scores @ v)
    torch.testing.assert_close(operator(7 * q, k, v, SIZE), scores @ v)
    if not extra:
        assert_rows('softmax', q, k, scores, rotary=False, unit_query=True)
