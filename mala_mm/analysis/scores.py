"""Attention scores of single queries, and how they are distributed.

A row of scores of query i holds ``s_ij`` in ``y_i = sum_j s_ij v_j``. Scores may be negative, so
shares are of the row's absolute mass ``sum_j |s_ij|``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import log

import torch
from torch import Tensor

from mala_mm.errors import UserError
from mala_mm.ops import OPERATORS, Operator
from mala_mm.ops.registry import feature_map

from .inside import AttentionLayer

FACTORS = (1.0, 2.0, 4.0, 8.0)
"""By how much the query's length grows, as in figure 2 of the MALA paper."""

LENGTHS = ('q', 'phi')
"""Whose length grows: the query's, or that of its feature map ``phi(q)``, as the proofs have it."""


def check_operators(names: Sequence[str]) -> None:
    """Refuse operators that are unknown or have no scores.

    Raises:
        UserError: If one is.
    """
    having = tuple(name for name, cls in OPERATORS.items() if not cls.no_scores)
    for name in names:
        if name not in OPERATORS:
            raise UserError(f'the operator must be one of {having}, got {name!r}')
        if name not in having:
            raise UserError(
                f'operator {name!r} has no scores: {OPERATORS[name].no_scores}; operators with '
                f'scores are {having}'
            )


def score_rows(
    layer: AttentionLayer,
    rows: Sequence[int] | Tensor,
    operator: Operator | None = None,
    q: Tensor | None = None,
) -> Tensor:
    """Return the scores of some queries of a layer; no N x N tensor is built.

    Args:
        layer (AttentionLayer): The layer.
        rows (Sequence[int] | Tensor): The queries, R indices of tokens.
        operator (Operator, optional): Another operator on the same queries and keys.
        q (Tensor, optional): Other queries, (1, heads, N, d).

    Returns:
        Tensor: Shape (heads, R, N), float32.

    Raises:
        UserError: If the operator has no scores.
    """
    operator = operator or layer.operator
    check_operators([operator.name])
    q = layer.q if q is None else q
    return operator.scores(q, layer.k, layer.size, rows, layer.x)[0]


def lengthen(q: Tensor, rows: Tensor, factor: float, length: str = 'q') -> Tensor:
    """Return queries of which some have ``factor`` times their length, in the same direction.

    Args:
        q (Tensor): Queries of shape (1, heads, N, d).
        rows (Tensor): Which.
        factor (float): The factor ``a``.
        length (str): ``'q'``: ``a q``. ``'phi'``: the query whose ``phi`` is ``a phi(q)``,
            ``phi = elu + 1``.

    Returns:
        Tensor: As ``q``.
    """
    some = q[:, :, rows]
    if length == 'phi':
        longer = factor * feature_map(some.double())
        some = torch.where(longer > 1, longer - 1, longer.clamp_min(1e-300).log()).to(q.dtype)
    else:
        some = factor * some
    q = q.clone()
    q[:, :, rows] = some
    return q


@dataclass(frozen=True)
class Distribution:
    """How rows of scores are distributed, each a mean over the rows of one head.

    Attributes:
        entropy (float): ``-sum_j p_j log p_j / log N`` with ``p_j = |s_j| / sum_m |s_m|``: 1 for a
            flat row, 0 for a single peak.
        peak (float): ``N max_j p_j``, 1 for a flat row.
        total (float): ``sum_j s_j``.
        negative_share (float): Share of the scores that are below 0.
        negative_mass (float): Their share of the absolute mass.
        lowest (float): The least score of any row, times N.
    """

    entropy: float
    peak: float
    total: float
    negative_share: float
    negative_mass: float
    lowest: float


def distributions(scores: Tensor) -> list[Distribution]:
    """Describe rows of scores (heads, R, N), head by head."""
    scores = scores.double()
    num_tokens = scores.shape[-1]
    mass = scores.abs().sum(-1, keepdim=True).clamp_min(1e-300)
    p = scores.abs() / mass
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1) / max(log(num_tokens), 1e-9)
    below = scores < 0
    columns = (
        entropy.mean(-1),
        p.amax(-1).mean(-1) * num_tokens,
        scores.sum(-1).mean(-1),
        below.double().mean((-1, -2)),
        (p * below).sum(-1).mean(-1),
        scores.amin((-1, -2)) * num_tokens,
    )
    return [Distribution(*values) for values in zip(*(c.tolist() for c in columns))]


def mean_distribution(found: Sequence[Distribution]) -> Distribution:
    """Return the mean of several; of ``lowest``, the least."""
    means = {
        f.name: sum(getattr(d, f.name) for d in found) / len(found) for f in fields(Distribution)
    }
    means['lowest'] = min(d.lowest for d in found)
    return Distribution(**means)


def spread_rows(num_tokens: int, count: int) -> Tensor:
    """Return ``count`` tokens spread evenly over all, or all if there are fewer."""
    if count >= num_tokens:
        return torch.arange(num_tokens)
    return torch.linspace(0, num_tokens - 1, count).round().long()
