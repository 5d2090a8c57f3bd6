"""The Triton kernels. ``mala_mm/ops/README.md`` derives every line.

Conventions, in all kernels:

- A tile is BLOCK_N tokens by P channels, P being the head width D rounded up to a power of two.
- Channels that the rotary embedding pairs are held as two tiles, even and odd, (BLOCK_N, P / 2).
- Everything between a load and a store is float32, but for the operands of a dot (``operand``).
- A tensor comes as a pointer, four strides and a layout code ``32 * wide + 8 * order +
  log2(unit)``: order 0 has adjacent channels, 1 adjacent tokens, 2 neither. Strides (but that of 1)
  are in multiples of ``unit`` elements, so that the compiler knows how wide a load may be, whatever
  their values; ``wide`` says that a tile spans more than 2^31 elements.
  ``TOKEN_UNIT`` does the same for the number of tokens.
- Run-time integers never specialise a kernel: a new H x W compiles nothing.
"""

import os

import triton
import triton.language as tl

RUNTIME_INTEGERS = [
    *(f'{x}_{s}' for x in ('q', 'k', 'v', 'y', 'l', 'o', 'g', 'dq', 'dk', 'dv', 'dl')
      for s in 'bhnd'),
    'heads', 'width', 'token_units', 'chunks', 'tiles', 'table_rows', 'rows', 'split', 'stride',
]  # fmt: skip
jit = triton.jit(do_not_specialize=RUNTIME_INTEGERS)

# Triton's interpreter cuts off the bits that bfloat16 has not; a device rounds to nearest.
INTERPRETED = tl.constexpr(os.environ.get('TRITON_INTERPRET') == '1')


# --- memory ---------------------------------------------------------------------------------------


@triton.jit
def head_start(x, batch, head, stride_b, stride_h, LAYOUT: tl.constexpr):
    """Pointer to the first token of one head."""
    unit: tl.constexpr = 1 << (LAYOUT % 8)
    return x + (batch * stride_b.to(tl.int64) + head * stride_h.to(tl.int64)) * unit


@triton.jit
def places(x, first, channels, stride_n, stride_d, LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers to a tile of the tokens from ``first`` on, with what is known of their alignment.

    The way to the tile is 64 bits wide and the same for all threads; inside of the tile 32 bits do
    unless the strides are enormous (WIDE).
    """
    unit: tl.constexpr = 1 << (LAYOUT % 8)
    order: tl.constexpr = (LAYOUT // 8) % 4
    tokens = tl.arange(0, BLOCK_N)[:, None]
    channels = channels[None, :]
    if LAYOUT // 32 == 1:  # WIDE
        stride_n = stride_n.to(tl.int64)
        stride_d = stride_d.to(tl.int64)
    if order == 0:
        start = x + first.to(tl.int64) * stride_n * unit
        return start + (tokens * (stride_n * unit) + channels)
    elif order == 1:
        return x + first.to(tl.int64) + (tokens + channels * (stride_d * unit))
    else:
        start = x + first.to(tl.int64) * stride_n
        return start + (tokens * stride_n + channels * stride_d)


@triton.jit
def load_tile(x, first, valid, stride_n, stride_d, LAYOUT: tl.constexpr, D: tl.constexpr,
              P: tl.constexpr):  # fmt: skip
    """Tile (BLOCK_N, P) in float32, zero outside."""
    channels = tl.arange(0, P)
    mask = valid[:, None] & (channels < D)[None, :]
    place = places(x, first, channels, stride_n, stride_d, LAYOUT, valid.shape[0])
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_pairs(x, first, valid, stride_n, stride_d, LAYOUT: tl.constexpr, D: tl.constexpr,
               P: tl.constexpr):  # fmt: skip
    """Even and odd channels of a tile, (BLOCK_N, P / 2) each, in float32, zero outside."""
    if (LAYOUT // 8) % 4 == 0:  # one wide load, parted within a thread
        tile = load_tile(x, first, valid, stride_n, stride_d, LAYOUT, D, P)
        return tl.split(tl.reshape(tile, (tile.shape[0], P // 2, 2)))
    else:  # a channel is a row of memory: each row is loaded once anyway
        pairs = tl.arange(0, P // 2)
        mask = valid[:, None] & (pairs < D // 2)[None, :]
        even = places(x, first, 2 * pairs, stride_n, stride_d, LAYOUT, valid.shape[0])
        odd = places(x, first, 2 * pairs + 1, stride_n, stride_d, LAYOUT, valid.shape[0])
        return (
            tl.load(even, mask=mask, other=0.0).to(tl.float32),
            tl.load(odd, mask=mask, other=0.0).to(tl.float32),
        )


@triton.jit
def cast(x, dtype: tl.constexpr):
    """To the nearest number of ``dtype``."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def store_tile(x, tile, first, valid, stride_n, stride_d, LAYOUT: tl.constexpr, D: tl.constexpr,
               P: tl.constexpr):  # fmt: skip
    channels = tl.arange(0, P)
    mask = valid[:, None] & (channels < D)[None, :]
    place = places(x, first, channels, stride_n, stride_d, LAYOUT, valid.shape[0])
    tl.store(place, cast(tile, x.dtype.element_ty), mask=mask)


@triton.jit
def store_pairs(x, even, odd, first, valid, stride_n, stride_d, LAYOUT: tl.constexpr,
                D: tl.constexpr, P: tl.constexpr):  # fmt: skip
    if (LAYOUT // 8) % 4 == 0:
        store_tile(x, merge(even, odd, P), first, valid, stride_n, stride_d, LAYOUT, D, P)
    else:
        pairs = tl.arange(0, P // 2)
        mask = valid[:, None] & (pairs < D // 2)[None, :]
        place = places(x, first, 2 * pairs, stride_n, stride_d, LAYOUT, valid.shape[0])
        tl.store(place, cast(even, x.dtype.element_ty), mask=mask)
        place = places(x, first, 2 * pairs + 1, stride_n, stride_d, LAYOUT, valid.shape[0])
        tl.store(place, cast(odd, x.dtype.element_ty), mask=mask)


@triton.jit
def merge(even, odd, P: tl.constexpr):
    """Interleave two tiles (BLOCK_N, P / 2) to one of (BLOCK_N, P)."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], P))


@triton.jit
def split_vector(x, D: tl.constexpr, P: tl.constexpr):
    """Even and odd elements of a vector of D float32, zero beyond."""
    pairs = tl.arange(0, P // 2)
    even = tl.load(x + 2 * pairs, mask=pairs < D // 2, other=0.0)
    odd = tl.load(x + 2 * pairs + 1, mask=pairs < D // 2, other=0.0)
    return even, odd


@triton.jit
def load_vector(x, D: tl.constexpr, P: tl.constexpr):
    channels = tl.arange(0, P)
    return tl.load(x + channels, mask=channels < D, other=0.0)


@triton.jit
def load_matrix(x, D: tl.constexpr, P: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Matrix (D, D) of float32, zero beyond, as (P, P)."""
    row = tl.arange(0, P)[:, None]
    column = tl.arange(0, P)[None, :]
    place = column * D + row if TRANSPOSED else row * D + column
    return tl.load(x + place, mask=(row < D) & (column < D), other=0.0)


# --- arithmetic -----------------------------------------------------------------------------------


@triton.jit
def feature_map(x):
    """``phi(x) = elu(x) + 1``."""
    return tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))


@triton.jit
def slope(feature):
    """``phi'(x)`` from ``phi(x)``: 1 where x > 0, that is ``phi(x) > 1``; else ``phi(x)``."""
    return tl.minimum(feature, 1.0)


@triton.jit
def turn(even, odd, cos, sin):
    """``R``; with ``-sin`` its transpose."""
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def rotary_turn(table, table_rows, tokens, valid, width, D: tl.constexpr, P: tl.constexpr):
    """Cosine and sine, (BLOCK_N, P / 2), of the angle by which each token's pairs turn."""
    pairs = tl.arange(0, P // 2)[None, :]
    row = (tokens // width)[:, None]
    column = (tokens % width)[:, None]
    place = tl.where(pairs < D // 4, row, column) * (D // 2) + pairs
    mask = valid[:, None] & (pairs < D // 2)
    cos = tl.load(table + place, mask=mask, other=0.0)
    sin = tl.load(table + table_rows.to(tl.int64) * (D // 2) + place, mask=mask, other=0.0)
    return cos, sin


@triton.jit
def operand(x, DOT: tl.constexpr):
    """Round to the type that the tensor cores multiply, if it is one."""
    if DOT == 'bf16':
        x = cast(x, tl.bfloat16)
        if INTERPRETED:  # whose dot takes bfloat16 for integers
            x = x.to(tl.float32)
    return x


@triton.jit
def add_dot(total, a, b, DOT: tl.constexpr):
    """``total + a @ b`` on the tensor cores, with float32 sums.

    ``bf16`` rounds the operands. ``bf16x3`` takes them for sums of two bfloat16 numbers and leaves
    out the smallest product, ``bf16x6`` of three and leaves out the three smallest; small products
    come first. Tensor cores cut off instead of rounding, which ``bf16x6`` keeps away from ``total``
    (in more registers).
    """
    a_high, b_high = operand(a, 'bf16'), operand(b, 'bf16')
    if DOT == 'bf16':
        return tl.dot(a_high, b_high, total)
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
def times(x, matrix_t, DOT: tl.constexpr, TURNED: tl.constexpr):
    """``x @ matrix``, from the transposed (P, P) matrix.

    TURNED computes ``(matrix^T x^T)^T``: the matrix then is the left operand, whose rows the warps
    share out. Which way leaves more registers was read off the compiled kernels; split into parts
    and 64 wide it never is this one.
    """
    if TURNED and (DOT == 'bf16' or matrix_t.shape[0] != 64):
        return tl.trans(dot(matrix_t, tl.trans(x), DOT))
    else:
        return dot(x, tl.trans(matrix_t), DOT)


@triton.jit
def row_dot(a_even, a_odd, b_even, b_odd):
    """Product of each row of a tile with a row, or with a vector."""
    return tl.sum(a_even * b_even + a_odd * b_odd, axis=1)


# --- forward --------------------------------------------------------------------------------------


@jit
def reduce_queries(
    q, q_b, q_h, q_n, q_d, part, heads, token_units, chunks, tiles,
    D: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, TOKEN_UNIT: tl.constexpr,
    Q: tl.constexpr,
):  # fmt: skip
    """Sum of ``phi(q_i)`` over one chunk of tokens, for RALA's global query."""
    program = tl.program_id(0).to(tl.int64)
    chunk = (program % chunks).to(tl.int32)
    head = program // chunks
    q = head_start(q, head // heads, head % heads, q_b, q_h, Q)
    num_tokens = token_units * TOKEN_UNIT
    total = tl.zeros((P,), tl.float32)
    for tile in range(chunk * tiles, chunk * tiles + tiles):
        first = tile * BLOCK_N
        tokens = first + tl.arange(0, BLOCK_N)
        valid = tokens < num_tokens
        x = feature_map(load_tile(q, first, valid, q_n, q_d, Q, D, P))
        total += tl.sum(tl.where(valid[:, None], x, 0.0), axis=0)
    channels = tl.arange(0, P)
    tl.store(part + program * D + channels, total, mask=channels < D)


@jit
def reduce_keys(
    k, k_b, k_h, k_n, k_d, v, v_b, v_h, v_n, v_d,
    part, peak, query, table, table_rows, scale, heads, width, token_units, chunks, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, TOKEN_UNIT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr,
    ROTARY: tl.constexpr, WEIGHTED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """``sum w_j (R_j phi(k_j))^T v_j``, ``sum w_j phi(k_j)`` and ``sum v_j`` over one chunk.

    ``w`` is 1, or with WEIGHTED ``exp(scale * g . phi(k_j) - m)`` with the chunk's own maximum m;
    then ``m`` and ``sum w_j`` go to ``peak``.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk = (program % chunks).to(tl.int32)
    head = program // chunks
    k = head_start(k, head // heads, head % heads, k_b, k_h, K)
    v = head_start(v, head // heads, head % heads, v_b, v_h, V)
    num_tokens = token_units * TOKEN_UNIT

    kv = tl.zeros((P, P), tl.float32)
    k_even, k_odd = tl.zeros((P // 2,), tl.float32), tl.zeros((P // 2,), tl.float32)
    v_sum = tl.zeros((P,), tl.float32)
    if WEIGHTED:
        g_even, g_odd = split_vector(query + head * stride, D, P)
        g_even *= scale
        g_odd *= scale
        highest, weights = float('-inf'), 0.0
    for tile in range(chunk * tiles, chunk * tiles + tiles):
        first = tile * BLOCK_N
        tokens = first + tl.arange(0, BLOCK_N)
        valid = tokens < num_tokens
        even, odd = load_pairs(k, first, valid, k_n, k_d, K, D, P)
        values = load_tile(v, first, valid, v_n, v_d, V, D, P)
        even = tl.where(valid[:, None], feature_map(even), 0.0)
        odd = tl.where(valid[:, None], feature_map(odd), 0.0)
        if WEIGHTED:
            logit = tl.where(valid, row_dot(even, odd, g_even[None, :], g_odd[None, :]),
                             float('-inf'))  # fmt: skip
            higher = tl.maximum(highest, tl.max(logit, axis=0))
            shrink = tl.exp(highest - higher)
            weight = tl.exp(logit - higher)
            highest = higher
            weights = weights * shrink + tl.sum(weight, axis=0)
            kv *= shrink
            k_even *= shrink
            k_odd *= shrink
            even *= weight[:, None]
            odd *= weight[:, None]
        k_even += tl.sum(even, axis=0)
        k_odd += tl.sum(odd, axis=0)
        v_sum += tl.sum(values, axis=0)
        if ROTARY:
            cos, sin = rotary_turn(table, table_rows, tokens, valid, width, D, P)
            even, odd = turn(even, odd, cos, sin)
        kv = add_dot(kv, tl.trans(merge(even, odd, P)), values, DOT)

    row = tl.arange(0, P)[:, None]
    column = tl.arange(0, P)[None, :]
    part += program * ((D + 2) * D)
    tl.store(part + row * D + column, kv, mask=(row < D) & (column < D))
    pairs = tl.arange(0, P // 2)
    tl.store(part + D * D + 2 * pairs, k_even, mask=pairs < D // 2)
    tl.store(part + D * D + 2 * pairs + 1, k_odd, mask=pairs < D // 2)
    channels = tl.arange(0, P)
    tl.store(part + D * D + D + channels, v_sum, mask=channels < D)
    if WEIGHTED:
        tl.store(peak + program * 2, highest)
        tl.store(peak + program * 2 + 1, weights)


@jit
def combine(
    part, peak, result, scale, tail_scale, chunks, rows, split, stride,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Sum of the chunks' partial results, in a fixed order.

    The first ``split`` of the ``rows`` numbers are multiplied by ``scale``, the others by
    ``tail_scale``. With WEIGHTED the first ones are a softmax over chunks: ``peak`` holds each
    chunk's maximum and sum, and those of all chunks go beyond the result.
    """
    blocks = tl.cdiv(rows, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    head = program // blocks
    number = (program % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    part += head * chunks * rows
    peak += head * chunks * 2
    result += head * stride
    total = tl.zeros((BLOCK,), tl.float32)
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
        mask = (chunk < chunks)[:, None] & (number < rows)[None, :]
        x = tl.load(part + chunk.to(tl.int64)[:, None] * rows + number[None, :], mask=mask,
                    other=0.0)  # fmt: skip
        if WEIGHTED:
            here = tl.load(peak + chunk * 2, mask=chunk < chunks, other=float('-inf'))
            weight = tl.exp(here - highest)
            weights += weight * tl.load(peak + chunk * 2 + 1, mask=chunk < chunks, other=0.0)
            x = tl.where((number < split)[None, :], x * weight[:, None], x)
        total += tl.sum(x, axis=0)
    if WEIGHTED:
        weights = tl.sum(weights, axis=0)
        scale /= weights
        # next to g, which is the row after these: see mala_mm.ops.fused.library.state_rows
        end = rows + (rows - split)
        # (two numbers rather than their logsumexp, whose rounding error all weights would share)
        tl.store(result + end + number, tl.where(number == 0, highest, weights), mask=number < 2)
    total *= tl.where(number < split, scale, tail_scale)
    tl.store(result + number, total, mask=number < rows)


@jit
def apply_queries(
    q, q_b, q_h, q_n, q_d, y, y_b, y_h, y_n, y_d, l, l_b, l_h, l_n, l_d, o, o_b, o_h, o_n, o_d,
    g, g_b, g_h, g_n, g_d, dl, dl_b, dl_h, dl_n, dl_d,
    states, table, table_rows, eps, heads, width, token_units, chunks, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, TOKEN_UNIT: tl.constexpr,
    Q: tl.constexpr, Y: tl.constexpr, L: tl.constexpr, O: tl.constexpr,
    G: tl.constexpr, DL: tl.constexpr,
    ROTARY: tl.constexpr, MALA: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """``y_i = a_i (R_i phi(q_i)) KV - b_i vbar``; with GATED ``(y_i + l_i) * o_i``.

    With BACKWARD ``y`` receives the gradient of the gate, ``g_i * (y_i + l_i)``, and ``dl`` that of
    what was gated, ``g_i * o_i``: to compute y again moves less than to keep it.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk = (program % chunks).to(tl.int32)
    head = program // chunks
    batch, inner = head // heads, head % heads
    q = head_start(q, batch, inner, q_b, q_h, Q)
    y = head_start(y, batch, inner, y_b, y_h, Y)
    if GATED:
        l = head_start(l, batch, inner, l_b, l_h, L)
        o = head_start(o, batch, inner, o_b, o_h, O)
    if BACKWARD:
        g = head_start(g, batch, inner, g_b, g_h, G)
        dl = head_start(dl, batch, inner, dl_b, dl_h, DL)
    states += head * stride
    num_tokens = token_units * TOKEN_UNIT

    kv = operand(load_matrix(states, D, P, False), DOT)
    k_even, k_odd = split_vector(states + D * D, D, P)
    if MALA:
        v_mean = load_vector(states + D * D + D, D, P)
    for tile in range(chunk * tiles, chunk * tiles + tiles):
        first = tile * BLOCK_N
        tokens = first + tl.arange(0, BLOCK_N)
        valid = tokens < num_tokens
        even, odd = load_pairs(q, first, valid, q_n, q_d, Q, D, P)
        even, odd = feature_map(even), feature_map(odd)
        z = row_dot(even, odd, k_even[None, :], k_odd[None, :])
        a = 1 / (z + eps)
        if MALA:
            a += 1
        even *= a[:, None]
        odd *= a[:, None]
        if ROTARY:
            cos, sin = rotary_turn(table, table_rows, tokens, valid, width, D, P)
            even, odd = turn(even, odd, cos, sin)
        out = dot(merge(even, odd, P), kv, DOT)
        if MALA:
            out -= z[:, None] * v_mean[None, :]
        if GATED:
            out += load_tile(l, first, valid, l_n, l_d, L, D, P)
            gate = load_tile(o, first, valid, o_n, o_d, O, D, P)
            if BACKWARD:
                grad = load_tile(g, first, valid, g_n, g_d, G, D, P)
                store_tile(dl, grad * gate, first, valid, dl_n, dl_d, DL, D, P)
                gate = grad
            out *= gate
        store_tile(y, out, first, valid, y_n, y_d, Y, D, P)


# --- backward -------------------------------------------------------------------------------------


@jit
def backward_queries(
    q, q_b, q_h, q_n, q_d, g, g_b, g_h, g_n, g_d, dq, dq_b, dq_h, dq_n, dq_d,
    states, part, dquery, table, table_rows, eps,
    heads, width, token_units, chunks, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, TOKEN_UNIT: tl.constexpr,
    Q: tl.constexpr, G: tl.constexpr, DQ: tl.constexpr,
    ROTARY: tl.constexpr, MALA: tl.constexpr, DOT: tl.constexpr,
    VALUES: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, GLOBAL: tl.constexpr,
):  # fmt: skip
    """The queries' side: the chunk's share of dKV and dvbar (VALUES), of dkbar (KEYS), and ``dq``
    (QUERIES).

    With GLOBAL every ``phi(q_i)`` also has the gradient ``dquery``, RALA's global query's.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk = (program % chunks).to(tl.int32)
    head = program // chunks
    batch, inner = head // heads, head % heads
    q = head_start(q, batch, inner, q_b, q_h, Q)
    g = head_start(g, batch, inner, g_b, g_h, G)
    if QUERIES:
        dq = head_start(dq, batch, inner, dq_b, dq_h, DQ)
    states += head * stride
    num_tokens = token_units * TOKEN_UNIT

    if KEYS or QUERIES:
        kv = operand(load_matrix(states, D, P, False), DOT)
    k_even, k_odd = split_vector(states + D * D, D, P)
    if MALA:
        v_mean = load_vector(states + D * D + D, D, P)
    if GLOBAL:
        dg_even, dg_odd = split_vector(dquery + head * D, D, P)
    if VALUES:
        dkv = tl.zeros((P, P), tl.float32)
        dv_mean = tl.zeros((P,), tl.float32)
    if KEYS:
        dk_even, dk_odd = tl.zeros((P // 2,), tl.float32), tl.zeros((P // 2,), tl.float32)
    for tile in range(chunk * tiles, chunk * tiles + tiles):
        first = tile * BLOCK_N
        tokens = first + tl.arange(0, BLOCK_N)
        valid = tokens < num_tokens
        even, odd = load_pairs(q, first, valid, q_n, q_d, Q, D, P)
        grad = load_tile(g, first, valid, g_n, g_d, G, D, P)
        even, odd = feature_map(even), feature_map(odd)
        z = row_dot(even, odd, k_even[None, :], k_odd[None, :])
        inverse = 1 / (z + eps)
        a = inverse
        if MALA:
            a += 1
        if ROTARY:
            cos, sin = rotary_turn(table, table_rows, tokens, valid, width, D, P)
        if MALA:
            dz = -tl.sum(grad * v_mean[None, :], axis=1)
            if VALUES:  # grad is 0 beyond the last token, which keeps those out of every sum
                dv_mean -= tl.sum(z[:, None] * grad, axis=0)
        grad = operand(grad, DOT)
        if VALUES:
            p_even, p_odd = even * a[:, None], odd * a[:, None]
            if ROTARY:
                p_even, p_odd = turn(p_even, p_odd, cos, sin)
            dkv = add_dot(dkv, tl.trans(merge(p_even, p_odd, P)), grad, DOT)
        if KEYS or QUERIES:
            # R_i^T (g_i KV^T): the gradient of phi(q_i) in the numerator, but for its factor a_i
            u = times(grad, kv, DOT, VALUES or KEYS != QUERIES)
            u_even, u_odd = tl.split(tl.reshape(u, (BLOCK_N, P // 2, 2)))
            if ROTARY:
                u_even, u_odd = turn(u_even, u_odd, cos, -sin)
            da = row_dot(even, odd, u_even, u_odd)
            if MALA:
                dz -= (da * inverse) * inverse
            else:
                dz = -(da * inverse) * inverse
            if KEYS:
                dk_even += tl.sum(dz[:, None] * even, axis=0)
                dk_odd += tl.sum(dz[:, None] * odd, axis=0)
            if QUERIES:
                u_even = u_even * a[:, None] + dz[:, None] * k_even[None, :]
                u_odd = u_odd * a[:, None] + dz[:, None] * k_odd[None, :]
                if GLOBAL:
                    u_even += dg_even[None, :]
                    u_odd += dg_odd[None, :]
                u_even *= slope(even)
                u_odd *= slope(odd)
                store_pairs(dq, u_even, u_odd, first, valid, dq_n, dq_d, DQ, D, P)

    part += program * ((D + 2) * D)
    if VALUES:
        row = tl.arange(0, P)[:, None]
        column = tl.arange(0, P)[None, :]
        tl.store(part + row * D + column, dkv, mask=(row < D) & (column < D))
        channels = tl.arange(0, P)
        tl.store(part + D * D + D + channels, dv_mean, mask=channels < D)
    if KEYS:
        pairs = tl.arange(0, P // 2)
        tl.store(part + D * D + 2 * pairs, dk_even, mask=pairs < D // 2)
        tl.store(part + D * D + 2 * pairs + 1, dk_odd, mask=pairs < D // 2)


@jit
def backward_keys(
    k, k_b, k_h, k_n, k_d, v, v_b, v_h, v_n, v_d, dk, dk_b, dk_h, dk_n, dk_d,
    dv, dv_b, dv_h, dv_n, dv_d,
    states, dstates, part, table, table_rows, scale,
    heads, width, token_units, chunks, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, TOKEN_UNIT: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    ROTARY: tl.constexpr, MALA: tl.constexpr, WEIGHTED: tl.constexpr, DOT: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """The keys' side: ``dk`` (KEYS), with WEIGHTED the chunk's share of the global query's
    gradient too, and ``dv`` (VALUES).
    """
    program = tl.program_id(0).to(tl.int64)
    chunk = (program % chunks).to(tl.int32)
    head = program // chunks
    batch, inner = head // heads, head % heads
    k = head_start(k, batch, inner, k_b, k_h, K)
    v = head_start(v, batch, inner, v_b, v_h, V)
    dk = head_start(dk, batch, inner, dk_b, dk_h, DK)
    dv = head_start(dv, batch, inner, dv_b, dv_h, DV)
    states += head * stride
    dstates += head * ((D + 2) * D)
    num_tokens = token_units * TOKEN_UNIT

    dkv = load_matrix(dstates, D, P, False)
    dk_even, dk_odd = split_vector(dstates + D * D, D, P)
    if MALA:
        dv_mean = load_vector(dstates + D * D + D, D, P)
    if WEIGHTED:
        g_even, g_odd = split_vector(states + (D + 2) * D, D, P)
        g_even *= scale
        g_odd *= scale
        highest = tl.load(states + (D + 3) * D)
        share = 1 / tl.load(states + (D + 3) * D + 1)
        if KEYS:
            # sum_j p_j r_j of the softmax' gradient, without a pass over the tokens
            mean = tl.sum(tl.sum(dkv * load_matrix(states, D, P, False), axis=1), axis=0)
            s_even, s_odd = split_vector(states + D * D, D, P)
            mean += tl.sum(dk_even * s_even + dk_odd * s_odd, axis=0)
            dg_even, dg_odd = tl.zeros((P // 2,), tl.float32), tl.zeros((P // 2,), tl.float32)
    dkv = operand(dkv, DOT)
    for tile in range(chunk * tiles, chunk * tiles + tiles):
        first = tile * BLOCK_N
        tokens = first + tl.arange(0, BLOCK_N)
        valid = tokens < num_tokens
        even, odd = load_pairs(k, first, valid, k_n, k_d, K, D, P)
        even, odd = feature_map(even), feature_map(odd)
        if KEYS:
            values = load_tile(v, first, valid, v_n, v_d, V, D, P)
        if ROTARY:
            cos, sin = rotary_turn(table, table_rows, tokens, valid, width, D, P)
        if WEIGHTED:
            logit = row_dot(even, odd, g_even[None, :], g_odd[None, :])
            weight = tl.where(valid, tl.exp(logit - highest) * share, 0.0)
        if VALUES:
            turned_even, turned_odd = even, odd
            if ROTARY:
                turned_even, turned_odd = turn(even, odd, cos, sin)
            if WEIGHTED:
                turned_even *= weight[:, None]
                turned_odd *= weight[:, None]
            grad_v = times(merge(turned_even, turned_odd, P), tl.trans(dkv), DOT, KEYS)
            if MALA:
                grad_v += dv_mean[None, :]
            store_tile(dv, grad_v, first, valid, dv_n, dv_d, DV, D, P)
        if KEYS:
            u = times(values, dkv, DOT, VALUES)
            u_even, u_odd = tl.split(tl.reshape(u, (BLOCK_N, P // 2, 2)))
            if ROTARY:
                u_even, u_odd = turn(u_even, u_odd, cos, -sin)
            u_even += dk_even[None, :]
            u_odd += dk_odd[None, :]
            if WEIGHTED:
                # r_j, what the loss gains from a higher weight of this key
                gain = row_dot(even, odd, u_even, u_odd)
                dlogit = weight * (gain - mean)
                u_even = u_even * weight[:, None] + dlogit[:, None] * g_even[None, :]
                u_odd = u_odd * weight[:, None] + dlogit[:, None] * g_odd[None, :]
                dg_even += tl.sum(dlogit[:, None] * even, axis=0)
                dg_odd += tl.sum(dlogit[:, None] * odd, axis=0)
            u_even *= slope(even)
            u_odd *= slope(odd)
            store_pairs(dk, u_even, u_odd, first, valid, dk_n, dk_d, DK, D, P)
    if WEIGHTED and KEYS:
        pairs = tl.arange(0, P // 2)
        part += program * D
        tl.store(part + 2 * pairs, dg_even, mask=pairs < D // 2)
        tl.store(part + 2 * pairs + 1, dg_odd, mask=pairs < D // 2)
