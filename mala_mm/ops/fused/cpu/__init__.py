"""The CPU backend: compiled kernels where a C compiler is at hand, else tiles in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from ..library import Problem

__all__ = ['backward', 'forward', 'why_not']


KINDS = ('mala', 'rala', 'linear')
"""What the kernels and the tiles compute."""


def why_not(problem: Problem | None, q: Tensor) -> str | None:
    """Why this backend cannot compute it for inputs like ``q``; see :mod:`..library`."""
    if problem is not None and problem.kind not in KINDS:
        return f'needs a kind among {KINDS}, got {problem.kind!r}'
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
