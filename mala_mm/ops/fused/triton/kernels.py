"""The Triton kernels. ``mala_mm/ops/README.md`` derives every line.

Conventions, in all kernels:

- A tile is a patch of ROWS x COLUMNS tokens of the feature map, BLOCK_N in all. A program walks
  down a strip of COLUMNS columns, so that what depends on the column stays what it is.
- The rotary embedding turns the first half of the channels by the row, the second by the column,
  in pairs of neighbours. So channels are held as four tiles (BLOCK_N, P / 4): even and odd ones of
  the row's half, ``re`` and ``ro``, and of the column's half, ``ce`` and ``co``; P / 2 is half of
  the head width D, rounded up to a power of two.
- Everything between a load and a store is float32, but for the operands of a dot (``operand``).
- A tensor comes as a pointer, four strides and a layout code ``32 * wide + 8 * order +
  log2(unit)``: order 0 has adjacent channels, 1 adjacent tokens, 2 neither. Strides (but that of 1)
  are in multiples of ``unit`` elements, so that the compiler knows how wide a load may be, whatever
  their values; ``wide`` says that a tile spans more than 2^31 elements.
  ``WIDTH_UNIT`` does the same for the number of columns.
- Run-time integers never specialise a kernel: a new H x W compiles nothing.
- The grid is (heads of all images, chunks of their tokens).
"""

import os

import triton
import triton.language as tl

# fmt: off
# (signatures stay one group of arguments a line)

RUNTIME_INTEGERS = [
    *(f'{x}_{s}' for x in ('q', 'k', 'v', 'y', 'l', 'o', 'g', 'dq', 'dk', 'dv', 'do', 'dl')
      for s in 'bhnd'),
    'heads', 'height', 'width_units', 'pieces', 'tiles', 'chunks', 'stride',
]
jit = triton.jit(do_not_specialize=RUNTIME_INTEGERS)

# Triton's interpreter knows no PTX, and cuts off the bits that bfloat16 has not, where a device
# rounds to nearest.
INTERPRETED = tl.constexpr(os.environ.get('TRITON_INTERPRET') == '1')


# --- memory ---------------------------------------------------------------------------------------


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
def cast(x, dtype: tl.constexpr):
    """To the nearest number of ``dtype``."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def store_tile(x, tile, row, column, height, width, stride_n, stride_d, LAYOUT: tl.constexpr,
               D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    channels = tl.arange(0, P)
    place = places(x, row, column, width, channels, stride_n, stride_d, LAYOUT, ROWS, COLUMNS)
    tile = cast(tile, x.dtype.element_ty)
    valid = patch(row, column, height, width, ROWS, COLUMNS)
    tl.store(place, tile, mask=valid[:, None] & (channels < D)[None, :])


@triton.jit
def store_half(x, even, odd, row, column, height, width, stride_n, stride_d, LAYOUT: tl.constexpr,
               D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
               HALF: tl.constexpr):
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
def pairs_of(x):
    """Even and odd channels of a tile."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def merge(even, odd):
    """Interleave two tiles to one of twice the channels."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def vector_quarters(x, D: tl.constexpr, P: tl.constexpr):
    """A vector of D float32 as four of (1, P / 4), zero beyond."""
    pair = tl.arange(0, P // 4)[None, :]
    mask = pair < D // 4
    re = tl.load(x + 2 * pair, mask=mask, other=0.0)
    ro = tl.load(x + 2 * pair + 1, mask=mask, other=0.0)
    ce = tl.load(x + D // 2 + 2 * pair, mask=mask, other=0.0)
    co = tl.load(x + D // 2 + 2 * pair + 1, mask=mask, other=0.0)
    return re, ro, ce, co


@triton.jit
def store_sums(x, re, ro, ce, co, D: tl.constexpr, P: tl.constexpr):
    """Store the sums over tokens of four tiles as a vector of D float32."""
    pair = tl.arange(0, P // 4)
    mask = pair < D // 4
    tl.store(x + 2 * pair, tl.sum(re, axis=0), mask=mask)
    tl.store(x + 2 * pair + 1, tl.sum(ro, axis=0), mask=mask)
    tl.store(x + D // 2 + 2 * pair, tl.sum(ce, axis=0), mask=mask)
    tl.store(x + D // 2 + 2 * pair + 1, tl.sum(co, axis=0), mask=mask)


@triton.jit
def store_folded(x, re, ro, ce, co, D: tl.constexpr, P: tl.constexpr):
    """``store_sums`` of what ``fold`` left."""
    pair = tl.arange(0, P // 4)
    mask = pair < D // 4
    tl.store(x + 2 * pair, unfold(re), mask=mask)
    tl.store(x + 2 * pair + 1, unfold(ro), mask=mask)
    tl.store(x + D // 2 + 2 * pair, unfold(ce), mask=mask)
    tl.store(x + D // 2 + 2 * pair + 1, unfold(co), mask=mask)


@triton.jit
def matrix_places(x, D: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr):
    """Pointers and mask, (P / 2, P), of half the rows of a (D, D) matrix."""
    row = tl.arange(0, P // 2)[:, None]
    column = tl.arange(0, P)[None, :]
    return x + (HALF * (D // 2) + row) * D + column, (row < D // 2) & (column < D)


@triton.jit
def load_matrix(x, D: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr):
    place, mask = matrix_places(x, D, P, HALF)
    return tl.load(place, mask=mask, other=0.0)


@triton.jit
def store_matrix(x, matrix, D: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr):
    place, mask = matrix_places(x, D, P, HALF)
    tl.store(place, matrix, mask=mask)


# --- arithmetic -----------------------------------------------------------------------------------


@triton.jit
def exp2(x):
    """``2 ** x``; what the type holds as a subnormal number only is 0."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise('ex2.approx.ftz.f32 $0, $1;', '=f,f', [x],
                                         dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def exp(x):
    return exp2(x * 1.4426950408889634)


@triton.jit
def reciprocal(x):
    if INTERPRETED:
        return 1 / x
    else:
        return tl.inline_asm_elementwise('rcp.approx.ftz.f32 $0, $1;', '=f,f', [x],
                                         dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def laid_out(x, like):
    """``x`` in the registers in which ``like`` lies. It costs nothing: the compiler, which would
    hold what came from memory and what came from a dot differently, sees an operation on both.
    """
    if INTERPRETED:
        return x
    else:
        return tl.inline_asm_elementwise('', '=f,0,f', [x, like], dtype=tl.float32, is_pure=True,
                                         pack=1)


@triton.jit
def feature_map(x, DOT: tl.constexpr):
    """``phi(x) = elu(x) + 1``; half of it for fp16, which keeps turned pairs in its range.

    The exponential of a large x is infinite, but it is not taken; NaN stays NaN.
    """
    if DOT == 'fp16':
        return tl.where(x > 0, x * 0.5 + 0.5, exp2(x * 1.4426950408889634 - 1))
    else:
        return tl.where(x > 0, x + 1, exp(x))


@triton.jit
def features(re, ro, ce, co, DOT: tl.constexpr):
    return feature_map(re, DOT), feature_map(ro, DOT), feature_map(ce, DOT), feature_map(co, DOT)


@triton.jit
def slope(feature, DOT: tl.constexpr):
    """``phi'(x)`` from ``phi(x)``: 1 where x > 0, that is ``phi(x) > 1``; else ``phi(x)``."""
    return tl.minimum(feature, 0.5 if DOT == 'fp16' else 1.0)


@triton.jit
def frequencies(D: tl.constexpr, P: tl.constexpr):
    """How far each pair turns per row or column, (1, P / 4), in units of 2^-64 of a full turn.

    ``theta_m = 10000 ** (-m / (D / 4 - 1))``, in float64 by the binary digits of m.
    """
    pair = tl.arange(0, P // 4)[None, :]
    turns = tl.full((1, P // 4), 2.0**64 / 6.283185307179586, tl.float64)
    for digit in tl.static_range(5):
        factor = tl.full((1, P // 4), 10000.0 ** (-(2.0**digit) / (D // 4 - 1)), tl.float64)
        turns = tl.where(((pair >> digit) & 1) == 1, turns * factor, turns)
    return turns.to(tl.int64)


@triton.jit
def turning(position, frequency):
    """Cosine and sine, (BLOCK_N, P / 4), of each pair's angle at each token's position.

    Angles are 64-bit fractions of a turn: whole turns wrap around, no position is too large, and
    nothing is rounded before the remainder of a quarter turn, of at most 45 degrees.
    """
    phase = position.to(tl.int64)[:, None] * frequency
    quarter = (phase + (1 << 61)) >> 62
    x = ((phase - (quarter << 62)) >> 32).to(tl.float32) * (6.283185307179586 / 2.0**32)
    square = x * x
    sin = -1.9515295891e-4 * square + 8.3321608736e-3
    sin = (sin * square - 1.6666654611e-1) * square * x + x
    cos = 2.443315711809948e-5 * square - 1.388731625493765e-3
    cos = (cos * square + 4.166664568298827e-2) * square * square - 0.5 * square + 1
    odd = (quarter & 1) == 1
    cos, sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    sin = tl.where((quarter & 2) == 2, -sin, sin)
    cos = tl.where(((quarter + 1) & 2) == 2, -cos, cos)
    return cos, sin


@triton.jit
def turn(even, odd, cos, sin, BACK: tl.constexpr = False):
    """``R``, or BACK, its transpose."""
    if BACK:
        return even * cos + odd * sin, odd * cos - even * sin
    else:
        return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def turn_rows(even, odd, cos, sin, BACK: tl.constexpr = False):
    """``turn`` the tokens of a tile by the angles (ROWS, P / 4) of their rows."""
    ROWS: tl.constexpr = cos.shape[0]
    COLUMNS: tl.constexpr = even.shape[0] // ROWS
    cos = tl.reshape(tl.broadcast_to(cos[:, None, :], (ROWS, COLUMNS, cos.shape[1])), even.shape)
    sin = tl.reshape(tl.broadcast_to(sin[:, None, :], (ROWS, COLUMNS, sin.shape[1])), even.shape)
    return turn(even, odd, cos, sin, BACK)


@triton.jit
def turn_columns(even, odd, cos, sin, BACK: tl.constexpr = False):
    """``turn`` the tokens of a tile by the angles (COLUMNS, P / 4) of their columns."""
    COLUMNS: tl.constexpr = cos.shape[0]
    ROWS: tl.constexpr = even.shape[0] // COLUMNS
    cos = tl.reshape(tl.broadcast_to(cos[None, :, :], (ROWS, COLUMNS, cos.shape[1])), even.shape)
    sin = tl.reshape(tl.broadcast_to(sin[None, :, :], (ROWS, COLUMNS, sin.shape[1])), even.shape)
    return turn(even, odd, cos, sin, BACK)


@triton.jit
def operand(x, DOT: tl.constexpr):
    """Round to the type that the tensor cores multiply, if it is one."""
    if DOT == 'fp16':
        x = x.to(tl.float16)
    elif DOT == 'bf16':
        if INTERPRETED:  # whose dot takes bfloat16 for integers
            x = cast(x.to(tl.float32), tl.bfloat16).to(tl.float32)
        else:
            x = x.to(tl.bfloat16)
    return x


@triton.jit
def add_dot(total, a, b, DOT: tl.constexpr):
    """``total + a @ b`` on the tensor cores, with float32 sums.

    ``bf16`` and ``fp16`` round the operands. ``bf16x3`` takes them for sums of two bfloat16 numbers
    and leaves out the smallest product, ``bf16x6`` of three and leaves out the three smallest;
    small products come first. Tensor cores cut off instead of rounding, which ``bf16x6`` keeps away
    from ``total`` (in more registers).
    """
    if DOT == 'fp16' or DOT == 'bf16':
        return tl.dot(operand(a, DOT), operand(b, DOT), total)
    a, b = a.to(tl.float32), b.to(tl.float32)
    a_high, b_high = operand(a, 'bf16'), operand(b, 'bf16')
    a, b = a - a_high.to(tl.float32), b - b_high.to(tl.float32)
    a_low, b_low = operand(a, 'bf16'), operand(b, 'bf16')
    if DOT == 'bf16x3':
        product = total
    else:
        a_rest = operand(a - a_low.to(tl.float32), 'bf16')
        b_rest = operand(b - b_low.to(tl.float32), 'bf16')
        product = tl.dot(a_low, b_low)
        product = tl.dot(a_rest, b_high, product)
        product = tl.dot(a_high, b_rest, product)
    product = tl.dot(a_low, b_high, product)
    product = tl.dot(a_high, b_low, product)
    product = tl.dot(a_high, b_high, product)
    if DOT == 'bf16x6':
        product += total
    return product


@triton.jit
def dot(a, b, DOT: tl.constexpr):
    """``a @ b``, see ``add_dot``."""
    return add_dot(tl.zeros((a.shape[0], b.shape[1]), tl.float32), a, b, DOT)


@triton.jit
def fold(x):
    """Sums of those rows of a tile that a thread holds, (BLOCK_N / 16, 8, channels): in tiles laid
    out like a dot's result, rows 8 apart. Cheap; what is left is summed once after the loop.
    """
    return tl.sum(tl.reshape(x, (x.shape[0] // 16, 2, 8, x.shape[1])), axis=1)


@triton.jit
def unfold(x):
    """The sum of what ``fold`` left."""
    return tl.sum(tl.reshape(x, (x.shape[0] * 8, x.shape[2])), axis=0)


@triton.jit
def row_dot(re, ro, ce, co, re2, ro2, ce2, co2):
    """Product of each row of a tile with a row, or with a vector."""
    return tl.sum(re * re2 + ro * ro2 + ce * ce2 + co * co2, axis=1)


@triton.jit
def fitting(x):
    """The power of two that brings the largest of ``x`` near the end of fp16's range, and its
    inverse; NaN stays NaN.
    """
    largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 14), 253)
    scale = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, ((exponent - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_operands(x, D: tl.constexpr, P: tl.constexpr, DOT: tl.constexpr):
    """Both halves, (P / 2, P), of a (D, D) matrix as operands of dots, and what these are of it.

    fp16, whose range is small, takes them times a power of two, and undoes the one in
    ``feature_map``.
    """
    upper, lower = load_matrix(x, D, P, 0), load_matrix(x, D, P, 1)
    factor = 1.0
    if DOT == 'fp16':
        scale, inverse = fitting(tl.maximum(tl.abs(upper), tl.abs(lower)))
        upper *= scale
        lower *= scale
        factor = 2 * inverse
    return operand(upper, DOT), operand(lower, DOT), factor


# --- forward --------------------------------------------------------------------------------------


@jit
def reduce_queries(
    q, q_b, q_h, q_n, q_d, part, heads, height, width_units, pieces, tiles,
    D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH_UNIT: tl.constexpr, STAGES: tl.constexpr, Q: tl.constexpr, DOT: tl.constexpr,
):
    """Sum of ``phi(q_i)`` over one chunk of tokens, for RALA's global query."""
    q = head_start(q, heads, q_b, q_h, Q)
    width = width_units * WIDTH_UNIT
    left, first, last = strip(height, pieces, tiles, ROWS, COLUMNS)
    zero = tl.zeros((ROWS * COLUMNS, P // 4), tl.float32)
    re_sum, ro_sum, ce_sum, co_sum = zero, zero, zero, zero
    top = first * ROWS
    for tile in tl.range(first, last, num_stages=STAGES):
        ahead = tile * ROWS
        valid = patch(top, left, height, width, ROWS, COLUMNS)
        here = tl.where(valid, 2.0 if DOT == 'fp16' else 1.0, 0.0)[:, None]
        re, ro, ce, co = load_quarters(q, ahead, left, height, width, q_n, q_d, Q, D, P,
                                       ROWS, COLUMNS)
        re, ro, ce, co = features(re, ro, ce, co, DOT)
        re_sum += re * here
        ro_sum += ro * here
        ce_sum += ce * here
        co_sum += co * here
        top += ROWS
    part += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * D
    store_sums(part, re_sum, ro_sum, ce_sum, co_sum, D, P)


@jit
def reduce_keys(
    k, k_b, k_h, k_n, k_d, v, v_b, v_h, v_n, v_d,
    part, peak, query, scale, heads, height, width_units, pieces, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH_UNIT: tl.constexpr, STAGES: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ROTARY: tl.constexpr, WEIGHTED: tl.constexpr, DOT: tl.constexpr,
):
    """``sum w_j (R_j phi(k_j))^T v_j``, ``sum w_j phi(k_j)`` and ``sum v_j`` over one chunk.

    ``w`` is 1, or with WEIGHTED ``exp(scale * g . phi(k_j) - m)`` with the chunk's own maximum m;
    then ``m`` and ``sum w_j`` go to ``peak``.
    """
    BLOCK_N: tl.constexpr = ROWS * COLUMNS
    HALVED: tl.constexpr = DOT == 'fp16'
    EXACT: tl.constexpr = DOT == 'bf16x3' or DOT == 'bf16x6'
    k = head_start(k, heads, k_b, k_h, K)
    v = head_start(v, heads, v_b, v_h, V)
    width = width_units * WIDTH_UNIT
    left, first, last = strip(height, pieces, tiles, ROWS, COLUMNS)
    if ROTARY:
        frequency = frequencies(D, P)
        c_cos, c_sin = turning(left + tl.arange(0, COLUMNS), frequency)
        r_cos, r_sin = turning(first * ROWS + tl.arange(0, ROWS), frequency)
        step_cos, step_sin = turning(tl.full((1,), ROWS, tl.int32), frequency)

    # transposed: (P, P / 2) each
    r_kv, c_kv = tl.zeros((P, P // 2), tl.float32), tl.zeros((P, P // 2), tl.float32)
    zero = tl.zeros((BLOCK_N, P // 4), tl.float32)
    re_sum, ro_sum, ce_sum, co_sum = zero, zero, zero, zero
    if EXACT:
        v_sum = tl.zeros((BLOCK_N, P), tl.float32)
    else:  # a column of ones has the tensor cores sum v
        ones = tl.full((BLOCK_N, 16), 1.0, tl.float32)
        v_sum = tl.zeros((P, 16), tl.float32)
    if WEIGHTED:
        re_g, ro_g, ce_g, co_g = vector_quarters(query + tl.program_id(0).to(tl.int64) * stride,
                                                 D, P)
        # as in backward_keys, to the bit: what is rounded differently there is in all weights alike
        re_g, ro_g, ce_g, co_g = re_g * scale, ro_g * scale, ce_g * scale, co_g * scale
        if HALVED:
            re_g, ro_g, ce_g, co_g = 2 * re_g, 2 * ro_g, 2 * ce_g, 2 * co_g
        highest, weights = float('-inf'), tl.zeros((BLOCK_N,), tl.float32)
    top = first * ROWS
    for tile in tl.range(first, last, num_stages=STAGES):
        ahead = tile * ROWS
        re, ro, ce, co = load_quarters(k, ahead, left, height, width, k_n, k_d, K, D, P,
                                       ROWS, COLUMNS)
        values = load_tile(v, ahead, left, height, width, v_n, v_d, V, D, P, ROWS, COLUMNS)
        valid = patch(top, left, height, width, ROWS, COLUMNS)
        re, ro, ce, co = features(re, ro, ce, co, DOT)
        if WEIGHTED:
            logit = row_dot(re, ro, ce, co, re_g, ro_g, ce_g, co_g)
            logit = tl.where(valid, logit, float('-inf'))
            higher = tl.maximum(highest, tl.max(logit, axis=0))
            shrink = exp(highest - higher)
            weight = exp(logit - higher)
            highest = higher
            weights = weights * shrink + weight
            r_kv *= shrink
            c_kv *= shrink
            re_sum *= shrink
            ro_sum *= shrink
            ce_sum *= shrink
            co_sum *= shrink
            weight = weight[:, None]
            re *= weight
            ro *= weight
            ce *= weight
            co *= weight
            re_sum += re
            ro_sum += ro
            ce_sum += ce
            co_sum += co
        else:  # features of what is no token are 1, but its values are 0
            here = tl.where(valid, 1.0, 0.0)[:, None]
            re_sum += re * here
            ro_sum += ro * here
            ce_sum += ce * here
            co_sum += co * here
        if ROTARY and EXACT:
            r_cos, r_sin = turning(top + tl.arange(0, ROWS), frequency)
        if ROTARY:
            re, ro = turn_rows(re, ro, r_cos, r_sin)
            ce, co = turn_columns(ce, co, c_cos, c_sin)
            if not EXACT:
                r_cos, r_sin = turn(r_cos, r_sin, step_cos, step_sin)
        values_t = tl.trans(values)
        r_kv = add_dot(r_kv, values_t, merge(re, ro), DOT)
        c_kv = add_dot(c_kv, values_t, merge(ce, co), DOT)
        if EXACT:
            v_sum += values
        else:
            v_sum = add_dot(v_sum, values_t, ones, DOT)
        top += ROWS

    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    part += program * ((D + 2) * D)
    if HALVED:
        r_kv *= 2
        c_kv *= 2
        re_sum *= 2
        ro_sum *= 2
        ce_sum *= 2
        co_sum *= 2
    store_matrix(part, tl.trans(r_kv), D, P, 0)
    store_matrix(part, tl.trans(c_kv), D, P, 1)
    store_sums(part + D * D, re_sum, ro_sum, ce_sum, co_sum, D, P)
    channels = tl.arange(0, P)
    if EXACT:
        v_total = tl.sum(v_sum, axis=0)
    else:
        v_total = tl.sum(v_sum, axis=1) * 0.0625
    tl.store(part + (D + 1) * D + channels, v_total, mask=channels < D)
    if WEIGHTED:
        tl.store(peak + program * 2, highest)
        tl.store(peak + program * 2 + 1, tl.sum(weights, axis=0))


@jit
def combine(
    part, peak, result, scale, tail_scale, chunks, stride,
    SIZE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Sum of the chunks' partial results, in a fixed order.

    The first SPLIT of the SIZE numbers are multiplied by ``scale``, the others by ``tail_scale``.
    With WEIGHTED the first ones are a softmax over chunks: ``peak`` holds each chunk's maximum and
    sum, and those of all chunks go beyond the result.
    """
    head = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part += head * chunks * SIZE
    peak += head * chunks * 2
    result += head * stride
    total = tl.zeros((CHUNKS, BLOCK), tl.float32)
    if WEIGHTED:
        highest = tl.full((CHUNKS,), float('-inf'), tl.float32)
        for first in range(0, chunks, CHUNKS):
            chunk = first + tl.arange(0, CHUNKS)
            here = tl.load(peak + chunk * 2, mask=chunk < chunks, other=float('-inf'))
            highest = tl.maximum(highest, here)
        highest = tl.max(highest, axis=0)
        weights = tl.zeros((CHUNKS,), tl.float32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        mask = (chunk < chunks)[:, None] & (number < SIZE)[None, :]
        x = tl.load(part + chunk.to(tl.int64)[:, None] * SIZE + number[None, :], mask=mask,
                    other=0.0)
        if WEIGHTED:
            here = tl.load(peak + chunk * 2, mask=chunk < chunks, other=float('-inf'))
            weight = exp(here - highest)
            weights += weight * tl.load(peak + chunk * 2 + 1, mask=chunk < chunks, other=0.0)
            x = tl.where((number < SPLIT)[None, :], x * weight[:, None], x)
        total += x
    total = tl.sum(total, axis=0)
    if WEIGHTED:
        weights = tl.sum(weights, axis=0)
        scale /= weights
        # next to g, which is the row after these: see mala_mm.ops.fused.library.state_rows
        # (two numbers rather than their logsumexp, whose rounding error all weights would share)
        end = SIZE + (SIZE - SPLIT)
        tl.store(result + end + number, tl.where(number == 0, highest, weights), mask=number < 2)
    total *= tl.where(number < SPLIT, scale, tail_scale)
    tl.store(result + number, total, mask=number < SIZE)


@triton.jit
def attend(
    re, ro, ce, co, re_k, ro_k, ce_k, co_k, v_mean, r_kv, c_kv, factor, eps,
    r_cos, r_sin, c_cos, c_sin, ROTARY: tl.constexpr, MALA: tl.constexpr, DOT: tl.constexpr,
):
    """``a_i (R_i phi(q_i)) KV - b_i vbar`` of a tile, from the features of its queries."""
    z = row_dot(re, ro, ce, co, re_k, ro_k, ce_k, co_k)
    a = reciprocal(z + eps)
    if MALA:
        a += 1
    if ROTARY:
        re, ro = turn_rows(re, ro, r_cos, r_sin)
        ce, co = turn_columns(ce, co, c_cos, c_sin)
    out = add_dot(dot(merge(re, ro), r_kv, DOT), merge(ce, co), c_kv, DOT)
    out *= (a * factor)[:, None]
    if MALA:
        out -= z[:, None] * v_mean
    return out


@jit
def apply_queries(
    q, q_b, q_h, q_n, q_d, l, l_b, l_h, l_n, l_d, o, o_b, o_h, o_n, o_d, y, y_b, y_h, y_n, y_d,
    states, eps, heads, height, width_units, pieces, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH_UNIT: tl.constexpr, STAGES: tl.constexpr,
    Q: tl.constexpr, L: tl.constexpr, O: tl.constexpr, Y: tl.constexpr,
    ROTARY: tl.constexpr, MALA: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr,
):
    """``y_i = a_i (R_i phi(q_i)) KV - b_i vbar``; with GATED ``(y_i + l_i) * o_i``."""
    EXACT: tl.constexpr = DOT == 'bf16x3' or DOT == 'bf16x6'
    q = head_start(q, heads, q_b, q_h, Q)
    y = head_start(y, heads, y_b, y_h, Y)
    if GATED:
        l = head_start(l, heads, l_b, l_h, L)
        o = head_start(o, heads, o_b, o_h, O)
    states += tl.program_id(0).to(tl.int64) * stride
    width = width_units * WIDTH_UNIT
    left, first, last = strip(height, pieces, tiles, ROWS, COLUMNS)
    r_cos, r_sin, c_cos, c_sin = 0.0, 0.0, 0.0, 0.0
    if ROTARY:
        frequency = frequencies(D, P)
        c_cos, c_sin = turning(left + tl.arange(0, COLUMNS), frequency)
        r_cos, r_sin = turning(first * ROWS + tl.arange(0, ROWS), frequency)
        step_cos, step_sin = turning(tl.full((1,), ROWS, tl.int32), frequency)

    r_kv, c_kv, factor = load_operands(states, D, P, DOT)
    re_k, ro_k, ce_k, co_k = vector_quarters(states + D * D, D, P)
    if DOT == 'fp16':
        re_k, ro_k, ce_k, co_k = 2 * re_k, 2 * ro_k, 2 * ce_k, 2 * co_k
    channels = tl.arange(0, P)[None, :]
    v_mean = tl.load(states + (D + 1) * D + channels, mask=channels < D, other=0.0)
    top = first * ROWS
    for tile in tl.range(first, last, num_stages=STAGES):
        ahead = tile * ROWS
        re, ro, ce, co = load_quarters(q, ahead, left, height, width, q_n, q_d, Q, D, P,
                                       ROWS, COLUMNS)
        if GATED:
            local = load_tile(l, ahead, left, height, width, l_n, l_d, L, D, P, ROWS, COLUMNS)
            gate = load_tile(o, ahead, left, height, width, o_n, o_d, O, D, P, ROWS, COLUMNS)
        if ROTARY and EXACT:
            r_cos, r_sin = turning(top + tl.arange(0, ROWS), frequency)
        re, ro, ce, co = features(re, ro, ce, co, DOT)
        out = attend(re, ro, ce, co, re_k, ro_k, ce_k, co_k, v_mean, r_kv, c_kv, factor, eps,
                     r_cos, r_sin, c_cos, c_sin, ROTARY, MALA, DOT)
        if ROTARY and not EXACT:
            r_cos, r_sin = turn(r_cos, r_sin, step_cos, step_sin)
        if GATED:
            out = (out + local.to(tl.float32)) * gate.to(tl.float32)
        store_tile(y, out, top, left, height, width, y_n, y_d, Y, D, P, ROWS, COLUMNS)
        top += ROWS


# --- backward -------------------------------------------------------------------------------------


@jit
def backward_gate(
    q, q_b, q_h, q_n, q_d, l, l_b, l_h, l_n, l_d, o, o_b, o_h, o_n, o_d, g, g_b, g_h, g_n, g_d,
    do, do_b, do_h, do_n, do_d, dl, dl_b, dl_h, dl_n, dl_d,
    states, eps, heads, height, width_units, pieces, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH_UNIT: tl.constexpr, STAGES: tl.constexpr,
    Q: tl.constexpr, L: tl.constexpr, O: tl.constexpr, G: tl.constexpr, DO: tl.constexpr,
    DL: tl.constexpr, ROTARY: tl.constexpr, MALA: tl.constexpr, DOT: tl.constexpr,
):
    """The gradients of ``(y_i + l_i) * o_i``: ``g_i * (y_i + l_i)`` for ``o``, ``g_i * o_i`` for
    the sum. To compute y again moves less than to keep it.
    """
    EXACT: tl.constexpr = DOT == 'bf16x3' or DOT == 'bf16x6'
    q = head_start(q, heads, q_b, q_h, Q)
    l = head_start(l, heads, l_b, l_h, L)
    o = head_start(o, heads, o_b, o_h, O)
    g = head_start(g, heads, g_b, g_h, G)
    do = head_start(do, heads, do_b, do_h, DO)
    dl = head_start(dl, heads, dl_b, dl_h, DL)
    states += tl.program_id(0).to(tl.int64) * stride
    width = width_units * WIDTH_UNIT
    left, first, last = strip(height, pieces, tiles, ROWS, COLUMNS)
    r_cos, r_sin, c_cos, c_sin = 0.0, 0.0, 0.0, 0.0
    if ROTARY:
        frequency = frequencies(D, P)
        c_cos, c_sin = turning(left + tl.arange(0, COLUMNS), frequency)
        r_cos, r_sin = turning(first * ROWS + tl.arange(0, ROWS), frequency)
        step_cos, step_sin = turning(tl.full((1,), ROWS, tl.int32), frequency)

    r_kv, c_kv, factor = load_operands(states, D, P, DOT)
    re_k, ro_k, ce_k, co_k = vector_quarters(states + D * D, D, P)
    if DOT == 'fp16':
        re_k, ro_k, ce_k, co_k = 2 * re_k, 2 * ro_k, 2 * ce_k, 2 * co_k
    channels = tl.arange(0, P)[None, :]
    v_mean = tl.load(states + (D + 1) * D + channels, mask=channels < D, other=0.0)
    top = first * ROWS
    for tile in tl.range(first, last, num_stages=STAGES):
        ahead = tile * ROWS
        re, ro, ce, co = load_quarters(q, ahead, left, height, width, q_n, q_d, Q, D, P,
                                       ROWS, COLUMNS)
        local = load_tile(l, ahead, left, height, width, l_n, l_d, L, D, P, ROWS, COLUMNS)
        gate = load_tile(o, ahead, left, height, width, o_n, o_d, O, D, P, ROWS, COLUMNS)
        grad = load_tile(g, ahead, left, height, width, g_n, g_d, G, D, P, ROWS, COLUMNS)
        grad = grad.to(tl.float32)
        store_tile(dl, grad * gate.to(tl.float32), top, left, height, width, dl_n, dl_d, DL, D, P,
                   ROWS, COLUMNS)
        if ROTARY and EXACT:
            r_cos, r_sin = turning(top + tl.arange(0, ROWS), frequency)
        re, ro, ce, co = features(re, ro, ce, co, DOT)
        out = attend(re, ro, ce, co, re_k, ro_k, ce_k, co_k, v_mean, r_kv, c_kv, factor, eps,
                     r_cos, r_sin, c_cos, c_sin, ROTARY, MALA, DOT)
        if ROTARY and not EXACT:
            r_cos, r_sin = turn(r_cos, r_sin, step_cos, step_sin)
        out = grad * (out + local.to(tl.float32))
        store_tile(do, out, top, left, height, width, do_n, do_d, DO, D, P, ROWS, COLUMNS)
        top += ROWS


@jit
def backward_queries(
    q, q_b, q_h, q_n, q_d, g, g_b, g_h, g_n, g_d, dq, dq_b, dq_h, dq_n, dq_d,
    states, part, dquery, eps, heads, height, width_units, pieces, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH_UNIT: tl.constexpr, STAGES: tl.constexpr,
    Q: tl.constexpr, G: tl.constexpr, DQ: tl.constexpr,
    ROTARY: tl.constexpr, MALA: tl.constexpr, DOT: tl.constexpr,
    VALUES: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, GLOBAL: tl.constexpr,
):
    """The queries' side: the chunk's share of dKV and dvbar (VALUES), of dkbar (KEYS), and ``dq``
    (QUERIES).

    With GLOBAL every ``phi(q_i)`` also has the gradient ``dquery``, RALA's global query's.
    """
    BLOCK_N: tl.constexpr = ROWS * COLUMNS
    EXACT: tl.constexpr = DOT == 'bf16x3' or DOT == 'bf16x6'
    head = tl.program_id(0).to(tl.int64)
    q = head_start(q, heads, q_b, q_h, Q)
    g = head_start(g, heads, g_b, g_h, G)
    if QUERIES:
        dq = head_start(dq, heads, dq_b, dq_h, DQ)
    states += head * stride
    width = width_units * WIDTH_UNIT
    left, first, last = strip(height, pieces, tiles, ROWS, COLUMNS)
    if ROTARY:
        frequency = frequencies(D, P)
        c_cos, c_sin = turning(left + tl.arange(0, COLUMNS), frequency)
        r_cos, r_sin = turning(first * ROWS + tl.arange(0, ROWS), frequency)
        step_cos, step_sin = turning(tl.full((1,), ROWS, tl.int32), frequency)

    zero = tl.zeros((BLOCK_N // 16, 8, P // 4), tl.float32)
    if KEYS or QUERIES:
        r_kv, c_kv, factor = load_operands(states, D, P, DOT)
    re_k, ro_k, ce_k, co_k = vector_quarters(states + D * D, D, P)
    if GLOBAL:
        re_g, ro_g, ce_g, co_g = vector_quarters(dquery + head * D, D, P)
    if DOT == 'fp16':
        re_k, ro_k, ce_k, co_k = 2 * re_k, 2 * ro_k, 2 * ce_k, 2 * co_k
        if GLOBAL:
            re_g, ro_g, ce_g, co_g = 2 * re_g, 2 * ro_g, 2 * ce_g, 2 * co_g
    channels = tl.arange(0, P)[None, :]
    if MALA:
        v_mean = tl.load(states + (D + 1) * D + channels, mask=channels < D, other=0.0)
    if VALUES:  # transposed: (P, P / 2) each
        r_dkv, c_dkv = tl.zeros((P, P // 2), tl.float32), tl.zeros((P, P // 2), tl.float32)
        dv_mean = tl.zeros((BLOCK_N // 16, 8, P), tl.float32)
    if KEYS:
        re_sum, ro_sum, ce_sum, co_sum = zero, zero, zero, zero
    top = first * ROWS
    for tile in tl.range(first, last, num_stages=STAGES):
        ahead = tile * ROWS
        re, ro, ce, co = load_quarters(q, ahead, left, height, width, q_n, q_d, Q, D, P,
                                       ROWS, COLUMNS)
        grad = load_tile(g, ahead, left, height, width, g_n, g_d, G, D, P, ROWS, COLUMNS)
        if VALUES and P == BLOCK_N:
            like, other = pairs_of(r_dkv)
            re, ro = laid_out(re, like), laid_out(ro, like)
            ce, co = laid_out(ce, like), laid_out(co, like)
        elif KEYS or QUERIES:
            ure, uro = pairs_of(dot(grad, tl.trans(r_kv), DOT))
            uce, uco = pairs_of(dot(grad, tl.trans(c_kv), DOT))
            re, ro = laid_out(re, ure), laid_out(ro, uro)
            ce, co = laid_out(ce, uce), laid_out(co, uco)
        re, ro, ce, co = features(re, ro, ce, co, DOT)
        z = row_dot(re, ro, ce, co, re_k, ro_k, ce_k, co_k)
        inverse = reciprocal(z + eps)
        a = inverse
        if MALA:
            a += 1
            wide = grad.to(tl.float32)
            dz = -tl.sum(wide * v_mean, axis=1)
            if VALUES:  # grad is 0 beyond the last token, which keeps those out of every sum
                dv_mean -= fold(z[:, None] * wide)
        if ROTARY and EXACT:
            r_cos, r_sin = turning(top + tl.arange(0, ROWS), frequency)
        if VALUES:
            pre, pro, pce, pco = re * a[:, None], ro * a[:, None], ce * a[:, None], co * a[:, None]
            if ROTARY:
                pre, pro = turn_rows(pre, pro, r_cos, r_sin)
                pce, pco = turn_columns(pce, pco, c_cos, c_sin)
            grad_t = tl.trans(grad)
            if DOT == 'fp16':  # sums of a tile fit into its range, times a power of two
                scale, inverse_scale = fitting(
                    tl.maximum(tl.maximum(tl.abs(pre), tl.abs(pro)),
                               tl.maximum(tl.abs(pce), tl.abs(pco))))
                r_dkv += dot(grad_t, merge(pre * scale, pro * scale), DOT) * inverse_scale
                c_dkv += dot(grad_t, merge(pce * scale, pco * scale), DOT) * inverse_scale
            else:
                r_dkv = add_dot(r_dkv, grad_t, merge(pre, pro), DOT)
                c_dkv = add_dot(c_dkv, grad_t, merge(pce, pco), DOT)
        if KEYS or QUERIES:
            # R_i^T (g_i KV^T): the gradient of phi(q_i) in the numerator, but for its factor a_i
            if VALUES and P == BLOCK_N:
                ure, uro = pairs_of(dot(grad, tl.trans(r_kv), DOT))
                uce, uco = pairs_of(dot(grad, tl.trans(c_kv), DOT))
            if ROTARY:
                ure, uro = turn_rows(ure, uro, r_cos, r_sin, True)
                uce, uco = turn_columns(uce, uco, c_cos, c_sin, True)
            da = row_dot(re, ro, ce, co, ure, uro, uce, uco) * factor
            if MALA:
                dz -= (da * inverse) * inverse
            else:
                dz = -(da * inverse) * inverse
            dz_column = dz[:, None]
            if KEYS:
                re_sum += fold(dz_column * re)
                ro_sum += fold(dz_column * ro)
                ce_sum += fold(dz_column * ce)
                co_sum += fold(dz_column * co)
            if QUERIES:
                af = (a * factor)[:, None]
                ure = ure * af + dz_column * re_k
                uro = uro * af + dz_column * ro_k
                uce = uce * af + dz_column * ce_k
                uco = uco * af + dz_column * co_k
                if GLOBAL:
                    ure += re_g
                    uro += ro_g
                    uce += ce_g
                    uco += co_g
                store_half(dq, ure * slope(re, DOT), uro * slope(ro, DOT), top, left, height, width,
                           dq_n, dq_d, DQ, D, P, ROWS, COLUMNS, 0)
                store_half(dq, uce * slope(ce, DOT), uco * slope(co, DOT), top, left, height, width,
                           dq_n, dq_d, DQ, D, P, ROWS, COLUMNS, 1)
        if ROTARY and not EXACT:
            r_cos, r_sin = turn(r_cos, r_sin, step_cos, step_sin)
        top += ROWS

    part += (head * tl.num_programs(1) + tl.program_id(1)) * ((D + 2) * D)
    if VALUES:
        if DOT == 'fp16':
            r_dkv *= 2
            c_dkv *= 2
        store_matrix(part, tl.trans(r_dkv), D, P, 0)
        store_matrix(part, tl.trans(c_dkv), D, P, 1)
        channels = tl.arange(0, P)
        tl.store(part + (D + 1) * D + channels, unfold(dv_mean), mask=channels < D)
    if KEYS:
        if DOT == 'fp16':
            re_sum *= 2
            ro_sum *= 2
            ce_sum *= 2
            co_sum *= 2
        store_folded(part + D * D, re_sum, ro_sum, ce_sum, co_sum, D, P)


@jit
def backward_keys(
    k, k_b, k_h, k_n, k_d, v, v_b, v_h, v_n, v_d, dk, dk_b, dk_h, dk_n, dk_d,
    dv, dv_b, dv_h, dv_n, dv_d,
    states, dstates, part, scale, heads, height, width_units, pieces, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH_UNIT: tl.constexpr, STAGES: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    ROTARY: tl.constexpr, MALA: tl.constexpr, WEIGHTED: tl.constexpr, DOT: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):
    """The keys' side: ``dk`` (KEYS), with WEIGHTED the chunk's share of the global query's
    gradient too, and ``dv`` (VALUES).
    """
    BLOCK_N: tl.constexpr = ROWS * COLUMNS
    HALVED: tl.constexpr = DOT == 'fp16'
    EXACT: tl.constexpr = DOT == 'bf16x3' or DOT == 'bf16x6'
    head = tl.program_id(0).to(tl.int64)
    k = head_start(k, heads, k_b, k_h, K)
    v = head_start(v, heads, v_b, v_h, V)
    dk = head_start(dk, heads, dk_b, dk_h, DK)
    dv = head_start(dv, heads, dv_b, dv_h, DV)
    states += head * stride
    dstates += head * ((D + 2) * D)
    width = width_units * WIDTH_UNIT
    left, first, last = strip(height, pieces, tiles, ROWS, COLUMNS)
    if ROTARY:
        frequency = frequencies(D, P)
        c_cos, c_sin = turning(left + tl.arange(0, COLUMNS), frequency)
        r_cos, r_sin = turning(first * ROWS + tl.arange(0, ROWS), frequency)
        step_cos, step_sin = turning(tl.full((1,), ROWS, tl.int32), frequency)

    r_dkv, c_dkv, factor = load_operands(dstates, D, P, DOT)
    re_dk, ro_dk, ce_dk, co_dk = vector_quarters(dstates + D * D, D, P)
    if MALA:
        channels = tl.arange(0, P)[None, :]
        dv_mean = tl.load(dstates + (D + 1) * D + channels, mask=channels < D, other=0.0)
    if WEIGHTED:
        re_g, ro_g, ce_g, co_g = vector_quarters(states + (D + 2) * D, D, P)
        re_g, ro_g, ce_g, co_g = re_g * scale, ro_g * scale, ce_g * scale, co_g * scale
        highest = tl.load(states + (D + 3) * D)
        share = 1 / tl.load(states + (D + 3) * D + 1)
        if KEYS:
            # sum_j p_j r_j of the softmax' gradient, without a pass over the tokens
            upper = load_matrix(dstates, D, P, 0) * load_matrix(states, D, P, 0)
            lower = load_matrix(dstates, D, P, 1) * load_matrix(states, D, P, 1)
            mean = tl.sum(tl.sum(upper + lower, axis=1), axis=0)
            re_s, ro_s, ce_s, co_s = vector_quarters(states + D * D, D, P)
            mean += tl.sum(row_dot(re_s, ro_s, ce_s, co_s, re_dk, ro_dk, ce_dk, co_dk), axis=0)
            zero = tl.zeros((BLOCK_N, P // 4), tl.float32)
            re_sum, ro_sum, ce_sum, co_sum = zero, zero, zero, zero
    if HALVED:
        re_dk, ro_dk, ce_dk, co_dk = 2 * re_dk, 2 * ro_dk, 2 * ce_dk, 2 * co_dk
        if WEIGHTED:
            re_g, ro_g, ce_g, co_g = 2 * re_g, 2 * ro_g, 2 * ce_g, 2 * co_g
    top = first * ROWS
    for tile in tl.range(first, last, num_stages=STAGES):
        ahead = tile * ROWS
        re, ro, ce, co = load_quarters(k, ahead, left, height, width, k_n, k_d, K, D, P,
                                       ROWS, COLUMNS)
        if KEYS:
            values = load_tile(v, ahead, left, height, width, v_n, v_d, V, D, P, ROWS, COLUMNS)
            ure, uro = pairs_of(dot(values, tl.trans(r_dkv), DOT))
            uce, uco = pairs_of(dot(values, tl.trans(c_dkv), DOT))
            re, ro = laid_out(re, ure), laid_out(ro, uro)
            ce, co = laid_out(ce, uce), laid_out(co, uco)
        re, ro, ce, co = features(re, ro, ce, co, DOT)
        if ROTARY and EXACT:
            r_cos, r_sin = turning(top + tl.arange(0, ROWS), frequency)
        if WEIGHTED:
            logit = row_dot(re, ro, ce, co, re_g, ro_g, ce_g, co_g)
            valid = patch(top, left, height, width, ROWS, COLUMNS)
            weight = tl.where(valid, exp(logit - highest) * share, 0.0)
        if VALUES:
            tre, tro, tce, tco = re, ro, ce, co
            if ROTARY:
                tre, tro = turn_rows(re, ro, r_cos, r_sin)
                tce, tco = turn_columns(ce, co, c_cos, c_sin)
            grad_v = add_dot(dot(merge(tre, tro), r_dkv, DOT), merge(tce, tco), c_dkv, DOT)
            if WEIGHTED:
                grad_v *= (weight * factor)[:, None]
            elif HALVED:
                grad_v *= factor
            if MALA:
                grad_v += dv_mean
            store_tile(dv, grad_v, top, left, height, width, dv_n, dv_d, DV, D, P, ROWS, COLUMNS)
        if KEYS:
            if ROTARY:
                ure, uro = turn_rows(ure, uro, r_cos, r_sin, True)
                uce, uco = turn_columns(uce, uco, c_cos, c_sin, True)
            ure = ure * factor + re_dk
            uro = uro * factor + ro_dk
            uce = uce * factor + ce_dk
            uco = uco * factor + co_dk
            if WEIGHTED:
                # r_j, what the loss gains from a higher weight of this key
                gain = row_dot(re, ro, ce, co, ure, uro, uce, uco)
                dlogit = (weight * (gain - mean))[:, None]
                weight = weight[:, None]
                ure = ure * weight + dlogit * re_g
                uro = uro * weight + dlogit * ro_g
                uce = uce * weight + dlogit * ce_g
                uco = uco * weight + dlogit * co_g
                re_sum += dlogit * re
                ro_sum += dlogit * ro
                ce_sum += dlogit * ce
                co_sum += dlogit * co
            store_half(dk, ure * slope(re, DOT), uro * slope(ro, DOT), top, left, height, width,
                       dk_n, dk_d, DK, D, P, ROWS, COLUMNS, 0)
            store_half(dk, uce * slope(ce, DOT), uco * slope(co, DOT), top, left, height, width,
                       dk_n, dk_d, DK, D, P, ROWS, COLUMNS, 1)
        if ROTARY and not EXACT:
            r_cos, r_sin = turn(r_cos, r_sin, step_cos, step_sin)
        top += ROWS
    if WEIGHTED and KEYS:
        part += (head * tl.num_programs(1) + tl.program_id(1)) * D
        if HALVED:
            re_sum, ro_sum, ce_sum, co_sum = 2 * re_sum, 2 * ro_sum, 2 * ce_sum, 2 * co_sum
        store_sums(part, re_sum, ro_sum, ce_sum, co_sum, D, P)
