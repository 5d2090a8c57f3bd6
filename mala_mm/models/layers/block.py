"""The block of which every stage consists."""

from __future__ import annotations

import torch
import torch.utils.checkpoint as cp
from mmcv.cnn.bricks import DropPath
from mmcv.cnn.bricks.scale import LayerScale
from mmengine.model import BaseModule
from torch import Tensor, nn

from mala_mm.ops.fused.depthwise import can_fuse_depthwise, depthwise_residual
from mala_mm.ops.fused.norm import can_fuse_norm, residual_norm

from .ffn import ConvFFN
from .inference import compute_dtype, takes_short_cuts
from .mixer import AttentionMixer
from .norm import LayerNorm2d
from .pointwise import fusible


class Block(BaseModule):
    """Conditional position, token mixer and feed-forward network, each on a residual path.

    ``x = x + DWConv3x3(x)``, ``x = x + drop_path(gamma1 * mixer(norm1(x)))``,
    ``x = x + drop_path(gamma2 * ffn(norm2(x)))``.

    Args:
        embed_dims (int): Number of channels C.
        num_heads (int): Number of heads.
        hidden_dims (int): Width of the feed-forward network.
        attn_type (str): Operator of the mixer, see :class:`AttentionMixer`.
        attn_cfg (dict, optional): Keywords of the operator.
        drop_path_rate (float): Probability of dropping a residual path.
        layer_scale_init_value (float): Initial value of ``gamma1`` and ``gamma2``.
        with_cp (bool): Whether to recompute the block in the backward pass, to save memory.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        hidden_dims: int,
        attn_type: str,
        attn_cfg: dict | None = None,
        drop_path_rate: float = 0.0,
        layer_scale_init_value: float = 1.0,
        with_cp: bool = False,
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.pos = nn.Conv2d(embed_dims, embed_dims, 3, padding=1, groups=embed_dims)
        self.norm1 = LayerNorm2d(embed_dims)
        self.attn = AttentionMixer(embed_dims, num_heads, attn_type, attn_cfg)
        self.gamma1 = LayerScale(
            embed_dims, data_format='channels_first', scale=layer_scale_init_value
        )
        self.norm2 = LayerNorm2d(embed_dims)
        self.ffn = ConvFFN(embed_dims, hidden_dims)
        self.gamma2 = LayerScale(
            embed_dims, data_format='channels_first', scale=layer_scale_init_value
        )
        self.drop_path = DropPath(drop_path_rate)

    def _forward(self, x: Tensor) -> Tensor:
        if fusible(self.pos) and can_fuse_depthwise(x):
            x = depthwise_residual(x, self.pos.weight, self.pos.bias)
        else:
            x = x + self.pos(x)
        if takes_short_cuts(x, self.attn, self.ffn) and not self.training:
            x = self.attn.add_to(x, self.norm1(x), _scale(self.gamma1))
            return self.ffn.add_to(x, self.norm2(x), _scale(self.gamma2))
        x, y = self._normed(self.norm1, x)
        x, y = self._normed(self.norm2, x, self.attn(y, _scale(self.gamma1)))
        return self._add(x, self.ffn(y, _scale(self.gamma2)))

    def _normed(
        self, norm: LayerNorm2d, x: Tensor, branch: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``x + drop_path(branch)`` and its norm, in one pass where there is a kernel for it."""
        if fusible(norm) and can_fuse_norm(x):
            keep = None if branch is None else self._keep(branch)
            dtype = compute_dtype(x)
            return residual_norm(x, norm.weight, norm.bias, norm.eps, branch, keep, dtype)
        if branch is not None:
            x = self._add(x, branch)
        return x, norm(x)

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        """``x + drop_path(branch)`` in one pass."""
        keep = self._keep(branch)
        return x + branch if keep is None else torch.addcmul(x, branch, keep)

    def _keep(self, branch: Tensor) -> Tensor | None:
        """Draw what drop path multiplies each image of the branch by, if anything."""
        if not self.training or self.drop_path.drop_prob == 0:
            return None
        keep = 1 - self.drop_path.drop_prob
        shape = len(branch), 1, 1, 1
        kept = torch.rand(shape, dtype=branch.dtype, device=branch.device) < keep
        return kept.to(branch.dtype).div_(keep)

    @torch.no_grad()
    def deploy(self) -> None:
        """Fold the layer scales into the projections before them."""
        for name, conv in (('gamma1', self.attn.proj), ('gamma2', self.ffn.fc2)):
            weight, bias = conv.scaled(getattr(self, name).weight)
            conv.weight.copy_(weight)
            conv.bias.copy_(bias)
            setattr(self, name, None)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        if self.with_cp and x.requires_grad:
            return cp.checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)


def _scale(gamma: LayerScale | None) -> Tensor | None:
    return None if gamma is None else gamma.weight
