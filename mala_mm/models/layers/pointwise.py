"""1x1 convolutions, and when layers may be computed together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .inference import add_pointwise, compute_dtype, takes_short_cuts
from .norm import LayerNorm2d


class PointwiseConv2d(nn.Conv2d):
    """A 1x1 convolution that takes the scale of what follows into its weights.

    On maps in channels_last memory a GPU computes it as a product of matrices, bias included:
    cuDNN adds that in a pass of its own. On the CPU oneDNN's convolution is the faster one.

    Args:
        in_channels (int): Channels of the input.
        out_channels (int): Channels D of the output.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 1)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Map (B, C, H, W) to (B, D, H, W), each output channel times ``scale`` (D, ) if given."""
        if scale is not None and compute_dtype(x) == torch.float16:
            # A scale of 1e-6 would take weights out of float16's range.
            return self.forward(x) * scale[:, None, None]
        weight, bias = self.scaled(scale)
        if x.device.type == 'cpu' or not x.is_contiguous(memory_format=torch.channels_last):
            return F.conv2d(x, weight, bias)
        return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)

    def add_to(self, residual: Tensor, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Map ``x`` and add it to ``residual``, in whose memory the sum may come back."""
        if not takes_short_cuts(x, self):
            return residual + self(x, scale)
        add_pointwise(residual, x, *self.scaled(scale))
        return residual

    def scaled(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Weight and bias times ``scale`` (D, )."""
        if scale is None:
            return self.weight, self.bias
        bias = None if self.bias is None else self.bias * scale
        return self.weight * scale[:, None, None, None], bias


def fusible(*modules: nn.Module) -> bool:
    """Whether the weights of these modules may be used without calling them.

    Not where a hook or a module put in place of one (an adapter, say) waits for the call, and not
    for a compiler, which fuses by itself.
    """
    return not torch.compiler.is_compiling() and all(
        type(m) in (nn.Conv2d, PointwiseConv2d, LayerNorm2d)
        and not m._forward_hooks
        and not m._forward_pre_hooks
        for m in modules
    )
