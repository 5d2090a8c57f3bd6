"""Softmax attention, the yardstick of the linear operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..fused import softmax as fused
from ..fused.dispatch import check_backend
from ..registry import (
    Operator,
    check_inputs,
    check_options,
    check_rows,
    in_float32,
    register_operator,
    split_heads,
)
from ..rotary import rotate


def softmax_attention(
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
    r"""Softmax attention over all tokens, without holding the N x N matrix.

    .. math:: y = \mathrm{softmax}(s\, (Rq)(Rk)^T)\, v

    Computed in tiles with sums in float32: by compiled kernels on the CPU, where they can be had,
    else by PyTorch's scaled dot-product attention.

    Arguments, returned value and errors as in :func:`mala_attention`. ``scale`` (``s``) defaults to
    ``d ** -0.5``; ``eps`` and ``backend`` stand in the signature so that all operators can be
    exchanged.
    """
    check_backend(backend)
    check_inputs(q, k, v, size)
    return _attend(q, k, v, size, scale, rotary)


def _attend(q, k, v, size, scale, rotary) -> Tensor:
    """Attend; the fused op turns q and k by itself."""
    if fused.can_fuse_softmax(q):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return fused.softmax_attention(q, k, v, size, float(scale), rotary)
    return _equations(q, k, v, size, scale, rotary)


def _equations(q, k, v, size, scale, rotary) -> Tensor:
    q, k = rotate(q, size, rotary), rotate(k, size, rotary)
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


@register_operator('softmax')
class Softmax(Operator):
    """Softmax attention, ``softmax(scale * (R q) (R k)^T) v``.

    Args:
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.
        scale (float, optional): Defaults to ``d ** -0.5``.
        rotary (bool): Whether the rotary embedding turns q and k.
        unit_query (bool): Whether to divide every query by its length (MALA paper, table 1).
    """

    paper = 'Attention Is All You Need, eq. 1, https://arxiv.org/abs/1706.03762'
    takes_extra_tokens = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        rotary: bool = True,
        unit_query: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim)
        check_options(scale, rotary=rotary, unit_query=unit_query)
        self.scale = scale
        self.rotary = rotary
        self.unit_query = unit_query

    def equations(self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        """``softmax(scale * (R q) (R k)^T) v``; rotation on the raw q and k."""
        q = F.normalize(q, dim=-1) if self.unit_query else q
        return _equations(q, k, v, size, self.scale, self.rotary)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], x: Tensor | None = None
    ) -> Tensor:
        """Attend in the type of the inputs: PyTorch's kernels hold their sums in float32."""
        self.check_heads(q)
        check_inputs(q, k, v, size, self.num_extra_tokens)
        q = F.normalize(q, dim=-1) if self.unit_query else q
        size = (1, q.shape[2]) if self.num_extra_tokens else size
        return softmax_attention(q, k, v, size=size, scale=self.scale, rotary=self.rotary)

    def gated(
        self, qkvo: Tensor, lepe: Tensor | Callable[[Tensor], Tensor], x: Tensor | None = None
    ) -> Tensor:
        """Attend between two 1x1 convolutions; see :meth:`Operator.gated`."""
        q = split_heads(qkvo.detach()[:, : qkvo.shape[1] // 4], self.num_heads)  # to look at
        if self.unit_query or not fused.can_fuse_softmax(q):
            return super().gated(qkvo, lepe, x)
        self.check_heads(q)
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return fused.gated_softmax_attention(qkvo, lepe, self.num_heads, float(scale), self.rotary)

    def scores(
        self,
        q: Tensor,
        k: Tensor,
        size: tuple[int, int],
        rows: Sequence[int] | Tensor,
        x: Tensor | None = None,
    ) -> Tensor:
        """Return rows of ``softmax(scale * (R q) (R k)^T)``, O(N d) each."""
        check_inputs(q, k, k, size, self.num_extra_tokens)
        self.check_heads(q)
        rows = check_rows(rows, q)
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        q, k = in_float32(q).detach(), in_float32(k).detach()
        q = F.normalize(q, dim=-1) if self.unit_query else q
        q, k = (rotate(t, size, self.rotary) for t in (q, k))
        return torch.softmax(scale * (q[:, :, rows] @ k.mT), dim=-1)

    def macs(self, num_tokens: int) -> int:
        """``2 N^2 d`` per head."""
        return 2 * num_tokens**2 * self.head_dim * self.num_heads
