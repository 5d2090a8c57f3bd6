"""Magnitude-aware linear attention."""

from __future__ import annotations

from torch import Tensor

from ..fused.dispatch import FusedOperator, attention
from ..fused.library import Problem
from ..registry import feature_map, register_operator
from ..rotary import rotate


def mala_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    size: tuple[int, int],
    scale: float | None = None,
    eps: float = 1e-6,
    rotary: bool = True,
    backend: str = 'auto',
    form: str = 'published',
) -> Tensor:
    r"""Magnitude-aware linear attention (`MALA <https://arxiv.org/abs/2507.00698>`_, eq. 8-14).

    .. math::
        y_i = \beta_i c\, R_i\phi(q_i) \sum_j (R_j\phi(k_j))^T v_j - \gamma_i \sum_j v_j,\quad
        z_i = c\,\phi(q_i) \cdot \sum_j \phi(k_j),\quad
        \beta_i = 1 + \frac{1}{z_i + \epsilon},\quad \gamma_i = \frac{z_i}{N}

    Args:
        q (Tensor): Queries of shape (B, heads, N, d), any floating dtype and strides.
        k (Tensor): Keys, same shape, dtype and device.
        v (Tensor): Values, same shape, dtype and device.
        size (tuple[int, int]): Height and width (H, W) of the feature map, ``H * W = N``.
        scale (float, optional): Scale of ``phi(q) . phi(k)``. Defaults to ``d ** -0.5`` in the
            published form and to 1 in the paper's.
        eps (float): Keeps the division finite where ``phi(q)`` underflows.
        rotary (bool): Whether to turn ``phi(q)`` and ``phi(k)`` by the rotary embedding.
        backend (str): ``'auto'`` or a backend's name (:data:`BACKENDS`); see
            :func:`choose_backend`.
        form (str): ``'published'``, with ``c = scale / N``, is what the published checkpoints were
            trained with; ``'paper'``, with ``c = scale``, is the equations as printed.

    Returns:
        Tensor: Shape (B, heads, N, d), dtype of ``q``.

    Raises:
        TypeError: If an input is no floating-point tensor.
        ValueError: If shapes, dtypes or devices differ, ``H * W != N``, ``d % 4 != 0``, or
            ``backend`` or ``form`` is unknown.
    """
    return attention('mala', q, k, v, size, scale, eps, rotary, backend, form)


@register_operator('mala')
class MALA(FusedOperator):
    """Magnitude-aware linear attention, see :func:`mala_attention`.

    Args:
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.
        form (str): ``'published'`` or ``'paper'``.
        scale (float, optional): Scale of ``phi(q) . phi(k)``.
        eps (float): Keeps the division finite.
        rotary (bool): Whether the rotary embedding turns ``phi(q)`` and ``phi(k)``.
        backend (str): ``'auto'`` or a backend's name.
    """

    paper = (
        'Rectifying Magnitude Neglect in Linear Attention, eq. 8-14, '
        'https://arxiv.org/abs/2507.00698'
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        form: str = 'published',
        scale: float | None = None,
        eps: float = 1e-6,
        rotary: bool = True,
        backend: str = 'auto',
    ) -> None:
        super().__init__(num_heads, head_dim, scale, eps, rotary, backend, form)

    @staticmethod
    def formula(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``attn_ij = beta_i * c * (R_i phi(q_i)) . (R_j phi(k_j)) - gamma_i``.

        With ``z_i = c * phi(q_i) . sum_m phi(k_m)``, ``beta_i = 1 + 1 / (z_i + eps)`` and
        ``gamma_i = z_i / N``.

        The two forms differ in ``c`` alone. The published models use ``c = scale / N`` with
        ``scale = d ** -0.5``; the paper's equations have ``c = scale = 1``, "phi already carrying
        the scale". Without rotation a row of scores sums to ``1 - eps / (z_i + eps)`` in both;
        ``z`` does not see the rotation, so with it the sum is no longer exactly 1.
        """
        # The root goes to either side of the product over the tokens: float16 overflows otherwise.
        root = problem.coefficient**0.5
        q, k = feature_map(q), feature_map(k)
        z = (q * root) @ (k * root).sum(-2, keepdim=True).mT  # (B, heads, N, 1)
        kv = (rotate(k, problem.size, problem.rotary) * root).mT @ (v * root)  # (B, heads, d, d)
        y = rotate(q, problem.size, problem.rotary) @ kv
        return (1 + 1 / (z + problem.eps)) * y - z * v.mean(-2, keepdim=True)

    def macs(self, num_tokens: int) -> int:
        """``N d (2 d + 1)`` per head: the state is built and read, and ``z``."""
        return self.num_heads * num_tokens * self.head_dim * (2 * self.head_dim + 1)
