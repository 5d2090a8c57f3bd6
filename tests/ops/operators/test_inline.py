"""InLine attention: the N x N matrix that is never built."""

import torch
import torch.nn.functional as F

from mala_mm.ops import build_operator

from .explicit import HEAD_DIM, SIZE, randomised, stencil


def test_inline_is_its_score_matrix(extra_qkv):
    extra, q, k, v = extra_qkv
    operator = randomised(build_operator('inline', 3, HEAD_DIM)).expect_extra_tokens(extra)
    n, channels = q.shape[2], 3 * HEAD_DIM
    assert sum(p.numel() for p in operator.parameters()) == 10 * channels * (HEAD_DIM + 1)
    products = HEAD_DIM**-0.5 / n * torch.einsum('bhid,bhjd->bhij', q, k)
    scores = products + (1 - products.sum(-1, keepdim=True)) / n
    torch.testing.assert_close(scores.sum(-1), torch.ones_like(scores[..., 0]))

    x = torch.randn(2, channels, n, generator=torch.Generator().manual_seed(3), dtype=q.dtype)
    residual = []
    for image in range(2):
        mean = x[image].mean(-1)
        rows = []
        for head in range(3):  # a group of channels for each head
            own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            hidden = F.gelu(operator.fc1.weight[own, :, 0, 0] @ mean[own] + operator.fc1.bias[own])
            own = slice(head * 9 * HEAD_DIM, (head + 1) * 9 * HEAD_DIM)
            taps = operator.fc2.weight[own, :, 0, 0] @ hidden + operator.fc2.bias[own]
            matrices = stencil(taps.reshape(HEAD_DIM, 3, 3), SIZE, extra)
            rows.append(torch.einsum('dij,jd->id', matrices, v[image, head]))
        residual.append(torch.stack(rows))
    if not extra:
        x = x.unflatten(2, SIZE)
    torch.testing.assert_close(operator(q, k, v, SIZE, x), scores @ v + torch.stack(residual))
