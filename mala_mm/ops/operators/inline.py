"""InLine attention: injective linear attention with a local residual."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..registry import Operator, depthwise, merge_heads, register_operator, split_heads


@register_operator('inline')
class InLine(Operator):
    r"""InLine attention with the identity as feature map, ``s = d ** -0.5``.

    .. math::
        y_i = \frac{s}{N} q_i \sum_j k_j^T v_j + (1 - s\, q_i \cdot \bar k)\, \bar v + r_i

    A row of scores sums to 1 by subtraction, not by division. ``r`` is a depthwise 3x3 convolution
    of v, without bias, whose weights an MLP makes for each image and channel from the mean token of
    the layer's input: grouped 1x1 (C to C), GELU, grouped 1x1 (C to 9 C), as many groups as heads.
    Tokens off the map have no ``r``.

    Args:
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.
    """

    paper = (
        'Bridging the Divide: Reconsidering Softmax and Linear Attention (2024), section on InLine '
        'attention, https://arxiv.org/abs/2412.06590'
    )
    needs_input = True
    takes_extra_tokens = True
    no_scores = 'a depthwise convolution adds weights that differ by channel'

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim)
        channels = num_heads * head_dim
        self.fc1 = nn.Conv2d(channels, channels, 1, groups=num_heads)
        self.fc2 = nn.Conv2d(channels, 9 * channels, 1, groups=num_heads)

    def equations(
        self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], x: Tensor
    ) -> Tensor:
        """``(s / N) q_i (k^T v) + (1 - s q_i . mean k) mean v + r_i``."""
        scale, num_tokens, extra = self.head_dim**-0.5, q.shape[2], self.num_extra_tokens
        kv = k.mT @ (v * (scale / num_tokens))
        z = (q * scale) @ k.mean(-2, keepdim=True).mT
        y = q @ kv + (1 - z) * v.mean(-2, keepdim=True)

        mean = x.flatten(2).mean(-1)[..., None, None]  # (B, C, 1, 1)
        weight = depthwise(self.fc2, F.gelu(depthwise(self.fc1, mean)))  # (B, 9 C, 1, 1)
        weight = weight.reshape(-1, 1, 3, 3)
        maps = merge_heads(v[:, :, extra:], size, token_major=False)
        r = F.conv2d(maps.flatten(0, 1)[None], weight, padding=1, groups=len(weight))
        r = split_heads(r.unflatten(1, maps.shape[:2])[0], self.num_heads)
        return y + F.pad(r, (0, 0, extra, 0))

    def macs(self, num_tokens: int) -> int:
        """``N d (2 d + 1)`` per head, state and mean, 9 per number of ``v``, and the MLP."""
        on_map = num_tokens - self.num_extra_tokens
        channels = self.num_heads * self.head_dim
        mlp = 10 * channels * self.head_dim
        return channels * (num_tokens * (2 * self.head_dim + 1) + 9 * on_map) + mlp
