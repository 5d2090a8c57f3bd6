"""The token mixer around each attention operator."""

from __future__ import annotations

from mmengine.model import BaseModule
from torch import Tensor, nn

from mala_mm.ops import gated_attention, softmax_attention

ATTENTION_TYPES = ('mala', 'rala', 'linear', 'softmax')


class AttentionMixer(BaseModule):
    """Attention with a local-position convolution and a gate, the same for every operator.

    ``q, k, v, o = split(Conv1x1(x)); y = attention(q, k, v) + DWConv5x5(v); Conv1x1(y * o)``. The
    parameters do not depend on ``attn_type``: a checkpoint cannot tell which one it was trained
    with.

    Args:
        embed_dims (int): Number of channels C.
        num_heads (int): Number of heads; ``C / num_heads`` must be divisible by 4.
        attn_type (str): One of ``'mala'``, ``'rala'``, ``'linear'``, ``'softmax'``.
        attn_cfg (dict, optional): Keywords of the operator: ``scale, eps, rotary, backend`` and,
            for MALA, ``form``. See :func:`mala_mm.ops.mala_attention`.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        attn_type: str = 'mala',
        attn_cfg: dict | None = None,
    ) -> None:
        super().__init__()
        if attn_type not in ATTENTION_TYPES:
            raise ValueError(f'attn_type must be one of {ATTENTION_TYPES}, got {attn_type!r}')
        if embed_dims % num_heads or embed_dims // num_heads % 4:
            raise ValueError(
                'embed_dims / num_heads must be an integer divisible by 4, got '
                f'embed_dims={embed_dims}, num_heads={num_heads}'
            )
        self.num_heads = num_heads
        self.attn_type = attn_type
        self.attn_cfg = dict(attn_cfg or {})
        self.qkvo = nn.Conv2d(embed_dims, 4 * embed_dims, 1)
        self.lepe = nn.Conv2d(embed_dims, embed_dims, 5, padding=2, groups=embed_dims)
        self.proj = nn.Conv2d(embed_dims, embed_dims, 1)

    def _to_heads(self, x: Tensor) -> Tensor:
        """View (B, C, H, W) as (B, heads, N, d)."""
        return x.flatten(2).unflatten(1, (self.num_heads, -1)).mT

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        qkvo = self.qkvo(x)
        if self.attn_type != 'softmax':  # one pass over the packed projection
            y = gated_attention(
                qkvo, self.lepe, self.num_heads, kind=self.attn_type, **self.attn_cfg
            )
            return self.proj(y)
        q, k, v, o = qkvo.chunk(4, dim=1)  # (B, C, H, W) each
        size = x.shape[-2:]
        y = softmax_attention(*map(self._to_heads, (q, k, v)), size=tuple(size), **self.attn_cfg)
        y = y.mT.flatten(1, 2).unflatten(-1, size)  # (B, C, H, W)
        return self.proj((y + self.lepe(v)) * o)

    def extra_repr(self) -> str:
        return f'attn_type={self.attn_type!r}, num_heads={self.num_heads}'
