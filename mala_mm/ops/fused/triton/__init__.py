"""The Triton backend: NVIDIA GPUs, forward and backward (see ``mala_mm/ops/README.md``).

The kernels are imported when they are first needed: ``import mala_mm`` needs no Triton.
"""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from ..library import Problem
from .tiling import DTYPES, HEAD_DIMS, lacks_memory

_INSTALLED = importlib.util.find_spec('triton') is not None
_INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'


def _version() -> tuple[int, ...]:
    """Major and minor; of a distribution by another name, as nightly builds have, the newest."""
    try:
        return tuple(map(int, version('triton').split('.')[:2]))
    except PackageNotFoundError:
        return (99,)


_VERSION = _version()


def _capability(index: int) -> int:
    # torch.compile takes the properties of a device for a constant; their capability it does not.
    properties = torch.cuda.get_device_properties(index)
    return 10 * properties.major + properties.minor


KINDS = ('mala', 'rala', 'linear')
"""What the kernels compute."""


def why_not(problem: Problem | None, q: Tensor) -> str | None:
    """Why the kernels cannot compute it for inputs like ``q``; see :mod:`..library`."""
    if problem is not None and problem.kind not in KINDS:
        return f'needs a kind among {KINDS}, got {problem.kind!r}'
    reason = _lacks(q)
    if reason is not None:
        return reason
    if q.shape[-1] not in HEAD_DIMS:
        return f'needs a head width among {HEAD_DIMS}, got d = {q.shape[-1]}'
    if q.device.type == 'cuda':
        return lacks_memory(q.shape[-1], q.dtype, _capability(q.device.index or 0))
    return None


def why_not_map(x: Tensor) -> str | None:
    """Why the kernels of maps (:mod:`.depthwise`) cannot take ``x`` (B, C, H, W)."""
    return _lacks(x)


def _lacks(x: Tensor) -> str | None:
    """What any kernel lacks to take ``x``: the package, a device, a type."""
    if not _INSTALLED:
        return 'needs the package triton, which is not installed'
    if _VERSION < (3, 3):
        # whose compiler ends the process on these kernels, and whose language knows no tuples
        return f'needs Triton 3.3 or higher, got {".".join(map(str, _VERSION))}'
    if x.device.type == 'cuda':
        if torch.version.hip is not None:
            return f'needs an NVIDIA device, got ROCm {torch.version.hip}'
        capability = _capability(x.device.index or 0)
        if capability < 80:
            return f'needs compute capability 8.0 or higher, got {capability / 10}'
    elif not (_INTERPRETED and x.device.type == 'cpu'):
        return f'needs tensors on a CUDA device, got {x.device}'
    if x.dtype not in DTYPES:
        return f'needs dtype bfloat16, float16 or float32, got {x.dtype}'
    return None


def forward(*args, **kwargs) -> None:
    """See :mod:`mala_mm.ops.fused.library`."""
    from . import launch

    launch.forward(*args, **kwargs)


def backward(*args, **kwargs) -> None:
    """See :mod:`mala_mm.ops.fused.library`."""
    from . import launch

    launch.backward(*args, **kwargs)
