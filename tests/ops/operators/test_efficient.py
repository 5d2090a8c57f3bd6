"""Efficient attention: the N x N matrix that is never built."""

import torch

from mala_mm.ops import build_operator

from .explicit import HEAD_DIM, SIZE


def test_efficient_is_its_score_matrix(extra_qkv):
    extra, q, k, v = extra_qkv
    q_exp, k_exp = q.exp(), k.exp()
    scores = torch.einsum(
        'bhid,bhjd,bhi,bhd->bhij', q_exp, k_exp, 1 / q_exp.sum(3), 1 / k_exp.sum(2)
    )
    # every row of scores is a mean over the keys' distributions
    torch.testing.assert_close(scores.sum(-1), torch.ones_like(scores[..., 0]))
    out = build_operator('efficient', 3, HEAD_DIM).expect_extra_tokens(extra)(q, k, v, SIZE)
    torch.testing.assert_close(out, scores @ v)
