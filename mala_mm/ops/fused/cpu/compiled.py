"""The operators through ``kernels.c``: float32 and half types, the head widths of the models.

The C file is compiled for this machine, a head width and a type when these are first needed (half a
second) and kept in the user's cache folder. Where that cannot be,
:mod:`mala_mm.ops.fused.cpu.tiles` takes over.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ..library import Problem
from . import tokens
from .build import DTYPES, compile_library

HEAD_DIMS = tokens.HEAD_DIMS
_SOURCE = Path(__file__).with_name('kernels.c')
# Of the states in kernels.c: rows after the d of KV, and the columns of the last.
_KBAR, _VBAR, _G, _SOFTMAX, _NUM_ROWS = 0, 1, 2, 3, 4
_LOGSUMEXP, _PEAK, _TOTAL = 0, 1, 2


def why_not(q: Tensor) -> str | None:
    """Why the kernels cannot take inputs like ``q`` (B, heads, N, d); None if they can."""
    reason = tokens.why_not(q)
    if reason is None and isinstance(library := _library(q.shape[-1], q.dtype), str):
        reason = library
    return reason


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    states: Tensor,
    lepe: Tensor | None = None,
    gate: Tensor | None = None,
) -> None:
    """Fill ``out`` and ``states``; the contract stands in :mod:`mala_mm.ops.fused.library`."""
    call = _Call(problem, q)
    d = q.shape[-1]
    if problem.kind == 'rala':
        call.run('sum_queries', q, call.partial_sums)
        s = call.partial_sums.view(call.partial_shape).sum(1)
        s[:, d + _G] /= problem.num_tokens
        call.run('sum_keys', k, v, s, call.partial_sums)
        _finish_softmax(s, call.partial_sums.view(call.partial_shape))
    else:
        call.run('sum_keys', k, v, None, call.partial_sums)
        s = call.partial_sums.view(call.partial_shape).sum(1)
        _fold_constants(problem, s)
    call.run('apply_queries', q, s, lepe, gate, out)
    states.copy_(s[:, : states.shape[2]].view_as(states))


def backward(
    problem: Problem,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    lepe: Tensor | None = None,
    gate: Tensor | None = None,
    dlepe: Tensor | None = None,
    dgate: Tensor | None = None,
) -> None:
    """Fill the gradients; the contract stands in :mod:`mala_mm.ops.fused.library`."""
    call = _Call(problem, q)
    d = q.shape[-1]
    s = states.new_empty(call.partial_shape[0], *call.partial_shape[2:])
    s[:, : states.shape[2]] = states.flatten(0, 1)
    call.run('query_gradients', grad, q, s, lepe, gate, dq, dlepe, dgate, call.partial_sums)
    ds = call.partial_sums.view(call.partial_shape).sum(1)
    if problem.kind != 'rala':
        _fold_constants(problem, ds)
        call.run('key_gradients', k, v, s, ds, dk, dv, None)
        return
    # sum_m w_m dw_m without a pass over the keys: dKV and dkbar hold it.
    ds[:, d + _SOFTMAX, 0] = (ds[:, : d + 1] * s[:, : d + 1]).sum((1, 2))
    call.run('key_gradients', k, v, s, ds, dk, dv, call.partial_sums)
    dg = call.partial_sums.view(call.partial_shape)[:, :, d + _G].sum(1)
    ds[:, d + _G] = dg / problem.num_tokens
    call.run('add_global_gradients', q, ds, dq)


def _fold_constants(problem: Problem, s: Tensor) -> None:
    """Fold in the weight of every key and the mean of the values: states or their gradients."""
    d = s.shape[-1]
    s[:, : d + 1] *= problem.coefficient
    s[:, d + _VBAR] /= problem.num_tokens


def _finish_softmax(s: Tensor, partial_sums: Tensor) -> None:
    """RALA: add the chunks up, each weighted relative to its own maximum."""
    d = s.shape[-1]
    peaks = partial_sums[:, :, d + _SOFTMAX, _PEAK]
    peak = peaks.amax(1, keepdim=True)
    fade = (peaks - peak).exp()[..., None, None]
    sums = partial_sums.mul_(fade).sum(1)
    total = sums[:, d + _SOFTMAX, _TOTAL]
    s[:, : d + 1] = sums[:, : d + 1] / total[:, None, None]
    s[:, d + _SOFTMAX, _LOGSUMEXP] = peak[:, 0] + total.log()
    s[:, d + _SOFTMAX, _PEAK] = peak[:, 0]
    s[:, d + _SOFTMAX, _TOTAL] = total


class _Call:
    """What the kernels of one call share.

    Attributes:
        partial_sums (Tensor): Memory for the sums of every chunk of tokens, (chunks of all, d + 4,
            d).
        partial_shape (tuple[int, ...]): The same per image and head, (B * heads, chunks, d + 4, d).
    """

    def __init__(self, problem: Problem, q: Tensor) -> None:
        images, heads, num_tokens, d = q.shape
        # Depends on N alone: results repeat bit for bit, whatever the number of threads. At most
        # 64 chunks per image and head, so that their sums stay small beside the feature map.
        chunk = 64 * max(8, -(-num_tokens // 4096))
        self.partial_shape = (images * heads, -(-num_tokens // chunk), d + _NUM_ROWS, d)
        self.partial_sums = q.new_empty(
            self.partial_shape[0] * self.partial_shape[1],
            *self.partial_shape[2:],
            dtype=torch.float32,
        )
        self.library = _library(d, q.dtype)
        kind = self.library.kind_of(problem.kind.encode())
        if kind < 0:
            raise ValueError(f'kernels.c computes no operator of the kind {problem.kind!r}')
        self.problem = tokens.TokenProblem(
            q, problem.size, chunk, problem.rotary, problem.scale, eps=problem.eps, kind=kind
        )

    def run(self, name: str, *tensors: Tensor | None) -> None:
        """Call a kernel."""
        tokens.run(self.library, name, self.problem, *tensors)


@functools.cache
def _library(head_dim: int, dtype: torch.dtype) -> ctypes.CDLL | str:
    """Return the compiled kernels of a head width and type, or the reason why there are none."""
    return compile_library(_SOURCE, f'WIDTH={head_dim}', DTYPES[dtype])
