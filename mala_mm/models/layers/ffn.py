"""The feed-forward network with a depthwise convolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor, nn

from mala_mm.ops.fused.depthwise import (
    can_fuse_depthwise,
    depthwise_residual,
    gelu_depthwise_linear,
)

from .inference import add_pointwise, bands, compute_dtype, takes_short_cuts
from .pointwise import PointwiseConv2d, fusible


class ConvFFN(BaseModule):
    """``fc1 -> GELU -> h + DWConv3x3(h) -> fc2``, 1x1 convolutions with biases.

    Args:
        embed_dims (int): Channels of the input and the output.
        hidden_dims (int): Channels in between.
    """

    def __init__(self, embed_dims: int, hidden_dims: int) -> None:
        super().__init__()
        self.fc1 = PointwiseConv2d(embed_dims, hidden_dims)
        self.dwconv = nn.Conv2d(hidden_dims, hidden_dims, 3, padding=1, groups=hidden_dims)
        self.fc2 = PointwiseConv2d(hidden_dims, embed_dims)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W), each output channel times ``scale`` (C, ) if given."""
        if not (fusible(self.fc1, self.dwconv, self.fc2) and can_fuse_depthwise(x)):
            x = F.gelu(self.fc1(x))
            return self.fc2(x + self.dwconv(x), scale)
        if x.device.type != 'cpu':  # making the hidden map again would be two passes
            weight, bias = self.dwconv.weight, self.dwconv.bias
            return self.fc2(depthwise_residual(self.fc1(x), weight, bias, gelu=True), scale)
        if scale is not None and compute_dtype(x) == torch.float16:
            return self(x) * scale[:, None, None]  # as PointwiseConv2d
        if torch.is_grad_enabled():
            x = self.fc1(x)
            weight, bias = self.fc2.scaled(scale)
            return gelu_depthwise_linear(x, self.dwconv.weight, self.dwconv.bias, weight, bias)
        return self._in_bands(x, scale, None)

    def add_to(self, residual: Tensor, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Map ``x`` and add it to ``residual``, in whose memory the sum may come back."""
        if not (
            takes_short_cuts(x, self)
            and fusible(self.fc1, self.dwconv, self.fc2)
            and can_fuse_depthwise(x)
        ):
            return residual + self(x, scale)
        return self._in_bands(x, scale, residual)

    def _in_bands(self, x: Tensor, scale: Tensor | None, residual: Tensor | None) -> Tensor:
        """Compute the same by bands of rows, so that the hidden map stays in the cache."""
        height, width = x.shape[2:]
        weight, bias = self.fc2.scaled(scale)
        out = residual
        if out is None:
            out = torch.empty_like(x, dtype=compute_dtype(x), memory_format=torch.channels_last)
        elements = height * width * self.fc1.out_channels
        for images, rows, with_halo, inside in bands(len(x), height, elements, halo=1):
            hidden = self.fc1(x[images, :, with_halo])
            hidden = depthwise_residual(hidden, self.dwconv.weight, self.dwconv.bias, gelu=True)
            hidden, result = hidden[:, :, inside], out[images, :, rows]
            if residual is None:
                result.copy_(F.conv2d(hidden, weight, bias))
            else:
                add_pointwise(result, hidden, weight, bias)
        return out
