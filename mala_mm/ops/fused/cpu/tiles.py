"""The operators in tiles that stay in the cache, in plain PyTorch: any dtype, any head width.

The tokens are walked over in tiles of some feature-map rows. Within a tile everything happens in
a few buffers that all tiles share: a pass reads its inputs from memory once, writes its outputs
once, and allocates nothing of the size of a feature map.

Forward: a pass over the keys sums the states, a pass over the queries applies them. Backward: a
pass over the queries, then one over the keys. RALA's global query costs one more of each: its mean
before the keys, its gradient after them. Formulas: :class:`~mala_mm.ops.fused.library.Problem` and
its derivatives; the comments name them where they are computed.

Sums and products are held in float32 for half types, else in the type of the inputs. For a given
number of threads results repeat bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...rotary import rotary_tables
from ..library import Problem

# Elements of a buffer per thread: small enough for three or four buffers to live in the second- and
# third-level caches, large enough to drown the microseconds that each call into PyTorch costs.
TILE_ELEMENTS = 1 << 18
_LOG2_E = 1 / math.log(2)
_ONE = torch.ones((), device='cpu')


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
    """Fill ``out`` and ``states``; the contract stands in :mod:`mala_mm.ops.fused.library`."""
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
            _combine(problem, y, z, a, tile.of(vbar), tile.cut(out))
        else:
            _combine(problem, y, z, a, tile.of(vbar), y)
            torch.mul(y.add_(tile.cut(lepe)), tile.cut(gate), out=tile.cut(out))


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
    """Fill the gradients; the contract stands in :mod:`mala_mm.ops.fused.library`."""
    tiles = _Tiles(problem, q)
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
        tile.cut(dq).add_(slope.mul_(tile.of(dg)))


# The passes. A leading d means the gradient of what follows.


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
            _combine(problem, y, z, a, tile.of(vbar), y)
            torch.mul(y.add_(tile.cut(lepe)), tile.cut(grad), out=tile.cut(dgate))
            g = torch.mul(tile.cut(grad), tile.cut(gate), out=tile.buffer(2))
            tile.cut(dlepe).copy_(g)
        if mala:
            tile.of(dvbar).sub_(_weighted_sum(z, g, tile.buffer(3)))
            dz = _dot(g, tile.of(vbar), tile.buffer(3)).neg_()
        g = torch.mul(g, a, out=tile.buffer(2))
        tile.of(dkv).baddbmm_(turned.mT, g)
        u = torch.bmm(g, tile.of(kv).mT, out=tile.buffer(1))
        u = tile.turn(u, u, back=True)  # R_i^T (a_i g_i KV^T)
        change = _dot(u, phi, tile.buffer(2)).mul_(shrink)  # -a'(z_i) / a_i times u_i . phi(q_i)
        dz = dz.sub_(change) if mala else change.neg_()
        tile.of(dkbar).add_(_weighted_sum(dz, phi, tile.buffer(2)))
        u.addcmul_(dz, tile.of(kbar))
        torch.mul(u, phi.clamp_(max=1), out=tile.cut(dq))


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
        u = tile.turn(u, u, back=True).add_(tile.of(dkbar))
        torch.mul(u, phi.clamp_(max=1), out=tile.cut(dk))
        y = torch.bmm(turned, tile.of(dkv), out=tile.buffer(3))
        torch.add(y, tile.of(dvbar), out=tile.cut(dv))


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
        u = tile.turn(u, u, back=True).add_(tile.of(dkbar))
        dlogits = _dot(u, phi, tile.buffer(2)).sub_(tile.of(mean)).mul_(weights)
        dlogits.mul_(problem.scale)
        tile.of(dg).add_(_weighted_sum(dlogits, phi, tile.buffer(2)))
        u.mul_(weights).addcmul_(dlogits, tile.of(g))
        torch.mul(u, phi.clamp_(max=1), out=tile.cut(dk))
        y = torch.bmm(turned, tile.of(dkv), out=tile.buffer(3))
        torch.mul(y, weights, out=tile.cut(dv))


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


def _combine(problem: Problem, y: Tensor, z: Tensor, a: Tensor, vbar: Tensor, out: Tensor) -> None:
    """``out = a_i y_i - b_i vbar``; ``y`` is overwritten."""
    if problem.kind == 'mala':
        torch.addcmul(y.mul_(a), z, vbar, value=-1, out=out)
    else:
        torch.div(y, z + problem.eps, out=out)


@functools.lru_cache(maxsize=32)
def _rotations(size: tuple[int, int], head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the turns of rows, (H, 1, d // 4), and columns, (W, d // 4), as complex numbers."""
    row_cos, row_sin, column_cos, column_sin = rotary_tables(size, head_dim, dtype)
    return torch.complex(row_cos, row_sin)[:, None], torch.complex(column_cos, column_sin)


def _even(total: int, at_most: int) -> int:
    """Return the size of the pieces when ``total`` is cut evenly into pieces of ``at_most``."""
    pieces = -(-total // max(1, at_most))
    return -(-total // pieces)


class _Tiles:
    """A walk over (B, heads, N, d) in tiles: a rectangle of one image's tokens, all heads.

    Where there is one head, several small images share a tile: images then stand for heads.

    Args:
        problem (Problem): The operator.
        like (Tensor): Shape (B, heads, N, d) and type of the inputs.
    """

    def __init__(self, problem: Problem, like: Tensor) -> None:
        if problem.kind not in ('mala', 'rala', 'linear'):
            raise ValueError(f'the tiles compute no operator of the kind {problem.kind!r}')
        self.problem = problem
        self.batch, self.heads, num_tokens, self.head_dim = like.shape
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        at_most = TILE_ELEMENTS * torch.get_num_threads() // (self.heads * self.head_dim)
        self.images = _even(self.batch, at_most // num_tokens) if self.heads == 1 else 1
        self.columns = _even(problem.width, at_most)
        self.rows = _even(problem.height, at_most // problem.width)
        self.memory: dict[int, Tensor] = {}

    def __iter__(self) -> Iterator[_Tile]:
        height, width = self.problem.size
        for top in range(0, height, self.rows):
            for left in range(0, width, self.columns):
                rows = slice(top, min(top + self.rows, height))
                columns = slice(left, min(left + self.columns, width))
                for first in range(0, self.batch, self.images):
                    images = slice(first, min(first + self.images, self.batch))
                    yield _Tile(self, images, rows, columns)

    def buffer(self, index: int, shape: tuple[int, ...]) -> Tensor:
        """Memory for a tile, the same for every tile and never initialised."""
        memory = self.memory.get(index)
        if memory is None:
            elements = self.images * self.heads * self.rows * self.columns * self.head_dim
            memory = self.memory[index] = torch.empty(elements, dtype=self.dtype)
        return memory[: math.prod(shape)].view(shape)


class _Tile:
    """Some tokens of one image, or of several with one head each.

    Everything is computed on shape (G, n, d), where G counts heads or images.
    """

    def __init__(self, tiles: _Tiles, images: slice, rows: slice, columns: slice) -> None:
        self.tiles, self.images, self.rows, self.columns = tiles, images, rows, columns
        width = tiles.problem.width
        self.tokens = slice(
            rows.start * width + columns.start, (rows.stop - 1) * width + columns.stop
        )
        self.states = slice(images.start * tiles.heads, images.stop * tiles.heads)
        self.shape = (
            self.states.stop - self.states.start,
            self.tokens.stop - self.tokens.start,
            tiles.head_dim,
        )

    def buffer(self, index: int) -> Tensor:
        """Working memory (G, n, d)."""
        return self.tiles.buffer(index, self.shape)

    def cut(self, x: Tensor) -> Tensor:
        """Return the tile's part (G, n, d) of an input or output (B, heads, N, d), a view."""
        x = x[self.images, 0] if self.tiles.heads == 1 else x[self.images.start]
        return x[:, self.tokens]

    def of(self, state: Tensor) -> Tensor:
        """Return the tile's part (G, ...) of a state (B * heads, ...), a view."""
        return state[self.states]

    def load(self, x: Tensor, index: int) -> Tensor:
        """Return the tile's part of an input in the computation's type, a view if it has that."""
        x = self.cut(x)
        return x if x.dtype == self.tiles.dtype else self.buffer(index).copy_(x)

    def feature_map(self, x: Tensor) -> Tensor:
        """``phi(x)`` in buffer 0, by way of buffer 1.

        ``elu(x) + 1 = min(max(x, 0) + 1, exp(x))``, which keeps the digits that the sum loses where
        it is small. PyTorch's exp2 takes a third of the time of its exp and expm1.
        """
        x, phi, linear = self.cut(x), self.buffer(0), self.buffer(1)
        if x.dtype != phi.dtype or x.stride(-1) != 1:
            x = linear.copy_(x)
        torch.mul(x, _LOG2_E, out=phi).exp2_()
        torch.add(x, 1, out=linear)
        return torch.clamp(linear, min=_ONE, max=phi, out=phi)

    def turn(self, x: Tensor, out: Tensor, back: bool = False) -> Tensor:
        """Every token of ``x`` by its rotary embedding, or back."""
        problem = self.tiles.problem
        if not problem.rotary:
            return x if out is x else out.copy_(x)
        of_row, of_column = _rotations(problem.size, self.shape[-1], self.tiles.dtype)
        of_row, of_column = of_row[self.rows], of_column[self.columns]
        if back:
            of_row, of_column = of_row.conj_physical(), of_column.conj_physical()
        row_half, column_half = self._halves(x)
        row_half_out, column_half_out = (row_half, column_half) if out is x else self._halves(out)
        torch.mul(row_half, of_row, out=row_half_out)
        torch.mul(column_half, of_column, out=column_half_out)
        return out

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Adjacent channels as complex numbers, (G, rows, columns, d // 4) per half of them."""
        groups, _, head_dim = self.shape
        rows = self.rows.stop - self.rows.start
        pairs = torch.view_as_complex(x.view(groups, rows, -1, head_dim // 2, 2))
        return pairs[..., : head_dim // 4], pairs[..., head_dim // 4 :]
