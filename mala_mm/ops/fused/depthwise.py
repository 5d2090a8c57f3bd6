"""``h + DWConv3x3(h)`` with ``h = x`` or ``h = gelu(x)``: the convolutions between the attentions.

One pass over memory in place of three or four: ``torch.library`` ops with a backend on the CPU
(:mod:`.cpu.depthwise`), and the equation in plain PyTorch wherever it does not apply. Backward, the
GELU is computed again rather than kept.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..registry import without_autocast
from .cpu import depthwise as cpu
from .dispatch import can_fuse

torch.library.define(
    'mala_mm::depthwise_residual', '(Tensor x, Tensor weight, Tensor bias, bool gelu) -> Tensor'
)
torch.library.define(
    'mala_mm::depthwise_residual_backward',
    '(Tensor grad, Tensor x, Tensor weight, bool gelu) -> (Tensor, Tensor, Tensor)',
)


def depthwise_residual(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool = False) -> Tensor:
    """``h + DWConv3x3(h)``, where ``h`` is ``x`` or ``gelu(x)``.

    Args:
        x (Tensor): Shape (B, C, H, W).
        weight (Tensor): Shape (C, 1, 3, 3); may be float32 where ``x`` is not.
        bias (Tensor): Shape (C, ).
        gelu (bool): Whether ``x`` passes the exact GELU first.

    Returns:
        Tensor: Shape and dtype of ``x``; channels_last where a fused kernel computes it.
    """
    if can_fuse_depthwise(x):
        return torch.ops.mala_mm.depthwise_residual(x, weight, bias, gelu)
    return reference(x, weight, bias, gelu)


def can_fuse_depthwise(x: Tensor) -> bool:
    """Whether a kernel computes maps like ``x`` (B, C, H, W); else plain PyTorch does."""
    return can_fuse(x) and cpu.why_not(x) is None


def reference(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool = False) -> Tensor:
    """Return the equation in plain PyTorch."""
    h = F.gelu(x) if gelu else x
    weight, bias = weight.to(h.dtype), bias.to(h.dtype)
    return h + F.conv2d(h, weight, bias, padding=1, groups=h.shape[1])


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
    if can_fuse_depthwise(x):
        return _GeluDepthwiseLinear.apply(x, weight, bias, out_weight, out_bias)
    return F.conv2d(depthwise_residual(x, weight, bias, gelu=True), out_weight, out_bias)


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _forward(x: Tensor, weight: Tensor, bias: Tensor, gelu: bool) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.channels_last)
    cpu.forward(_dense(x), weight, bias, gelu, out)
    return out


def _backward(grad: Tensor, x: Tensor, weight: Tensor, gelu: bool) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    dweight, dbias = cpu.backward(_dense(grad), _dense(x), weight, gelu, dx)
    return dx, dweight, dbias


torch.library.impl('mala_mm::depthwise_residual', 'default', _forward)
torch.library.impl('mala_mm::depthwise_residual_backward', 'default', _backward)


@torch.library.register_fake('mala_mm::depthwise_residual')
def _(x, weight, bias, gelu):
    return torch.empty_like(x, memory_format=torch.channels_last)


@torch.library.register_fake('mala_mm::depthwise_residual_backward')
def _(grad, x, weight, gelu):
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    return dx, torch.empty_like(weight), weight.new_empty(weight.shape[0])


def _setup(ctx, inputs, output):
    x, weight, bias, ctx.gelu = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = bias.dtype


def _differentiate(ctx, grad):
    x, weight = ctx.saved_tensors
    dx, dweight, dbias = torch.ops.mala_mm.depthwise_residual_backward(grad, x, weight, ctx.gelu)
    return dx, dweight, dbias.to(ctx.bias_dtype), None


def _refuse_second_derivative(ctx, *grads):
    raise RuntimeError(
        'the fused depthwise convolution has no second derivative: '
        'set MALA_MM_CPU_KERNELS=0 to differentiate twice'
    )


_register = torch.library.register_autograd
_register('mala_mm::depthwise_residual', _differentiate, setup_context=_setup)
_register('mala_mm::depthwise_residual_backward', _refuse_second_derivative)


class _GeluDepthwiseLinear(torch.autograd.Function):
    """Backward makes the input of the 1x1 convolution once more, a pass over memory."""

    @staticmethod
    def forward(ctx, x, weight, bias, out_weight, out_bias):
        hidden = torch.ops.mala_mm.depthwise_residual(x, weight, bias, True)
        ctx.save_for_backward(x, weight, bias, out_weight)
        return F.conv2d(hidden, out_weight, out_bias)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            _refuse_second_derivative(ctx)
        x, weight, bias, out_weight = ctx.saved_tensors
        with without_autocast(x.device):
            hidden = torch.ops.mala_mm.depthwise_residual(x, weight, bias, True)
            dhidden, dout_weight, dout_bias = torch.ops.aten.convolution_backward(
                *(grad, hidden, out_weight, [out_weight.shape[0]]),
                *([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3),
            )
            dx, dweight, dbias = torch.ops.mala_mm.depthwise_residual_backward(
                dhidden, x, weight, True
            )
        return dx, dweight, dbias.to(bias.dtype), dout_weight, dout_bias


@register_flop_formula(torch.ops.mala_mm.depthwise_residual)
def _(x_shape, weight_shape, *_, out_shape=None, **__) -> int:
    return 2 * 9 * math.prod(x_shape)
