"""Plain linear attention."""

from __future__ import annotations

from torch import Tensor

from ..fused.dispatch import FusedOperator, attention
from ..fused.library import Problem
from ..registry import feature_map, register_operator
from ..rotary import rotate


def linear_attention(
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
    r"""Plain linear attention with ``phi = elu + 1``.

    .. math::
        y_i = \frac{R_i\phi(q_i) \sum_j (R_j\phi(k_j))^T v_j}
                   {\phi(q_i) \cdot \sum_j \phi(k_j) + \epsilon}

    Arguments, returned value and errors as in :func:`mala_attention`. ``scale`` stands in the
    signature so that all operators can be exchanged; the ratio does not depend on it.
    """
    return attention('linear', q, k, v, size, scale, eps, rotary, backend)


@register_operator('linear')
class Linear(FusedOperator):
    """Plain linear attention with ``phi = elu + 1``, see :func:`linear_attention`.

    Args:
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.
        eps (float): Keeps the division finite.
        rotary (bool): Whether the rotary embedding turns ``phi(q)`` and ``phi(k)``.
        backend (str): ``'auto'`` or a backend's name.
    """

    paper = 'Transformers are RNNs, eq. 4-7, https://arxiv.org/abs/2006.16236'

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        eps: float = 1e-6,
        rotary: bool = True,
        backend: str = 'auto',
    ) -> None:
        super().__init__(num_heads, head_dim, None, eps, rotary, backend)

    @staticmethod
    def formula(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotation on the numerator only.

        ``y_i = (R_i phi(q_i)) (sum_j (R_j phi(k_j))^T v_j) / (phi(q_i) . sum_j phi(k_j) + eps)``.
        """
        q, k = feature_map(q), feature_map(k)
        z = q @ k.sum(-2, keepdim=True).mT
        kv = rotate(k, problem.size, problem.rotary).mT @ v
        return (rotate(q, problem.size, problem.rotary) @ kv) / (z + problem.eps)

    def macs(self, num_tokens: int) -> int:
        """``N d (2 d + 1)`` per head: the state is built and read, and ``z``."""
        return self.num_heads * num_tokens * self.head_dim * (2 * self.head_dim + 1)
