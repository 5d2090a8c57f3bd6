"""Residual and LayerNorm in one pass: ``total = x + keep * branch`` and ``norm(total)``.

What stands between the parts of a block. ``torch.library`` ops with a backend on NVIDIA GPUs
(:mod:`.triton.norm`), and plain PyTorch elsewhere. The sum's own gradient and that through the norm
come back in one pass too; nothing but the sum is kept.
"""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

from . import triton
from .dispatch import can_fuse, check_backend, device_backend

_NAMES = {
    'residual_norm': (
        '(Tensor x, Tensor? branch, Tensor? keep, Tensor weight, Tensor bias, float eps, '
        'ScalarType dtype) -> (Tensor, Tensor)'
    ),
    'residual_norm_backward': (
        '(Tensor? dtotal, Tensor dy, Tensor total, Tensor? keep, Tensor weight, float eps, '
        'ScalarType dtype, ScalarType branch_dtype) -> (Tensor, Tensor, Tensor, Tensor)'
    ),
}
for _name, _schema in _NAMES.items():
    torch.library.define(f'mala_mm::{_name}', _schema)

MAX_CHANNELS = 1024
"""A row lies in one tile."""


def _triton_why_not(x: Tensor) -> str | None:
    if x.shape[1] > MAX_CHANNELS:
        return f'needs at most {MAX_CHANNELS} channels, got {x.shape[1]}'
    return triton.why_not_map(x)


_WHY_NOT = {'triton': _triton_why_not}


def residual_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    branch: Tensor | None = None,
    keep: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = 'auto',
) -> tuple[Tensor, Tensor]:
    """``total = x + keep * branch`` and its LayerNorm over the channels.

    Args:
        x (Tensor): Shape (B, C, H, W).
        weight (Tensor): Of the norm, shape (C, ).
        bias (Tensor): Of the norm, shape (C, ).
        eps (float): Added to the variance.
        branch (Tensor, optional): Shape of ``x``. Without it the sum is ``x`` itself.
        keep (Tensor, optional): Factors of the branch, (B, 1, 1, 1), without a gradient.
        dtype (torch.dtype, optional): Of the norm; that of ``x`` by default.
        backend (str): ``'auto'``, ``'reference'`` or ``'triton'``.

    Returns:
        tuple[Tensor, Tensor]: The sum, in the wider of the types of ``x`` and ``branch``, and its
        norm, both (B, C, H, W).

    Raises:
        ValueError: If the backend is unknown, or is named and cannot take such inputs.
    """
    dtype = dtype or x.dtype
    check_backend(backend)
    if backend == 'auto':
        backend = 'triton' if can_fuse_norm(x) else 'reference'
    if backend == 'reference':
        return reference(x, weight, bias, eps, branch, keep, dtype)
    reason = _WHY_NOT[backend](x) if backend in _WHY_NOT else 'has no norms'
    if reason is not None:
        raise ValueError(f'backend {backend!r} {reason}')
    return _ResidualNorm.apply(x, branch, keep, weight, bias, eps, dtype)


def can_fuse_norm(x: Tensor) -> bool:
    """Whether a kernel computes maps like ``x`` (B, C, H, W); else plain PyTorch does."""
    name = device_backend(x)
    return name in _WHY_NOT and can_fuse(x) and _WHY_NOT[name](x) is None


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    branch: Tensor | None,
    keep: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the equations in plain PyTorch."""
    if branch is not None:
        x = x + branch if keep is None else torch.addcmul(x, branch, keep)
    rows = x.permute(0, 2, 3, 1)
    if rows.dtype != weight.dtype and rows.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()
    y = F.layer_norm(rows, rows.shape[-1:], weight.to(rows.dtype), bias.to(rows.dtype), eps)
    return x, y.permute(0, 3, 1, 2).to(dtype)


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.channels_last)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous(memory_format=torch.channels_last)


def _allocate(x, branch, keep, weight, bias, eps, dtype):
    total = (
        x.new_empty(0) if branch is None else _like(x, torch.promote_types(x.dtype, branch.dtype))
    )
    return total, _like(x, dtype)


def _allocate_backward(dtotal, dy, total, keep, weight, eps, dtype, branch_dtype):
    dbranch = total.new_empty(0) if keep is None else _like(total, branch_dtype)
    return _like(total, dtype), dbranch, torch.empty_like(weight), torch.empty_like(weight)


def _forward(x, branch, keep, weight, bias, eps, dtype):
    total, y = _allocate(x, branch, keep, weight, bias, eps, dtype)
    if x.numel():
        importlib.import_module('.triton.norm', __package__).forward(
            *(_dense(x), _dense(branch), keep, weight, bias, eps),
            *(None if branch is None else total, y),
        )
    return total, y


def _backward(dtotal, dy, total, keep, weight, eps, dtype, branch_dtype):
    dx, dbranch, *_ = _allocate_backward(dtotal, dy, total, keep, weight, eps, dtype, branch_dtype)
    if not total.numel():
        return dx, dbranch, torch.zeros_like(weight), torch.zeros_like(weight)
    dweight, dbias = importlib.import_module('.triton.norm', __package__).backward(
        *(_dense(dtotal), _dense(dy), _dense(total), keep, weight, eps, dx),
        None if keep is None else dbranch,
    )
    return dx, dbranch, dweight, dbias.clone()


for _name, _compute, _fake in (
    ('residual_norm', _forward, _allocate),
    ('residual_norm_backward', _backward, _allocate_backward),
):
    torch.library.impl(f'mala_mm::{_name}', 'default', _compute)
    torch.library.register_fake(f'mala_mm::{_name}', _fake)


class _ResidualNorm(torch.autograd.Function):
    """The op; where there is no branch the sum is ``x``, whose gradients meet here."""

    @staticmethod
    def forward(ctx, x, branch, keep, weight, bias, eps, dtype):
        total, y = torch.ops.mala_mm.residual_norm(x, branch, keep, weight, bias, eps, dtype)
        ctx.save_for_backward(x if branch is None else total, keep, weight)
        ctx.set_materialize_grads(False)
        ctx.dtypes = x.dtype, None if branch is None else branch.dtype, bias.dtype
        ctx.eps = eps
        return x.view_as(x) if branch is None else total, y

    @staticmethod
    def backward(ctx, dtotal, dy):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused norm has no second derivative: take backend='reference' to "
                'differentiate twice'
            )
        total, keep, weight = ctx.saved_tensors
        dtype, branch_dtype, bias_dtype = ctx.dtypes
        dweight = dbias = None
        if dy is None:
            dx, dbranch = dtotal, dtotal if keep is None else dtotal * keep
        else:
            dx, dbranch, dweight, dbias = torch.ops.mala_mm.residual_norm_backward(
                dtotal, dy, total, keep, weight, ctx.eps, dtype, branch_dtype or dtype
            )
            dbranch = dx if keep is None else dbranch
            dbias = dbias.to(bias_dtype)
        if branch_dtype is None:
            dbranch = None
        elif dbranch is not None:
            dbranch = dbranch.to(branch_dtype)
        return None if dx is None else dx.to(dtype), dbranch, None, dweight, dbias, None, None
