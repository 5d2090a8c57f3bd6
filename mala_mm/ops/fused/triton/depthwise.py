"""Launches of ``stencil.py``: depthwise convolutions on maps (B, C, H, W), forward and backward.

What is launched, and how large, is decided by the kernel's size and the pass; only the number of
programs follows the map's size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import stencil
from .launch import Launch, Plan, _device, replay
from .layout import Operand, common_unit

TAPS = (3, 5)
"""Sizes of the kernels that there are."""


@dataclass(frozen=True)
class Tile:
    """What a program computes in a step, and the least that it walks over.

    Attributes:
        warps: Warps per program, of which a multiprocessor holds eight: nearly all registers are in
            use.
        columns: Columns of a strip.
        strips: Strips of a program.
        channels: Channels of a program.
        least: Fewest rows of a piece, since each is read with (taps - 1) rows more.
    """

    warps: int
    columns: int = 4
    strips: int = 8
    channels: int = 32
    least: int = 8


_TILES = {
    ('convolve', 3): Tile(warps=1),
    ('convolve', 5): Tile(warps=2),
    ('backward', 3): Tile(warps=2),
    ('backward', 5): Tile(warps=4),
}


def tile(name: str, taps: int, dtype: torch.dtype) -> Tile:
    """The tile of a pass, ``'convolve'`` or ``'backward'``, for kernels of taps x taps.

    Rows that are on their way take twice the registers in float32.
    """
    chosen = _TILES[name, taps]
    return replace(chosen, warps=2 * chosen.warps) if dtype == torch.float32 else chosen


def cut(
    tile: Tile, shape: tuple[int, int, int, int], multiprocessors: int
) -> tuple[int, int, int, int, int]:
    """How a map is dealt out, so that the programs fill the device once where it is small.

    Args:
        tile (Tile): What a program computes in a step.
        shape (tuple[int, int, int, int]): Images, channels, height and width.
        multiprocessors (int): Streaming multiprocessors of the device.

    Returns:
        tuple[int, int, int, int, int]: Strips in all, strips next to each other, pieces of a
        column, rows of a piece, and groups of strips, each the work of a program for every block of
        channels.
    """
    images, channels, height, width = shape
    across = -(-width // tile.columns)
    blocks = -(-channels // tile.channels)
    places = multiprocessors * max(1, 8 // tile.warps) * tile.strips
    pieces = max(1, min(places // (images * across * blocks), height // tile.least))
    rows = -(-height // pieces)
    pieces = -(-height // rows)
    strips = images * pieces * across
    return strips, across, pieces, rows, -(-strips // tile.strips)


def _channels_adjacent(x: Tensor) -> Tensor:
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x
    return x.contiguous(memory_format=torch.channels_last)


def _layout(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """The unit of the strides, and those of images, rows and columns in it."""
    strides = [s if n > 1 else 0 for s, n in zip(x.stride(), x.shape)]
    strides = (strides[0], *strides[2:])
    size = x.element_size()
    unit = common_unit(x.data_ptr() // size, *strides, most=16 // size)
    return unit, tuple(s // unit for s in strides)


def _describe(
    name: str,
    maps: dict[str, Tensor],
    vectors: tuple[str, ...],
    taps: int,
    gelu: bool,
    residual: bool,
) -> Plan:
    """The launch of a pass: ``maps`` come first among its tensors, then ``vectors``."""
    x = maps['x']
    chosen = tile(name, taps, x.dtype)
    strips, across, pieces, rows, groups = cut(chosen, x.shape, _device(x.device.index)[2])
    unit = common_unit(x.shape[1], most=16 // x.element_size())
    arguments = dict(
        strips=strips,
        across=across,
        pieces=pieces,
        rows=rows,
        height=x.shape[2],
        width=x.shape[3],
        channel_units=x.shape[1] // unit,
        TAPS=taps,
        COLUMNS=chosen.columns,
        STRIPS=chosen.strips,
        CHANNELS=chosen.channels,
        UNIT=unit,
        GELU=gelu,
        RESIDUAL=residual,
        EXACT=x.dtype == torch.float32,
    )
    for place, (key, value) in enumerate(maps.items()):
        arguments[key] = Operand(place)
        arguments[key.upper()], strides = _layout(value)
        arguments |= {f'{key}_{axis}': stride for axis, stride in zip('bhw', strides)}
    arguments |= {key: Operand(len(maps) + place) for place, key in enumerate(vectors)}
    grid = (groups * -(-x.shape[1] // chosen.channels),)
    return Plan([Launch(getattr(stencil, name), grid, arguments, chosen.warps, 1)], 0)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, gelu: bool, residual: bool, out: Tensor
) -> None:
    """Fill ``out`` (B, C, H, W), whose channels are adjacent."""
    maps = {'x': _channels_adjacent(x), 'y': out}
    weight, bias = weight.contiguous(), bias.contiguous()
    options = (weight.shape[-1], gelu, residual)
    kind = ('convolve', *options, x.shape, weight.dtype, bias.dtype)
    replay(
        kind,
        lambda: _describe('convolve', maps, ('weight', 'bias'), *options),
        (*maps.values(), weight, bias),
    )


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, gelu: bool, residual: bool, dx: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill ``dx`` and return the gradients of weight and bias in the weight's dtype.

    Every program writes its share of these, and the shares are added in a fixed order.
    """
    maps = {'g': _channels_adjacent(grad), 'x': _channels_adjacent(x), 'dx': dx}
    weight = weight.contiguous()
    options = (weight.shape[-1], gelu, residual)
    chosen = tile('backward', weight.shape[-1], x.dtype)
    groups = cut(chosen, x.shape, _device(x.device.index)[2])[-1]
    part = x.new_empty(groups, weight.numel() + weight.shape[0], dtype=torch.float32)
    replay(
        ('backward', *options, x.shape, weight.dtype),
        lambda: _describe('backward', maps, ('weight', 'part'), *options),
        (*maps.values(), weight, part),
    )
    sums = part.sum(0).to(weight.dtype)
    return sums[: weight.numel()].view(weight.shape), sums[weight.numel() :]
