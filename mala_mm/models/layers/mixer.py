"""The token mixer around each attention operator."""

from __future__ import annotations

from mmengine.model import BaseModule
from torch import Tensor, nn

from mala_mm.ops import build_operator, get_operator
from mala_mm.ops.fused.depthwise import can_fuse_depthwise, depthwise
from mala_mm.ops.fused.dispatch import FusedOperator

from .inference import convolve, takes_short_cuts
from .pointwise import PointwiseConv2d, fusible


class AttentionMixer(BaseModule):
    """Attention with a local-position convolution and a gate, the same for every operator.

    ``q, k, v, o = split(Conv1x1(x)); y = attention(q, k, v) + DWConv5x5(v); Conv1x1(y * o)``.
    MALA, RALA, linear and softmax attention have no parameters of their own: a checkpoint cannot
    tell which of them it was trained with.

    Args:
        embed_dims (int): Number of channels C.
        num_heads (int): Number of heads; ``C / num_heads`` must be divisible by 4.
        attn_type (str): The name of a registered operator, see :data:`mala_mm.ops.OPERATORS`.
        attn_cfg (dict, optional): Options of the operator, see its class.

    Raises:
        ValueError: If the operator or an option is unknown, or the widths do not fit.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        attn_type: str = 'mala',
        attn_cfg: dict | None = None,
    ) -> None:
        super().__init__()
        get_operator(attn_type)
        if embed_dims % num_heads or embed_dims // num_heads % 4:
            raise ValueError(
                'embed_dims / num_heads must be an integer divisible by 4, got '
                f'embed_dims={embed_dims}, num_heads={num_heads}'
            )
        self.num_heads = num_heads
        self.attn_type = attn_type
        self.operator = build_operator(
            attn_type, num_heads, embed_dims // num_heads, **(attn_cfg or {})
        )
        self.qkvo = PointwiseConv2d(embed_dims, 4 * embed_dims)
        self.lepe = nn.Conv2d(embed_dims, embed_dims, 5, padding=2, groups=embed_dims)
        self.proj = PointwiseConv2d(embed_dims, embed_dims)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W), each output channel times ``scale`` (C, ) if given."""
        return self.proj(self._attend(x), scale)

    def add_to(self, residual: Tensor, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Map ``x`` and add it to ``residual``, in whose memory the sum may come back."""
        if not fusible(self.proj):
            return residual + self(x, scale)
        return self.proj.add_to(residual, self._attend(x), scale)

    def _attend(self, x: Tensor) -> Tensor:
        apart = isinstance(self.operator, FusedOperator) and self.operator.fused
        apart = apart and fusible(self.qkvo, self.lepe) and takes_short_cuts(x, self.operator)
        if not apart:
            return self.operator.gated(self.qkvo(x), self._local_position, x)
        # Four maps rather than one: the local position wants the values dense.
        weights = zip(self.qkvo.weight.chunk(4), self.qkvo.bias.chunk(4))
        q, k, v, o = (convolve(x, weight, bias) for weight, bias in weights)
        return self.operator.gated_apart(q, k, v, o, self.lepe(v))

    def _local_position(self, v: Tensor) -> Tensor:
        if fusible(self.lepe) and can_fuse_depthwise(v, taps=5, residual=False):
            return depthwise(v, self.lepe.weight, self.lepe.bias)  # where v lies in qkvo
        return self.lepe(v)
