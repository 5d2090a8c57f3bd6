"""The CPU backend: compiled kernels where a C compiler is at hand, else tiles in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from ..library import Problem

__all__ = ['backward', 'forward', 'why_not']


def why_not(q: Tensor) -> str | None:
    """Why this backend cannot take inputs like ``q`` (B, heads, N, d); None if it can."""
    if q.device.type != 'cpu':
        return f'needs tensors on the CPU, got {q.device}'
    return None


def forward(problem: Problem, q: Tensor, *tensors: Tensor) -> None:
    """See :mod:`mala_mm.ops.fused.library`."""
    _engine(q).forward(problem, q, *tensors)


def backward(problem: Problem, grad: Tensor, q: Tensor, *tensors: Tensor) -> None:
    """See :mod:`mala_mm.ops.fused.library`."""
    _engine(q).backward(problem, grad, q, *tensors)


def _engine(q: Tensor):
    from . import compiled, tiles

    return compiled if compiled.why_not(q) is None else tiles
