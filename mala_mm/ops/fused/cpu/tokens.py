"""What ``tokens.h`` takes: maps of tokens and the problem that kernels share."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ...rotary import rotary_tables
from .build import DTYPES

HEAD_DIMS = (32, 64, 96, 128)


def why_not(q: Tensor) -> str | None:
    """Why compiled kernels cannot take inputs like ``q`` (B, heads, N, d); None if they can."""
    if q.dtype not in DTYPES:
        return f'needs dtype float32, bfloat16 or float16, got {q.dtype}'
    if q.shape[-1] not in HEAD_DIMS:
        return f'needs a head width among {HEAD_DIMS}, got d = {q.shape[-1]}'
    return None


class _Map(ctypes.Structure):
    _fields_ = [('data', ctypes.c_void_p), ('strides', ctypes.c_int64 * 4)]


class TokenProblem(ctypes.Structure):
    """The ``problem`` of ``tokens.h`` for inputs like ``q`` (B, heads, N, d)."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ('images', 'heads', 'height', 'width')),
        *((name, ctypes.c_int64) for name in ('chunk', 'threads')),
        *((name, ctypes.c_int) for name in ('kind', 'rotary')),
        *((name, ctypes.c_float) for name in ('scale', 'eps')),
        ('tables', ctypes.c_void_p * 4),
    ]

    def __init__(
        self, q: Tensor, size: tuple[int, int], chunk: int, rotary: bool, scale: float, **other
    ) -> None:
        images, heads, _, head_dim = q.shape
        height, width = size
        super().__init__(
            images=images,
            heads=heads,
            height=height,
            width=width,
            chunk=chunk,
            threads=torch.get_num_threads(),
            rotary=rotary,
            scale=scale,
            **other,
        )
        if rotary:
            self.kept = _tables(size, head_dim)  # alive as long as their addresses
            self.tables[:] = [table.data_ptr() for table in self.kept]


@functools.lru_cache(maxsize=32)
def _tables(size: tuple[int, int], head_dim: int) -> tuple[Tensor, ...]:
    return rotary_tables(size, head_dim)


def run(
    library: ctypes.CDLL, name: str, problem: TokenProblem, *arguments: Tensor | float | int | None
) -> None:
    """Call a kernel: tensors of four dimensions are maps, others dense memory."""
    getattr(library, name)(ctypes.byref(problem), *map(_argument, arguments))


def _argument(x: Tensor | float | int | None) -> object:
    if isinstance(x, int):
        return ctypes.c_int64(x)
    if isinstance(x, float):
        return ctypes.c_float(x)
    if x is not None and x.dim() == 4:
        return ctypes.byref(_Map(data=x.data_ptr(), strides=x.stride()))
    return ctypes.c_void_p(None if x is None else x.data_ptr())
