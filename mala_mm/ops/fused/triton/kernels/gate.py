"""The backward of the gate and of the local position encoding."""

import triton.language as tl

from .arithmetic import features
from .forward import attend
from .rotation import angles, below
from .states import load_factor, load_operands, load_row
from .tiles import head_start, jit, load_quarters, load_tile, store_tile, strip

# fmt: off
# (signatures stay one group of arguments a line)


@jit
def backward_gate(
    q, q_b, q_h, q_n, q_d, lepe, lepe_b, lepe_h, lepe_n, lepe_d, o, o_b, o_h, o_n, o_d,
    dy, dy_b, dy_h, dy_n, dy_d, do, do_b, do_h, do_n, do_d,
    dlepe, dlepe_b, dlepe_h, dlepe_n, dlepe_d,
    states, eps, heads, height, width_units, pieces, tiles, stride,
    D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH_UNIT: tl.constexpr, STAGES: tl.constexpr,
    Q: tl.constexpr, LEPE: tl.constexpr, O: tl.constexpr, DY: tl.constexpr, DO: tl.constexpr,
    DLEPE: tl.constexpr, ROTARY: tl.constexpr, MALA: tl.constexpr, DOT: tl.constexpr,
):
    """The gradients of ``(y_i + lepe_i) * o_i``, whose own is ``dy_i``.

    ``dy_i * (y_i + lepe_i)`` for ``o``, ``dy_i * o_i`` for the sum. To compute ``y`` again moves
    less than to keep it.
    """
    q = head_start(q, heads, q_b, q_h, Q)
    lepe = head_start(lepe, heads, lepe_b, lepe_h, LEPE)
    o = head_start(o, heads, o_b, o_h, O)
    dy = head_start(dy, heads, dy_b, dy_h, DY)
    do = head_start(do, heads, do_b, do_h, DO)
    dlepe = head_start(dlepe, heads, dlepe_b, dlepe_h, DLEPE)
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
        local = load_tile(lepe, top, left, height, width, lepe_n, lepe_d, LEPE, D, P,
                          ROWS, COLUMNS)
        gate = load_tile(o, top, left, height, width, o_n, o_d, O, D, P, ROWS, COLUMNS)
        grad = load_tile(dy, top, left, height, width, dy_n, dy_d, DY, D, P, ROWS, COLUMNS)
        grad = grad.to(tl.float32)
        store_tile(dlepe, grad * gate.to(tl.float32), top, left, height, width, dlepe_n, dlepe_d,
                   DLEPE, D, P, ROWS, COLUMNS)
        re, ro, ce, co = features(re, ro, ce, co, DOT)
        out = attend(re, ro, ce, co, re_k, ro_k, ce_k, co_k, v_mean, r_kv, c_kv, factor, eps,
                     r_cos, r_sin, c_cos, c_sin, ROTARY, MALA, DOT)
        r_cos, r_sin = below(r_cos, r_sin, top, frequency, step_cos, step_sin, ROWS, ROTARY, DOT)
        out = grad * (out + local.to(tl.float32))
        store_tile(do, out, top, left, height, width, do_n, do_d, DO, D, P, ROWS, COLUMNS)
