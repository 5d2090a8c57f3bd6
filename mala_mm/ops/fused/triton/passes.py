"""What the forward and the backward launch, in which order and with which arguments."""

from __future__ import annotations

import functools
import math
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import library
from ..library import Problem
from . import kernels
from .layout import Operand, common_unit, layout
from .tiling import Tiling, cut, padded, precision, tiling

# What of the kernels each kind runs; a kind that is not here is no kind of theirs.
FLAGS = {
    'mala': dict(MALA=True, WEIGHTED=False),
    'rala': dict(MALA=False, WEIGHTED=True),
    'linear': dict(MALA=False, WEIGHTED=False),
}
# All loads of a program are on their way at once. The interpreter is fastest with few programs.
_COMBINE = {'BLOCK': 2048 if os.environ.get('TRITON_INTERPRET') == '1' else 64, 'CHUNKS': 128}


class Description:
    """Collects the launches of the forward or the backward, with what all kernels take.

    Args:
        problem (Problem): What is computed.
        states (torch.Size): Shape of the states, (B, heads, rows, d).
        sources (int): Tensors that every call brings along; the scratch memory comes after them.
        device (tuple[str, int, int]): Name, compute capability and streaming multiprocessors.

    Attributes:
        launches (list[tuple]): The arguments of each :class:`~.launch.Launch`.
        scratch (int): Float32 numbers that they share.

    Raises:
        ValueError: If the kernels do not compute the problem's kind.
    """

    def __init__(
        self, problem: Problem, states: torch.Size, sources: int, device: tuple[str, int, int]
    ) -> None:
        if problem.kind not in FLAGS:
            raise ValueError(f'the kernels compute {", ".join(FLAGS)}, got kind {problem.kind!r}')
        self.problem = problem
        self.batch, self.heads, self.state_rows, self.head_dim = states
        self.tokens = problem.num_tokens
        self.sources = sources
        self.device, self.capability, self.multiprocessors = device
        self.launches: list[tuple] = []
        self.scratch = 0

    def take(self, q: Tensor) -> None:
        """Choose layout and precision by the queries."""
        self.dtype, self.token_major = q.dtype, q.stride(3) == 1

    def empty(self, *shape: int) -> Operand:
        """Scratch memory for every image and head."""
        start = self.scratch
        # a multiple of 256 bytes, so that every piece is aligned
        self.scratch += -(-self.batch * self.heads * math.prod(shape) // 64) * 64
        return Operand(self.sources, 4 * start)

    def cut(self, name: str) -> tuple[Tiling, int, int, int]:
        """How a pass is compiled, chunks per head, pieces per strip and tiles per piece."""
        chosen = tiling(
            name, self.head_dim, self.dtype, self.token_major, self.device, self.capability
        )
        heads, size = self.batch * self.heads, self.problem.size
        strips, pieces, tiles = cut(chosen, heads, size, self.multiprocessors)
        return chosen, strips * pieces, pieces, tiles

    def run(
        self, name: str, cut: tuple[Tiling, int, int, int], tensors: dict, **arguments: Any
    ) -> None:
        """Launch a kernel that passes over the tokens.

        Args:
            name (str): Its name in ``kernels``.
            cut (tuple): How it is compiled and cut.
            tensors (dict[str, Operand | None]): The maps that it reads and writes.
            **arguments: What else it takes; flags that are not named are off.
        """
        chosen, chunks, pieces, tiles = cut
        kernel = getattr(kernels, name)
        codes = []
        for key, operand in tensors.items():
            code, strides = 0, (1, 1, 1, 1)
            if operand is not None:
                code, strides = layout(operand.view, self.problem.width)
            codes.append(code)
            arguments[key] = Operand(0) if operand is None else operand
            for axis, stride in zip('bhnd', strides):
                arguments[f'{key}_{axis}'] = stride
            arguments[key.upper()] = code
        adjacent = any(code // 8 % 4 == 1 for code in codes)
        unit = common_unit(self.problem.width, most=16 // self.dtype.itemsize) if adjacent else 1
        common = {
            'heads': self.heads,
            'height': self.problem.height,
            'width_units': self.problem.width // unit,
            'WIDTH_UNIT': unit,
            'pieces': pieces,
            'tiles': tiles,
            'stride': self.state_rows * self.head_dim,
            'D': self.head_dim,
            'P': padded(self.head_dim),
            'ROWS': chosen.rows,
            'COLUMNS': chosen.columns,
            'STAGES': chosen.stages,
            'FOLLOW': chosen.follow,
            'ROTARY': self.problem.rotary,
            **FLAGS[self.problem.kind],
            **dict.fromkeys(('QUERIES', 'KEYS', 'VALUES', 'GLOBAL'), False),
            'DOT': precision(self.dtype),
        }
        arguments = {x: common[x] for x in kernel.arg_names if x in common} | arguments
        grid = (self.batch * self.heads, chunks)
        self.launches.append((kernel, grid, arguments, chosen.warps, chosen.stages))

    def combine(
        self,
        part: Operand,
        chunks: int,
        rows: int,
        split: int,
        scale: float,
        tail_scale: float,
        result: Operand,
        stride: int,
        peak: Operand | None = None,
    ) -> None:
        """Launch the sum of the chunks' partial results."""
        arguments = dict(
            part=part,
            peak=part if peak is None else peak,
            result=result,
            scale=scale,
            tail_scale=tail_scale,
            chunks=chunks,
            stride=stride,
            SIZE=rows,
            SPLIT=split,
            WEIGHTED=peak is not None,
            **_COMBINE,
        )
        blocks = -(-rows // _COMBINE['BLOCK'])
        grid = (self.batch * self.heads, blocks)
        self.launches.append((kernels.combine, grid, arguments, 8, 3))


class Maps(NamedTuple):
    """Every (B, heads, N, d) of one pass, with the states' place."""

    q: Operand
    k: Operand
    v: Operand
    gate: Operand | None = None
    lepe: Operand | None = None


def _parts(source: int, x: Tensor, heads: int, number: int = 1) -> list[Operand]:
    """The parts (B, heads, N, d) of a packed map, equal shares of its channels."""
    views = [library.split_heads(part, heads) for part in x.chunk(number, 1)]
    return [Operand(source, view.data_ptr() - x.data_ptr(), view) for view in views]


def _maps(source: int, tensors: tuple[Tensor, ...], heads: int) -> Maps:
    """Of ``(q, k, v)`` or ``(qkvo, lepe)``, or their gradients, which are the call's from there."""
    if len(tensors) == 3:
        return Maps(*(Operand(source + i, 0, x) for i, x in enumerate(tensors)))
    packed, lepe = tensors
    return Maps(*_parts(source, packed, heads, 4), *_parts(source + 1, lepe, heads))


def describe_forward(call: Description, tensors: tuple[Tensor, ...]) -> None:
    """Reduce the keys, combine, apply to the queries; RALA reduces the queries before."""
    *inputs, out, _ = tensors
    maps = _maps(0, tuple(inputs), call.heads)
    y = Operand(len(inputs), 0, out)
    if maps.gate is not None:
        (y,) = _parts(len(inputs), out, call.heads)
    states = Operand(len(inputs) + 1)
    call.take(maps.q.view)
    problem, d, rala = call.problem, call.head_dim, call.problem.kind == 'rala'
    stride, rows = call.state_rows * d, (d + 2) * d
    query = Operand(states.source, 4 * rows)
    if rala:
        cut = call.cut('reduce_queries')
        part = call.empty(cut[1], d)
        call.run('reduce_queries', cut, {'q': maps.q}, part=part)
        call.combine(part, cut[1], d, d, 1 / call.tokens, 1.0, query, stride)
    cut = call.cut('reduce_keys')
    chunks = cut[1]
    part = call.empty(chunks, rows)
    peak = call.empty(chunks, 2) if rala else None
    call.run(
        'reduce_keys',
        cut,
        {'k': maps.k, 'v': maps.v},
        part=part,
        peak=part if peak is None else peak,
        query=query if rala else part,
        scale=problem.scale,
    )
    weight = 1.0 if rala else problem.coefficient
    call.combine(part, chunks, rows, rows - d, weight, 1 / call.tokens, states, stride, peak)
    call.run(
        'apply_queries',
        call.cut('apply_queries'),
        {'q': maps.q, 'lepe': maps.lepe, 'o': maps.gate, 'y': y},
        states=states,
        eps=problem.eps,
        GATED=maps.gate is not None,
    )


def describe_backward(call: Description, tensors: tuple[Tensor, ...]) -> None:
    """The gate if there is one, the queries' side, combine, the keys' side.

    RALA's queries have a gradient through the global query too, which is known only after the keys:
    their side is parted in what is summed and what is written.
    """
    number = (len(tensors) - 2) // 2  # of inputs
    grad, inputs, grads = tensors[0], tensors[1 : 1 + number], tensors[2 + number :]
    maps = _maps(1, inputs, call.heads)
    states = Operand(1 + number)
    out = _maps(2 + number, grads, call.heads)
    call.take(maps.q.view)
    problem, d, rala = call.problem, call.head_dim, call.problem.kind == 'rala'
    rows = (d + 2) * d
    dy = Operand(0, 0, grad)
    if maps.gate is not None:
        (dy,) = _parts(0, grad, call.heads)
        call.run(
            'backward_gate',
            call.cut('backward_gate'),
            {
                'q': maps.q,
                'lepe': maps.lepe,
                'o': maps.gate,
                'dy': dy,
                'do': out.gate,
                'dlepe': out.lepe,
            },
            states=states,
            eps=problem.eps,
        )
        dy = out.lepe
    cut = call.cut('backward_queries')
    chunks = cut[1]
    part, dstates = call.empty(chunks, rows), call.empty(rows)
    dquery = call.empty(d)
    queries = functools.partial(
        call.run,
        'backward_queries',
        cut,
        {'q': maps.q, 'dy': dy, 'dq': out.q},
        states=states,
        part=part,
        dquery=dquery,
        eps=problem.eps,
    )
    if cut[0].fused:
        queries(VALUES=True, KEYS=True, QUERIES=not rala)
    else:
        queries(VALUES=True)
        queries(KEYS=True, QUERIES=not rala)
    weight = 1.0 if rala else problem.coefficient
    call.combine(part, chunks, rows, rows - d, weight, 1 / call.tokens, dstates, rows)
    keys_cut = call.cut('backward_keys')
    share = call.empty(keys_cut[1], d) if rala else part
    keys = functools.partial(
        call.run,
        'backward_keys',
        keys_cut,
        {'k': maps.k, 'v': maps.v, 'dk': out.k, 'dv': out.v},
        states=states,
        dstates=dstates,
        part=share,
        scale=problem.scale,
    )
    if keys_cut[0].fused:
        keys(KEYS=True, VALUES=True)
    else:
        keys(VALUES=True)
        keys(KEYS=True)
    if rala:
        call.combine(share, keys_cut[1], d, d, problem.scale / call.tokens, 1.0, dquery, d)
        queries(QUERIES=True, GLOBAL=True)
