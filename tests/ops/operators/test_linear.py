"""Linear attention: the N x N matrix that is never built."""

import pytest
import torch

from mala_mm.ops import apply_rotary
from mala_mm.ops.fused.dispatch import eager

from .explicit import SIZE, assert_rows, phi


@pytest.mark.parametrize('rotary', [True, False])
def test_linear_is_its_score_matrix(qkv, rotary):
    q, k, v = qkv
    fq, fk = phi(q), phi(k)
    z = torch.einsum('bhid,bhjd->bhi', fq, fk)[..., None]
    turned = [apply_rotary(x, SIZE) if rotary else x for x in (fq, fk)]
    scores = torch.einsum('bhid,bhjd->bhij', *turned) / (z + 1e-6)
    torch.testing.assert_close(eager('linear', q, k, v, SIZE, rotary=rotary), scores @ v)
    assert_rows('linear', q, k, scores, rotary=rotary)
