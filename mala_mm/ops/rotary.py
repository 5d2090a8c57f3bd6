"""The rotary position embedding in two dimensions that all operators share."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_frequencies(head_dim: int, device: torch.device | str | None = None) -> Tensor:
    """Return the turning speed of each channel pair, in radians per row or column.

    ``theta = 10000 ** -linspace(0, 1, d // 4)``, end point included. Pair ``m`` of either half of
    the channels turns by ``theta[m]`` per step.

    Args:
        head_dim (int): Width ``d`` of a head, divisible by 4.
        device (torch.device | str, optional): Where the result lies.

    Returns:
        Tensor: float64 of shape (d // 4, ).
    """
    exponent = torch.linspace(0, 1, head_dim // 4, dtype=torch.float64, device=device)
    return 10000.0**-exponent


def rotary_tables(
    size: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cosines and sines of every row and every column.

    Angles are computed in float64 and only the results are rounded, so that large indices lose
    nothing. The tables are one-dimensional in space: ``(H + W) * d / 2`` numbers, never ``N * d``.

    Args:
        size (tuple[int, int]): Height and width (H, W) of the feature map.
        head_dim (int): Width ``d`` of a head, divisible by 4.
        dtype (torch.dtype): float32 or float64; half types would be wrong by more than 1 at large
            indices.
        device (torch.device | str, optional): Where the tables lie.

    Returns:
        tuple[Tensor, Tensor, Tensor, Tensor]: ``row_cos, row_sin`` of shape (H, d // 4) and
        ``col_cos, col_sin`` of shape (W, d // 4).
    """
    theta = rotary_frequencies(head_dim, device)
    tables = []
    for length in size:
        angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * theta
        tables += [angle.cos().to(dtype), angle.sin().to(dtype)]
    return tuple(tables)


def apply_rotary(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Turn every token's channels by its row (first half) and its column (second half).

    ``(x_2m, x_2m+1) -> (x_2m cos - x_2m+1 sin, x_2m+1 cos + x_2m sin)``.

    Args:
        x (Tensor): Tokens in row order, shape (B, heads, H * W, d).
        size (tuple[int, int]): Height and width (H, W) of the feature map.

    Returns:
        Tensor: Same shape and dtype as ``x``. Half types are turned in float32.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    height, width = size
    row_cos, row_sin, col_cos, col_sin = rotary_tables(size, x.shape[-1], dtype, x.device)
    cos, sin = (
        torch.cat([row[:, None].expand(-1, width, -1), column.expand(height, -1, -1)], -1)
        for row, column in ((row_cos, col_cos), (row_sin, col_sin))
    )  # (H, W, d // 2): the row's pairs, then the column's
    cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
    even, odd = x.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)  # (B, heads, N, d // 2) each
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return turned.flatten(-2).to(x.dtype)


def rotate(x: Tensor, size: tuple[int, int], rotary: bool) -> Tensor:
    """:func:`apply_rotary` if ``rotary``, else ``x`` itself."""
    return apply_rotary(x, size) if rotary else x
