"""The rotary embedding: angles from positions, and tiles turned by them."""

import triton
import triton.language as tl

# fmt: off
# (signatures stay one group of arguments a line)


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
def angles(left, first, D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
           COLUMNS: tl.constexpr, ROTARY: tl.constexpr):
    """What a strip needs to turn its tiles.

    Returns the pairs' frequencies, cosines and sines of a step of ROWS rows (1, P / 4), of the rows
    of the first tile (ROWS, P / 4) and of the columns (COLUMNS, P / 4); nothing without ROTARY.
    """
    if ROTARY:
        frequency = frequencies(D, P)
        step_cos, step_sin = turning(tl.full((1,), ROWS, tl.int32), frequency)
        r_cos, r_sin = turning(first * ROWS + tl.arange(0, ROWS), frequency)
        c_cos, c_sin = turning(left + tl.arange(0, COLUMNS), frequency)
        return frequency, step_cos, step_sin, r_cos, r_sin, c_cos, c_sin
    else:
        return 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0


@triton.jit
def below(r_cos, r_sin, top, frequency, step_cos, step_sin, ROWS: tl.constexpr,
          ROTARY: tl.constexpr, DOT: tl.constexpr):
    """Cosines and sines of the rows of the next tile, below that at ``top``.

    In half types they follow by one rotation; in float32, whose accuracy that would cost, anew.
    """
    if ROTARY:
        if DOT == 'fp16' or DOT == 'bf16':
            return turn(r_cos, r_sin, step_cos, step_sin)
        else:
            return turning(top + ROWS + tl.arange(0, ROWS), frequency)
    else:
        return r_cos, r_sin


@triton.jit
def turn_tile(re, ro, ce, co, r_cos, r_sin, c_cos, c_sin, ROTARY: tl.constexpr,
              BACK: tl.constexpr = False):
    """``R``, or BACK, its transpose, of the four tiles of a tile."""
    if ROTARY:
        re, ro = turn_rows(re, ro, r_cos, r_sin, BACK)
        ce, co = turn_columns(ce, co, c_cos, c_sin, BACK)
    return re, ro, ce, co
