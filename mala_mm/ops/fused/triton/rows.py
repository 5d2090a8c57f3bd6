"""The Triton kernels of norms over the channels, one row of a dense (tokens, C) map per token.

``residual_norm`` computes ``total = x + keep * branch`` and ``y = norm(total)``, ``backward_norm``
their gradients. A row lies in one tile (TOKENS, P), P being C rounded up to a power of two; its
mean and variance are computed anew in the backward pass from ``total``, which is read anyway.
"""

import triton
import triton.language as tl

# fmt: off
# (signatures stay one group of arguments a line)

RUNTIME_INTEGERS = ['tokens', 'area', 'tiles']
jit = triton.jit(do_not_specialize=RUNTIME_INTEGERS)


@triton.jit
def normalize(row, valid, eps, C: tl.constexpr):
    """Rows less their means, over their standard deviations; and one over these."""
    mean = tl.sum(row, axis=1) / C
    row = tl.where(valid[None, :], row - mean[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(row * row, axis=1) / C + eps)
    return row * scale[:, None], scale


@triton.jit
def kept(keep, token, tokens, area):
    """The factor of the branch in the image of each token."""
    return tl.load(keep + token // area, mask=token < tokens, other=0.0).to(tl.float32)[:, None]


@jit
def residual_norm(
    x, branch, keep, weight, bias, total, y, eps, tokens, area, tiles,
    C: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr,
    BRANCH: tl.constexpr, KEEP: tl.constexpr,
):
    """``total`` (with BRANCH) and ``y``."""
    channel = tl.arange(0, P)
    valid = channel < C
    w = tl.load(weight + channel, mask=valid, other=0.0).to(tl.float32)[None, :]
    b = tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)[None, :]
    first = tl.program_id(0) * tiles
    for tile in tl.range(first, tl.minimum(first + tiles, tl.cdiv(tokens, TOKENS))):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        place = token.to(tl.int64)[:, None] * C + channel[None, :]
        mask = (token < tokens)[:, None] & valid[None, :]
        row = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        if BRANCH:
            other = tl.load(branch + place, mask=mask, other=0.0).to(tl.float32)
            if KEEP:
                other *= kept(keep, token, tokens, area)
            rounded = (row + other).to(total.dtype.element_ty)  # as all that follows reads it
            tl.store(total + place, rounded, mask=mask)
            row = rounded.to(tl.float32)
        normal, _ = normalize(row, valid, eps, C)
        tl.store(y + place, normal * w + b, mask=mask)


@jit
def backward_norm(
    dtotal, dy, total, keep, weight, dx, dbranch, part, eps, tokens, area, tiles,
    C: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr,
    TOTAL: tl.constexpr, KEEP: tl.constexpr,
):
    """``dx``, with KEEP ``dbranch = keep * dx`` too, and a row (2, C) of ``part``: this program's
    share of the gradients of weight and bias.

    TOTAL says whether the sum has a gradient of its own.
    """
    channel = tl.arange(0, P)
    valid = channel < C
    w = tl.load(weight + channel, mask=valid, other=0.0).to(tl.float32)[None, :]
    dweight, dbias = tl.zeros((TOKENS, P), tl.float32), tl.zeros((TOKENS, P), tl.float32)
    first = tl.program_id(0) * tiles
    for tile in tl.range(first, tl.minimum(first + tiles, tl.cdiv(tokens, TOKENS))):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        place = token.to(tl.int64)[:, None] * C + channel[None, :]
        mask = (token < tokens)[:, None] & valid[None, :]
        row = tl.load(total + place, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dy + place, mask=mask, other=0.0).to(tl.float32)
        normal, scale = normalize(row, valid, eps, C)
        dweight += grad * normal
        dbias += grad
        # d/dx of (x - mean) * scale: what is left of the gradient beside the row's own directions
        grad *= w
        along = tl.sum(grad * normal, axis=1) / C
        grad = (grad - (tl.sum(grad, axis=1) / C)[:, None] - normal * along[:, None])
        grad *= scale[:, None]
        if TOTAL:
            grad += tl.load(dtotal + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + place, grad, mask=mask)
        if KEEP:
            tl.store(dbranch + place, grad * kept(keep, token, tokens, area), mask=mask)
    part += tl.program_id(0).to(tl.int64) * (2 * C)
    tl.store(part + channel, tl.sum(dweight, axis=0), mask=valid)
    tl.store(part + C + channel, tl.sum(dbias, axis=0), mask=valid)
