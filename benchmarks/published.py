"""The models in the form in which they were published: what the benchmarks compare with.

Plain PyTorch, written from the papers and the layout of the published checkpoints, whose names the
parameters bear. Nothing of ``mala_mm`` is used. What makes this form slow is kept, since users of
the published code pay for it: channel-first maps that LayerNorm copies twice, heads that are
transposed in memory, softmax attention with its N x N matrix, the formula of linear attention one
operation at a time in the type that it is given. What a careful user would do is done: angles are
computed once per stage and forward, and nothing is computed that the result does not need.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mala_mm import models

ARCHS = {
    name: (arch['embed_dims'], arch['depths'], arch['num_heads'])
    for name, arch in models.ARCHS.items()
}
EPS = 1e-6
Turn = tuple[Tensor, Tensor]  # cosine and sine of each token's pairs, (N, d / 2)


def turn(x: Tensor, angles: Turn) -> Tensor:
    """Turn the pairs of channels of ``x`` (B, heads, N, d)."""
    cos, sin = angles
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def mala(q: Tensor, k: Tensor, v: Tensor, angles: Turn) -> Tensor:
    """Magnitude-aware linear attention of (B, heads, N, d)."""
    tokens, head_dim = q.shape[2:]
    scale = head_dim**-0.5
    q, k = F.elu(q) + 1, F.elu(k) + 1
    z = scale * (q @ k.mean(2, keepdim=True).mT)
    share = (scale / tokens) ** 0.5  # of each factor: the sum over the tokens overflows in float16
    kv = (turn(k, angles).mT * share) @ (v * share)
    return (1 + 1 / (z + EPS)) * (turn(q, angles) @ kv) - z * v.mean(2, keepdim=True)


def rala(q: Tensor, k: Tensor, v: Tensor, angles: Turn) -> Tensor:
    """Rank-augmented linear attention of (B, heads, N, d)."""
    tokens, head_dim = q.shape[2:]
    q, k = F.elu(q) + 1, F.elu(k) + 1
    logits = head_dim**-0.5 * (q.mean(2, keepdim=True) @ k.mT)
    k = k * (tokens * logits.softmax(-1)).mT
    z = q @ k.mean(2, keepdim=True).mT
    share = tokens**-0.5
    kv = (turn(k, angles).mT * share) @ (v * share)
    return (turn(q, angles) @ kv) / (z + EPS)


def softmax(q: Tensor, k: Tensor, v: Tensor, angles: Turn) -> Tensor:
    """Softmax attention of (B, heads, N, d), with its matrix."""
    scores = (turn(q, angles) * q.shape[-1] ** -0.5) @ turn(k, angles).mT
    return scores.softmax(-1) @ v


ATTENTIONS = dict(mala=mala, rala=rala, softmax=softmax)


class Rotary(nn.Module):
    """The angles of a stage's tokens."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        theta = 10000 ** -torch.linspace(0, 1, head_dim // 4)
        self.register_buffer('angle', theta.repeat_interleave(2))

    def forward(self, height: int, width: int) -> Turn:
        """Cosines and sines of all tokens, (H * W, d) each."""
        theta = self.angle[::2]
        row, column = (
            torch.arange(n, device=theta.device)[:, None] * theta for n in (height, width)
        )
        angles = torch.cat(
            [row[:, None].expand(-1, width, -1), column[None].expand(height, -1, -1)], -1
        ).flatten(0, 1)
        return angles.cos(), angles.sin()


class LayerNorm2d(nn.Module):
    """LayerNorm over the channels of (B, C, H, W), through a copy to (B, H, W, C) and back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        x = self.norm(x.permute(0, 2, 3, 1).contiguous())
        return x.permute(0, 3, 1, 2).contiguous()


class Mixer(nn.Module):
    """Attention, local position and gate between two 1x1 convolutions."""

    def __init__(self, channels: int, heads: int, attention: str) -> None:
        super().__init__()
        self.heads, self.attention = heads, ATTENTIONS[attention]
        self.qkvo = nn.Conv2d(channels, 4 * channels, 1)
        self.lepe = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, angles: Turn) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        batch, channels, height, width = x.shape
        q, k, v, gate = self.qkvo(x).split(channels, 1)
        local = self.lepe(v)
        q, k, v = (
            t.reshape(batch, self.heads, -1, height * width).transpose(2, 3).contiguous()
            for t in (q, k, v)
        )
        y = self.attention(q, k, v, angles).transpose(2, 3)
        return self.proj((y.reshape(batch, channels, height, width) + local) * gate)


class FFN(nn.Module):
    """The feed-forward network: 1x1, GELU, 3x3 depthwise on a residual path, 1x1."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, hidden, 1)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.fc2 = nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        x = F.gelu(self.fc1(x))
        return self.fc2(x + self.dwconv(x))


class Block(nn.Module):
    """One block of a stage.

    Args:
        channels (int): Channels C.
        heads (int): Number of heads.
        attention (str): ``'mala'``, ``'rala'`` or ``'softmax'``.
        drop_path (float): Share of the samples whose residual path is dropped in training.
        layer_scale (float): Initial value of the residual paths' factors.
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        attention: str,
        drop_path: float = 0.0,
        layer_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.pos = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm1 = LayerNorm2d(channels)
        self.attn = Mixer(channels, heads, attention)
        self.norm2 = LayerNorm2d(channels)
        self.ffn = FFN(channels, int(3.5 * channels))
        self.gamma_1 = nn.Parameter(torch.full((1, channels, 1, 1), layer_scale))
        self.gamma_2 = nn.Parameter(torch.full((1, channels, 1, 1), layer_scale))

    def drop(self, x: Tensor) -> Tensor:
        """Drop whole images of a residual branch, in training."""
        if not self.training or self.drop_path == 0:
            return x
        keep = 1 - self.drop_path
        return x * (x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(keep) / keep)

    def forward(self, x: Tensor, angles: Turn) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        x = x + self.pos(x)
        x = x + self.drop(self.gamma_1 * self.attn(self.norm1(x), angles))
        return x + self.drop(self.gamma_2 * self.ffn(self.norm2(x)))


class Backbone(nn.Module):
    """A published backbone for dense prediction.

    Args:
        arch (str): A key of :data:`ARCHS`.
        attention (str | Sequence[str]): Attention of stages 1 and 2, ``'mala'`` or ``'rala'``;
            stages 3 and 4 have softmax attention. Or that of each stage.
        drop_path_rate (float): Of the last block; rises linearly from 0.
    """

    def __init__(
        self,
        arch: str = 'tiny',
        attention: str | Sequence[str] = 'mala',
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        dims, depths, heads = ARCHS[arch]
        if isinstance(attention, str):
            attention = (attention, attention, 'softmax', 'softmax')
        half, layers = dims[0] // 2, []
        for inputs, outputs, stride in ((3, half, 2), (half, half, 1), (half, half, 1)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.GELU()]
        layers += [nn.Conv2d(half, dims[0], 3, 2, 1), nn.BatchNorm2d(dims[0])]
        self.patch_embed = nn.ModuleDict({'proj': nn.Sequential(*layers)})
        self.layers = nn.ModuleList()
        rates = iter(torch.linspace(0, drop_path_rate, sum(depths)).tolist())
        for i, (dim, depth) in enumerate(zip(dims, depths)):
            blocks = [Block(dim, heads[i], attention[i], next(rates)) for _ in range(depth)]
            stage = nn.ModuleDict(
                {'RoPE': Rotary(dim // heads[i]), 'blocks': nn.ModuleList(blocks)}
            )
            if i + 1 < len(dims):
                stage['downsample'] = nn.ModuleDict(
                    {
                        'reduction': nn.Conv2d(dim, dims[i + 1], 3, 2, 1),
                        'norm': nn.BatchNorm2d(dims[i + 1]),
                    }
                )
            self.layers.append(stage)
        self.extra_norms = nn.ModuleList(map(LayerNorm2d, dims))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Images (B, 3, H, W) to the maps of strides 4, 8, 16 and 32."""
        x = self.patch_embed['proj'](x)
        maps = []
        for stage, norm in zip(self.layers, self.extra_norms):
            angles = stage['RoPE'](*x.shape[2:])
            for block in stage['blocks']:
                x = block(x, angles)
            maps.append(norm(x))
            if 'downsample' in stage:
                x = stage['downsample']['norm'](stage['downsample']['reduction'](x))
        return maps
