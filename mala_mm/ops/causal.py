"""Linear attention and MALA over sequences, where a token sees itself and those before it.

With sums up to ``i``, ``S_i = sum_{j<=i} phi(k_j)^T v_j`` and ``z_i = c phi(q_i) . sum_{j<=i}
phi(k_j)``:

- ``linear``: ``y_i = phi(q_i) S_i / (phi(q_i) . sum_{j<=i} phi(k_j) + eps)``
- ``mala``: ``y_i = (1 + 1 / (z_i + eps)) c phi(q_i) S_i - (z_i / i) sum_{j<=i} v_j``

Everything that a token needs of its past is a state of ``d (d + 2)`` numbers per head. Plain
PyTorch, any floating type and device, no rotation; half types are computed in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .registry import check_inputs, check_options, feature_map, in_float32, without_autocast

CAUSAL_KINDS = ('linear', 'mala')
"""The operators with a causal form."""


class CausalState(NamedTuple):
    """What is kept of the tokens seen so far.

    Attributes:
        kv (Tensor): ``sum_j phi(k_j)^T v_j``, (B, heads, d, d).
        k (Tensor): ``sum_j phi(k_j)``, (B, heads, 1, d).
        v (Tensor): ``sum_j v_j``, (B, heads, 1, d).
        length (int): How many they are.
    """

    kv: Tensor
    k: Tensor
    v: Tensor
    length: int


def empty_state(q: Tensor) -> CausalState:
    """Return the state before the first token of inputs like ``q`` (B, heads, N, d)."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, _, width = q.shape
    row = q.new_zeros(batch, heads, 1, width, dtype=dtype)
    return CausalState(row.new_zeros(batch, heads, width, width), row, row, 0)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: str = 'mala',
    scale: float = 1.0,
    eps: float = 1e-6,
    chunk: int = 64,
    state: CausalState | None = None,
) -> tuple[Tensor, CausalState]:
    """Attend to all earlier tokens, a chunk at a time: linear in N.

    Inside a chunk the scores of its tokens are a masked matrix, everything before the chunk is in
    the state. A sequence may come in pieces of any length, down to single tokens (the recurrence),
    each with the state that the piece before returned.

    Args:
        q (Tensor): Queries of shape (B, heads, N, d).
        k (Tensor): Keys, same shape, dtype and device.
        v (Tensor): Values, same shape, dtype and device.
        kind (str): ``'mala'`` (MALA paper, eq. 8-14, with sums up to i) or ``'linear'``
            (Transformers are RNNs, section 3.3).
        scale (float): ``c``, the scale of ``phi(q) . phi(k)`` in MALA.
        eps (float): Keeps the divisions finite.
        chunk (int): Tokens in a chunk.
        state (CausalState, optional): Of the tokens before the first of these; none by default.

    Returns:
        tuple[Tensor, CausalState]: The output, as ``q``, and the state after the last token.

    Raises:
        TypeError: If an input is no floating-point tensor.
        ValueError: If the inputs do not fit each other or the state, or an option is wrong.
    """
    _check(q, k, v, kind, scale, eps, state)
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ValueError(f'chunk must be a positive integer, got {chunk!r}')
    state = empty_state(q) if state is None else state
    parts = []
    with without_autocast(q.device):
        for piece in zip(*(x.split(chunk, dim=2) for x in (q, k, v))):
            y, state = _chunk(*(in_float32(x) for x in piece), kind, scale, eps, state)
            parts.append(y.to(q.dtype))
    return torch.cat(parts, 2), state


def causal_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: CausalState,
    *,
    kind: str = 'mala',
    scale: float = 1.0,
    eps: float = 1e-6,
) -> tuple[Tensor, CausalState]:
    """Attend with one more token, for generation: O(d^2), whatever came before.

    Args:
        q (Tensor): Query of shape (B, heads, 1, d).
        k (Tensor): Key, as ``q``.
        v (Tensor): Value, as ``q``.
        state (CausalState): Of the tokens before; :func:`empty_state` for the first one.
        kind (str): As in :func:`causal_attention`.
        scale (float): As in :func:`causal_attention`.
        eps (float): As in :func:`causal_attention`.

    Returns:
        tuple[Tensor, CausalState]: The output, as ``q``, and the state with this token.

    Raises:
        TypeError: If an input is no floating-point tensor.
        ValueError: If the inputs are not one token, or as in :func:`causal_attention`.
    """
    _check(q, k, v, kind, scale, eps, state)
    if q.shape[2] != 1:
        raise ValueError(f'a step takes one token, (B, heads, 1, d), got {tuple(q.shape)}')
    dtype, (q, k, v) = q.dtype, (in_float32(x) for x in (q, k, v))
    with without_autocast(q.device):
        q, k = feature_map(q), feature_map(k)
        state = CausalState(state.kv + k.mT @ v, state.k + k, state.v + v, state.length + 1)
        y = _normalise(kind, q @ state.kv, q @ state.k.mT, state.v, state.length, scale, eps)
    return y.to(dtype), state


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, kind: str = 'mala', scale: float = 1.0, eps: float = 1e-6
) -> Tensor:
    """Return the same from the masked N x N matrix: the definition, quadratic in N.

    Arguments and errors as in :func:`causal_attention`.
    """
    _check(q, k, v, kind, scale, eps, None)
    dtype, (q, k, v) = q.dtype, (in_float32(x) for x in (q, k, v))
    with without_autocast(q.device):
        q, k = feature_map(q), feature_map(k)
        scores = (q @ k.mT).tril()
        z = scores.sum(-1, keepdim=True)
        if kind == 'linear':
            scores = scores / (z + eps)
        else:
            z, scores = scale * z, scale * scores
            lengths = torch.arange(1, q.shape[2] + 1, dtype=q.dtype, device=q.device)[:, None]
            scores = ((1 + 1 / (z + eps)) * scores - z / lengths).tril()
        return (scores @ v).to(dtype)


def _chunk(q, k, v, kind, scale, eps, state) -> tuple[Tensor, CausalState]:
    """Attend within a chunk and to the state, of float32 or float64."""
    q, k = feature_map(q), feature_map(k)
    lengths = state.length + torch.arange(1, q.shape[2] + 1, dtype=q.dtype, device=q.device)
    scores = (q @ k.mT).tril()
    y = scores @ v + q @ state.kv
    z = scores.sum(-1, keepdim=True) + q @ state.k.mT
    y = _normalise(kind, y, z, state.v + v.cumsum(2), lengths[:, None], scale, eps)
    after = CausalState(
        state.kv + k.mT @ v,
        state.k + k.sum(2, keepdim=True),
        state.v + v.sum(2, keepdim=True),
        state.length + q.shape[2],
    )
    return y, after


def _normalise(kind, y, z, v_sum, length, scale, eps) -> Tensor:
    """Make the output of ``phi(q_i) S_i`` and ``phi(q_i) . sum phi(k_j)``."""
    if kind == 'linear':
        return y / (z + eps)
    z = scale * z
    return (1 + 1 / (z + eps)) * (scale * y) - z * (v_sum / length)


def _check(q, k, v, kind, scale, eps, state) -> None:
    if kind not in CAUSAL_KINDS:
        raise ValueError(f'kind must be one of {CAUSAL_KINDS}, got {kind!r}')
    check_options(scale, eps)
    tokens = q.shape[2] if isinstance(q, Tensor) and q.dim() == 4 else 0
    check_inputs(q, k, v, (1, tokens))
    if not tokens:
        raise ValueError(f'there must be at least one token, got inputs of shape {tuple(q.shape)}')
    wanted = (*q.shape[:2], q.shape[3], q.shape[3])
    if state is not None and tuple(state.kv.shape) != wanted:
        raise ValueError(
            f'the state must be of shape {wanted}, as these inputs, got {tuple(state.kv.shape)}'
        )
