"""Linear angular attention: the N x N matrix that is never built."""

from math import pi

import torch

from mala_mm.ops import build_operator

from .explicit import HEAD_DIM, SIZE, randomised


def test_angular_is_its_score_matrix(extra_qkv):
    """Half of the identity is the token's own value; the class token is one of the row."""
    extra, q, k, v = extra_qkv
    operator = randomised(build_operator('angular', 3, HEAD_DIM)).expect_extra_tokens(extra)
    n = q.shape[2]
    q_rows, k_rows = (x / (x**2).sum(-1, keepdim=True).sqrt() for x in (q, k))
    scores = torch.eye(n, dtype=q.dtype) / 2 + torch.einsum('bhid,bhjd->bhij', q_rows, k_rows) / pi
    u = scores @ v
    (taps,) = operator.parameters()
    assert taps.numel() == 9 * 3
    band = q.new_zeros(3, n, n)
    for i in range(n):
        for j in range(max(i - 4, 0), min(i + 5, n)):
            band[:, i, j] = taps[:, 0, j - i + 4, 0]
    expected = u / (u**2).sum(-1, keepdim=True).sqrt() + band @ v
    torch.testing.assert_close(operator(q, k, v, SIZE), expected)
