"""What the Triton kernels move, counted from their grids and tiles, beside the least possible.

    python -m benchmarks.traffic [--multiprocessors 132]

For every launch two numbers: ``memory``, each operand once per launch, which is what reaches the
device's memory when re-reads of the small states hit the cache; and ``issued``, every element that
a program asks for, re-reads included. Partial sums count in full in both,
although a cache may keep them. The floor is the least that any implementation moves: with
``t = B * N * C * bytes``, forward 4t (k, v, q in, y out), backward 7t (q, g in, dq out; k, v in,
dk, dv out). RALA has to read q once more forward, and q and g once more backward.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from mala_mm.ops.fused.library import state_rows
from mala_mm.ops.fused.triton.tiling import cut, tiling


@dataclass(frozen=True)
class Shape:
    """One attention call of a published model at a dense-prediction size."""

    name: str
    batch: int
    height: int
    width: int
    heads: int
    head_dim: int

    @property
    def tokens(self) -> int:
        return self.height * self.width

    def unit(self, dtype: torch.dtype) -> int:
        """``t``, bytes of one tensor (B, heads, N, d)."""
        return self.batch * self.heads * self.tokens * self.head_dim * dtype.itemsize


SHAPES = (
    Shape('800x1333 stage 1, tiny/small', 2, 200, 334, 1, 64),
    Shape('800x1333 stage 1, base/large', 2, 200, 334, 1, 96),
    Shape('800x1333 stage 2, tiny/small', 2, 100, 167, 2, 64),
    Shape('512x2048 stage 1, tiny/small', 1, 128, 512, 1, 64),
    Shape('512x2048 stage 1, base/large', 1, 128, 512, 1, 96),
)


@dataclass(frozen=True)
class Launch:
    """Bytes of one launch."""

    name: str
    programs: int
    memory: int
    issued: int


def _token_pass(name, shape, dtype, multiprocessors, tensors, states, partial) -> Launch:
    """A pass over the tokens: ``tensors`` of size t, states read per program, partials written."""
    chosen = tiling(name, shape.head_dim, dtype, True)
    heads = shape.batch * shape.heads
    strips, pieces, _ = cut(chosen, heads, (shape.height, shape.width), multiprocessors)
    programs = heads * strips * pieces
    written = 4 * partial * programs
    memory = tensors * shape.unit(dtype) + 4 * states * heads + written
    issued = tensors * shape.unit(dtype) + 4 * states * programs + written
    return Launch(name, programs, memory, issued)


def _combine(launch_chunks: int, heads: int, rows: int) -> Launch:
    moved = 4 * heads * rows * (launch_chunks + 1)
    return Launch('combine', heads * -(-rows // 64), moved, moved)


def forward(shape: Shape, dtype: torch.dtype, multiprocessors: int, kind='mala', gated=False):
    """The launches of the forward, in order."""
    d, heads = shape.head_dim, shape.batch * shape.heads
    rows = (d + 2) * d
    states = state_rows(kind, d) * d
    launches = []
    if kind == 'rala':
        launches.append(_token_pass('reduce_queries', shape, dtype, multiprocessors, 1, 0, d))
        launches.append(_combine(launches[-1].programs // heads, heads, d))
    read = d if kind == 'rala' else 0
    partial = rows + (2 if kind == 'rala' else 0)
    launches.append(_token_pass('reduce_keys', shape, dtype, multiprocessors, 2, read, partial))
    launches.append(_combine(launches[-1].programs // heads, heads, rows))
    tensors = 4 if gated else 2
    launches.append(_token_pass('apply_queries', shape, dtype, multiprocessors, tensors, states, 0))
    return launches


def backward(shape: Shape, dtype: torch.dtype, multiprocessors: int, kind='mala', gated=False):
    """The launches of the backward, in order."""
    d, heads = shape.head_dim, shape.batch * shape.heads
    rows = (d + 2) * d
    states = state_rows(kind, d) * d
    rala = kind == 'rala'

    def token_pass(name, tensors, read, partial):
        return _token_pass(name, shape, dtype, multiprocessors, tensors, read, partial)

    launches = []
    if gated:  # q, lepe, o, g in; the gradients of o and lepe out
        launches.append(token_pass('backward_gate', 6, states, 0))
    if tiling('backward_queries', d, dtype, True).fused:
        launches.append(token_pass('backward_queries', 2 if rala else 3, states, rows))
    else:
        launches.append(token_pass('backward_queries', 2, states - d * d, rows - d))
        launches.append(token_pass('backward_queries', 2 if rala else 3, states, d))
    launches.append(_combine(launches[-1].programs // heads, heads, rows))
    read, written = rows + (states if rala else 0), d if rala else 0
    if tiling('backward_keys', d, dtype, True).fused:
        launches.append(token_pass('backward_keys', 4, read, written))
    else:
        launches.append(token_pass('backward_keys', 2, rows, 0))
        launches.append(token_pass('backward_keys', 3, read, written))
    if rala:
        launches.append(_combine(launches[-1].programs // heads, heads, d))
        launches.append(token_pass('backward_queries', 3, states + d, 0))
    return launches


def floor(direction: str, kind: str = 'mala', gated: bool = False) -> int:
    """Least traffic in units of t.

    The gate adds lepe and o forward (2t); backward it adds reading them and writing their two
    gradients, and y has to be kept or q read again: 5t.
    """
    if direction == 'forward':
        return 4 + (kind == 'rala') + 2 * gated
    return 7 + 2 * (kind == 'rala') + 5 * gated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--multiprocessors', type=int, default=132, help='of an H100 or H200')
    parser.add_argument('--dtype', choices=('bfloat16', 'float16', 'float32'), default='bfloat16')
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    print(f'{args.dtype}, {args.multiprocessors} multiprocessors; bytes in units of t, x floor\n')
    print('| shape | operator | direction | launches | programs | floor | memory | issued |')
    print('|---' * 8 + '|')
    for shape in SHAPES:
        for kind, gated in (('mala', False), ('mala', True), ('rala', False)):
            for direction, launches in (('forward', forward), ('backward', backward)):
                parts = launches(shape, dtype, args.multiprocessors, kind, gated)
                t, least = shape.unit(dtype), floor(direction, kind, gated)
                memory = sum(part.memory for part in parts) / t
                issued = sum(part.issued for part in parts) / t
                programs = '/'.join(str(part.programs) for part in parts)
                print(
                    f'| {shape.name} | {kind}{" gated" if gated else ""} | {direction} '
                    f'| {len(parts)} | {programs} | {least} t '
                    f'| {memory:.2f} t, {memory / least:.3f} x | {issued:.2f} t |'
                )


if __name__ == '__main__':
    main()
