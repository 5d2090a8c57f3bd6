"""Residual and norm: the equation, and what is refused. The kernels: ``triton/test_norm.py``."""

import pytest
import torch
import torch.nn.functional as F

from mala_mm.ops.fused import triton
from mala_mm.ops.fused.norm import can_fuse_norm, residual_norm


@pytest.mark.parametrize('keep', [None, 0.5])
def test_the_equation_agrees_with_finite_differences(keep):
    generator = torch.Generator().manual_seed(0)
    x, branch = torch.randn(2, 2, 3, 2, 1, generator=generator, dtype=torch.float64)
    weight, bias = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    if keep is not None:
        keep = torch.full((2, 1, 1, 1), keep, dtype=torch.float64)
    tensors = [t.requires_grad_() for t in (x, weight, bias, branch)]

    def function(x, weight, bias, branch):
        return residual_norm(x, weight, bias, 1e-6, branch, keep)

    assert torch.autograd.gradcheck(function, tensors)


def test_is_a_layer_norm_of_the_sum():
    x, branch = torch.randn(2, 2, 8, 3, 5)
    weight, bias = torch.randn(2, 8)
    total, y = residual_norm(x, weight, bias, 1e-6, branch, dtype=torch.bfloat16)
    assert torch.equal(total, x + branch)
    expected = F.layer_norm(total.permute(0, 2, 3, 1), (8,), weight, bias, 1e-6)
    assert torch.equal(y, expected.permute(0, 3, 1, 2).bfloat16())
    total, _ = residual_norm(x, weight, bias, 1e-6)
    assert total is x


def test_backends_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(triton, '_INTERPRETED', False)
    x, weight = torch.zeros(1, 4, 2, 2), torch.ones(4)
    assert not can_fuse_norm(x)
    for backend, reason in (('triton', 'needs tensors on a CUDA device'), ('cpu', 'has no norms')):
        with pytest.raises(ValueError, match=f"backend '{backend}' {reason}"):
            residual_norm(x, weight, weight, 1e-6, backend=backend)
    with pytest.raises(ValueError, match='needs at most 1024 channels, got 1025'):
        residual_norm(torch.zeros(1, 1025, 1, 1), *torch.ones(2, 1025), 1e-6, backend='triton')
