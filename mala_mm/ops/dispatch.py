"""The public operators: one signature, input checks, and the choice of a backend."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference

BACKENDS = ('auto', 'reference')
MALA_FORMS = ('published', 'paper')


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
        raise ValueError(
            f'q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}'
        )
    if not q.dtype.is_floating_point:
        raise TypeError(f'q, k and v must be floating point, got {q.dtype}')
    height, width = size
    if q.shape[2] != height * width:
        raise ValueError(
            f'size (H, W) must have H * W = N, got size {(height, width)} for N = {q.shape[2]}'
        )
    if q.shape[3] % 4:
        raise ValueError(f'the head width d must be divisible by 4, got {q.shape[3]}')


def _compute(function, q: Tensor, k: Tensor, v: Tensor, *args, **kwargs) -> Tensor:
    """Sums over the tokens are held in float32 at least, whatever the input type."""
    if q.dtype in (torch.float16, torch.bfloat16):
        with torch.autocast(q.device.type, enabled=False):
            return function(q.float(), k.float(), v.float(), *args, **kwargs).to(q.dtype)
    return function(q, k, v, *args, **kwargs)


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
        backend (str): ``'auto'`` or a backend's name (:data:`BACKENDS`).
        form (str): ``'published'``, with ``c = scale / N``, is what the published checkpoints were
            trained with; ``'paper'``, with ``c = scale``, is the equations as printed.

    Returns:
        Tensor: Shape (B, heads, N, d), dtype of ``q``.

    Raises:
        TypeError: If an input is no floating-point tensor.
        ValueError: If shapes, dtypes or devices differ, ``H * W != N``, ``d % 4 != 0``, or
            ``backend`` or ``form`` is unknown.
    """
    _check(q, k, v, size, backend)
    if form not in MALA_FORMS:
        raise ValueError(f'form must be one of {MALA_FORMS}, got {form!r}')
    return _compute(reference.mala, q, k, v, size, scale, eps, rotary, form)


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
    _check(q, k, v, size, backend)
    return _compute(reference.rala, q, k, v, size, scale, eps, rotary)


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
    _check(q, k, v, size, backend)
    return _compute(reference.linear, q, k, v, size, eps, rotary)


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
    # Both backends are PyTorch's fused attention, which keeps its sums in float32 by itself.
    return reference.softmax(q, k, v, size, scale, rotary)
