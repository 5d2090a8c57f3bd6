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
    y: Tensor | None,
    logsumexp: Tensor,
    lepe: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Fill ``y`` (B, heads, N, d) and ``logsumexp`` (B, heads, N), float32 and dense.

    With a gate fill ``out`` with ``(y + lepe) * gate``, all (B, heads, N, d); ``y`` may be None.
    """
    batch, heads, num_tokens, d = q.shape
    problem = tokens.TokenProblem(q, size, _BLOCK, rotary, scale)
    packed = torch.empty(2, batch * heads, -(-num_tokens // d), d, d, dtype=torch.float32)
    keys, values = (x.flatten() for x in packed)
    library = _library(d, q.dtype)
    tokens.run(library, 'pack', problem, k, v, keys, values)
    logsumexp = logsumexp.flatten()
    tokens.run(library, 'attend', problem, q, keys, values, y, logsumexp, lepe, gate, out)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    logsumexp: Tensor,
    size: tuple[int, int],
    scale: float,
    rotary: bool,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    lepe: Tensor | None = None,
    gate: Tensor | None = None,
    dlepe: Tensor | None = None,
    dgate: Tensor | None = None,
) -> None:
    """Fill the gradients; ``y`` and ``logsumexp`` are those of the forward."""
    batch, heads, num_tokens, d = q.shape
    problem = tokens.TokenProblem(q, size, _BLOCK, rotary, scale)
    library = _library(d, q.dtype)
    pairs, blocks = batch * heads, -(-num_tokens // _BLOCK)
    # Work for sixteen threads where there are few images and heads. The number depends on the shape
    # alone, hence so do the results.
    parts = min(-(-num_tokens // d), -(-16 // pairs))
    shape = (pairs * blocks, _BLOCK, d)
    queries, grads = torch.empty(2, *shape, dtype=torch.float32).unbind()
    dqueries = torch.empty(parts * shape[0], *shape[1:], dtype=torch.float32)
    corrections = torch.empty(shape[:2], dtype=torch.float32)
    logsumexp = logsumexp.flatten()
    tokens.run(
        *(library, 'prepare', problem, grad, q, y, lepe, gate, dlepe, dgate),
        *(queries, grads, corrections),
    )
    tokens.run(
        *(library, 'differentiate', problem, k, v, queries, grads, logsumexp, corrections),
        *(dk, dv, dqueries, parts),
    )
    tokens.run(library, 'add_parts', problem, dqueries, dq, parts)


@functools.cache
def _library(head_dim: int, dtype: torch.dtype) -> ctypes.CDLL | str:
    """Return the compiled kernels of a head width and type, or the reason why there are none."""
    return compile_library(_SOURCE, f'WIDTH={head_dim}', DTYPES[dtype])
