"""Focused linear attention of FLatten Transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..registry import Operator, depthwise, merge_heads, register_operator, split_heads


@register_operator('focused')
class Focused(Operator):
    r"""Focused linear attention.

    .. math::
        y_i = \frac{f(a_i) \frac{1}{N} \sum_j f(b_j)^T v_j}
                   {f(a_i) \cdot \frac{1}{N} \sum_j f(b_j) + 10^{-6}} + \mathrm{DW}(v)_i,\quad
        f(x) = |x| \frac{x^3}{|x^3|}

    with ``a = (relu(q) + 1e-6) / softplus(sigma)`` and ``b`` likewise of ``k + P``. Lengths are
    taken over all ``C = heads * d`` channels, cubes elementwise. ``sigma`` is one number per
    channel, ``P`` one key per token, both start at 0. ``DW`` is a 5x5 depthwise convolution of d
    channels with bias, the same for every head.

    ``P`` belongs to a map of one size, ``grid``. On maps of other sizes it is interpolated
    (bicubic), as position embeddings are when a vision transformer meets another image. Tokens
    off the map have no ``P`` and no convolution.

    Args:
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.
        grid (Sequence[int]): Height and width of the map in training, in tokens.
    """

    paper = (
        'FLatten Transformer (2023), section on focused linear attention, '
        'https://arxiv.org/abs/2308.00442'
    )
    takes_extra_tokens = True
    no_scores = 'a depthwise convolution adds weights that differ by channel'

    def __init__(self, num_heads: int, head_dim: int, *, grid: Sequence[int] = (14, 14)) -> None:
        super().__init__(num_heads, head_dim)
        if (
            not isinstance(grid, Sequence)
            or len(grid) != 2
            or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in grid)
        ):
            raise ValueError(f'grid must be a height and a width in tokens, got {grid!r}')
        self.grid = tuple(grid)
        channels = num_heads * head_dim
        self.positions = nn.Parameter(torch.zeros(1, channels, *self.grid))
        self.sigma = nn.Parameter(torch.zeros(channels))
        self.local = nn.Conv2d(head_dim, head_dim, 5, padding=2, groups=head_dim)

    def equations(self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        """``f(a_i) (mean f(b)^T v) / (f(a_i) . mean f(b) + 1e-6)`` and ``DW(v)``."""
        num_tokens, extra = q.shape[2], self.num_extra_tokens
        positions = self.positions.to(k.dtype)
        if tuple(size) != self.grid:
            positions = F.interpolate(positions, size, mode='bicubic', align_corners=False)
        k = k + F.pad(split_heads(positions, self.num_heads), (0, 0, extra, 0))
        q, k = self._focus(q), self._focus(k)
        z = q @ k.mean(-2, keepdim=True).mT
        y = (q @ (k.mT @ (v / num_tokens))) / (z + 1e-6)
        heads = v[:, :, extra:].flatten(0, 1)[:, None]  # (B * heads, 1, H * W, d)
        local = depthwise(self.local, merge_heads(heads, size, token_major=False))
        local = split_heads(local, 1).unflatten(0, v.shape[:2])[:, :, 0]
        return y + F.pad(local, (0, 0, extra, 0))

    def _focus(self, x: Tensor) -> Tensor:
        """Return ``|a| * a^3 / |a^3|``, from ``a / |a|``, whose cubes stay in range."""
        scale = F.softplus(self.sigma.to(x.dtype)).unflatten(0, (self.num_heads, 1, self.head_dim))
        x = (F.relu(x) + 1e-6) / scale
        length = torch.linalg.vector_norm(x, dim=(1, 3), keepdim=True)
        cubes = (x / length) ** 3
        return length * cubes / torch.linalg.vector_norm(cubes, dim=(1, 3), keepdim=True)

    def macs(self, num_tokens: int) -> int:
        """``N d (2 d + 1)`` per head, state and divisor, and 25 per number of ``v`` on the map."""
        on_map = num_tokens - self.num_extra_tokens
        per_channel = num_tokens * (2 * self.head_dim + 1) + 25 * on_map
        return self.num_heads * self.head_dim * per_channel
