"""The feed-forward network with a depthwise convolution."""

import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor, nn


class ConvFFN(BaseModule):
    """``fc1 -> GELU -> h + DWConv3x3(h) -> fc2``, 1x1 convolutions with biases.

    Args:
        embed_dims (int): Channels of the input and the output.
        hidden_dims (int): Channels in between.
    """

    def __init__(self, embed_dims: int, hidden_dims: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(embed_dims, hidden_dims, 1)
        self.dwconv = nn.Conv2d(hidden_dims, hidden_dims, 3, padding=1, groups=hidden_dims)
        self.fc2 = nn.Conv2d(hidden_dims, embed_dims, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        x = F.gelu(self.fc1(x))
        return self.fc2(x + self.dwconv(x))
