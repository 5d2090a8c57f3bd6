"""Angles of the rotary embedding, computed from positions on the way."""

import pytest
import torch
import triton
import triton.language as tl

from mala_mm.ops.fused.triton import tiling
from mala_mm.ops.fused.triton.kernels.rotation import frequencies, turning
from mala_mm.ops.rotary import rotary_frequencies


@pytest.mark.parametrize('head_dim', [32, 96])
def test_angles_at_any_position(device, head_dim):
    """Cosines and sines within float32's rounding of float64's, far beyond any feature map."""

    @triton.jit
    def probe(cos, sin, positions, D: tl.constexpr, P: tl.constexpr, N: tl.constexpr):
        position = tl.load(positions + tl.arange(0, N))
        c, s = turning(position, frequencies(D, P))
        place = tl.arange(0, N)[:, None] * (P // 4) + tl.arange(0, P // 4)[None, :]
        tl.store(cos + place, c)
        tl.store(sin + place, s)

    channels = tiling.padded(head_dim)
    position = torch.tensor([0, 1, 2, 45, 333, 1025, 4095, 10**6], dtype=torch.int32, device=device)
    cos, sin = torch.empty(2, len(position), channels // 4, device=device)
    probe[(1,)](cos, sin, position, head_dim, channels, len(position))
    angle = position.cpu().double()[:, None] * rotary_frequencies(head_dim)
    for ours, exact in ((cos, angle.cos()), (sin, angle.sin())):
        # the remainder is rounded (2^-25 of a quarter turn), the polynomial is good to 2^-24, and
        # float64's own angle is rounded at 10^6 to 6e-11
        assert (ours[:, : head_dim // 4].cpu() - exact).abs().max() < 2.0**-22.5
