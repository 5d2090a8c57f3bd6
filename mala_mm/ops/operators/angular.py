"""Linear angular attention of Castling-ViT."""

from __future__ import annotations

from math import pi

import torch.nn.functional as F
from torch import Tensor, nn

from ..registry import Operator, depthwise, register_operator


@register_operator('angular')
class LinearAngular(Operator):
    r"""Linear angular attention.

    .. math::
        y_i = \frac{u_i}{|u_i|} + \mathrm{DW}(v)_i,\quad
        u_i = \frac{v_i}{2} + \frac{1}{\pi} \hat q_i \sum_j \hat k_j^T v_j,\quad \hat x = x / |x|

    The first term of ``u_i`` is the token's own value, as in the paper's code. ``DW`` is a
    convolution along the tokens in row order, 9 taps, one filter per head for all its channels,
    without bias.

    Args:
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.
    """

    paper = (
        'Castling-ViT (2023), section on linear-angular attention, https://arxiv.org/abs/2211.10526'
    )
    takes_extra_tokens = True
    no_scores = 'each sum of values is divided by its own length'

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim)
        # of maps (B, heads, N, d): heads are its channels
        self.along_tokens = nn.Conv2d(
            num_heads, num_heads, (9, 1), padding=(4, 0), groups=num_heads, bias=False
        )

    def equations(self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        """``u_i = v_i / 2 + q_i (k^T v) / pi`` of unit q and k, made unit, and ``DW(v)``."""
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        u = v / 2 + q @ (k.mT @ v) / pi
        return F.normalize(u, dim=-1) + depthwise(self.along_tokens, v)

    def macs(self, num_tokens: int) -> int:
        """``N d (2 d + 9)`` per head: the state is built and read, and the convolution."""
        return self.num_heads * num_tokens * self.head_dim * (2 * self.head_dim + 9)
