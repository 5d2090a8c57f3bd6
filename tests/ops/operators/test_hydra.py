"""Hydra attention: one N x N matrix for each channel."""

import torch

from mala_mm.ops import build_operator

from .explicit import HEAD_DIM, SIZE


def test_hydra_is_a_score_matrix_for_each_channel(extra_qkv):
    extra, q, k, v = extra_qkv
    rows = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]  # (B, N, C)
    q_rows, k_rows = (x / (x**2).sum(-1, keepdim=True).sqrt() for x in rows[:2])
    scores = torch.einsum('bic,bjc->bcij', q_rows, k_rows)
    expected = torch.einsum('bcij,bjc->bic', scores, rows[2])
    out = build_operator('hydra', 3, HEAD_DIM).expect_extra_tokens(extra)(q, k, v, SIZE)
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), expected)


def test_the_number_of_heads_does_not_matter(qkv):
    many = build_operator('hydra', 3, HEAD_DIM)(*qkv, SIZE)
    one = [x.transpose(1, 2).flatten(2)[:, None] for x in qkv]
    out = build_operator('hydra', 1, 3 * HEAD_DIM)(*one, SIZE)
    torch.testing.assert_close(out[:, 0], many.transpose(1, 2).flatten(2))
