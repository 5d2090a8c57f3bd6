"""``softmax.c``, the kernels of :mod:`mala_mm.ops.fused.softmax` on the CPU."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from . import tokens
from .build import DTYPES, compile_library

_SOURCE = Path(__file__).with_name('softmax.c')
_BLOCK = 64  # tokens of a piece


def why_not(q: Tensor) -> str | None:
    """Why the kernels cannot take inputs like ``q`` (B, heads, N, d); None if they can."""
    if q.device.type != 'cpu':
        return f'needs tensors on the CPU, got {q.device}'
    reason = tokens.why_not(q)
    if reason is None and isinstance(library := _library(q.shape[-1], q.dtype), str):
        reason = library
    return reason


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: tuple[int, int],
    scale: float,
    rotary: bool,
    out: Tensor,
    logsumexp: Tensor,
) -> None:
    """Fill ``out`` (B, heads, N, d) and ``logsumexp`` (B, heads, N), float32 and dense."""
    batch, heads, num_tokens, d = q.shape
    problem = tokens.TokenProblem(q, size, _BLOCK, rotary, scale)
    packed = torch.empty(2, batch * heads, -(-num_tokens // d), d, d, dtype=torch.float32)
    keys, values = packed
    library = _library(d, q.dtype)
    tokens.run(library, 'pack', problem, k, v, keys.flatten(), values.flatten())
    logsumexp = logsumexp.flatten()
    tokens.run(library, 'attend', problem, q, keys.flatten(), values.flatten(), out, logsumexp)


def turn(x: Tensor, size: tuple[int, int], direction: float, out: Tensor) -> None:
    """Fill ``out`` with the rotary embedding of ``x``, or its inverse for a direction of -1."""
    problem = tokens.TokenProblem(x, size, _BLOCK, True, 1.0)
    tokens.run(_library(x.shape[-1], x.dtype), 'turn_all', problem, x, out, float(direction))


@functools.cache
def _library(head_dim: int, dtype: torch.dtype) -> ctypes.CDLL | str:
    """Return the compiled kernels of a head width and type, or the reason why there are none."""
    return compile_library(_SOURCE, f'WIDTH={head_dim}', DTYPES[dtype])
