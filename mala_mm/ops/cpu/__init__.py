"""The CPU backend."""

from __future__ import annotations

from torch import Tensor

from .tiles import backward, forward

__all__ = ['backward', 'forward', 'why_not']


def why_not(q: Tensor) -> str | None:
    """Why this backend cannot take inputs like ``q`` (B, heads, N, d); None if it can."""
    if q.device.type != 'cpu':
        return f'needs tensors on the CPU, got {q.device}'
    return None
