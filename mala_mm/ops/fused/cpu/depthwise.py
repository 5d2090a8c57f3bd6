"""``depthwise.c``, the convolution of :mod:`mala_mm.ops.fused.depthwise` on the CPU."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from .build import DTYPES, compile_library

_SOURCE = Path(__file__).with_name('depthwise.c')
_TILE, _SUMS = 30, 10  # columns of a strip, and its sums per channel: nine taps and the bias


def why_not(x: Tensor) -> str | None:
    """Why the kernels cannot take maps like ``x`` (B, C, H, W); None if they can."""
    if x.device.type != 'cpu':
        return f'needs tensors on the CPU, got {x.device}'
    if x.dtype not in DTYPES:
        return f'needs dtype float32, bfloat16 or float16, got {x.dtype}'
    library = _library(x.dtype)
    return library if isinstance(library, str) else None


def forward(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool, out: Tensor) -> None:
    """Fill ``out`` (B, C, H, W); it and ``x`` are dense in channels_last memory."""
    _run('forward', x, gelu, x, _taps(weight), bias.float().contiguous(), out)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, gelu: bool, dx: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill ``dx`` and return the gradients of weight and bias in the weight's dtype."""
    batch, channels, _, width = x.shape
    sums = x.new_empty(batch * -(-width // _TILE), _SUMS, channels, dtype=torch.float32)
    _run('backward', x, gelu, grad, x, _taps(weight), dx, sums)
    sums = sums.sum(0).to(weight.dtype)
    return sums[:-1].t().reshape(weight.shape).contiguous(), sums[-1]


def _taps(weight: Tensor) -> Tensor:
    """Return the kernel as (9, C), float32."""
    return weight.flatten(1).t().float().contiguous()


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ('images', 'height', 'width', 'channels', 'threads')),
        ('gelu', ctypes.c_int),
    ]


def _run(name: str, x: Tensor, gelu: bool, *tensors: Tensor) -> None:
    batch, channels, height, width = x.shape
    problem = _Problem(batch, height, width, channels, torch.get_num_threads(), gelu)
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    getattr(_library(x.dtype), name)(ctypes.byref(problem), *pointers)


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | str:
    """Return the compiled kernels of a type, or the reason why there are none."""
    return compile_library(_SOURCE, DTYPES[dtype])
