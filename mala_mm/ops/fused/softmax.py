"""Softmax attention with its rotary embedding in one op, on the CPU.

``mala_mm::softmax_attention`` turns queries and keys where it reads them, and keeps what PyTorch's
own backward pass wants, which then takes over. Other devices have PyTorch's attention.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .cpu import softmax as cpu
from .dispatch import can_fuse
from .library import empty_tokens

_SPEC = 'SymInt height, SymInt width, float scale, bool rotary'
torch.library.define(
    'mala_mm::softmax_attention', f'(Tensor q, Tensor k, Tensor v, {_SPEC}) -> (Tensor, Tensor)'
)
torch.library.define(
    'mala_mm::softmax_attention_backward',
    f'(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, {_SPEC}) '
    '-> (Tensor, Tensor, Tensor)',
)


def can_fuse_softmax(q: Tensor) -> bool:
    """Whether the op computes inputs like ``q`` (B, heads, N, d)."""
    return not torch.compiler.is_compiling() and can_fuse(q) and cpu.why_not(q) is None


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], scale: float, rotary: bool
) -> Tensor:
    """``softmax(scale * (R q) (R k)^T) v`` of (B, heads, N, d), any strides."""
    return torch.ops.mala_mm.softmax_attention(q, k, v, *size, scale, rotary)[0]


def _allocate(q, k, v, *_):
    return empty_tokens(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _forward(q, k, v, height, width, scale, rotary):
    out, logsumexp = _allocate(q, k, v)
    cpu.forward(q, k, v, (height, width), scale, rotary, out, logsumexp)
    return out, logsumexp


def _backward(grad, q, k, v, out, logsumexp, height, width, scale, rotary):
    size = (height, width)

    def turned(x: Tensor, direction: float) -> Tensor:
        if not rotary:
            return x.contiguous()
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        cpu.turn(x, size, direction, result)
        return result

    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(grad, turned(q, 1), turned(k, 1), v, out, logsumexp), 0.0, False, scale=scale
    )
    return turned(dq, -1), turned(dk, -1), dv.contiguous()


def _fake_backward(grad, q, k, v, *_):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


torch.library.impl('mala_mm::softmax_attention', 'default', _forward)
torch.library.register_fake('mala_mm::softmax_attention', _allocate)
torch.library.impl('mala_mm::softmax_attention_backward', 'default', _backward)
torch.library.register_fake('mala_mm::softmax_attention_backward', _fake_backward)


def _setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.spec = inputs[3:]


def _differentiate(ctx, grad, _):
    if grad is None:
        return (None,) * 7
    grads = torch.ops.mala_mm.softmax_attention_backward(grad, *ctx.saved_tensors, *ctx.spec)
    return *grads, *(None for _ in ctx.spec)


def _refuse_second_derivative(ctx, *grads):
    raise RuntimeError(
        'the fused softmax attention has no second derivative: '
        'set MALA_MM_CPU_KERNELS=0 to differentiate twice'
    )


_register = torch.library.register_autograd
_register('mala_mm::softmax_attention', _differentiate, setup_context=_setup)
_register('mala_mm::softmax_attention_backward', _refuse_second_derivative)


@register_flop_formula(torch.ops.mala_mm.softmax_attention)
def _(q_shape, *_, out_shape=None, **__) -> int:
    batch, heads, num_tokens, head_dim = q_shape
    return 4 * batch * heads * num_tokens**2 * head_dim
