"""LayerNorm over the channels of a feature map."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of a (B, C, H, W) map.

    On a channels_last map the permutations are views, so that nothing is copied.

    Args:
        num_channels (int): Number of channels C.
        eps (float): Added to the variance. The published models use 1e-6.
    """

    def __init__(self, num_channels: int, eps: float = 1e-6) -> None:
        super().__init__(num_channels, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        x = x.permute(0, 2, 3, 1)  # (B, H, W, C)
        if x.dtype != self.weight.dtype and x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()  # under autocast, as it does by itself on a GPU
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)
