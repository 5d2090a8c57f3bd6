"""The backward of the attention: the queries' side, then the keys'."""

import triton.language as tl

from .arithmetic import (
    add_columns,
    add_dot,
    columns_of,
    dot,
    exp,
    features,
    fitting,
    fold,
    laid_out,
    merge,
    no_columns,
    pairs_of,
    reciprocal,
    row_dot,
    slope,
)
from .rotation import angles, below, turn_tile
from .states import (
    load_factor,
    load_matrix,
    load_operands,
    load_row,
    load_vector,
    store_products,
    store_sums,
)
from .tiles import (
    head_start,
    jit,
    load_quarters,
    load_tile,
    patch,
    store_quarters,
    store_tile,
    strip,
)

# fmt: off
# (signatures stay one group of arguments a line)


@jit
def backward_queries(
    q, q_b, q_h, q_n, q_d, dy, dy_b, dy_h, dy_n, dy_d, dq, dq_b, dq_h, dq_n, dq_d,
    states, part, dquery, eps, heads, height, width_units, pieces, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH_UNIT: tl.constexpr, STAGES: tl.constexpr,
    Q: tl.constexpr, DY: tl.constexpr, DQ: tl.constexpr,
    ROTARY: tl.constexpr, MALA: tl.constexpr, DOT: tl.constexpr,
    VALUES: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, GLOBAL: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    """The queries' side, from the gradient ``dy``.

    The chunk's share of dKV and dvbar (VALUES), of dkbar (KEYS), and ``dq`` (QUERIES). With GLOBAL
    every ``phi(q_i)`` also has the gradient ``dquery``, RALA's global query's.
    """
    BLOCK_N: tl.constexpr = ROWS * COLUMNS
    head = tl.program_id(0).to(tl.int64)
    q = head_start(q, heads, q_b, q_h, Q)
    dy = head_start(dy, heads, dy_b, dy_h, DY)
    if QUERIES:
        dq = head_start(dq, heads, dq_b, dq_h, DQ)
    states += head * stride
    width = width_units * WIDTH_UNIT
    left, first, last = strip(height, pieces, tiles, ROWS, COLUMNS)
    frequency, step_cos, step_sin, r_cos, r_sin, c_cos, c_sin = angles(
        left, first, D, P, ROWS, COLUMNS, ROTARY)

    if KEYS or QUERIES:
        r_kv, c_kv, factor = load_operands(states, D, P, DOT)
    re_k, ro_k, ce_k, co_k = load_factor(states + D * D, D, P, DOT)
    if GLOBAL:
        re_g, ro_g, ce_g, co_g = load_factor(dquery + head * D, D, P, DOT)
    if MALA:
        v_mean = load_row(states + (D + 1) * D, D, P)
    if VALUES:  # transposed: (P, P / 2) each
        r_dkv, c_dkv = tl.zeros((P, P // 2), tl.float32), tl.zeros((P, P // 2), tl.float32)
        dv_mean = no_columns(BLOCK_N, P, DOT)
    if KEYS:
        zero = tl.zeros((BLOCK_N // 16, 8, P // 4), tl.float32)
        re_sum, ro_sum, ce_sum, co_sum = zero, zero, zero, zero
    for tile in tl.range(first, last, num_stages=STAGES):
        top = tile * ROWS
        re, ro, ce, co = load_quarters(q, top, left, height, width, q_n, q_d, Q, D, P,
                                       ROWS, COLUMNS)
        grad = load_tile(dy, top, left, height, width, dy_n, dy_d, DY, D, P, ROWS, COLUMNS)
        if KEYS or QUERIES:
            # R_i^T (dy_i KV^T): the gradient of phi(q_i) in the numerator, but for its factor a_i
            ure, uro = pairs_of(dot(grad, tl.trans(r_kv), DOT))
            uce, uco = pairs_of(dot(grad, tl.trans(c_kv), DOT))
            if FOLLOW:
                re, ro = laid_out(re, ure), laid_out(ro, uro)
                ce, co = laid_out(ce, uce), laid_out(co, uco)
        re, ro, ce, co = features(re, ro, ce, co, DOT)
        z = row_dot(re, ro, ce, co, re_k, ro_k, ce_k, co_k)
        inverse = reciprocal(z + eps)
        a = inverse
        if MALA:
            a += 1
            dz = -tl.sum(grad.to(tl.float32) * v_mean, axis=1)
        if VALUES:  # dy is 0 beyond the last token, which keeps those out of every sum
            if DOT == 'fp16':  # what is summed in a tile fits into its range, times a power of two
                largest = tl.max(tl.maximum(tl.maximum(re, ro), tl.maximum(ce, co)), axis=1) * a
                if MALA:
                    largest = tl.maximum(largest, z)
                scale, undo = fitting(tl.max(largest, axis=0))
                pa = (a * scale)[:, None]
                if MALA:
                    share = no_columns(BLOCK_N, P, DOT)
                    dv_mean += add_columns(share, grad, z * scale, DOT) * undo
            else:
                pa = a[:, None]
                if MALA:
                    dv_mean = add_columns(dv_mean, grad, z, DOT)
            pre, pro, pce, pco = turn_tile(re * pa, ro * pa, ce * pa, co * pa,
                                           r_cos, r_sin, c_cos, c_sin, ROTARY)
            grad_t = tl.trans(grad)
            if DOT == 'fp16':
                r_dkv += dot(grad_t, merge(pre, pro), DOT) * undo
                c_dkv += dot(grad_t, merge(pce, pco), DOT) * undo
            else:
                r_dkv = add_dot(r_dkv, grad_t, merge(pre, pro), DOT)
                c_dkv = add_dot(c_dkv, grad_t, merge(pce, pco), DOT)
        if KEYS or QUERIES:
            ure, uro, uce, uco = turn_tile(ure, uro, uce, uco, r_cos, r_sin, c_cos, c_sin, ROTARY,
                                           True)
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
                store_quarters(dq, ure * slope(re, DOT), uro * slope(ro, DOT),
                               uce * slope(ce, DOT), uco * slope(co, DOT), top, left, height,
                               width, dq_n, dq_d, DQ, D, P, ROWS, COLUMNS)
        r_cos, r_sin = below(r_cos, r_sin, top, frequency, step_cos, step_sin, ROWS, ROTARY, DOT)

    part += (head * tl.num_programs(1) + tl.program_id(1)) * ((D + 2) * D)
    if VALUES:
        store_products(part, r_dkv, c_dkv, D, P, DOT)
        channels = tl.arange(0, P)
        tl.store(part + (D + 1) * D + channels, -columns_of(dv_mean, DOT), mask=channels < D)
    if KEYS:
        store_sums(part + D * D, re_sum, ro_sum, ce_sum, co_sum, D, P, DOT)


@jit
def backward_keys(
    k, k_b, k_h, k_n, k_d, v, v_b, v_h, v_n, v_d, dk, dk_b, dk_h, dk_n, dk_d,
    dv, dv_b, dv_h, dv_n, dv_d,
    states, dstates, part, scale, heads, height, width_units, pieces, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH_UNIT: tl.constexpr, STAGES: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    ROTARY: tl.constexpr, MALA: tl.constexpr, WEIGHTED: tl.constexpr, DOT: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, FOLLOW: tl.constexpr,
):
    """The keys' side: ``dk`` (KEYS) and ``dv`` (VALUES).

    With WEIGHTED and KEYS the chunk's share of the global query's gradient too.
    """
    BLOCK_N: tl.constexpr = ROWS * COLUMNS
    head = tl.program_id(0).to(tl.int64)
    k = head_start(k, heads, k_b, k_h, K)
    v = head_start(v, heads, v_b, v_h, V)
    dk = head_start(dk, heads, dk_b, dk_h, DK)
    dv = head_start(dv, heads, dv_b, dv_h, DV)
    states += head * stride
    dstates += head * ((D + 2) * D)
    width = width_units * WIDTH_UNIT
    left, first, last = strip(height, pieces, tiles, ROWS, COLUMNS)
    frequency, step_cos, step_sin, r_cos, r_sin, c_cos, c_sin = angles(
        left, first, D, P, ROWS, COLUMNS, ROTARY)

    r_dkv, c_dkv, factor = load_operands(dstates, D, P, DOT)
    re_dk, ro_dk, ce_dk, co_dk = load_factor(dstates + D * D, D, P, DOT)
    if MALA:
        dv_mean = load_row(dstates + (D + 1) * D, D, P)
    if WEIGHTED:
        re_g, ro_g, ce_g, co_g = load_factor(states + (D + 2) * D, D, P, DOT)
        re_g, ro_g, ce_g, co_g = re_g * scale, ro_g * scale, ce_g * scale, co_g * scale
        highest = tl.load(states + (D + 3) * D)
        share = 1 / tl.load(states + (D + 3) * D + 1)
        if KEYS:
            # sum_j p_j r_j of the softmax' gradient, without a pass over the tokens
            upper = load_matrix(dstates, D, P, 0) * load_matrix(states, D, P, 0)
            lower = load_matrix(dstates, D, P, 1) * load_matrix(states, D, P, 1)
            mean = tl.sum(tl.sum(upper + lower, axis=1), axis=0)
            re_s, ro_s, ce_s, co_s = load_vector(states + D * D, D, P)
            re_d, ro_d, ce_d, co_d = load_vector(dstates + D * D, D, P)
            mean += tl.sum(row_dot(re_s, ro_s, ce_s, co_s, re_d, ro_d, ce_d, co_d), axis=0)
            zero = tl.zeros((BLOCK_N, P // 4), tl.float32)
            re_sum, ro_sum, ce_sum, co_sum = zero, zero, zero, zero
    for tile in tl.range(first, last, num_stages=STAGES):
        top = tile * ROWS
        re, ro, ce, co = load_quarters(k, top, left, height, width, k_n, k_d, K, D, P,
                                       ROWS, COLUMNS)
        if KEYS:
            values = load_tile(v, top, left, height, width, v_n, v_d, V, D, P, ROWS, COLUMNS)
            ure, uro = pairs_of(dot(values, tl.trans(r_dkv), DOT))
            uce, uco = pairs_of(dot(values, tl.trans(c_dkv), DOT))
            if FOLLOW:
                re, ro = laid_out(re, ure), laid_out(ro, uro)
                ce, co = laid_out(ce, uce), laid_out(co, uco)
        re, ro, ce, co = features(re, ro, ce, co, DOT)
        if WEIGHTED:
            logit = row_dot(re, ro, ce, co, re_g, ro_g, ce_g, co_g)
            valid = patch(top, left, height, width, ROWS, COLUMNS)
            weight = tl.where(valid, exp(logit - highest) * share, 0.0)
        if VALUES:
            tre, tro, tce, tco = turn_tile(re, ro, ce, co, r_cos, r_sin, c_cos, c_sin, ROTARY)
            grad_v = add_dot(dot(merge(tre, tro), r_dkv, DOT), merge(tce, tco), c_dkv, DOT)
            if WEIGHTED:
                grad_v *= (weight * factor)[:, None]
            elif DOT == 'fp16':
                grad_v *= factor
            if MALA:
                grad_v += dv_mean
            store_tile(dv, grad_v, top, left, height, width, dv_n, dv_d, DV, D, P, ROWS, COLUMNS)
        if KEYS:
            ure, uro, uce, uco = turn_tile(ure, uro, uce, uco, r_cos, r_sin, c_cos, c_sin, ROTARY,
                                           True)
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
            store_quarters(dk, ure * slope(re, DOT), uro * slope(ro, DOT), uce * slope(ce, DOT),
                           uco * slope(co, DOT), top, left, height, width, dk_n, dk_d, DK, D, P,
                           ROWS, COLUMNS)
        r_cos, r_sin = below(r_cos, r_sin, top, frequency, step_cos, step_sin, ROWS, ROTARY, DOT)
    if WEIGHTED and KEYS:
        part += (head * tl.num_programs(1) + tl.program_id(1)) * D
        store_sums(part, re_sum, ro_sum, ce_sum, co_sum, D, P, DOT)
