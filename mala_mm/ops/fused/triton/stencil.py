"""The Triton kernels of depthwise convolutions on maps (B, C, H, W) with adjacent channels.

A program's tile is (STRIPS, CHANNELS): every strip is COLUMNS columns wide and walked down over
``rows`` rows, all in the same step. The columns of a strip are tensors of their own, held in
tuples, so that a thread has its neighbours' values in registers: a value is loaded, widened and
passed through the GELU (COLUMNS + 2 * MARGIN) / COLUMNS times in all, MARGIN = (TAPS - 1) / 2.

Rows are handled the other way around: what an output still lacks from the rows below waits in
``pending``, (TAPS - 1) * COLUMNS sums in float32, and no row is looked at twice.

Strips are counted through images, pieces of ``rows`` rows, and columns: any size fills the tiles.
"""

import os

import triton
import triton.language as tl

# fmt: off
# (signatures stay one group of arguments a line)

RUNTIME_INTEGERS = [
    *(f'{x}_{s}' for x in ('x', 'y', 'g', 'dx') for s in 'bhw'),
    'strips', 'across', 'pieces', 'rows', 'height', 'width', 'channel_units',
]
jit = triton.jit(do_not_specialize=RUNTIME_INTEGERS)

# Triton's interpreter knows no PTX.
INTERPRETED = tl.constexpr(os.environ.get('TRITON_INTERPRET') == '1')


# --- where a program works ------------------------------------------------------------------------


@triton.jit
def place(program, strips, across, pieces, rows, STRIPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Image, first row and first column of this program's strips, (STRIPS, ) each.

    A strip that there is not begins below every map.
    """
    strip = program * STRIPS + tl.arange(0, STRIPS)
    column = strip % across * COLUMNS
    piece = strip // across
    row = piece % pieces * rows
    return (piece // pieces).to(tl.int64), tl.where(strip < strips, row, 1 << 30), column


@triton.jit
def start(x, image, row, column, channel, stride_b, stride_h, stride_w, UNIT: tl.constexpr):
    """Pointers (STRIPS, CHANNELS) to the strips' first rows and columns."""
    row = tl.where(row < 1 << 30, row, 0).to(tl.int64)
    inside = image * stride_b + row * stride_h + column.to(tl.int64) * stride_w
    return x + inside[:, None] * UNIT + channel[None, :]


@triton.jit
def load_row(x, row, column, valid, top, height, width, step, MARGIN: tl.constexpr,
             WIDE: tl.constexpr):
    """A row of the strips, ``x`` being its first column, with MARGIN columns on either side."""
    inside = (row >= top) & (row < height)
    found = ()
    for i in tl.static_range(WIDE):
        beside = column + (i - MARGIN)
        mask = (inside & (beside >= 0) & (beside < width))[:, None] & valid[None, :]
        found += (tl.load(x + (i - MARGIN) * step, mask=mask, other=0.0),)
    return found


@triton.jit
def load_taps(weight, channel, valid, TAPS: tl.constexpr, FLIPPED: tl.constexpr,
              RESIDUAL: tl.constexpr):
    """The kernel (C, TAPS * TAPS) in float32, a tuple of (1, CHANNELS) by tap.

    FLIPPED for the gradient of the input. A residual path is a one at the centre.
    """
    found = ()
    for i in tl.static_range(TAPS * TAPS):
        place = weight + channel * (TAPS * TAPS) + (TAPS * TAPS - 1 - i if FLIPPED else i)
        tap = tl.load(place, mask=valid, other=0.0)
        tap = tap.to(tl.float32)
        if RESIDUAL and i == TAPS * TAPS // 2:
            tap += 1.0
        found += (tap[None, :],)
    return found


# --- GELU -----------------------------------------------------------------------------------------


@triton.jit
def exp2(x):
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        'ex2.approx.ftz.f32 $0, $1;', '=f,f', [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def gelu(x, EXACT: tl.constexpr):
    """``x Phi(x)``, and ``Phi(-|x|)``.

    Not EXACT, for half types: the logarithm of the tail is a polynomial fitted for this file. Its
    error is 8e-6 at most in ``x Phi(x)``, and 4.5e-4 of the tail up to |x| = 4. NaN stays NaN.
    """
    z = tl.abs(x)
    if EXACT:
        tail = 0.5 * (1.0 - tl.erf(z * 0.7071067811865476))
    else:
        log = -3.142553808e-04 * z + 5.804271957e-03
        log = log * z + -4.824414194e-02
        log = log * z + -4.641292149e-01
        log = log * z + -1.148998326e+00
        log = log * z + -1.000221472e+00
        tail = exp2(log)
    return tl.maximum(x, 0.0) - z * tail, tail


@triton.jit
def slope(x, tail):
    """The derivative of the GELU, ``Phi(x) + x phi(x)``, from ``Phi(-|x|)``."""
    density = exp2(x * x * -0.7213475204444817 - 1.3257480647361595)
    below = tail - tl.abs(x) * density
    return tl.where(x < 0, below, 1.0 - below)


@triton.jit
def widen(values, GELU: tl.constexpr, EXACT: tl.constexpr):
    """A tuple in float32, through the GELU."""
    found = ()
    for i in tl.static_range(len(values)):
        h = values[i].to(tl.float32)
        if GELU:
            h, _ = gelu(h, EXACT)
        found += (h,)
    return found


# --- the convolution ------------------------------------------------------------------------------


@triton.jit
def sum_row(total, values, weights, ROW: tl.constexpr, TAPS: tl.constexpr, COLUMNS: tl.constexpr,
            FIRST: tl.constexpr):
    """Add to COLUMNS sums, from ``total[FIRST]`` on, a row under the kernel's row ROW."""
    found = ()
    for i in tl.static_range(COLUMNS):
        s = total[FIRST + i]
        for j in tl.static_range(TAPS):
            s += weights[ROW * TAPS + j] * values[i + j]
        found += (s,)
    return found


@triton.jit
def advance(pending, values, weights, begin, TAPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Take one more row in; return the sums of the row that this completes, and those pending."""
    done = sum_row(pending, values, weights, TAPS - 1, TAPS, COLUMNS, 0)
    waiting = ()
    for k in tl.static_range(1, TAPS - 1):
        waiting += sum_row(pending, values, weights, TAPS - 1 - k, TAPS, COLUMNS, k * COLUMNS)
    waiting += sum_row((begin,) * COLUMNS, values, weights, 0, TAPS, COLUMNS, 0)
    return done, waiting


@jit
def convolve(
    x, x_b, x_h, x_w, y, y_b, y_h, y_w, weight, bias,
    strips, across, pieces, rows, height, width, channel_units,
    TAPS: tl.constexpr, COLUMNS: tl.constexpr, STRIPS: tl.constexpr, CHANNELS: tl.constexpr,
    UNIT: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
    GELU: tl.constexpr, RESIDUAL: tl.constexpr, EXACT: tl.constexpr,
):
    """``y = h + conv(h) + bias`` with ``h = x`` or ``gelu(x)``; terms by flags."""
    MARGIN: tl.constexpr = TAPS // 2
    WIDE: tl.constexpr = COLUMNS + 2 * MARGIN
    channels = channel_units * UNIT
    blocks = tl.cdiv(channels, CHANNELS)
    program = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    valid = channel < channels
    image, first, column = place(program, strips, across, pieces, rows, STRIPS, COLUMNS)
    x = start(x, image, first, column, channel, x_b, x_h, x_w, X)
    y = start(y, image, first, column, channel, y_b, y_h, y_w, Y)
    down, step = x_h.to(tl.int64) * X, x_w.to(tl.int64) * X
    y_down, y_step = y_h.to(tl.int64) * Y, y_w.to(tl.int64) * Y
    weights = load_taps(weight, channel, valid, TAPS, False, RESIDUAL)
    begin = tl.zeros((STRIPS, CHANNELS), tl.float32)
    begin += tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)[None, :]
    pending = (begin,) * ((TAPS - 1) * COLUMNS)
    x -= MARGIN * down
    y -= 2 * MARGIN * y_down
    row = first - MARGIN
    ahead = load_row(x, row, column, valid, 0, height, width, step, MARGIN, WIDE)
    for i in tl.range(0, rows + 2 * MARGIN):
        values = widen(ahead, GELU, EXACT)
        row += 1
        x += down
        ahead = load_row(x, row, column, valid, 0, height, width, step, MARGIN, WIDE)
        done, pending = advance(pending, values, weights, begin, TAPS, COLUMNS)
        if i >= 2 * MARGIN:
            inside = row - 1 - MARGIN < height
            for j in tl.static_range(COLUMNS):
                mask = (inside & (column + j < width))[:, None] & valid[None, :]
                tl.store(y + j * y_step, done[j], mask=mask)
        y += y_down


@jit
def backward(
    g, g_b, g_h, g_w, x, x_b, x_h, x_w, dx, dx_b, dx_h, dx_w, weight, part,
    strips, across, pieces, rows, height, width, channel_units,
    TAPS: tl.constexpr, COLUMNS: tl.constexpr, STRIPS: tl.constexpr, CHANNELS: tl.constexpr,
    UNIT: tl.constexpr, G: tl.constexpr, X: tl.constexpr, DX: tl.constexpr,
    GELU: tl.constexpr, RESIDUAL: tl.constexpr, EXACT: tl.constexpr,
):
    """``dx``, and this program's share of the gradients of weight and bias.

    In the step in which row r of the gradient ``g`` comes, row r - MARGIN of ``dx`` is complete,
    and row r - MARGIN of h meets the rows of ``g`` around it, of which the last ones are kept. A
    row of ``part``, float32, is the gradient of the kernel (C, TAPS * TAPS), then the bias'.
    """
    MARGIN: tl.constexpr = TAPS // 2
    WIDE: tl.constexpr = COLUMNS + 2 * MARGIN
    channels = channel_units * UNIT
    blocks = tl.cdiv(channels, CHANNELS)
    program = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    valid = channel < channels
    image, first, column = place(program, strips, across, pieces, rows, STRIPS, COLUMNS)
    g = start(g, image, first, column, channel, g_b, g_h, g_w, G)
    x = start(x, image, first, column, channel, x_b, x_h, x_w, X)
    dx = start(dx, image, first, column, channel, dx_b, dx_h, dx_w, DX)
    g_down, g_step = g_h.to(tl.int64) * G, g_w.to(tl.int64) * G
    x_down, x_step = x_h.to(tl.int64) * X, x_w.to(tl.int64) * X
    dx_down, dx_step = dx_h.to(tl.int64) * DX, dx_w.to(tl.int64) * DX
    weights = load_taps(weight, channel, valid, TAPS, True, RESIDUAL)

    zero = tl.zeros((STRIPS, CHANNELS), tl.float32)
    pending = (zero,) * ((TAPS - 1) * COLUMNS)
    kept = (zero,) * ((TAPS - 1) * COLUMNS)
    sums, bias_sum = (zero,) * (TAPS * TAPS), zero
    g -= MARGIN * g_down
    x -= 2 * MARGIN * x_down
    dx -= 2 * MARGIN * dx_down
    row, here = first - MARGIN, first - 2 * MARGIN
    g_ahead = load_row(g, row, column, valid, 0, height, width, g_step, MARGIN, WIDE)
    x_ahead = load_row(x, here, column, valid, first, height, width, x_step, MARGIN, WIDE)
    for _ in tl.range(0, rows + 2 * MARGIN):
        grad = widen(g_ahead, False, EXACT)
        values = x_ahead
        g += g_down
        x += x_down
        g_ahead = load_row(g, row + 1, column, valid, 0, height, width, g_step, MARGIN, WIDE)
        x_ahead = load_row(x, here + 1, column, valid, first, height, width, x_step, MARGIN, WIDE)
        done, pending = advance(pending, grad, weights, zero, TAPS, COLUMNS)
        # the rows of g from r - 2 * MARGIN to r, of this strip alone
        rows_of_g = kept + grad[MARGIN:MARGIN + COLUMNS]
        kept = rows_of_g[COLUMNS:]
        h, tails = (), ()
        for j in tl.static_range(WIDE):
            value, tail = values[j].to(tl.float32), zero
            if GELU:
                value, tail = gelu(value, EXACT)
            h += (value,)
            tails += (tail,)
        found = ()
        for k in tl.static_range(TAPS * TAPS):
            s = sums[k]
            for j in tl.static_range(COLUMNS):
                # g[y, c] meets h[y + k // TAPS - MARGIN, c + k % TAPS - MARGIN]
                s += rows_of_g[(TAPS - 1 - k // TAPS) * COLUMNS + j] * h[j + k % TAPS]
            found += (s,)
        sums = found
        for j in tl.static_range(COLUMNS):
            d = done[j]
            bias_sum += tl.where((here >= first)[:, None], rows_of_g[MARGIN * COLUMNS + j], 0.0)
            if GELU:
                d *= slope(values[MARGIN + j].to(tl.float32), tails[MARGIN + j])
            inside = (here >= first) & (here < height) & (column + j < width)
            tl.store(dx + j * dx_step, d, mask=inside[:, None] & valid[None, :])
        dx += dx_down
        row += 1
        here += 1

    part += program.to(tl.int64) * ((TAPS * TAPS + 1) * channels)
    for k in tl.static_range(TAPS * TAPS):
        tl.store(part + channel * (TAPS * TAPS) + k, tl.sum(sums[k], axis=0), mask=valid)
    tl.store(part + TAPS * TAPS * channels + channel, tl.sum(bias_sum, axis=0), mask=valid)
