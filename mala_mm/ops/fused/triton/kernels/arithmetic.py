"""What happens to the numbers of a tile: feature map, dots, sums."""

import os

import triton
import triton.language as tl

# fmt: off
# (signatures stay one group of arguments a line)

# Triton's interpreter knows no PTX, and cuts off the bits that bfloat16 has not, where a device
# rounds to nearest.
INTERPRETED = tl.constexpr(os.environ.get('TRITON_INTERPRET') == '1')


@triton.jit
def cast(x, dtype: tl.constexpr):
    """To the nearest number of ``dtype``."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def pairs_of(x):
    """Even and odd channels of a tile."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def merge(even, odd):
    """Interleave two tiles to one of twice the channels."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


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
    """``x`` in the registers in which ``like`` lies.

    It costs nothing: the compiler, which would hold what came from memory and what came from a dot
    differently, sees an operation on both.
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
    one: tl.constexpr = 0.5 if DOT == 'fp16' else 1.0
    return tl.minimum(feature, one, propagate_nan=tl.PropagateNan.ALL)


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
    """Sums of those rows of a tile that a thread holds, (BLOCK_N / 16, 8, channels).

    In tiles laid out like a dot's result these are 8 apart. It takes half the registers of the tile
    to keep such sums, which are summed once after the loop.
    """
    return tl.sum(tl.reshape(x, (x.shape[0] // 16, 2, 8, x.shape[1])), axis=1)


@triton.jit
def unfold(x):
    """The sum of what ``fold`` left."""
    return tl.sum(tl.reshape(x, (x.shape[0] * 8, x.shape[2])), axis=0)


@triton.jit
def no_columns(BLOCK_N: tl.constexpr, P: tl.constexpr, DOT: tl.constexpr):
    """What ``add_columns`` starts from."""
    if DOT == 'fp16' or DOT == 'bf16':
        return tl.zeros((P, 16), tl.float32)
    else:
        return tl.zeros((BLOCK_N, P), tl.float32)


@triton.jit
def add_columns(total, x, weight, DOT: tl.constexpr):
    """Add the sum over tokens of ``weight_i x_i``.

    By the tensor cores, whose smallest dot has 16 columns, all alike: ``x`` never enters a register
    for it. In float32 the rows stay apart until ``columns_of``.
    """
    if DOT == 'fp16' or DOT == 'bf16':
        weights = tl.broadcast_to(weight[:, None], (x.shape[0], 16))
        return add_dot(total, tl.trans(x), weights, DOT)
    else:
        return total + x * weight[:, None]


@triton.jit
def columns_of(total, DOT: tl.constexpr):
    """The sum (P,) that ``add_columns`` made."""
    if DOT == 'fp16' or DOT == 'bf16':
        return tl.sum(total, axis=1) * 0.0625
    else:
        return tl.sum(total, axis=0)


@triton.jit
def row_dot(re, ro, ce, co, re2, ro2, ce2, co2):
    """Product of each row of a tile with a row, or with a vector."""
    return tl.sum(re * re2 + ro * ro2 + ce * ce2 + co * co2, axis=1)


@triton.jit
def fitting(largest):
    """The power of two that brings a number near the end of fp16's range, and its inverse."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 14), 253)
    scale = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, ((exponent - 13) << 23).to(tl.float32, bitcast=True)
