"""The forward: sums over the keys, and what they give each query."""

import triton
import triton.language as tl

from .arithmetic import (
    add_columns,
    add_dot,
    columns_of,
    dot,
    exp,
    features,
    merge,
    no_columns,
    reciprocal,
    row_dot,
)
from .rotation import angles, below, turn_tile
from .states import load_factor, load_operands, load_row, store_products, store_sums
from .tiles import head_start, jit, load_quarters, load_tile, patch, store_tile, strip

# fmt: off
# (signatures stay one group of arguments a line)


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
    for tile in tl.range(first, last, num_stages=STAGES):
        top = tile * ROWS
        re, ro, ce, co = load_quarters(q, top, left, height, width, q_n, q_d, Q, D, P,
                                       ROWS, COLUMNS)
        re, ro, ce, co = features(re, ro, ce, co, DOT)
        here = tl.where(patch(top, left, height, width, ROWS, COLUMNS), 1.0, 0.0)[:, None]
        re_sum += re * here
        ro_sum += ro * here
        ce_sum += ce * here
        co_sum += co * here
    part += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * D
    store_sums(part, re_sum, ro_sum, ce_sum, co_sum, D, P, DOT)


@jit
def reduce_keys(
    k, k_b, k_h, k_n, k_d, v, v_b, v_h, v_n, v_d,
    part, peak, query, scale, heads, height, width_units, pieces, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH_UNIT: tl.constexpr, STAGES: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ROTARY: tl.constexpr, WEIGHTED: tl.constexpr, DOT: tl.constexpr,
):
    """``sum w_j (R_j phi(k_j))^T v_j``, ``sum w_j phi(k_j)`` and ``sum v_j`` over one chunk.

    ``w`` is 1, or with WEIGHTED ``exp(scale * query . phi(k_j) - m)`` with the chunk's own maximum
    m; then ``m`` and ``sum w_j`` go to ``peak``.
    """
    BLOCK_N: tl.constexpr = ROWS * COLUMNS
    k = head_start(k, heads, k_b, k_h, K)
    v = head_start(v, heads, v_b, v_h, V)
    width = width_units * WIDTH_UNIT
    left, first, last = strip(height, pieces, tiles, ROWS, COLUMNS)
    frequency, step_cos, step_sin, r_cos, r_sin, c_cos, c_sin = angles(
        left, first, D, P, ROWS, COLUMNS, ROTARY)

    # transposed: (P, P / 2) each
    r_kv, c_kv = tl.zeros((P, P // 2), tl.float32), tl.zeros((P, P // 2), tl.float32)
    zero = tl.zeros((BLOCK_N, P // 4), tl.float32)
    re_sum, ro_sum, ce_sum, co_sum = zero, zero, zero, zero
    v_sum, one = no_columns(BLOCK_N, P, DOT), tl.full((BLOCK_N,), 1.0, tl.float32)
    if WEIGHTED:
        re_g, ro_g, ce_g, co_g = load_factor(
            query + tl.program_id(0).to(tl.int64) * stride, D, P, DOT)
        # as in backward_keys, to the bit: what is rounded differently there is in all weights alike
        re_g, ro_g, ce_g, co_g = re_g * scale, ro_g * scale, ce_g * scale, co_g * scale
        highest, weights = float('-inf'), tl.zeros((BLOCK_N,), tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        top = tile * ROWS
        re, ro, ce, co = load_quarters(k, top, left, height, width, k_n, k_d, K, D, P,
                                       ROWS, COLUMNS)
        values = load_tile(v, top, left, height, width, v_n, v_d, V, D, P, ROWS, COLUMNS)
        valid = patch(top, left, height, width, ROWS, COLUMNS)
        re, ro, ce, co = features(re, ro, ce, co, DOT)
        if WEIGHTED:
            logit = row_dot(re, ro, ce, co, re_g, ro_g, ce_g, co_g)
            logit = tl.where(valid, logit, float('-inf'))
            # A NaN that the maximum overlooks is still in its own weight, and so in every sum.
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
        re, ro, ce, co = turn_tile(re, ro, ce, co, r_cos, r_sin, c_cos, c_sin, ROTARY)
        r_cos, r_sin = below(r_cos, r_sin, top, frequency, step_cos, step_sin, ROWS, ROTARY, DOT)
        values_t = tl.trans(values)
        r_kv = add_dot(r_kv, values_t, merge(re, ro), DOT)
        c_kv = add_dot(c_kv, values_t, merge(ce, co), DOT)
        v_sum = add_columns(v_sum, values, one, DOT)

    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    part += program * ((D + 2) * D)
    store_products(part, r_kv, c_kv, D, P, DOT)
    store_sums(part + D * D, re_sum, ro_sum, ce_sum, co_sum, D, P, DOT)
    channels = tl.arange(0, P)
    tl.store(part + (D + 1) * D + channels, columns_of(v_sum, DOT), mask=channels < D)
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
        # next to RALA's query, the row after these: see mala_mm.ops.fused.library.state_rows
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
    re, ro, ce, co = turn_tile(re, ro, ce, co, r_cos, r_sin, c_cos, c_sin, ROTARY)
    out = add_dot(dot(merge(re, ro), r_kv, DOT), merge(ce, co), c_kv, DOT)
    out *= (a * factor)[:, None]
    if MALA:
        out -= z[:, None] * v_mean
    return out


@jit
def apply_queries(
    q, q_b, q_h, q_n, q_d, lepe, lepe_b, lepe_h, lepe_n, lepe_d, o, o_b, o_h, o_n, o_d,
    y, y_b, y_h, y_n, y_d, states, eps, heads, height, width_units, pieces, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH_UNIT: tl.constexpr, STAGES: tl.constexpr,
    Q: tl.constexpr, LEPE: tl.constexpr, O: tl.constexpr, Y: tl.constexpr,
    ROTARY: tl.constexpr, MALA: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr,
):
    """``y_i = a_i (R_i phi(q_i)) KV - b_i vbar``; with GATED ``(y_i + lepe_i) * o_i``."""
    q = head_start(q, heads, q_b, q_h, Q)
    y = head_start(y, heads, y_b, y_h, Y)
    if GATED:
        lepe = head_start(lepe, heads, lepe_b, lepe_h, LEPE)
        o = head_start(o, heads, o_b, o_h, O)
    states += tl.program_id(0).to(tl.int64) * stride
    width = width_units * WIDTH_UNIT
    left, first, last = strip(height, pieces, tiles, ROWS, COLUMNS)
    frequency, step_cos, step_sin, r_cos, r_sin, c_cos, c_sin = angles(
        left, first, D, P, ROWS, COLUMNS, ROTARY)

    r_kv, c_kv, factor = load_operands(states, D, P, DOT)
    re_k, ro_k, ce_k, co_k = load_factor(states + D * D, D, P, DOT)
    v_mean = load_row(states + (D + 1) * D, D, P)
    for tile in tl.range(first, last, num_stages=STAGES):
        top = tile * ROWS
        re, ro, ce, co = load_quarters(q, top, left, height, width, q_n, q_d, Q, D, P,
                                       ROWS, COLUMNS)
        if GATED:
            local = load_tile(lepe, top, left, height, width, lepe_n, lepe_d, LEPE, D, P,
                              ROWS, COLUMNS)
            gate = load_tile(o, top, left, height, width, o_n, o_d, O, D, P, ROWS, COLUMNS)
        re, ro, ce, co = features(re, ro, ce, co, DOT)
        out = attend(re, ro, ce, co, re_k, ro_k, ce_k, co_k, v_mean, r_kv, c_kv, factor, eps,
                     r_cos, r_sin, c_cos, c_sin, ROTARY, MALA, DOT)
        r_cos, r_sin = below(r_cos, r_sin, top, frequency, step_cos, step_sin, ROWS, ROTARY, DOT)
        if GATED:
            out = (out + local.to(tl.float32)) * gate.to(tl.float32)
        store_tile(y, out, top, left, height, width, y_n, y_d, Y, D, P, ROWS, COLUMNS)
