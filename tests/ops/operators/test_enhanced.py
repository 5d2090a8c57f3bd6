"""Enhanced linear attention: the N x N matrix that is never built."""

import torch

from mala_mm.ops import build_operator

from .explicit import HEAD_DIM, SIZE


def test_enhanced_is_its_score_matrix(extra_qkv):
    extra, q, k, v = extra_qkv
    scores = torch.einsum('bhid,bhjd->bhij', q.clamp(min=0), k.clamp(min=0))
    scores = scores / (scores.sum(-1, keepdim=True) + 1e-15)
    out = build_operator('enhanced', 3, HEAD_DIM).expect_extra_tokens(extra)(q, k, v, SIZE)
    torch.testing.assert_close(out, scores @ v)


def test_a_query_without_a_positive_channel_attends_to_nothing(qkv):
    q, k, v = qkv
    q = q.clone()
    q[:, :, 4] = -1
    out = build_operator('enhanced', 3, HEAD_DIM)(q.requires_grad_(), k, v, SIZE)
    assert not out[:, :, 4].any() and out[:, :, 5].all()
    out.sum().backward()
    assert q.grad.isfinite().all()
