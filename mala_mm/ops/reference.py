"""The operators as their equations stand, in plain PyTorch: the specification.

Every other backend is tested against this file. Each function computes in the type of its inputs
(float64 included) and is differentiable by autograd. Notation: ``q, k, v`` of shape
(B, heads, N, d) with ``N = H * W`` tokens in row order, ``R`` the two-dimensional rotary embedding
(:mod:`mala_mm.ops.rotary`), ``phi(x) = elu(x) + 1``. Nothing is causal: sums run over all tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .rotary import apply_rotary


def feature_map(x: Tensor) -> Tensor:
    """``phi(x) = elu(x) + 1``, positive everywhere."""
    return F.elu(x) + 1


def _rotate(x: Tensor, size: tuple[int, int], rotary: bool) -> Tensor:
    return apply_rotary(x, size) if rotary else x


def mala(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: tuple[int, int],
    scale: float | None = None,
    eps: float = 1e-6,
    rotary: bool = True,
    form: str = 'published',
) -> Tensor:
    """Magnitude-aware linear attention (MALA paper, eq. 8-14).

    ``attn_ij = beta_i * c * (R_i phi(q_i)) . (R_j phi(k_j)) - gamma_i`` with
    ``z_i = c * phi(q_i) . sum_m phi(k_m)``, ``beta_i = 1 + 1 / (z_i + eps)`` and
    ``gamma_i = z_i / N``.

    The two forms differ in ``c`` alone. The published models use ``c = scale / N`` with
    ``scale = d ** -0.5``; the paper's equations have ``c = scale = 1``, "phi already carrying the
    scale". Without rotation a row of scores sums to ``1 - eps / (z_i + eps)`` in both; ``z`` does
    not see the rotation, so with it the sum is no longer exactly 1.
    """
    num_tokens, head_dim = q.shape[-2:]
    if form == 'published':
        coefficient = (head_dim**-0.5 if scale is None else scale) / num_tokens
    else:
        coefficient = 1.0 if scale is None else scale
    # The root goes to either side of the product over the tokens: float16 overflows otherwise.
    root = coefficient**0.5
    q, k = feature_map(q), feature_map(k)
    z = (q * root) @ (k * root).sum(-2, keepdim=True).mT  # (B, heads, N, 1)
    kv = (_rotate(k, size, rotary) * root).mT @ (v * root)  # (B, heads, d, d)
    return (1 + 1 / (z + eps)) * (_rotate(q, size, rotary) @ kv) - z * v.mean(-2, keepdim=True)


def rala(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: tuple[int, int],
    scale: float | None = None,
    eps: float = 1e-6,
    rotary: bool = True,
) -> Tensor:
    """Rank-augmented linear attention (RALA paper, eq. 3-6), as the published models compute it.

    Every key is weighted by ``a_j = N * softmax_j(scale * g . phi(k_j))``, where ``g`` is the mean
    of all ``phi(q_i)``; then ``y_i = (R_i phi(q_i)) KV / (z_i + eps)`` with
    ``KV = 1/N sum_j (R_j a_j phi(k_j))^T v_j`` and ``z_i = phi(q_i) . 1/N sum_j a_j phi(k_j)``.
    """
    num_tokens, head_dim = q.shape[-2:]
    scale = head_dim**-0.5 if scale is None else scale
    q, k = feature_map(q), feature_map(k)
    global_query = q.mean(-2, keepdim=True)  # (B, heads, 1, d)
    weight = num_tokens * torch.softmax(scale * (k @ global_query.mT), dim=-2)  # (B, heads, N, 1)
    k = weight * k
    z = q @ k.mean(-2, keepdim=True).mT
    kv = _rotate(k, size, rotary).mT @ (v / num_tokens)
    return (_rotate(q, size, rotary) @ kv) / (z + eps)


def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: tuple[int, int],
    eps: float = 1e-6,
    rotary: bool = True,
) -> Tensor:
    """Plain linear attention with ``phi = elu + 1``; rotation on the numerator only.

    ``y_i = (R_i phi(q_i)) (sum_j (R_j phi(k_j))^T v_j) / (phi(q_i) . sum_j phi(k_j) + eps)``.
    """
    q, k = feature_map(q), feature_map(k)
    z = q @ k.sum(-2, keepdim=True).mT
    kv = _rotate(k, size, rotary).mT @ v
    return (_rotate(q, size, rotary) @ kv) / (z + eps)


def softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: tuple[int, int],
    scale: float | None = None,
    rotary: bool = True,
) -> Tensor:
    """Softmax attention, ``softmax(scale * (R q) (R k)^T) v``; rotation on the raw q and k.

    The N x N matrix is never held: PyTorch's scaled dot-product attention computes it in tiles.
    """
    q, k = _rotate(q, size, rotary), _rotate(k, size, rotary)
    return F.scaled_dot_product_attention(q, k, v, scale=scale)
