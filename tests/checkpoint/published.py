"""The published models, evaluated as their definition reads, straight from their own names.

Nothing of mala_mm is used, the sizes are typed from the specification once more: the converter and
the models are checked against this. Attention is the explicit N x N form, everything is float64.
"""

import math
from collections import OrderedDict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Arch(NamedTuple):
    dims: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]


ARCHS = dict(
    tiny=Arch((64, 128, 256, 512), (2, 2, 6, 2), (1, 2, 4, 8)),
    small=Arch((64, 128, 320, 512), (3, 5, 9, 3), (1, 2, 5, 8)),
    base=Arch((96, 192, 384, 512), (4, 6, 12, 6), (1, 2, 6, 8)),
    large=Arch((96, 192, 448, 640), (4, 7, 19, 8), (1, 2, 7, 10)),
)
PROJECTIONS = dict(
    mavit=dict(tiny=2048, small=2048, base=2048, large=2560),
    ravlt=dict(tiny=1024, small=1024, base=1024, large=1024),
)
EPS = 1e-6


def random_weights(
    arch: Arch, projection: int = 0, classes: int = 10, norms: tuple[int, ...] = (), seed: int = 0
) -> OrderedDict[str, Tensor]:
    """Draw the weights of a published file, every one away from its initial value.

    Args:
        arch (Arch): The size.
        projection (int): Width of the classifier's projection; 0 leaves the classifier out.
        classes (int): Number of classes.
        norms (tuple[int, ...]): Stages with an output norm.
        seed (int): Seed of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = OrderedDict()

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    def conv(name: str, outputs: int, inputs: int, kernel: int, gain: float = 1.0) -> None:
        std = gain / math.sqrt(inputs * kernel**2)
        weights[f'{name}.weight'] = (
            torch.randn(outputs, inputs, kernel, kernel, generator=generator) * std
        )
        weights[f'{name}.bias'] = uniform(-0.3, 0.3, outputs)

    def norm(name: str, channels: int, batch: bool = False) -> None:
        weights[f'{name}.weight'] = uniform(0.5, 1.5, channels)
        weights[f'{name}.bias'] = uniform(-0.3, 0.3, channels)
        if batch:
            weights[f'{name}.running_mean'] = uniform(-0.5, 0.5, channels)
            weights[f'{name}.running_var'] = uniform(0.25, 2.0, channels)
            weights[f'{name}.num_batches_tracked'] = torch.tensor(1000)

    half = arch.dims[0] // 2
    for index, (inputs, outputs) in enumerate(
        ((3, half), (half, half), (half, half), (half, arch.dims[0]))
    ):
        conv(f'patch_embed.proj.{3 * index}', outputs, inputs, 3)
        norm(f'patch_embed.proj.{3 * index + 1}', outputs, batch=True)
    for i, (dim, depth, heads) in enumerate(zip(*arch, strict=True)):
        weights[f'layers.{i}.RoPE.angle'] = angles(dim // heads).float()
        for j in range(depth):
            block = f'layers.{i}.blocks.{j}'
            conv(f'{block}.pos', dim, 1, 3, gain=0.5)
            norm(f'{block}.norm1.norm', dim)
            conv(f'{block}.attn.qkvo', 4 * dim, dim, 1, gain=1.5)
            conv(f'{block}.attn.lepe', dim, 1, 5, gain=0.5)
            conv(f'{block}.attn.proj', dim, dim, 1)
            norm(f'{block}.norm2.norm', dim)
            hidden = int(3.5 * dim)
            conv(f'{block}.ffn.fc1', hidden, dim, 1)
            conv(f'{block}.ffn.dwconv', hidden, 1, 3, gain=0.5)
            conv(f'{block}.ffn.fc2', dim, hidden, 1)
            for gamma in ('gamma_1', 'gamma_2'):
                weights[f'{block}.{gamma}'] = uniform(-0.5, 0.5, 1, dim, 1, 1)
        if i + 1 < len(arch.dims):
            conv(f'layers.{i}.downsample.reduction', arch.dims[i + 1], dim, 3)
            norm(f'layers.{i}.downsample.norm', arch.dims[i + 1], batch=True)
    if projection:
        conv('proj', projection, arch.dims[-1], 1)
        norm('norm', projection, batch=True)
        conv('head', classes, projection, 1, gain=4.0)
    for i in norms:
        norm(f'extra_norms.{i}.norm', arch.dims[i])
    return weights


def angles(d: int) -> Tensor:
    """The angles per channel pair of one half of a head, each theta twice: (d / 2,)."""
    n = d // 4
    theta = [10000.0 ** -(m / (n - 1) if n > 1 else 0.0) for m in range(n)]
    return torch.tensor([t for t in theta for _ in range(2)], dtype=torch.float64)


def evaluate(
    weights: dict[str, Tensor], arch: Arch, attention: str, image: Tensor
) -> tuple[list[Tensor], Tensor | None]:
    """Evaluate a published model with ``attention`` ('mala', 'rala') in stages 1 and 2.

    Returns:
        tuple[list[Tensor], Tensor | None]: The map of each stage, through its output norm if the
        weights have one, and the logits if they have a classifier.
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    x, maps = image.double(), []
    for index, stride in enumerate((2, 1, 1, 2)):
        x = convolve(w, f'patch_embed.proj.{3 * index}', x, stride)
        x = batch_norm(w, f'patch_embed.proj.{3 * index + 1}', x)
        x = gelu(x) if index < 3 else x
    for i, depth in enumerate(arch.depths):
        for j in range(depth):
            block = f'layers.{i}.blocks.{j}'
            x = x + convolve(w, f'{block}.pos', x)
            mixed = mix(
                w,
                f'{block}.attn',
                layer_norm(w, f'{block}.norm1.norm', x),
                arch.heads[i],
                attention if i < 2 else 'softmax',
            )
            x = x + w[f'{block}.gamma_1'] * mixed
            hidden = layer_norm(w, f'{block}.norm2.norm', x)
            hidden = gelu(convolve(w, f'{block}.ffn.fc1', hidden))
            hidden = hidden + convolve(w, f'{block}.ffn.dwconv', hidden)
            x = x + w[f'{block}.gamma_2'] * convolve(w, f'{block}.ffn.fc2', hidden)
        normed = f'extra_norms.{i}.norm'
        maps.append(layer_norm(w, normed, x) if f'{normed}.weight' in w else x)
        if i + 1 < len(arch.depths):
            x = convolve(w, f'layers.{i}.downsample.reduction', x, stride=2)
            x = batch_norm(w, f'layers.{i}.downsample.norm', x)
    if 'proj.weight' not in w:
        return maps, None
    x = batch_norm(w, 'norm', convolve(w, 'proj', x))
    x = (x * torch.sigmoid(x)).mean(dim=(2, 3), keepdim=True)
    return maps, convolve(w, 'head', x)[:, :, 0, 0]


def convolve(w: dict, name: str, x: Tensor, stride: int = 1) -> Tensor:
    weight = w[f'{name}.weight']
    groups = x.shape[1] // weight.shape[1]
    return F.conv2d(x, weight, w[f'{name}.bias'], stride, weight.shape[-1] // 2, groups=groups)


def batch_norm(w: dict, name: str, x: Tensor) -> Tensor:
    mean, var, weight, bias = (
        w[f'{name}.{part}'][:, None, None]
        for part in ('running_mean', 'running_var', 'weight', 'bias')
    )
    return (x - mean) / (var + 1e-5).sqrt() * weight + bias


def layer_norm(w: dict, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    normed = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()
    return normed * w[f'{name}.weight'][:, None, None] + w[f'{name}.bias'][:, None, None]


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def mix(w: dict, name: str, x: Tensor, heads: int, attention: str) -> Tensor:
    batch, channels, height, width = x.shape
    q, k, v, o = convolve(w, f'{name}.qkvo', x).split(channels, dim=1)
    tokens = [
        part.reshape(batch, heads, channels // heads, height * width).transpose(2, 3)
        for part in (q, k, v)
    ]  # (B, heads, N, d)
    y = ATTENTIONS[attention](*tokens, height, width)
    y = y.transpose(2, 3).reshape(batch, channels, height, width)
    return convolve(w, f'{name}.proj', (y + convolve(w, f'{name}.lepe', v)) * o)


def phi(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def rotate(x: Tensor, height: int, width: int) -> Tensor:
    """Turn the pairs of the first half of the channels by the row, of the second by the column."""
    d = x.shape[-1]
    row = torch.arange(height).repeat_interleave(width)
    column = torch.arange(width).repeat(height)
    turn = angles(d)[::2]  # one per pair
    angle = torch.cat([row[:, None] * turn, column[:, None] * turn], dim=1)  # (N, d / 2)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], d // 2, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def mala(q: Tensor, k: Tensor, v: Tensor, height: int, width: int) -> Tensor:
    n, scale = height * width, q.shape[-1] ** -0.5
    q, k = phi(q), phi(k)
    z = scale * (q * k.mean(2, keepdim=True)).sum(-1, keepdim=True)
    scores = scale / n * rotate(q, height, width) @ rotate(k, height, width).transpose(2, 3)
    return (1 + 1 / (z + EPS)) * (scores @ v) - z * v.mean(2, keepdim=True)


def rala(q: Tensor, k: Tensor, v: Tensor, height: int, width: int) -> Tensor:
    n, scale = height * width, q.shape[-1] ** -0.5
    q, k = phi(q), phi(k)
    query = q.mean(2, keepdim=True)
    k = n * torch.softmax(scale * (query * k).sum(-1), dim=-1)[..., None] * k
    z = (q * k.mean(2, keepdim=True)).sum(-1, keepdim=True)
    scores = rotate(q, height, width) @ rotate(k, height, width).transpose(2, 3) / n
    return scores @ v / (z + EPS)


def softmax(q: Tensor, k: Tensor, v: Tensor, height: int, width: int) -> Tensor:
    scores = rotate(q, height, width) @ rotate(k, height, width).transpose(2, 3)
    return torch.softmax(q.shape[-1] ** -0.5 * scores, dim=-1) @ v


ATTENTIONS = dict(mala=mala, rala=rala, softmax=softmax)
