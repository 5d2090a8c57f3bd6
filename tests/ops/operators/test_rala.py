"""RALA: the N x N matrix that is never built."""

import pytest
import torch

from mala_mm.ops import apply_rotary
from mala_mm.ops.fused.dispatch import eager

from .explicit import HEAD_DIM, SIZE, assert_rows, phi


@pytest.mark.parametrize('rotary', [True, False])
def test_rala_is_its_score_matrix(qkv, rotary):
    q, k, v = qkv
    fq, fk = phi(q), phi(k)
    logits = HEAD_DIM**-0.5 * torch.einsum('bhd,bhjd->bhj', fq.mean(2), fk)
    fk = fk * 15 * logits.softmax(-1)[..., None]
    z = torch.einsum('bhid,bhjd->bhi', fq, fk)[..., None] / 15
    turned = [apply_rotary(x, SIZE) if rotary else x for x in (fq, fk)]
    scores = torch.einsum('bhid,bhjd->bhij', *turned) / 15 / (z + 1e-6)
    torch.testing.assert_close(eager('rala', q, k, v, SIZE, rotary=rotary), scores @ v)
    assert_rows('rala', q, k, scores, rotary=rotary)
