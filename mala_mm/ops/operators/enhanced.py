"""Enhanced linear attention of EfficientViT's first version."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..registry import Operator, register_operator


@register_operator('enhanced')
class EnhancedLinear(Operator):
    r"""Linear attention with ReLU; what enhances it stands in the feed-forward network.

    .. math::
        y_i = \frac{\mathrm{relu}(q_i) \sum_j \mathrm{relu}(k_j)^T v_j}
                   {\mathrm{relu}(q_i) \cdot \sum_j \mathrm{relu}(k_j) + 10^{-15}}

    The block's feed-forward network has a 3x3 depthwise convolution on its hidden features
    (``local_ffn``): MAViT's has one anyway, and
    :func:`mala_mm.models.hosts.replace_attention` adds it to others.

    Args:
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.
    """

    paper = (
        'EfficientViT: Enhanced Linear Attention (first version, 2022), section 3, '
        'https://arxiv.org/abs/2205.14756'
    )
    local_ffn = True
    takes_extra_tokens = True

    def equations(self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        """``relu(q_i) (relu(k)^T v) / (relu(q_i) . sum_j relu(k_j) + 1e-15)``."""
        q, k = F.relu(q), F.relu(k)
        z = q @ k.sum(-2, keepdim=True).mT
        return (q @ (k.mT @ v)) / (z + 1e-15)

    def macs(self, num_tokens: int) -> int:
        """``N d (2 d + 1)`` per head: the state is built and read, and the divisor."""
        return self.num_heads * num_tokens * self.head_dim * (2 * self.head_dim + 1)
