"""The public operators: one signature, input checks, and the choice of a backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from . import reference
from .fused import cpu, library, triton

BACKENDS = ('auto', 'reference', 'cpu', 'triton')
MALA_FORMS = ('published', 'paper')
_OF_DEVICE = {'cuda': 'triton', 'cpu': 'cpu'}
_WHY_NOT = {'cpu': cpu.why_not, 'triton': triton.why_not}


def _check(q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f'backend must be one of {BACKENDS}, got {backend!r}')
    for name, x in (('q', q), ('k', k), ('v', v)):
        if not isinstance(x, Tensor):
            raise TypeError(f'{name} must be a Tensor, got {type(x).__name__}')
    if q.dim() != 4 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            'q, k and v must share one shape (B, heads, N, d), got '
            f'{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}'
        )
    if len({q.device, k.device, v.device}) > 1:
        raise ValueError(
            f'q, k and v must lie on one device, got {q.device}, {k.device} and {v.device}'
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise ValueError(f'q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}')
    if not q.dtype.is_floating_point:
        raise TypeError(f'q, k and v must be floating point, got {q.dtype}')
    height, width = size
    if q.shape[2] != height * width:
        raise ValueError(
            f'size (H, W) must have H * W = N, got size {(height, width)} for N = {q.shape[2]}'
        )
    if q.shape[3] % 4:
        raise ValueError(f'the head width d must be divisible by 4, got {q.shape[3]}')


def _check_form(form: str) -> None:
    if form not in MALA_FORMS:
        raise ValueError(f'form must be one of {MALA_FORMS}, got {form!r}')


def choose_backend(name: str, q: Tensor) -> str:
    """The backend that computes inputs like ``q`` (B, heads, N, d) where ``name`` was asked for.

    ``'auto'`` is Triton on a CUDA device, the CPU backend on the CPU, and the reference wherever
    these cannot run or should not: float64 (they keep float32 sums), other head widths, under
    ``torch.func`` and forward-mode differentiation, and in ``torch.export`` (an exported program,
    ONNX too, is made of PyTorch's own operators and runs without this package).

    Args:
        name (str): ``'auto'`` or a backend's name.
        q (Tensor): Stands for all inputs.

    Returns:
        str: ``'reference'``, ``'cpu'`` or ``'triton'``.

    Raises:
        ValueError: If the named backend cannot take such inputs; names the requirement and the
            value received.
    """
    if name == 'reference':
        return name
    if name != 'auto':
        reason = _WHY_NOT[name](q)
        if reason is not None:
            raise ValueError(f'backend {name!r} {reason}')
        return name
    name = _OF_DEVICE.get(q.device.type)
    if name is None or q.dtype == torch.float64:
        return 'reference'
    if torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export() or _transformed():
        return 'reference'
    return name if _WHY_NOT[name](q) is None else 'reference'


def _transformed() -> bool:
    """Whether a function transform is at work that a fused operator has no rule for."""
    if torch.compiler.is_compiling():  # it resolves transforms before it sees an operator
        return False
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def _attend(kind, q, k, v, size, scale, eps, rotary, backend, form='published') -> Tensor:
    _check(q, k, v, size, backend)
    if scale is None:
        scale = library.default_scale(kind, form, q.shape[-1])
    backend = choose_backend(backend, q)
    if backend == 'reference':
        return _reference(kind, q, k, v, size, scale, eps, rotary, form)
    return torch.ops.mala_mm.attention(
        q, k, v, *size, kind, form, float(scale), float(eps), bool(rotary), backend
    )[0]


def _reference(kind, q, k, v, size, scale, eps, rotary, form) -> Tensor:
    """Sums over the tokens are held in float32 at least, whatever the input type."""
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        # In torch 2.13 elu's backward has other strides than AOT autograd foresees, but for these.
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    # Devices without autocast, such as meta, have none to turn off.
    available = torch.amp.is_autocast_available(q.device.type)
    with torch.autocast(q.device.type, enabled=False) if available else nullcontext():
        if kind == 'mala':
            out = reference.mala(q, k, v, size, scale, eps, rotary, form)
        elif kind == 'rala':
            out = reference.rala(q, k, v, size, scale, eps, rotary)
        else:
            out = reference.linear(q, k, v, size, eps, rotary)
    return out.to(dtype)


def mala_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    size: tuple[int, int],
    scale: float | None = None,
    eps: float = 1e-6,
    rotary: bool = True,
    backend: str = 'auto',
    form: str = 'published',
) -> Tensor:
    r"""Magnitude-aware linear attention (`MALA <https://arxiv.org/abs/2507.00698>`_, eq. 8-14).

    .. math::
        y_i = \beta_i c\, R_i\phi(q_i) \sum_j (R_j\phi(k_j))^T v_j - \gamma_i \sum_j v_j,\quad
        z_i = c\,\phi(q_i) \cdot \sum_j \phi(k_j),\quad
        \beta_i = 1 + \frac{1}{z_i + \epsilon},\quad \gamma_i = \frac{z_i}{N}

    Args:
        q (Tensor): Queries of shape (B, heads, N, d), any floating dtype and strides.
        k (Tensor): Keys, same shape, dtype and device.
        v (Tensor): Values, same shape, dtype and device.
        size (tuple[int, int]): Height and width (H, W) of the feature map, ``H * W = N``.
        scale (float, optional): Scale of ``phi(q) . phi(k)``. Defaults to ``d ** -0.5`` in the
            published form and to 1 in the paper's.
        eps (float): Keeps the division finite where ``phi(q)`` underflows.
        rotary (bool): Whether to turn ``phi(q)`` and ``phi(k)`` by the rotary embedding.
        backend (str): ``'auto'`` or a backend's name (:data:`BACKENDS`); see
            :func:`choose_backend`.
        form (str): ``'published'``, with ``c = scale / N``, is what the published checkpoints were
            trained with; ``'paper'``, with ``c = scale``, is the equations as printed.

    Returns:
        Tensor: Shape (B, heads, N, d), dtype of ``q``.

    Raises:
        TypeError: If an input is no floating-point tensor.
        ValueError: If shapes, dtypes or devices differ, ``H * W != N``, ``d % 4 != 0``, or
            ``backend`` or ``form`` is unknown.
    """
    _check_form(form)
    return _attend('mala', q, k, v, size, scale, eps, rotary, backend, form)


def rala_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    size: tuple[int, int],
    scale: float | None = None,
    eps: float = 1e-6,
    rotary: bool = True,
    backend: str = 'auto',
) -> Tensor:
    r"""Rank-augmented linear attention (`RALA <https://arxiv.org/abs/2411.07635>`_, eq. 3-6).

    .. math::
        a_j = N\,\mathrm{softmax}_j(s\, \overline{\phi(q)} \cdot \phi(k_j)),\quad
        y_i = \frac{R_i\phi(q_i) \sum_j (R_j a_j\phi(k_j))^T v_j}
                   {\phi(q_i) \cdot \sum_j a_j\phi(k_j) + N\epsilon}

    Arguments, returned value and errors as in :func:`mala_attention`; ``scale`` (``s``, default
    ``d ** -0.5``) is that of the softmax which weighs the keys.
    """
    return _attend('rala', q, k, v, size, scale, eps, rotary, backend)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    size: tuple[int, int],
    scale: float | None = None,
    eps: float = 1e-6,
    rotary: bool = True,
    backend: str = 'auto',
) -> Tensor:
    r"""Plain linear attention with ``phi = elu + 1``.

    .. math::
        y_i = \frac{R_i\phi(q_i) \sum_j (R_j\phi(k_j))^T v_j}
                   {\phi(q_i) \cdot \sum_j \phi(k_j) + \epsilon}

    Arguments, returned value and errors as in :func:`mala_attention`. ``scale`` stands in the
    signature so that all operators can be exchanged; the ratio does not depend on it.
    """
    return _attend('linear', q, k, v, size, scale, eps, rotary, backend)


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
    _check_form(form)
    if kind not in library.KINDS:
        raise ValueError(f'kind must be one of {library.KINDS}, got {kind!r}')
    if not isinstance(qkvo, Tensor):
        raise TypeError(f'qkvo must be a Tensor, got {type(qkvo).__name__}')
    if qkvo.dim() != 4 or qkvo.shape[1] % 4:
        raise ValueError(f'qkvo must have shape (B, 4C, H, W), got {tuple(qkvo.shape)}')
    if callable(lepe):
        qkvo, v = _share_values(qkvo)
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
    q, k, v, gate = (library.split_heads(x, num_heads) for x in qkvo.chunk(4, 1))
    _check(q, k, v, (height, width), backend)
    if scale is None:
        scale = library.default_scale(kind, form, q.shape[-1])
    backend = choose_backend(backend, q)
    if backend == 'reference':
        y = _reference(kind, q, k, v, (height, width), scale, eps, rotary, form)
        y = (y + library.split_heads(lepe, num_heads)) * gate
        return y.transpose(2, 3).reshape(batch, channels, height, width)
    return torch.ops.mala_mm.gated_attention(
        qkvo, lepe, num_heads, kind, form, float(scale), float(eps), bool(rotary), backend
    )[0]


def _share_values(qkvo: Tensor) -> tuple[Tensor, Tensor]:
    # A compiler fuses the slices itself, function transforms want pure functions, and a trace
    # operators that it can save.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or _transformed():
        return qkvo, qkvo.chunk(4, 1)[2]
    return library.ShareValues.apply(qkvo)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    size: tuple[int, int],
    scale: float | None = None,
    eps: float = 1e-6,
    rotary: bool = True,
    backend: str = 'auto',
) -> Tensor:
    r"""Softmax attention over all tokens, without holding the N x N matrix.

    .. math:: y = \mathrm{softmax}(s\, (Rq)(Rk)^T)\, v

    Arguments, returned value and errors as in :func:`mala_attention`. ``scale`` (``s``) defaults to
    ``d ** -0.5``; ``eps`` stands in the signature so that all operators can be exchanged.
    """
    _check(q, k, v, size, backend)
    # Every backend is PyTorch's fused attention, which keeps its sums in float32 by itself.
    return reference.softmax(q, k, v, size, scale, rotary)
