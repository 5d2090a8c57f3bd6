"""The CPU backend: compiled kernels where a C compiler is at hand, else tiles in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from ..library import Problem, split_heads, views

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


def forward(problem: Problem, inputs: tuple[Tensor, ...], out: Tensor, states: Tensor) -> None:
    """See :mod:`mala_mm.ops.fused.library`."""
    if len(inputs) == 3:
        _engine(inputs[0]).forward(problem, *inputs, out, states)
        return
    heads = states.shape[1]
    q, k, v, gate, lepe = views(*inputs, heads)
    _engine(q).forward(problem, q, k, v, split_heads(out, heads), states, lepe, gate)


def backward(
    problem: Problem,
    grad: Tensor,
    inputs: tuple[Tensor, ...],
    states: Tensor,
    grads: tuple[Tensor, ...],
) -> None:
    """See :mod:`mala_mm.ops.fused.library`."""
    if len(inputs) == 3:
        _engine(grad).backward(problem, grad, *inputs, states, *grads)
        return
    heads = states.shape[1]
    q, k, v, gate, lepe = views(*inputs, heads)
    dq, dk, dv, dgate, dlepe = views(*grads, heads)
    grad = split_heads(grad, heads)
    _engine(q).backward(problem, grad, q, k, v, states, dq, dk, dv, lepe, gate, dlepe, dgate)


def _engine(q: Tensor):
    from . import compiled, tiles

    return compiled if compiled.why_not(q) is None else tiles
