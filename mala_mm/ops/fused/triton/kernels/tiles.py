"""Tiles of the feature map, read and written where they lie."""

import triton
import triton.language as tl

from .arithmetic import cast, merge, pairs_of

# fmt: off
# (signatures stay one group of arguments a line)

RUNTIME_INTEGERS = [
    *(f'{x}_{s}' for x in ('q', 'k', 'v', 'o', 'y', 'lepe', 'dq', 'dk', 'dv', 'do', 'dy', 'dlepe')
      for s in 'bhnd'),
    'heads', 'height', 'width_units', 'pieces', 'tiles', 'chunks', 'stride',
]
jit = triton.jit(do_not_specialize=RUNTIME_INTEGERS)


@triton.jit
def head_start(x, heads, stride_b, stride_h, LAYOUT: tl.constexpr):
    """Pointer to the first token of this program's head."""
    unit: tl.constexpr = 1 << (LAYOUT % 8)
    head = tl.program_id(0)
    batch, inner = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    return x + (batch * stride_b + inner * stride_h) * unit


@triton.jit
def strip(height, pieces, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """First column of this program's strip, and the tiles that it walks from and to."""
    chunk = tl.program_id(1)
    first = (chunk % pieces) * tiles
    last = tl.minimum(first + tiles, tl.cdiv(height, ROWS))
    return (chunk // pieces) * COLUMNS, first, last


@triton.jit
def patch(row, column, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Whether the map has the tokens of a tile."""
    token = tl.arange(0, ROWS * COLUMNS)
    return (row + token // COLUMNS < height) & (column + token % COLUMNS < width)


@triton.jit
def places(x, row, column, width, channels, stride_n, stride_d, LAYOUT: tl.constexpr,
           ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to the tile that begins at (row, column), with what is known of their alignment.

    The way to the tile is 64 bits wide and the same for all threads; inside of the tile 32 bits do
    unless the strides are enormous (WIDE).
    """
    unit: tl.constexpr = 1 << (LAYOUT % 8)
    order: tl.constexpr = (LAYOUT // 8) % 4
    token = tl.arange(0, ROWS * COLUMNS)
    inside = ((token // COLUMNS) * width + token % COLUMNS)[:, None]
    channels = channels[None, :]
    first = row.to(tl.int64) * width + column
    if LAYOUT // 32 == 1:  # WIDE
        inside = inside.to(tl.int64)
        stride_d = stride_d.to(tl.int64)
    if order == 0:
        return x + first * stride_n * unit + (inside * (stride_n * unit) + channels)
    elif order == 1:
        return x + first + (inside + channels * (stride_d * unit))
    else:
        return x + first * stride_n + (inside * stride_n + channels * stride_d)


@triton.jit
def load_tile(x, row, column, height, width, stride_n, stride_d, LAYOUT: tl.constexpr,
              D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile (BLOCK_N, P) as it lies in memory, zero outside."""
    channels = tl.arange(0, P)
    place = places(x, row, column, width, channels, stride_n, stride_d, LAYOUT, ROWS, COLUMNS)
    valid = patch(row, column, height, width, ROWS, COLUMNS)
    return tl.load(place, mask=valid[:, None] & (channels < D)[None, :], other=0.0)


@triton.jit
def load_half(x, row, column, height, width, stride_n, stride_d, LAYOUT: tl.constexpr,
              D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              HALF: tl.constexpr):
    """Even and odd channels of half a tile, (BLOCK_N, P / 4) each, in float32, zero outside."""
    valid = patch(row, column, height, width, ROWS, COLUMNS)
    first: tl.constexpr = HALF * (D // 2)
    if (LAYOUT // 8) % 4 == 0:  # one wide load, parted within a thread
        channels = tl.arange(0, P // 2)
        mask = valid[:, None] & (channels < D // 2)[None, :]
        place = places(x, row, column, width, channels + first, stride_n, stride_d, LAYOUT, ROWS,
                       COLUMNS)
        return pairs_of(tl.load(place, mask=mask, other=0.0).to(tl.float32))
    else:  # a channel is a row of memory: each row is loaded once anyway
        channels = 2 * tl.arange(0, P // 4)
        mask = valid[:, None] & (channels < D // 2)[None, :]
        even = places(x, row, column, width, channels + first, stride_n, stride_d, LAYOUT, ROWS,
                      COLUMNS)
        odd = places(x, row, column, width, channels + (first + 1), stride_n, stride_d, LAYOUT,
                     ROWS, COLUMNS)
        return (
            tl.load(even, mask=mask, other=0.0).to(tl.float32),
            tl.load(odd, mask=mask, other=0.0).to(tl.float32),
        )


@triton.jit
def load_quarters(x, row, column, height, width, stride_n, stride_d, LAYOUT: tl.constexpr,
                  D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The four tiles (BLOCK_N, P / 4) of a tile, in float32, zero outside."""
    re, ro = load_half(x, row, column, height, width, stride_n, stride_d, LAYOUT, D, P, ROWS,
                       COLUMNS, 0)
    ce, co = load_half(x, row, column, height, width, stride_n, stride_d, LAYOUT, D, P, ROWS,
                       COLUMNS, 1)
    return re, ro, ce, co


@triton.jit
def store_tile(x, tile, row, column, height, width, stride_n, stride_d, LAYOUT: tl.constexpr,
               D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a tile (BLOCK_N, P)."""
    channels = tl.arange(0, P)
    place = places(x, row, column, width, channels, stride_n, stride_d, LAYOUT, ROWS, COLUMNS)
    tile = cast(tile, x.dtype.element_ty)
    valid = patch(row, column, height, width, ROWS, COLUMNS)
    tl.store(place, tile, mask=valid[:, None] & (channels < D)[None, :])


@triton.jit
def store_half(x, even, odd, row, column, height, width, stride_n, stride_d, LAYOUT: tl.constexpr,
               D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
               HALF: tl.constexpr):
    """Store the even and odd channels of half a tile."""
    valid = patch(row, column, height, width, ROWS, COLUMNS)
    first: tl.constexpr = HALF * (D // 2)
    dtype: tl.constexpr = x.dtype.element_ty
    if (LAYOUT // 8) % 4 == 0:
        channels = tl.arange(0, P // 2)
        mask = valid[:, None] & (channels < D // 2)[None, :]
        place = places(x, row, column, width, channels + first, stride_n, stride_d, LAYOUT, ROWS,
                       COLUMNS)
        tl.store(place, cast(merge(even, odd), dtype), mask=mask)
    else:
        channels = 2 * tl.arange(0, P // 4)
        mask = valid[:, None] & (channels < D // 2)[None, :]
        place = places(x, row, column, width, channels + first, stride_n, stride_d, LAYOUT, ROWS,
                       COLUMNS)
        tl.store(place, cast(even, dtype), mask=mask)
        place = places(x, row, column, width, channels + (first + 1), stride_n, stride_d, LAYOUT,
                       ROWS, COLUMNS)
        tl.store(place, cast(odd, dtype), mask=mask)


@triton.jit
def store_quarters(x, re, ro, ce, co, row, column, height, width, stride_n, stride_d,
                   LAYOUT: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr):
    """Store the four tiles (BLOCK_N, P / 4) of a tile."""
    store_half(x, re, ro, row, column, height, width, stride_n, stride_d, LAYOUT, D, P, ROWS,
               COLUMNS, 0)
    store_half(x, ce, co, row, column, height, width, stride_n, stride_d, LAYOUT, D, P, ROWS,
               COLUMNS, 1)
