"""Depthwise convolutions in one pass: ``h + conv(h)`` or ``conv(h)``, ``h`` x or gelu(x).

The convolutions between the attentions, with what stands around them: a ``torch.library`` op with a
backend on NVIDIA GPUs (:mod:`.triton.depthwise`, kernels of 3x3 and 5x5) and one on the CPU
(:mod:`.cpu.depthwise`, 3x3 on a residual path), and the equation in plain PyTorch wherever neither
applies. Backward, the GELU is computed again rather than kept.
"""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..registry import without_autocast
from . import triton
from .cpu import depthwise as cpu
from .dispatch import can_fuse, check_backend, device_backend

_OPTIONS = 'bool gelu, bool residual, str backend'
torch.library.define(
    'mala_mm::depthwise', f'(Tensor x, Tensor weight, Tensor bias, {_OPTIONS}) -> Tensor'
)
torch.library.define(
    'mala_mm::depthwise_backward',
    f'(Tensor grad, Tensor x, Tensor weight, {_OPTIONS}) -> (Tensor, Tensor, Tensor)',
)


def _cpu_why_not(x: Tensor, taps: int, residual: bool) -> str | None:
    if taps != 3 or not residual:
        return f'needs a 3x3 kernel on a residual path, got {taps}x{taps}, residual={residual}'
    return cpu.why_not(x)


def _triton_why_not(x: Tensor, taps: int, residual: bool) -> str | None:
    if taps not in (3, 5):
        return f'needs a kernel of 3x3 or 5x5, got {taps}x{taps}'
    return triton.why_not_map(x)


_WHY_NOT = {'cpu': _cpu_why_not, 'triton': _triton_why_not}


def depthwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gelu: bool = False,
    residual: bool = False,
    backend: str = 'auto',
) -> Tensor:
    """``conv(h)``, or ``h + conv(h)`` on a residual path, where ``h`` is ``x`` or ``gelu(x)``.

    Args:
        x (Tensor): Shape (B, C, H, W).
        weight (Tensor): Shape (C, 1, K, K), K odd; may be float32 where ``x`` is not.
        bias (Tensor): Shape (C, ).
        gelu (bool): Whether ``x`` passes the exact GELU first.
        residual (bool): Whether ``h`` is added.
        backend (str): ``'auto'``, ``'reference'``, ``'cpu'`` or ``'triton'``.

    Returns:
        Tensor: Shape and dtype of ``x``; channels_last where a fused kernel computes it.

    Raises:
        ValueError: If the backend is unknown, or is named and cannot take such inputs.
    """
    name = _choose(backend, x, weight.shape[-1], residual)
    if name == 'reference':
        return reference(x, weight, bias, gelu, residual)
    return torch.ops.mala_mm.depthwise(x, weight, bias, gelu, residual, name)


def depthwise_residual(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool = False) -> Tensor:
    """:func:`depthwise` with the residual path."""
    return depthwise(x, weight, bias, gelu, residual=True)


def can_fuse_depthwise(x: Tensor, taps: int = 3, residual: bool = True) -> bool:
    """Whether a kernel computes maps like ``x`` (B, C, H, W); else plain PyTorch does."""
    return _choose('auto', x, taps, residual) != 'reference'


def _choose(name: str, x: Tensor, taps: int, residual: bool) -> str:
    check_backend(name)
    if name == 'auto':
        name = device_backend(x)
        if name is None or not can_fuse(x) or _WHY_NOT[name](x, taps, residual) is not None:
            return 'reference'
    elif name != 'reference':
        reason = _WHY_NOT[name](x, taps, residual)
        if reason is not None:
            raise ValueError(f'backend {name!r} {reason}')
    return name


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, gelu: bool = False, residual: bool = True
) -> Tensor:
    """Return the equation in plain PyTorch."""
    h = F.gelu(x) if gelu else x
    weight, bias = weight.to(h.dtype), bias.to(h.dtype)
    y = F.conv2d(h, weight, bias, padding=weight.shape[-1] // 2, groups=h.shape[1])
    return h + y if residual else y


def gelu_depthwise_linear(
    x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor
) -> Tensor:
    """``Conv1x1(depthwise_residual(x, gelu=True))``, of which nothing but ``x`` is kept.

    Args:
        x (Tensor): Shape (B, C, H, W).
        weight (Tensor): Of the depthwise convolution, shape (C, 1, 3, 3).
        bias (Tensor): Of the depthwise convolution, shape (C, ).
        out_weight (Tensor): Of the 1x1 convolution, shape (D, C, 1, 1).
        out_bias (Tensor): Of the 1x1 convolution, shape (D, ).

    Returns:
        Tensor: Shape (B, D, H, W), dtype of ``x``.
    """
    out_weight, out_bias = out_weight.to(x.dtype), out_bias.to(x.dtype)
    if _choose('auto', x, weight.shape[-1], True) == 'cpu':
        return _GeluDepthwiseLinear.apply(x, weight, bias, out_weight, out_bias)
    return F.conv2d(depthwise_residual(x, weight, bias, gelu=True), out_weight, out_bias)


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _triton() -> ModuleType:
    return importlib.import_module('.triton.depthwise', __package__)


def _fake(x, *_):
    return torch.empty_like(x, memory_format=torch.channels_last)


def _fake_backward(grad, x, weight, *_):
    return _fake(x), torch.empty_like(weight), weight.new_empty(weight.shape[0])


def _forward(x, weight, bias, gelu, residual, backend):
    out = _fake(x)
    if x.numel() and backend == 'cpu':
        cpu.forward(_dense(x), weight, bias, gelu, out)
    elif x.numel():
        _triton().forward(x, weight, bias, gelu, residual, out)
    return out


def _backward(grad, x, weight, gelu, residual, backend):
    dx = _fake(x)
    if not x.numel():
        return dx, torch.zeros_like(weight), weight.new_zeros(weight.shape[0])
    if backend == 'cpu':
        dweight, dbias = cpu.backward(_dense(grad), _dense(x), weight, gelu, dx)
    else:
        dweight, dbias = _triton().backward(grad, x, weight, gelu, residual, dx)
    return dx, dweight, dbias


torch.library.impl('mala_mm::depthwise', 'default', _forward)
torch.library.impl('mala_mm::depthwise_backward', 'default', _backward)
torch.library.register_fake('mala_mm::depthwise', _fake)
torch.library.register_fake('mala_mm::depthwise_backward', _fake_backward)


def _setup(ctx, inputs, output):
    x, weight, bias, *ctx.options = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = bias.dtype


def _differentiate(ctx, grad):
    x, weight = ctx.saved_tensors
    dx, dweight, dbias = torch.ops.mala_mm.depthwise_backward(grad, x, weight, *ctx.options)
    return dx, dweight, dbias.to(ctx.bias_dtype), None, None, None


def _refuse_second_derivative(ctx, *grads):
    raise RuntimeError(
        'the fused depthwise convolution has no second derivative: '
        "set MALA_MM_CPU_KERNELS=0 on the CPU, or take backend='reference', to differentiate twice"
    )


_register = torch.library.register_autograd
_register('mala_mm::depthwise', _differentiate, setup_context=_setup)
_register('mala_mm::depthwise_backward', _refuse_second_derivative)


class _GeluDepthwiseLinear(torch.autograd.Function):
    """Backward makes the input of the 1x1 convolution once more, a pass over memory."""

    @staticmethod
    def forward(ctx, x, weight, bias, out_weight, out_bias):
        hidden = torch.ops.mala_mm.depthwise(x, weight, bias, True, True, 'cpu')
        ctx.save_for_backward(x, weight, bias, out_weight)
        return F.conv2d(hidden, out_weight, out_bias)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            _refuse_second_derivative(ctx)
        x, weight, bias, out_weight = ctx.saved_tensors
        with without_autocast(x.device):
            hidden = torch.ops.mala_mm.depthwise(x, weight, bias, True, True, 'cpu')
            dhidden, dout_weight, dout_bias = torch.ops.aten.convolution_backward(
                *(grad, hidden, out_weight, [out_weight.shape[0]]),
                *([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3),
            )
            dx, dweight, dbias = torch.ops.mala_mm.depthwise_backward(
                dhidden, x, weight, True, True, 'cpu'
            )
        return dx, dweight, dbias.to(bias.dtype), dout_weight, dout_bias


@register_flop_formula(torch.ops.mala_mm.depthwise)
def _(x_shape, weight_shape, *_, out_shape=None, **__) -> int:
    return 2 * math.prod(x_shape) * math.prod(weight_shape[1:])
