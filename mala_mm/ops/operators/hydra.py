"""Hydra attention: as many heads as channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import Operator, register_operator


@register_operator('hydra')
class Hydra(Operator):
    r"""Hydra attention, every channel a head of its own.

    .. math:: y_i = \hat q_i \odot \sum_j \hat k_j \odot v_j,\quad \hat x = x / |x|

    The lengths are taken over all ``C = heads * d`` channels: the number of heads does not matter.

    Args:
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.
    """

    paper = (
        'Hydra Attention: Efficient Attention with Many Heads (2022), section 3, '
        'https://arxiv.org/abs/2209.07484'
    )
    takes_extra_tokens = True
    no_scores = 'every channel weighs the values differently'

    def equations(self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        """``y_i = q_i / |q_i| * sum_j (k_j / |k_j| * v_j)``, channel by channel."""
        q, k = F.normalize(q, dim=(1, 3)), F.normalize(k, dim=(1, 3))
        state = torch.einsum('bhnd,bhnd->bhd', k, v)  # N d products a head
        return q * state[:, :, None]

    def macs(self, num_tokens: int) -> int:
        """``N d`` per head: the state is built; reading it scales the queries' channels."""
        return self.num_heads * num_tokens * self.head_dim
