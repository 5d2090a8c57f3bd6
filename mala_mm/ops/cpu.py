"""The CPU backend: the operators in tiles that stay in the cache, in plain PyTorch.

The tokens are walked over in tiles of some feature-map rows. Within a tile everything happens in
a few buffers that all tiles share: a pass reads its inputs from memory once, writes its outputs
once, and allocates nothing of the size of a feature map.

Forward: a pass over the keys sums the states, a pass over the queries applies them. Backward: a
pass over the queries, then one over the keys. RALA's global query costs one more of each: its mean
before the keys, its gradient after them. Formulas: :class:`~mala_mm.ops.library.Problem` and its
derivatives; the comments name them where they are computed.

Sums and products are held in float32 for half types, else in the type of the inputs. For a given
number of threads results repeat bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .library import Problem
from .rotary import rotary_tables

# Elements of a buffer per thread: small enough for three or four buffers to live in the second- and
# third-level caches, large enough to drown the microseconds that each call into PyTorch costs.
TILE_ELEMENTS = 1 << 17
_LOG2_E = 1 / math.log(2)


def why_not(q: Tensor) -> str | None:
    """Why this backend cannot take inputs like ``q``; None if it can."""
    if q.device.type != 'cpu':
        return f'needs tensors on the CPU, got {q.device}'
    return None


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    states: Tensor,
    lepe: Tensor | None = None,
    gate: Tensor | None = None,
) -> None:
    """Fill ``out`` and ``states``; the contract stands in :mod:`mala_mm.ops.library`."""
    tiles = _Tiles(problem, q)
    sums = torch.zeros(states.shape, dtype=tiles.dtype)
    kv, kbar, vbar, *_ = _rows(sums)
    if problem.kind == 'rala':
        _weighted_sums(problem, tiles, q, k, v, sums)
    else:
        _plain_sums(problem, tiles, k, v, sums)
    states.copy_(sums)
    for tile in tiles:
        phi = tile.feature_map(q)
        z, a, _ = _normalisers(problem, phi, tile.of(kbar), tile.buffer(1))
        y = torch.bmm(tile.turn(phi, phi), tile.of(kv), out=tile.buffer(1))
        if gate is None:
            _combine(problem, tile, y, z, a, vbar, tile.cut(out))
        else:
            y4 = tile.split(y)
            _combine(problem, tile, y, z, a, vbar, y4)
            torch.mul(y4.add_(tile.cut(lepe)), tile.cut(gate), out=tile.cut(out))


def backward(
    problem: Problem,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    lepe: Tensor | None = None,
    gate: Tensor | None = None,
    dlepe: Tensor | None = None,
    dgate: Tensor | None = None,
) -> None:
    """Fill the gradients; the contract stands in :mod:`mala_mm.ops.library`."""
    tiles = _Tiles(problem, q, inverse=True)
    states = states.to(tiles.dtype)
    sums = torch.zeros_like(states)
    _query_gradients(problem, tiles, grad, q, states, sums, dq, lepe, gate, dlepe, dgate)
    if problem.kind != 'rala':
        _key_gradients(problem, tiles, k, v, sums, dk, dv)
        return
    dg = torch.zeros_like(_rows(sums)[3])
    _weighted_key_gradients(problem, tiles, k, v, states, sums, dk, dv, dg)
    dg /= problem.num_tokens
    for tile in tiles:  # dq_i += dg/N * phi'(q_i)
        slope = tile.feature_map(q).clamp_(max=1)
        tile.cut(dq).add_(tile.split(slope.mul_(tile.of(dg))))


# The passes. A capital name is that of the formulas, a leading d means the gradient of what follows.


def _plain_sums(problem: Problem, tiles: _Tiles, k: Tensor, v: Tensor, sums: Tensor) -> None:
    kv, kbar, vbar, *_ = _rows(sums)
    for tile in tiles:
        phi = tile.feature_map(k)
        values = tile.load(v, 1)
        tile.of(kbar).add_(phi.sum(-2, keepdim=True))
        if problem.kind == 'mala':
            tile.of(vbar).add_(values.sum(-2, keepdim=True))
        tile.of(kv).baddbmm_(tile.turn(phi, phi).mT, values)
    kv *= problem.coefficient
    kbar *= problem.coefficient
    vbar /= problem.num_tokens


def _weighted_sums(
    problem: Problem, tiles: _Tiles, q: Tensor, k: Tensor, v: Tensor, sums: Tensor
) -> None:
    """RALA: the weights come out of a softmax whose maximum grows from tile to tile."""
    kv, kbar, _, g, softmax = _rows(sums)
    peak, total = softmax[..., 1:2], softmax[..., 2:3]
    for tile in tiles:
        tile.of(g).add_(tile.feature_map(q).sum(-2, keepdim=True))
    g /= problem.num_tokens
    peak.fill_(-math.inf)
    for tile in tiles:
        phi = tile.feature_map(k)
        logits = _logits(problem, phi, tile.of(g))
        top = torch.maximum(tile.of(peak), logits.amax(-2, keepdim=True))
        fade = (tile.of(peak) - top).exp_()
        weights = logits.sub_(top).exp_()
        tile.of(peak).copy_(top)
        tile.of(total).mul_(fade).add_(weights.sum(-2, keepdim=True))
        phi.mul_(weights)
        values = tile.load(v, 1)
        tile.of(kbar).mul_(fade).add_(phi.sum(-2, keepdim=True))
        tile.of(kv).mul_(fade).baddbmm_(tile.turn(phi, phi).mT, values)
    kv /= total
    kbar /= total
    torch.add(peak, total.log(), out=softmax[..., :1])


def _query_gradients(
    problem: Problem,
    tiles: _Tiles,
    grad: Tensor,
    q: Tensor,
    states: Tensor,
    sums: Tensor,
    dq: Tensor,
    lepe: Tensor | None,
    gate: Tensor | None,
    dlepe: Tensor | None,
    dgate: Tensor | None,
) -> None:
    """Fill dq (RALA: without the part through g), dlepe and dgate; sum dKV, dkbar and dvbar."""
    kv, kbar, vbar, *_ = _rows(states)
    dkv, dkbar, dvbar, *_ = _rows(sums)
    mala = problem.kind == 'mala'
    for tile in tiles:
        phi = tile.feature_map(q)
        z, a, shrink = _normalisers(problem, phi, tile.of(kbar), tile.buffer(1))
        turned = tile.turn(phi, tile.buffer(1))
        if gate is None:
            g = tile.load(grad, 2)
        else:
            y = torch.bmm(turned, tile.of(kv), out=tile.buffer(2))
            y4 = tile.split(y)
            _combine(problem, tile, y, z, a, vbar, y4)
            torch.mul(y4.add_(tile.cut(lepe)), tile.cut(grad), out=tile.cut(dgate))
            g = tile.buffer(2)
            torch.mul(tile.cut(grad), tile.cut(gate), out=tile.split(g))
            tile.cut(dlepe).copy_(tile.split(g))
        if mala:
            tile.of(dvbar).sub_(_weighted_sum(z, g, tile.buffer(3)))
            dz = _dot(g, tile.of(vbar), tile.buffer(3)).neg_()
        g = torch.mul(g, a, out=tile.buffer(2))
        tile.of(dkv).baddbmm_(turned.mT, g)
        u = torch.bmm(g, tile.of(kv).mT, out=tile.buffer(1))
        u = tile.turn_back(u)  # R_i^T (a_i g_i KV^T)
        change = _dot(u, phi, tile.buffer(2)).mul_(shrink)  # -a'(z_i) / a_i times u_i . phi(q_i)
        dz = dz.sub_(change) if mala else change.neg_()
        tile.of(dkbar).add_(_weighted_sum(dz, phi, tile.buffer(2)))
        u.addcmul_(dz, tile.of(kbar))
        torch.mul(tile.split(u), tile.split(phi.clamp_(max=1)), out=tile.cut(dq))


def _key_gradients(
    problem: Problem, tiles: _Tiles, k: Tensor, v: Tensor, sums: Tensor, dk: Tensor, dv: Tensor
) -> None:
    dkv, dkbar, dvbar, *_ = _rows(sums)
    dkv *= problem.coefficient
    dkbar *= problem.coefficient
    dvbar /= problem.num_tokens
    for tile in tiles:
        phi = tile.feature_map(k)
        turned = tile.turn(phi, tile.buffer(1))
        u = torch.bmm(tile.load(v, 2), tile.of(dkv).mT, out=tile.buffer(3))
        u = tile.turn_back(u).add_(tile.of(dkbar))
        torch.mul(tile.split(u), tile.split(phi.clamp_(max=1)), out=tile.cut(dk))
        y = tile.split(torch.bmm(turned, tile.of(dkv), out=tile.buffer(3)))
        torch.add(y, tile.split(tile.of(dvbar)), out=tile.cut(dv))


def _weighted_key_gradients(
    problem: Problem,
    tiles: _Tiles,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    sums: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
) -> None:
    """RALA: through the softmax as well, ``dlogit_j = w_j (dw_j - sum_m w_m dw_m)``."""
    kv, kbar, _, g, softmax = _rows(states)
    dkv, dkbar, *_ = _rows(sums)
    peak, total = softmax[..., 1:2], softmax[..., 2:3]
    # The sum over all keys, without a pass over them: w_m dw_m adds up to these two products.
    mean = (
        (dkv.double() * kv).sum((-2, -1), keepdim=True)
        + (dkbar.double() * kbar).sum(-1, keepdim=True)
    ).to(kv.dtype)
    for tile in tiles:
        phi = tile.feature_map(k)
        logits = _logits(problem, phi, tile.of(g))
        weights = logits.sub_(tile.of(peak)).exp_().div_(tile.of(total))
        turned = tile.turn(phi, tile.buffer(1))
        u = torch.bmm(tile.load(v, 2), tile.of(dkv).mT, out=tile.buffer(3))
        u = tile.turn_back(u).add_(tile.of(dkbar))
        dlogits = _dot(u, phi, tile.buffer(2)).sub_(tile.of(mean)).mul_(weights)
        dlogits.mul_(problem.scale)
        tile.of(dg).add_(_weighted_sum(dlogits, phi, tile.buffer(2)))
        u.mul_(weights).addcmul_(dlogits, tile.of(g))
        torch.mul(tile.split(u), tile.split(phi.clamp_(max=1)), out=tile.cut(dk))
        y = tile.split(torch.bmm(turned, tile.of(dkv), out=tile.buffer(3)))
        torch.mul(y, tile.split(weights), out=tile.cut(dv))


# What the passes share.


def _rows(states: Tensor) -> tuple[Tensor, ...]:
    """KV, kbar, vbar and, for RALA, g and the softmax's logsumexp, maximum and sum.

    Each of shape (B * heads, rows, d). The maximum and the sum stand behind the logsumexp because
    ``exp(logit - maximum) / sum`` is more accurate than ``exp(logit - logsumexp)``.
    """
    states = states.flatten(0, 1)
    return states[:, : states.shape[-1]], *states[:, states.shape[-1] :].split(1, 1)


def _dot(x: Tensor, y: Tensor, scratch: Tensor) -> Tensor:
    """Inner products over the last dimension, which is kept."""
    return torch.mul(x, y, out=scratch).sum(-1, keepdim=True)


def _weighted_sum(weights: Tensor, x: Tensor, scratch: Tensor) -> Tensor:
    """``sum_i weights_i x_i`` over the tokens, which stay as one.

    PyTorch sums in a cascade; a product with the weights as a row of a matrix loses ten times more.
    """
    return torch.mul(x, weights, out=scratch).sum(-2, keepdim=True)


def _logits(problem: Problem, phi: Tensor, g: Tensor) -> Tensor:
    """RALA's ``scale * g . phi(k_j)``, whose error the softmax raises to a relative one.

    A product of matrices rounds less often than :func:`_dot`.
    """
    return torch.bmm(phi, g.mT).mul_(problem.scale)


def _normalisers(
    problem: Problem, phi: Tensor, kbar: Tensor, scratch: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``z_i``, ``a_i`` and ``-a'(z_i) / a_i``, which stays finite where ``a'`` overflows."""
    z = _dot(phi, kbar, scratch)
    inverse = (z + problem.eps).reciprocal_()
    if problem.kind == 'mala':
        return z, inverse + 1, inverse / (z + (1 + problem.eps))
    return z, inverse, inverse


def _combine(
    problem: Problem, tile: _Tile, y: Tensor, z: Tensor, a: Tensor, vbar: Tensor, out: Tensor
) -> None:
    """``out = a_i y_i - b_i vbar``; ``y`` is overwritten."""
    if problem.kind == 'mala':
        y, z, vbar = (tile.split(x) for x in (y.mul_(a), z, tile.of(vbar)))
        torch.addcmul(y, z, vbar, value=-1, out=out)
    else:
        torch.div(tile.split(y), tile.split(z + problem.eps), out=out)


@functools.lru_cache(maxsize=32)
def _tables(size: tuple[int, int], head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rotations of the rows and of the columns as complex numbers, (H, d // 4) and (W, d // 4)."""
    row_cos, row_sin, col_cos, col_sin = rotary_tables(size, head_dim, dtype)
    return torch.complex(row_cos, row_sin), torch.complex(col_cos, col_sin)


def _even(total: int, at_most: int) -> int:
    """The size of the pieces when ``total`` is cut as evenly as pieces of ``at_most`` allow."""
    pieces = -(-total // max(1, at_most))
    return -(-total // pieces)


class _Tiles:
    """A walk over (B, heads, N, d) in tiles: some tokens of as many images as fill a tile.

    Args:
        problem (Problem): The operator.
        like (Tensor): Shape (B, heads, N, d) and type of the inputs.
        inverse (bool): Whether the tiles have to turn back as well.
    """

    def __init__(self, problem: Problem, like: Tensor, inverse: bool = False) -> None:
        self.size, self.rotary, self.inverse = problem.size, problem.rotary, inverse
        self.batch, self.heads, num_tokens, self.head_dim = like.shape
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        channels = self.heads * self.head_dim
        at_most = TILE_ELEMENTS * torch.get_num_threads() // channels
        self.images = _even(self.batch, at_most // num_tokens)
        self.columns = _even(problem.width, at_most)
        self.rows = _even(problem.height, at_most // problem.width)
        self.elements = self.images * self.rows * self.columns * channels
        self.memory: dict[int, Tensor] = {}
        self.corner: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[_Tile]:
        height, width = self.size
        for top in range(0, height, self.rows):
            for left in range(0, width, self.columns):
                bottom, right = min(top + self.rows, height), min(left + self.columns, width)
                if self.rotary and self.corner != (top, left):
                    self.corner = top, left
                    self._fill_rotation(slice(top, bottom), slice(left, right))
                tokens = slice(top * width + left, (bottom - 1) * width + right)
                for first in range(0, self.batch, self.images):
                    yield _Tile(self, slice(first, min(first + self.images, self.batch)), tokens)

    def buffer(self, name: int | str, shape: tuple[int, ...]) -> Tensor:
        """Memory for a tile, allocated when first asked for; never initialised."""
        if name not in self.memory:
            self.memory[name] = torch.empty(self.elements, dtype=self.dtype)
        return self.memory[name][: math.prod(shape)].view(shape)

    def _fill_rotation(self, rows: slice, columns: slice) -> None:
        """The turns of a tile's tokens as complex numbers, (tokens, d // 2)."""
        of_row, of_column = _tables(self.size, self.head_dim, self.dtype)
        of_row, of_column = of_row[rows, None], of_column[columns]
        shape = (of_row.shape[0], of_column.shape[0], self.head_dim // 2)
        turn = torch.view_as_complex(self.buffer('turn', (*shape, 2)))
        turn[..., : self.head_dim // 4] = of_row
        turn[..., self.head_dim // 4 :] = of_column
        self.turn = turn.flatten(0, 1)
        if self.inverse:
            back = torch.view_as_complex(self.buffer('back', (*shape, 2)))
            self.back = torch.conj_physical(turn, out=back).flatten(0, 1)


class _Tile:
    """Some tokens of some images. Computation is on (G, n, d) with G = images * heads.

    ``cut`` takes its part of an input or output, (images, heads, n, d), ``of`` that of the states.
    """

    def __init__(self, tiles: _Tiles, images: slice, tokens: slice) -> None:
        self.tiles, self.images, self.tokens = tiles, images, tokens
        groups = (images.stop - images.start) * tiles.heads
        self.shape = (groups, tokens.stop - tokens.start, tiles.head_dim)

    def buffer(self, index: int) -> Tensor:
        """Working memory (G, n, d), the same for every tile."""
        return self.tiles.buffer(index, self.shape)

    def cut(self, x: Tensor) -> Tensor:
        """The tile of an input or output (B, heads, N, d): (images, heads, n, d)."""
        return x[self.images, :, self.tokens]

    def of(self, state: Tensor) -> Tensor:
        """The tile's part of a state (B * heads, ...): (G, ...)."""
        heads = self.tiles.heads
        return state[self.images.start * heads : self.images.stop * heads]

    def split(self, x: Tensor) -> Tensor:
        """(G, ...) as (images, heads, ...)."""
        return x.unflatten(0, (-1, self.tiles.heads))

    def load(self, x: Tensor, index: int) -> Tensor:
        """The tile of an input in the type of the computation; a view where that is possible."""
        x = self.cut(x)
        if x.dtype == self.tiles.dtype and 1 in x.shape[:2]:
            return x.flatten(0, 1)
        buffer = self.buffer(index)
        self.split(buffer).copy_(x)
        return buffer

    def feature_map(self, x: Tensor) -> Tensor:
        """``phi(x)`` in buffer 0, by way of buffer 1.

        ``exp(min(x, 0)) + max(x, 0)`` keeps the digits that ``elu(x) + 1`` loses where it is small,
        and PyTorch's exp2 takes a third of the time of its exp and expm1.
        """
        x = self.cut(x)
        phi, positive = self.buffer(0), self.buffer(1)
        if x.dtype != phi.dtype or x.stride(-1) != 1:
            x = self.split(positive).copy_(x)
        torch.mul(x, _LOG2_E, out=self.split(phi))
        torch.clamp(x, min=0, out=self.split(positive))
        return phi.clamp_(max=0).exp2_().add_(positive)

    def turn(self, x: Tensor, out: Tensor) -> Tensor:
        """Every token of ``x`` by its rotary embedding."""
        if not self.tiles.rotary:
            return out.copy_(x) if out is not x else x
        torch.mul(_pairs(x), self.tiles.turn, out=_pairs(out))
        return out

    def turn_back(self, x: Tensor) -> Tensor:
        """In place, by the inverse."""
        if self.tiles.rotary:
            _pairs(x).mul_(self.tiles.back)
        return x


def _pairs(x: Tensor) -> Tensor:
    """Adjacent channels as complex numbers."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))
