"""The operators as PyTorch sees them: ``torch.library`` ops over exchangeable backends.

Two ops, each with its backward as an op of its own, carry every linear operator:

- ``mala_mm::attention``: ``q, k, v`` of shape (B, heads, N, d), any strides, to the attention;
- ``mala_mm::gated_attention``: the packed projection ``qkvo`` (B, 4C, H, W) and the local-position
  map ``lepe`` (B, C, H, W) to ``(attention + lepe) * o``, with one packed gradient back.

Compilers, exporters, tracers and dispatch modes see these ops. A plain call on plain tensors takes
the short way, :class:`FusedAttention`, which spares the host the dispatcher's part.

A backend is a module with three functions. It computes; what is allocated, in which layout, is
decided here::

    why_not(problem, q) -> str | None
        Why this backend cannot compute the problem (None: any of the family) on inputs like ``q``
        (B, heads, N, d): the requirement and the value received. None if it can. Must not look at
        B, heads, N or the size (they may be symbolic).
    forward(problem, inputs, out, states) -> None
        Fills ``out`` and ``states`` (B, heads, rows, d), see ``state_rows``, float32. ``inputs``
        are those of the op, ``(q, k, v)`` or ``(qkvo, lepe)``.
    backward(problem, grad, inputs, states, grads) -> None
        Fills ``grads``, one per input, from that of ``out``. ``states`` are those of the forward,
        read only.

``views`` parts packed tensors. All of them may have arbitrary, mutually different strides; the
memory of the outputs is not initialised. There is at least one token.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ..registry import split_heads

KINDS = ('mala', 'rala', 'linear')
"""The fused family. It is closed: an operator joins it with kernels in every backend."""

MALA_FORMS = ('published', 'paper')
"""The forms of MALA."""


@dataclass(frozen=True)
class Problem:
    r"""One operator, as backends see it. All kinds are one formula.

    .. math::
        y_i = a_i\, (R_i\phi(q_i))\, KV - b_i\, \bar v,\quad
        KV = \sum_j w_j (R_j\phi(k_j))^T v_j,\quad \bar k = \sum_j w_j \phi(k_j),\quad
        z_i = \phi(q_i) \cdot \bar k

    ======  =======================================  ====================  =====
    kind    ``w_j``                                  ``a_i``               ``b_i``
    ======  =======================================  ====================  =====
    mala    ``coefficient``                          ``1 + 1/(z_i + eps)``  ``z_i``
    rala    ``softmax_j(scale * g . phi(k_j))``      ``1/(z_i + eps)``      0
    linear  1                                        ``1/(z_i + eps)``      0
    ======  =======================================  ====================  =====

    with ``phi(x) = elu(x) + 1``, ``vbar = mean_j v_j``, ``g = mean_i phi(q_i)`` and ``R`` the
    rotary embedding (identity unless ``rotary``).

    Attributes:
        kind (str): ``'mala'``, ``'rala'`` or ``'linear'``.
        form (str): ``'published'`` or ``'paper'``; matters to MALA alone.
        height (int): Rows H of the feature map.
        width (int): Columns W; N = H * W tokens in row order.
        scale (float): Resolved scale, never None.
        eps (float): Added to ``z``.
        rotary (bool): Whether ``R`` turns.
    """

    kind: str
    form: str
    height: int
    width: int
    scale: float
    eps: float
    rotary: bool

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f'kind must be one of {KINDS}, got {self.kind!r}')
        if self.form not in MALA_FORMS:
            raise ValueError(f'form must be one of {MALA_FORMS}, got {self.form!r}')

    @property
    def spec(self) -> tuple[str, str, float, float, bool]:
        """What the ``torch.library`` ops take of it, beside the size."""
        return self.kind, self.form, self.scale, self.eps, self.rotary

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.height, self.width

    @property
    def num_tokens(self) -> int:
        """``N = H * W``."""
        return self.height * self.width

    @property
    def coefficient(self) -> float:
        """The constant weight ``w`` of every key (MALA and linear)."""
        if self.kind != 'mala':
            return 1.0
        return self.scale / self.num_tokens if self.form == 'published' else self.scale


def state_rows(kind: str, head_dim: int) -> int:
    """Rows of the float32 states (B, heads, rows, d) that the forward keeps for the backward.

    Rows 0..d-1 hold ``KV``, row d ``kbar``, row d+1 ``vbar``; RALA adds row d+2, ``g``, and row
    d+3, where the backend notes what it needs to evaluate the softmax again. All weights and
    coefficients are folded in (see :class:`Problem`).
    """
    return head_dim + (4 if kind == 'rala' else 2)


def make_problem(
    kind: str,
    head_dim: int,
    size: tuple[int, int],
    scale: float | None = None,
    eps: float = 1e-6,
    rotary: bool = True,
    form: str = 'published',
) -> Problem:
    """Return the problem that a caller's options describe.

    Args:
        kind (str): One of :data:`KINDS`.
        head_dim (int): Width ``d`` of a head.
        size (tuple[int, int]): Height and width (H, W).
        scale (float, optional): Defaults to ``d ** -0.5`` where the models were trained with it:
            in the published form of MALA and in RALA's softmax; to 1 elsewhere.
        eps (float): Added to ``z``.
        rotary (bool): Whether the rotary embedding turns.
        form (str): One of :data:`MALA_FORMS`.

    Raises:
        ValueError: If the kind or the form is unknown.
    """
    if scale is None:
        unscaled = kind == 'linear' or (kind == 'mala' and form == 'paper')
        scale = 1.0 if unscaled else head_dim**-0.5
    return Problem(kind, form, *size, float(scale), float(eps), bool(rotary))


@functools.cache
def backend_module(name: str) -> ModuleType:
    """Return the module of a backend, imported when first needed."""
    return importlib.import_module(f'{__package__}.{name}')


def views(packed: Tensor | tuple[Tensor, ...], local: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """``q, k, v, o`` and ``lepe`` (B, heads, N, d) of a packed map, or of its parts, and lepe."""
    parts = packed if isinstance(packed, tuple) else packed.chunk(4, 1)
    return tuple(split_heads(x, num_heads) for x in (*parts, local))


def empty_tokens(x: Tensor) -> Tensor:
    """Fresh memory for a result like ``x`` (B, heads, N, d), dense in the order of x's strides."""
    batch, heads, tokens, head_dim = x.shape
    if x.stride(2) == 1 and x.stride(3) != 1:  # channel-first: tokens are adjacent
        return x.new_empty(batch, heads, head_dim, tokens).transpose(2, 3)
    if x.stride(1) < x.stride(2):  # token-major: the heads of one token are adjacent
        return x.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)
    return x.new_empty(batch, heads, tokens, head_dim)


def empty_map(x: Tensor, channels: int) -> Tensor:
    """Fresh memory for a map of ``channels`` channels in the memory format of ``x``."""
    batch, _, height, width = x.shape
    if x.stride(1) == 1 and x.stride(3) != 1:
        return x.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)
    return x.new_empty(batch, channels, height, width)


def _empty_states(x: Tensor, batch: int, heads: int, head_dim: int, kind: str) -> Tensor:
    return x.new_empty(batch, heads, state_rows(kind, head_dim), head_dim, dtype=torch.float32)


_SIZE = 'SymInt height, SymInt width'
_SPEC = 'str kind, str form, float scale, float eps, bool rotary, str backend'
_OPS = {
    'attention': f'(Tensor q, Tensor k, Tensor v, {_SIZE}, {_SPEC}) -> (Tensor, Tensor)',
    'attention_backward': (
        f'(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor states, {_SIZE}, {_SPEC}) '
        '-> (Tensor, Tensor, Tensor)'
    ),
    'gated_attention': f'(Tensor qkvo, Tensor lepe, SymInt heads, {_SPEC}) -> (Tensor, Tensor)',
    'gated_attention_backward': (
        f'(Tensor grad, Tensor qkvo, Tensor lepe, Tensor states, SymInt heads, {_SPEC}) '
        '-> (Tensor, Tensor)'
    ),
}
for _name, _schema in _OPS.items():
    torch.library.define(f'mala_mm::{_name}', _schema)


# Each op is an allocation, which alone is what the fake implementation does, and a computation.


def _allocate_attention(q, k, v, height, width, kind, *_):
    batch, heads, _, head_dim = q.shape
    return empty_tokens(q), _empty_states(q, batch, heads, head_dim, kind)


def _allocate_attention_backward(grad, q, k, v, *_):
    return empty_tokens(q), empty_tokens(k), empty_tokens(v)


def _allocate_gated(qkvo, lepe, heads, kind, *_):
    batch, channels = lepe.shape[:2]
    out = empty_map(qkvo, channels)
    return out, _empty_states(qkvo, batch, heads, channels // heads, kind)


def _allocate_gated_backward(grad, qkvo, lepe, *_):
    return empty_map(qkvo, qkvo.shape[1]), empty_map(lepe, lepe.shape[1])


def _forward(inputs, outputs, height, width, kind, form, scale, eps, rotary, backend):
    out, states = outputs
    if out.numel() == 0:  # nothing to launch
        states.zero_()
        return outputs
    problem = _problem(kind, form, height, width, scale, eps, rotary)
    backend_module(backend).forward(problem, inputs, out, states)
    return outputs


def _backward(grad, inputs, states, grads, height, width, kind, form, scale, eps, rotary, backend):
    if grad.numel():
        problem = _problem(kind, form, height, width, scale, eps, rotary)
        backend_module(backend).backward(problem, grad, inputs, states, grads)
    return grads


def _attention(q, k, v, *spec):
    return _forward((q, k, v), _allocate_attention(q, k, v, *spec), *spec)


def _attention_backward(grad, q, k, v, states, *spec):
    grads = _allocate_attention_backward(grad, q, k, v)
    return _backward(grad, (q, k, v), states, grads, *spec)


def _gated_attention(qkvo, lepe, heads, *spec):
    outputs = _allocate_gated(qkvo, lepe, heads, *spec)
    return _forward((qkvo, lepe), outputs, *qkvo.shape[2:], *spec)


def _gated_attention_backward(grad, qkvo, lepe, states, heads, *spec):
    grads = _allocate_gated_backward(grad, qkvo, lepe)
    return _backward(grad, (qkvo, lepe), states, grads, *qkvo.shape[2:], *spec)


@functools.lru_cache(maxsize=1024)
def _problem(kind, form, height, width, scale, eps, rotary) -> Problem:
    return Problem(kind, form, height, width, scale, eps, rotary)


for _name, _compute, _allocate in (
    ('attention', _attention, _allocate_attention),
    ('attention_backward', _attention_backward, _allocate_attention_backward),
    ('gated_attention', _gated_attention, _allocate_gated),
    ('gated_attention_backward', _gated_attention_backward, _allocate_gated_backward),
):
    torch.library.impl(f'mala_mm::{_name}', 'default', _compute)
    torch.library.register_fake(f'mala_mm::{_name}', _allocate)


# Autograd. Only the inputs and the small states are kept.


def _setup(num_tensors):
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:num_tensors], output[1])
        ctx.spec = inputs[num_tensors:]

    return setup_context


def _differentiate(ctx, grad, _):
    if grad is None:
        return (None,) * (3 + len(ctx.spec))
    grads = torch.ops.mala_mm.attention_backward(grad, *ctx.saved_tensors, *ctx.spec)
    return *grads, *(None for _ in ctx.spec)


def _differentiate_gated(ctx, grad, _):
    if grad is None:
        return (None,) * (2 + len(ctx.spec))
    grads = torch.ops.mala_mm.gated_attention_backward(grad, *ctx.saved_tensors, *ctx.spec)
    return *grads, *(None for _ in ctx.spec)


def _refuse_second_derivative(ctx, *grads):
    raise RuntimeError(
        'the fused attention operators have no second derivative: '
        "pass backend='reference' to differentiate twice"
    )


_register = torch.library.register_autograd
_register('mala_mm::attention', _differentiate, setup_context=_setup(3))
_register('mala_mm::gated_attention', _differentiate_gated, setup_context=_setup(2))
_register('mala_mm::attention_backward', _refuse_second_derivative)
_register('mala_mm::gated_attention_backward', _refuse_second_derivative)


# The short way. The same computations without the dispatcher, which takes longer than all of them.


class FusedAttention(torch.autograd.Function):
    """``attention`` or ``gated_attention``, by the number of tensors, without the states."""

    @staticmethod
    def forward(ctx, spec: tuple, *inputs: Tensor) -> Tensor:
        """Compute; keep the inputs and the small states."""
        compute = _attention if len(inputs) == 3 else _gated_attention
        out, states = compute(*inputs, *spec)
        ctx.save_for_backward(*inputs, states)
        ctx.spec = spec
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs, none of the options."""
        saved = ctx.saved_tensors
        gated = len(saved) == 3
        if torch.is_grad_enabled():  # the ops refuse a second derivative where it is asked for
            ops = torch.ops.mala_mm
            compute = ops.gated_attention_backward if gated else ops.attention_backward
        else:
            compute = _gated_attention_backward if gated else _attention_backward
        return None, *compute(grad, *saved, *ctx.spec)


def attention(q: Tensor, k: Tensor, v: Tensor, *spec) -> Tensor:
    """Compute ``mala_mm::attention`` less its states, by the shortest way that will do."""
    if not is_plain_call(q, k, v):
        return torch.ops.mala_mm.attention(q, k, v, *spec)[0]
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return FusedAttention.apply(spec, q, k, v)
    return _attention(q, k, v, *spec)[0]


def gated_attention(qkvo: Tensor, lepe: Tensor, *spec) -> Tensor:
    """Compute ``mala_mm::gated_attention`` less its states, likewise."""
    if not is_plain_call(qkvo, lepe):
        return torch.ops.mala_mm.gated_attention(qkvo, lepe, *spec)[0]
    if torch.is_grad_enabled() and (qkvo.requires_grad or lepe.requires_grad):
        return FusedAttention.apply(spec, qkvo, lepe)
    return _gated_attention(qkvo, lepe, *spec)[0]


def gated_apart(parts: tuple[Tensor, ...], lepe: Tensor, heads: int, *spec) -> Tensor:
    """``gated_attention`` of q, k, v and o that lie apart, without gradients, on the CPU."""
    outputs = _allocate_gated(parts[0], lepe, heads, *spec)
    return _forward((parts, lepe), outputs, *lepe.shape[2:], *spec)[0]


def is_plain_call(*tensors: Tensor) -> bool:
    """Whether nobody watches who has to see an op: compiler, exporter, tracer, mode, transform."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or any(type(x) is not Tensor and type(x) is not torch.nn.Parameter for x in tensors)
    )


class ShareValues(torch.autograd.Function):
    """``qkvo`` and its values, whose gradient is added into the packed one where it lies."""

    @staticmethod
    def forward(ctx, qkvo: Tensor) -> tuple[Tensor, Tensor]:
        """``qkvo`` itself and its third quarter."""
        return qkvo.view_as(qkvo), qkvo.chunk(4, 1)[2]

    @staticmethod
    def backward(ctx, grad: Tensor, grad_v: Tensor) -> Tensor:
        """Add the gradient of the values into the packed one."""
        if torch.is_grad_enabled():  # a second derivative: nothing may change in place
            q, k, v, o = grad.chunk(4, 1)
            return torch.cat((q, k, v + grad_v, o), 1)
        grad.chunk(4, 1)[2].add_(grad_v)  # it was made for nobody else
        return grad
