"""Launches of ``rows.py``: residual and norm over the channels of dense (B, H, W, C) maps."""

from __future__ import annotations

import torch
from torch import Tensor

from . import rows
from .launch import Launch, Plan, _device, replay
from .layout import Operand
from .tiling import padded

WARPS = 4
ELEMENTS = 4096
"""Numbers of a tile: 32 for each thread, which holds three to five such tiles."""
RESIDENCY = 4
"""Programs per multiprocessor: backward each writes sums of 2 C numbers."""


def _shape(x: Tensor) -> dict[str, int]:
    batch, channels, height, width = x.shape
    tokens = max(1, ELEMENTS // padded(channels))
    return {
        'tokens': batch * height * width,
        'area': height * width,
        'C': channels,
        'P': padded(channels),
        'TOKENS': tokens,
    }


def shares(x: Tensor) -> tuple[int, int]:
    """How many programs there are, and how many tiles each of them takes."""
    shape = _shape(x)
    tiles = -(-shape['tokens'] // shape['TOKENS'])
    each = -(-tiles // (RESIDENCY * _device(x.device.index)[2]))
    return -(-tiles // each), each


def _operands(tensors: dict[str, Tensor | None]) -> tuple[dict[str, Operand], tuple[Tensor, ...]]:
    """Places of the tensors that there are; the others stand where the first one is."""
    present = {key: x for key, x in tensors.items() if x is not None}
    places = {key: place for place, key in enumerate(present)}
    return {key: Operand(places.get(key, 0)) for key in tensors}, tuple(present.values())


def forward(
    x: Tensor,
    branch: Tensor | None,
    keep: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    total: Tensor | None,
    y: Tensor,
) -> None:
    """Fill ``total = x + keep * branch`` and ``y``, its norm."""
    tensors = dict(x=x, branch=branch, keep=keep, weight=weight, bias=bias, total=total, y=y)
    operands, present = _operands(tensors)

    def describe() -> Plan:
        programs, tiles = shares(x)
        flags = {'BRANCH': branch is not None, 'KEEP': keep is not None, 'eps': eps}
        arguments = operands | _shape(x) | flags | {'tiles': tiles}
        return Plan([Launch(rows.residual_norm, (programs,), arguments, WARPS, 1)], 0)

    dtypes = tuple(None if t is None else t.dtype for t in tensors.values())
    replay(('residual_norm', x.shape, eps, dtypes), describe, present)


def backward(
    dtotal: Tensor | None,
    dy: Tensor,
    total: Tensor,
    keep: Tensor | None,
    weight: Tensor,
    eps: float,
    dx: Tensor,
    dbranch: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Fill ``dx`` and ``dbranch``; return the gradients of weight and bias in the weight's dtype.

    Every program writes its share of these, and the shares are added in a fixed order.
    """
    programs, tiles = shares(total)
    part = total.new_empty(programs, 2 * total.shape[1], dtype=torch.float32)
    tensors = dict(dtotal=dtotal, dy=dy, total=total, keep=keep, weight=weight)
    tensors |= dict(dx=dx, dbranch=dbranch, part=part)
    operands, present = _operands(tensors)

    def describe() -> Plan:
        flags = {'TOTAL': dtotal is not None, 'KEEP': keep is not None, 'eps': eps}
        arguments = operands | _shape(total) | flags | {'tiles': tiles}
        return Plan([Launch(rows.backward_norm, (programs,), arguments, WARPS, 1)], 0)

    dtypes = tuple(None if t is None else t.dtype for t in tensors.values())
    replay(('backward_norm', total.shape, eps, dtypes), describe, present)
    return tuple(part.sum(0).to(weight.dtype).view(2, -1))
