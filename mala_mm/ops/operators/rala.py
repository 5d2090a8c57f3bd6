"""Rank-augmented linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ..fused.dispatch import FusedOperator, attention
from ..fused.library import Problem
from ..registry import feature_map, register_operator
from ..rotary import rotate


def rala_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    size: tuple[int, int],
    scale: float | None = None,
    eps: float = 1e-6,
    rotary: bool = True,
    backend: str = 'auto',
) -> Tensor:
    r"""Rank-augmented linear attention (`RALA <https://arxiv.org/abs/2411.07635>`_, eq. 3-6).

    .. math::
        a_j = N\,\mathrm{softmax}_j(s\, \overline{\phi(q)} \cdot \phi(k_j)),\quad
        y_i = \frac{R_i\phi(q_i) \sum_j (R_j a_j\phi(k_j))^T v_j}
                   {\phi(q_i) \cdot \sum_j a_j\phi(k_j) + N\epsilon}

    Arguments, returned value and errors as in :func:`mala_attention`; ``scale`` (``s``, default
    ``d ** -0.5``) is that of the softmax which weighs the keys.
    """
    return attention('rala', q, k, v, size, scale, eps, rotary, backend)


@register_operator('rala')
class RALA(FusedOperator):
    """Rank-augmented linear attention, see :func:`rala_attention`.

    Args:
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.
        scale (float, optional): Scale of the softmax that weighs the keys.
        eps (float): Keeps the division finite.
        rotary (bool): Whether the rotary embedding turns ``phi(q)`` and ``phi(k)``.
        backend (str): ``'auto'`` or a backend's name.
    """

    paper = (
        'Breaking the Low-Rank Dilemma of Linear Attention, eq. 3-6, '
        'https://arxiv.org/abs/2411.07635'
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        eps: float = 1e-6,
        rotary: bool = True,
        backend: str = 'auto',
    ) -> None:
        super().__init__(num_heads, head_dim, scale, eps, rotary, backend)

    @staticmethod
    def formula(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the published models compute it.

        Every key is weighted by ``a_j = N * softmax_j(scale * g . phi(k_j))``, where ``g`` is the
        mean of all ``phi(q_i)``; then ``y_i = (R_i phi(q_i)) KV / (z_i + eps)`` with
        ``KV = 1/N sum_j (R_j a_j phi(k_j))^T v_j`` and ``z_i = phi(q_i) . 1/N sum_j a_j phi(k_j)``.
        """
        num_tokens = q.shape[-2]
        q, k = feature_map(q), feature_map(k)
        k = num_tokens * RALA.key_weights(problem, q, k) * k
        z = q @ k.mean(-2, keepdim=True).mT
        kv = rotate(k, problem.size, problem.rotary).mT @ (v / num_tokens)
        return (rotate(q, problem.size, problem.rotary) @ kv) / (z + problem.eps)

    @staticmethod
    def key_weights(problem: Problem, q: Tensor, k: Tensor) -> Tensor:
        """``a_j / N``: the weight of each key by its likeness to the mean of all queries."""
        global_query = q.mean(-2, keepdim=True)  # (B, heads, 1, d)
        return torch.softmax(problem.scale * (k @ global_query.mT), dim=-2)

    def macs(self, num_tokens: int) -> int:
        """``N d (2 d + 2)`` per head: the state is built and read, ``z`` and the keys' weights."""
        return self.num_heads * num_tokens * self.head_dim * (2 * self.head_dim + 2)
