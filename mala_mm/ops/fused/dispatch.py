"""Which backend computes a fused operator, and the two ways to call one.

The family is closed: :data:`~mala_mm.ops.fused.library.KINDS` are the kinds that share one formula
(:class:`~mala_mm.ops.fused.library.Problem`). Any other operator is plain PyTorch
(:class:`mala_mm.ops.Operator`) and does not come here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..registry import (
    OPERATORS,
    Operator,
    check_inputs,
    check_options,
    feature_map,
    in_float32,
    merge_heads,
    split_heads,
    without_autocast,
)
from ..rotary import rotate
from . import cpu, library, triton
from .library import KINDS, MALA_FORMS, Problem, make_problem

BACKENDS = ('auto', 'reference', 'cpu', 'triton')
_OF_DEVICE = {'cuda': 'triton', 'cpu': 'cpu'}
_WHY_NOT = {'cpu': cpu.why_not, 'triton': triton.why_not}


def check_backend(name: str) -> None:
    """Refuse an unknown backend.

    Raises:
        ValueError: If ``name`` is none of :data:`BACKENDS`.
    """
    if name not in BACKENDS:
        raise ValueError(f'backend must be one of {BACKENDS}, got {name!r}')


def choose_backend(name: str, q: Tensor, problem: Problem | None = None) -> str:
    """Choose the backend that computes inputs like ``q`` (B, heads, N, d) for a name.

    ``'auto'`` is Triton on a CUDA device, the CPU backend on the CPU, and the reference wherever
    these cannot run or should not: float64 (they keep float32 sums), other head widths, under
    ``torch.func`` and forward-mode differentiation, and in ``torch.export`` (an exported program,
    ONNX too, is made of PyTorch's own operators and runs without this package).

    Args:
        name (str): ``'auto'`` or a backend's name.
        q (Tensor): Stands for all inputs.
        problem (Problem, optional): What is to be computed; any of the family by default.

    Returns:
        str: ``'reference'``, ``'cpu'`` or ``'triton'``.

    Raises:
        ValueError: If the named backend cannot take such inputs; names the requirement and the
            value received.
    """
    check_backend(name)
    if name == 'reference':
        return name
    if name != 'auto':
        reason = _WHY_NOT[name](problem, q)
        if reason is not None:
            raise ValueError(f'backend {name!r} {reason}')
        return name
    name = device_backend(q)
    if name is None or not can_fuse(q):
        return 'reference'
    return name if _WHY_NOT[name](problem, q) is None else 'reference'


def device_backend(x: Tensor) -> str | None:
    """Return the backend of the device that ``x`` is on, if there is one."""
    return _OF_DEVICE.get(x.device.type)


def can_fuse(x: Tensor) -> bool:
    """Whether fused operators may stand in for plain PyTorch: not in float64, nor in exports."""
    exporting = (
        torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export() or torch.jit.is_tracing()
    )
    return x.dtype != torch.float64 and not exporting and not _transformed()


def _transformed() -> bool:
    """Whether a function transform is at work that a fused operator has no rule for."""
    if torch.compiler.is_compiling():  # it resolves transforms before it sees an operator
        return False
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


_known_problem = functools.lru_cache(maxsize=1024)(make_problem)


def _problem(kind, head_dim, size, *options) -> Problem:
    """Return the problem of a call, made once for all calls of its kind."""
    if torch.compiler.is_compiling():  # sizes may be symbols
        return make_problem(kind, head_dim, size, *options)
    return _known_problem(kind, head_dim, tuple(size), *options)


def _reference(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the equations of the registered operator; sums are held in float32 at least."""
    dtype = q.dtype
    q, k, v = in_float32(q), in_float32(k), in_float32(v)
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        # In torch 2.13 elu's backward has other strides than AOT autograd foresees, but for these.
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    with without_autocast(q.device):
        return OPERATORS[problem.kind].formula(problem, q, k, v).to(dtype)


def eager(
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: tuple[int, int],
    scale: float | None = None,
    eps: float = 1e-6,
    rotary: bool = True,
    form: str = 'published',
) -> Tensor:
    """Return the equations of one of the family as they stand, in the type of the inputs.

    The yardstick of the backends: what plain PyTorch loses in a type, and what it takes.
    ``backend='reference'`` computes the same with sums in float32. Arguments as in
    :func:`mala_attention`.
    """
    problem = make_problem(kind, q.shape[-1], size, scale, eps, rotary, form)
    return OPERATORS[kind].formula(problem, q, k, v)


def attention(
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: tuple[int, int],
    scale: float | None,
    eps: float,
    rotary: bool,
    backend: str,
    form: str = 'published',
) -> Tensor:
    """One of the family on queries, keys and values; arguments as in :func:`mala_attention`."""
    check_backend(backend)
    check_inputs(q, k, v, size)
    problem = _problem(kind, q.shape[-1], size, scale, eps, rotary, form)
    backend = choose_backend(backend, q, problem)
    if backend == 'reference':
        return _reference(problem, q, k, v)
    return library.attention(q, k, v, *size, *problem.spec, backend)


def gated_attention(
    qkvo: Tensor,
    lepe: Tensor | Callable[[Tensor], Tensor],
    num_heads: int,
    *,
    kind: str = 'mala',
    scale: float | None = None,
    eps: float = 1e-6,
    rotary: bool = True,
    backend: str = 'auto',
    form: str = 'published',
) -> Tensor:
    """Linear attention between two 1x1 convolutions: ``(attention(q, k, v) + lepe) * o``.

    One pass reads the packed projection where it lies, and one packed gradient comes back: nothing
    is split, transposed or concatenated in memory.

    Args:
        qkvo (Tensor): Projection of shape (B, 4C, H, W), channels in the order q, k, v, o, in any
            memory format. A head is a group of ``C / num_heads`` consecutive channels.
        lepe (Tensor | Callable): Local position, shape (B, C, H, W), dtype and device of ``qkvo``;
            or the function that computes it from v, (B, C, H, W). The gradient that comes back
            through that function is added to that of v where it lies in the packed one, 3 passes
            over a map of C channels, where slicing v out of ``qkvo`` costs autograd 18.
        num_heads (int): Number of heads.
        kind (str): ``'mala'``, ``'rala'`` or ``'linear'``.
        scale (float, optional): As in the operator of that kind.
        eps (float): As in :func:`mala_attention`.
        rotary (bool): As in :func:`mala_attention`.
        backend (str): As in :func:`mala_attention`.
        form (str): Form of MALA, as in :func:`mala_attention`.

    Returns:
        Tensor: Shape (B, C, H, W), dtype and memory format of ``qkvo``.

    Raises:
        TypeError: If an input is no floating-point tensor.
        ValueError: If shapes, dtypes or devices do not fit each other, or a name is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f'kind must be one of {KINDS}, got {kind!r}')
    if not isinstance(qkvo, Tensor):
        raise TypeError(f'qkvo must be a Tensor, got {type(qkvo).__name__}')
    if qkvo.dim() != 4 or qkvo.shape[1] % 4:
        raise ValueError(f'qkvo must have shape (B, 4C, H, W), got {tuple(qkvo.shape)}')
    if callable(lepe):
        qkvo, v = share_values(qkvo)
        lepe = lepe(v)
    if not isinstance(lepe, Tensor):
        raise TypeError(
            f'lepe must be a Tensor or a function that computes one, got {type(lepe).__name__}'
        )
    batch, channels, height, width = qkvo.shape
    channels //= 4
    if lepe.shape != (batch, channels, height, width):
        raise ValueError(
            f'lepe must have shape (B, C, H, W) = {(batch, channels, height, width)}, '
            f'got {tuple(lepe.shape)}'
        )
    if lepe.dtype != qkvo.dtype or lepe.device != qkvo.device:
        raise ValueError(
            f'lepe must have the dtype and device of qkvo, {qkvo.dtype} on {qkvo.device}, '
            f'got {lepe.dtype} on {lepe.device}'
        )
    if num_heads < 1 or channels % num_heads:
        raise ValueError(f'num_heads must divide C = {channels}, got {num_heads}')
    head_dim, size = channels // num_heads, (height, width)
    if not qkvo.dtype.is_floating_point:
        raise TypeError(f'qkvo must be floating point, got {qkvo.dtype}')
    if head_dim % 4:
        raise ValueError(f'the head width d must be divisible by 4, got {head_dim}')
    problem = _problem(kind, head_dim, size, scale, eps, rotary, form)
    q = split_heads(qkvo.detach()[:, :channels], num_heads)  # to look at, not to compute with
    backend = choose_backend(backend, q, problem)
    if backend == 'reference':
        q, k, v, gate = (split_heads(x, num_heads) for x in qkvo.chunk(4, 1))
        y = (_reference(problem, q, k, v) + split_heads(lepe, num_heads)) * gate
        return merge_heads(y, size, token_major=qkvo.stride(1) == 1)
    return library.gated_attention(qkvo, lepe, num_heads, *problem.spec, backend)


def share_values(qkvo: Tensor) -> tuple[Tensor, Tensor]:
    """``qkvo`` and its v, whose gradient is added to the packed one where it lies."""
    # A compiler fuses the slices itself, function transforms want pure functions, and a trace
    # operators that it can save.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or _transformed():
        return qkvo, qkvo.chunk(4, 1)[2]
    return library.ShareValues.apply(qkvo)


class FusedOperator(Operator):
    """An operator of the fused family, computed by the fastest backend that takes its inputs.

    Subclasses implement :meth:`formula`, against which every backend is tested. Their name is their
    kind.

    Args:
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.
        scale (float, optional): As in :func:`mala_attention`.
        eps (float): As in :func:`mala_attention`.
        rotary (bool): As in :func:`mala_attention`.
        backend (str): As in :func:`mala_attention`.
        form (str): Form of MALA.
    """

    takes_extra_tokens = True
    phi = staticmethod(feature_map)
    fused = True  # not where options leave the family

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scale: float | None,
        eps: float,
        rotary: bool,
        backend: str,
        form: str = 'published',
    ) -> None:
        super().__init__(num_heads, head_dim)
        check_options(scale, eps, rotary=rotary)
        check_backend(backend)
        if form not in MALA_FORMS:
            raise ValueError(f'form must be one of {MALA_FORMS}, got {form!r}')
        self.scale, self.eps, self.rotary = scale, eps, rotary
        self.backend, self.form = backend, form

    @staticmethod
    def formula(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the equations in plain PyTorch, differentiable, in the type of the inputs.

        Args:
            problem (Problem): The options, none of them left open.
            q (Tensor): Queries of shape (B, heads, N, d).
            k (Tensor): Keys, as ``q``.
            v (Tensor): Values, as ``q``.

        Returns:
            Tensor: As ``q``.
        """
        raise NotImplementedError

    def equations(self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the formula with this operator's options; see :meth:`Operator.equations`."""
        size = (1, q.shape[2]) if self.num_extra_tokens else size
        return eager(self.name, q, k, v, size, self.scale, self.eps, self.rotary, self.form)

    @staticmethod
    def key_weights(problem: Problem, q: Tensor, k: Tensor) -> Tensor | float:
        """Return the weight ``w_j`` of each key in the state, broadcast to (B, heads, N, 1).

        Args:
            problem (Problem): The options.
            q (Tensor): ``phi(q)`` of shape (B, heads, N, d).
            k (Tensor): ``phi(k)``, as ``q``.
        """
        return problem.coefficient

    def state(self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        """``KV = sum_j w_j (R_j phi(k_j))^T v_j``; see :meth:`Operator.state`."""
        check_inputs(q, k, v, size, self.num_extra_tokens)
        self.check_heads(q)
        size = (1, q.shape[2]) if self.num_extra_tokens else size
        problem = _problem(
            self.name, self.head_dim, size, self.scale, self.eps, self.rotary, self.form
        )
        q, k = self.phi(in_float32(q)), self.phi(in_float32(k))
        keys = self.key_weights(problem, q, k) * rotate(k, size, self.rotary)
        return (keys.mT @ in_float32(v)).to(v.dtype)

    @property
    def _options(self) -> dict:
        return dict(
            scale=self.scale,
            eps=self.eps,
            rotary=self.rotary,
            backend=self.backend,
            form=self.form,
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], x: Tensor | None = None
    ) -> Tensor:
        """Attend; see :meth:`Operator.forward`."""
        self.check_heads(q)
        if self.num_extra_tokens:
            check_inputs(q, k, v, size, self.num_extra_tokens)
            size = (1, q.shape[2])  # without rotation the places do not matter
        return attention(self.name, q, k, v, size, **self._options)

    def gated(
        self, qkvo: Tensor, lepe: Tensor | Callable[[Tensor], Tensor], x: Tensor | None = None
    ) -> Tensor:
        """Attend between two 1x1 convolutions; see :func:`gated_attention`."""
        return gated_attention(qkvo, lepe, self.num_heads, kind=self.name, **self._options)

    def gated_apart(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lepe: Tensor) -> Tensor:
        """:meth:`gated` at inference, of maps (B, C, H, W) that lie apart."""
        head_dim, size = q.shape[1] // self.num_heads, tuple(q.shape[2:])
        problem = _problem(
            *(self.name, head_dim, size, self.scale, self.eps, self.rotary, self.form)
        )
        if choose_backend(self.backend, split_heads(q, self.num_heads), problem) != 'cpu':
            return self.gated(torch.cat((q, k, v, o), 1), lepe)
        return library.gated_apart((q, k, v, o), lepe, self.num_heads, *problem.spec, 'cpu')
