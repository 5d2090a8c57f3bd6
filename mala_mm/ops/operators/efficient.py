"""Efficient attention: two softmaxes, over the channels of queries and the tokens of keys."""

from __future__ import annotations

from torch import Tensor

from ..registry import Operator, register_operator


@register_operator('efficient')
class Efficient(Operator):
    r"""Efficient attention.

    .. math:: Y = \mathrm{softmax_{channels}}(Q)\, (\mathrm{softmax_{tokens}}(K)^T V)

    Args:
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.
    """

    paper = (
        'Efficient Attention: Attention with Linear Complexities (2021), section 3.2, '
        'https://arxiv.org/abs/1812.01243'
    )
    takes_extra_tokens = True

    def equations(self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        """``softmax(q, channels) (softmax(k, tokens)^T v)``, without ``d ** -0.5``."""
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)

    def macs(self, num_tokens: int) -> int:
        """``2 N d^2`` per head: the state is built and read."""
        return 2 * self.num_heads * num_tokens * self.head_dim**2
