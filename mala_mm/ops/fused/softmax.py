"""Softmax attention with its rotary embedding in one op, on the CPU.

- ``mala_mm::softmax_attention``: ``q, k, v`` of shape (B, heads, N, d), any strides, to the
  attention;
- ``mala_mm::gated_softmax_attention``: the packed projection ``qkvo`` and the local position to
  ``(attention + lepe) * o``, with one packed gradient back.

Queries and keys are turned where they are read. Other devices have PyTorch's attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .cpu import softmax as cpu
from .dispatch import can_fuse, share_values
from .library import empty_map, empty_tokens, split_heads, views

_SIZE, _SPEC = 'SymInt height, SymInt width', 'float scale, bool rotary'
_OPS = {
    'softmax_attention': (
        f'(Tensor q, Tensor k, Tensor v, {_SIZE}, {_SPEC}) -> (Tensor y, Tensor logsumexp)'
    ),
    'softmax_attention_backward': (
        f'(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor y, Tensor logsumexp, {_SIZE}, {_SPEC})'
        ' -> (Tensor, Tensor, Tensor)'
    ),
    # y is empty unless it is to be kept for the backward
    'gated_softmax_attention': (
        f'(Tensor qkvo, Tensor lepe, SymInt heads, {_SPEC}, bool keep) '
        '-> (Tensor out, Tensor y, Tensor logsumexp)'
    ),
    'gated_softmax_attention_backward': (
        '(Tensor grad, Tensor qkvo, Tensor lepe, Tensor y, Tensor logsumexp, SymInt heads, '
        f'{_SPEC}) -> (Tensor, Tensor)'
    ),
}
for _name, _schema in _OPS.items():
    torch.library.define(f'mala_mm::{_name}', _schema)


def can_fuse_softmax(q: Tensor) -> bool:
    """Whether the op computes inputs like ``q`` (B, heads, N, d)."""
    return not torch.compiler.is_compiling() and can_fuse(q) and cpu.why_not(q) is None


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], scale: float, rotary: bool
) -> Tensor:
    """``softmax(scale * (R q) (R k)^T) v`` of (B, heads, N, d), any strides."""
    return torch.ops.mala_mm.softmax_attention(q, k, v, *size, scale, rotary)[0]


def gated_softmax_attention(
    qkvo: Tensor,
    lepe: Tensor | Callable[[Tensor], Tensor],
    num_heads: int,
    scale: float,
    rotary: bool,
) -> Tensor:
    """``(softmax_attention(q, k, v) + lepe) * o``; see :func:`.dispatch.gated_attention`."""
    if callable(lepe):
        qkvo, v = share_values(qkvo)
        lepe = lepe(v)
    keep = torch.is_grad_enabled() and (qkvo.requires_grad or lepe.requires_grad)
    op = torch.ops.mala_mm.gated_softmax_attention
    return op(qkvo, lepe, num_heads, scale, rotary, keep)[0]


# Each op is an allocation, which alone is what the fake implementation does, and a computation.


def _allocate(q, k, v, *_):
    return empty_tokens(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _allocate_backward(grad, q, k, v, *_):
    return empty_tokens(q), empty_tokens(k), empty_tokens(v)


def _allocate_gated(qkvo, lepe, heads, scale, rotary, keep):
    batch, channels, height, width = lepe.shape
    y = empty_map(qkvo, channels) if keep else qkvo.new_empty(0)
    logsumexp = qkvo.new_empty(batch, heads, height * width, dtype=torch.float32)
    return empty_map(qkvo, channels), y, logsumexp


def _allocate_gated_backward(grad, qkvo, lepe, *_):
    return empty_map(qkvo, qkvo.shape[1]), empty_map(lepe, lepe.shape[1])


def _forward(q, k, v, height, width, scale, rotary):
    y, logsumexp = _allocate(q, k, v)
    cpu.forward(q, k, v, (height, width), scale, rotary, y, logsumexp)
    return y, logsumexp


def _backward(grad, q, k, v, y, logsumexp, height, width, scale, rotary):
    grads = _allocate_backward(grad, q, k, v)
    cpu.backward(grad, q, k, v, y, logsumexp, (height, width), scale, rotary, *grads)
    return grads


def _gated(qkvo, lepe, heads, scale, rotary, keep):
    out, y, logsumexp = outputs = _allocate_gated(qkvo, lepe, heads, scale, rotary, keep)
    q, k, v, gate, local = views(qkvo, lepe, heads)
    kept = split_heads(y, heads) if keep else None
    size, out = lepe.shape[2:], split_heads(out, heads)
    cpu.forward(q, k, v, size, scale, rotary, kept, logsumexp, local, gate, out)
    return outputs


def _gated_backward(grad, qkvo, lepe, y, logsumexp, heads, scale, rotary):
    grads = _allocate_gated_backward(grad, qkvo, lepe)
    q, k, v, gate, local = views(qkvo, lepe, heads)
    dq, dk, dv, dgate, dlepe = views(*grads, heads)
    grad, y = split_heads(grad, heads), split_heads(y, heads)
    cpu.backward(
        *(grad, q, k, v, y, logsumexp, lepe.shape[2:], scale, rotary, dq, dk, dv),
        *(local, gate, dlepe, dgate),
    )
    return grads


for _name, _compute, _fake in (
    ('softmax_attention', _forward, _allocate),
    ('softmax_attention_backward', _backward, _allocate_backward),
    ('gated_softmax_attention', _gated, _allocate_gated),
    ('gated_softmax_attention_backward', _gated_backward, _allocate_gated_backward),
):
    torch.library.impl(f'mala_mm::{_name}', 'default', _compute)
    torch.library.register_fake(f'mala_mm::{_name}', _fake)


# Autograd.


def _setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.spec = inputs[3:]


def _differentiate(ctx, grad, _):
    if grad is None:
        return (None,) * 7
    grads = torch.ops.mala_mm.softmax_attention_backward(grad, *ctx.saved_tensors, *ctx.spec)
    return *grads, *(None for _ in ctx.spec)


def _setup_gated(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.spec = inputs[2:-1]


def _differentiate_gated(ctx, grad, *_):
    if grad is None:
        return (None,) * 6
    op = torch.ops.mala_mm.gated_softmax_attention_backward
    return *op(grad, *ctx.saved_tensors, *ctx.spec), *(None,) * 4


def _refuse_second_derivative(ctx, *grads):
    raise RuntimeError(
        'the fused softmax attention has no second derivative: '
        'set MALA_MM_CPU_KERNELS=0 to differentiate twice'
    )


_register = torch.library.register_autograd
_register('mala_mm::softmax_attention', _differentiate, setup_context=_setup)
_register('mala_mm::gated_softmax_attention', _differentiate_gated, setup_context=_setup_gated)
for _name in ('softmax_attention_backward', 'gated_softmax_attention_backward'):
    _register(f'mala_mm::{_name}', _refuse_second_derivative)


@register_flop_formula(torch.ops.mala_mm.softmax_attention)
def _(q_shape, *_, out_shape=None, **__) -> int:
    batch, heads, num_tokens, head_dim = q_shape
    return 4 * batch * heads * num_tokens**2 * head_dim


@register_flop_formula(torch.ops.mala_mm.gated_softmax_attention)
def _(qkvo_shape, lepe_shape, *_, out_shape=None, **__) -> int:
    batch, channels, height, width = lepe_shape
    return 4 * batch * channels * (height * width) ** 2
