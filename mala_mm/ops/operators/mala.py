"""Magnitude-aware linear attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..fused.dispatch import FusedOperator, attention
from ..fused.library import Problem, make_problem
from ..registry import check_options, feature_map, register_operator
from ..rotary import rotate

KERNELS = {'elu+1': feature_map, 'relu': F.relu, 'exp': torch.exp}
"""What ``phi`` may be."""

FACTORS = ('computed', 'none', 'learned')
"""Where ``beta`` and ``gamma`` may come from."""


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

    ``kernel``, ``beta``, ``gamma`` and ``unit_query`` are the ablations of the paper. With any of
    them the operator leaves the fused family: it is computed in plain PyTorch, still linear in N,
    and a named backend refuses it.

    Args:
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.
        form (str): ``'published'`` or ``'paper'``.
        scale (float, optional): Scale of ``phi(q) . phi(k)``.
        eps (float): Keeps the division finite.
        rotary (bool): Whether the rotary embedding turns ``phi(q)`` and ``phi(k)``.
        backend (str): ``'auto'`` or a backend's name.
        kernel (str): ``phi``: ``'elu+1'``, ``'relu'`` or ``'exp'`` (table 10). The exponential
            leaves float32's range where a query or key exceeds 88.
        beta (str): ``'computed'``; ``'none'``, which is 1, so that a row of scores sums to 0; or
            ``'learned'``, one number per head that starts at 1 (table 11).
        gamma (str): ``'computed'``; ``'none'``, which is 0, so that the sum of a row grows with the
            query; or ``'learned'``, one number per head that starts at 0 (table 11). The paper does
            not print shape and start of the learned ones; give them no weight decay.
        unit_query (bool): Whether to divide every ``phi(q)`` by its length (table 1 does so in
            softmax attention).
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
        kernel: str = 'elu+1',
        beta: str = 'computed',
        gamma: str = 'computed',
        unit_query: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, scale, eps, rotary, backend, form)
        check_options(unit_query=unit_query)
        for name, value, known in (
            ('kernel', kernel, tuple(KERNELS)),
            ('beta', beta, FACTORS),
            ('gamma', gamma, FACTORS),
        ):
            if value not in known:
                raise ValueError(f'{name} must be one of {known}, got {value!r}')
        self.kernel, self.beta, self.gamma, self.unit_query = kernel, beta, gamma, unit_query
        self.phi = KERNELS[kernel]
        self.fused = (kernel, beta, gamma, unit_query) == ('elu+1', 'computed', 'computed', False)
        if not self.fused and backend not in ('auto', 'reference'):
            raise ValueError(
                f'backend {backend!r} has no kernels for MALA with kernel={kernel!r}, '
                f"beta={beta!r}, gamma={gamma!r}, unit_query={unit_query}; set backend='auto'"
            )
        if beta == 'learned':
            self.learned_beta = nn.Parameter(torch.ones(num_heads))
        if gamma == 'learned':
            self.learned_gamma = nn.Parameter(torch.zeros(num_heads))

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
        q, k = feature_map(q), feature_map(k)
        y, z = _weighted_values(problem, q, k, v), _row_sums(problem, q, k)
        return (1 + 1 / (z + problem.eps)) * y - z * v.mean(-2, keepdim=True)

    def equations(self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        """:meth:`formula` with other ``phi``, ``beta`` and ``gamma`` where options ask for them."""
        if self.fused:
            return super().equations(q, k, v, size)
        size = (1, q.shape[2]) if self.num_extra_tokens else size
        problem = make_problem(
            'mala', q.shape[-1], size, self.scale, self.eps, self.rotary, self.form
        )
        q, k = self.phi(q), self.phi(k)
        q = F.normalize(q, dim=-1) if self.unit_query else q
        y = _weighted_values(problem, q, k, v)
        z = _row_sums(problem, q, k) if 'computed' in (self.beta, self.gamma) else None
        if self.beta == 'computed':
            y = (1 + 1 / (z + self.eps)) * y
        elif self.beta == 'learned':
            y = self.learned_beta.to(y.dtype)[:, None, None] * y
        if self.gamma == 'computed':
            y = y - z * v.mean(-2, keepdim=True)
        elif self.gamma == 'learned':
            y = y - self.learned_gamma.to(y.dtype)[:, None, None] * v.sum(-2, keepdim=True)
        return y

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], x: Tensor | None = None
    ) -> Tensor:
        """Attend; see :meth:`Operator.forward`."""
        return (super() if self.fused else super(FusedOperator, self)).forward(q, k, v, size, x)

    def gated(
        self, qkvo: Tensor, lepe: Tensor | Callable[[Tensor], Tensor], x: Tensor | None = None
    ) -> Tensor:
        """Attend between two 1x1 convolutions; see :meth:`Operator.gated`."""
        return (super() if self.fused else super(FusedOperator, self)).gated(qkvo, lepe, x)

    def macs(self, num_tokens: int) -> int:
        """``N d (2 d + 1)`` per head: the state is built and read, and ``z``."""
        needs_z = 'computed' in (self.beta, self.gamma)
        return self.num_heads * num_tokens * self.head_dim * (2 * self.head_dim + needs_z)


# The root of c goes to either side of a product over the tokens: float16 overflows otherwise.


def _weighted_values(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return ``c sum_j (R_i q_i) . (R_j k_j) v_j`` of mapped q and k."""
    root = problem.coefficient**0.5
    kv = (rotate(k, problem.size, problem.rotary) * root).mT @ (v * root)  # (B, heads, d, d)
    return rotate(q, problem.size, problem.rotary) @ kv


def _row_sums(problem: Problem, q: Tensor, k: Tensor) -> Tensor:
    """Return ``z_i = c q_i . sum_j k_j`` of mapped q and k, (B, heads, N, 1)."""
    root = problem.coefficient**0.5
    return (q * root) @ (k * root).sum(-2, keepdim=True).mT
