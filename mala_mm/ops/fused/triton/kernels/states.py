"""Vectors and matrices of a head: the states, their gradients and the chunks' shares of both.

``DOT == 'fp16'`` halves the features (``feature_map``): what multiplies features is loaded twice
as large, and sums of features are stored so.
"""

import triton
import triton.language as tl

from .arithmetic import fitting, operand, unfold

# fmt: off
# (signatures stay one group of arguments a line)


@triton.jit
def load_vector(x, D: tl.constexpr, P: tl.constexpr):
    """A vector of D float32 as four of (1, P / 4), zero beyond."""
    pair = tl.arange(0, P // 4)[None, :]
    mask = pair < D // 4
    re = tl.load(x + 2 * pair, mask=mask, other=0.0)
    ro = tl.load(x + 2 * pair + 1, mask=mask, other=0.0)
    ce = tl.load(x + D // 2 + 2 * pair, mask=mask, other=0.0)
    co = tl.load(x + D // 2 + 2 * pair + 1, mask=mask, other=0.0)
    return re, ro, ce, co


@triton.jit
def load_factor(x, D: tl.constexpr, P: tl.constexpr, DOT: tl.constexpr):
    """``load_vector`` of what multiplies features."""
    re, ro, ce, co = load_vector(x, D, P)
    if DOT == 'fp16':
        return 2 * re, 2 * ro, 2 * ce, 2 * co
    else:
        return re, ro, ce, co


@triton.jit
def load_row(x, D: tl.constexpr, P: tl.constexpr):
    """A vector of D float32 as (1, P), zero beyond."""
    channels = tl.arange(0, P)[None, :]
    return tl.load(x + channels, mask=channels < D, other=0.0)


@triton.jit
def sum_rows(x):
    """The sum over the tokens of a tile, or of what ``fold`` left of them."""
    if len(x.shape) == 3:
        return unfold(x)
    else:
        return tl.sum(x, axis=0)


@triton.jit
def store_sums(x, re, ro, ce, co, D: tl.constexpr, P: tl.constexpr, DOT: tl.constexpr):
    """Store the sums over tokens of features as a vector of D float32."""
    factor: tl.constexpr = 2.0 if DOT == 'fp16' else 1.0
    pair = tl.arange(0, P // 4)
    mask = pair < D // 4
    tl.store(x + 2 * pair, sum_rows(re) * factor, mask=mask)
    tl.store(x + 2 * pair + 1, sum_rows(ro) * factor, mask=mask)
    tl.store(x + D // 2 + 2 * pair, sum_rows(ce) * factor, mask=mask)
    tl.store(x + D // 2 + 2 * pair + 1, sum_rows(co) * factor, mask=mask)


@triton.jit
def matrix_places(x, D: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr):
    """Pointers and mask, (P / 2, P), of half the rows of a (D, D) matrix."""
    row = tl.arange(0, P // 2)[:, None]
    column = tl.arange(0, P)[None, :]
    return x + (HALF * (D // 2) + row) * D + column, (row < D // 2) & (column < D)


@triton.jit
def load_matrix(x, D: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr):
    """Half the rows of a (D, D) matrix, (P / 2, P), zero beyond."""
    place, mask = matrix_places(x, D, P, HALF)
    return tl.load(place, mask=mask, other=0.0)


@triton.jit
def load_operands(x, D: tl.constexpr, P: tl.constexpr, DOT: tl.constexpr):
    """Both halves of a (D, D) matrix as operands of dots with features, and what these are of it.

    fp16, whose range is small, takes them times a power of two.
    """
    upper, lower = load_matrix(x, D, P, 0), load_matrix(x, D, P, 1)
    factor = 1.0
    if DOT == 'fp16':
        largest = tl.max(tl.max(tl.maximum(tl.abs(upper), tl.abs(lower)), axis=1), axis=0)
        scale, inverse = fitting(largest)
        upper *= scale
        lower *= scale
        factor = 2 * inverse
    return operand(upper, DOT), operand(lower, DOT), factor


@triton.jit
def store_products(x, upper_t, lower_t, D: tl.constexpr, P: tl.constexpr, DOT: tl.constexpr):
    """Store the sum over tokens of features times values, from its transposed halves (P, P / 2)."""
    factor: tl.constexpr = 2.0 if DOT == 'fp16' else 1.0
    place, mask = matrix_places(x, D, P, 0)
    tl.store(place, tl.trans(upper_t) * factor, mask=mask)
    place, mask = matrix_places(x, D, P, 1)
    tl.store(place, tl.trans(lower_t) * factor, mask=mask)
