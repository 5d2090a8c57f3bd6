"""The launches of the forward and the backward."""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from ...rotary import rotary_tables
from ..library import Problem
from . import kernels
from .plan import Config, config, cut, padded, precision

_INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'
# What of the kernels each kind runs; a kind that is not here is no kind of theirs.
_FLAGS = {
    'mala': dict(MALA=True, WEIGHTED=False),
    'rala': dict(MALA=False, WEIGHTED=True),
    'linear': dict(MALA=False, WEIGHTED=False),
}
_COMBINE = {'BLOCK': 128, 'CHUNKS': 32, 'num_warps': 4}
_tables: dict[tuple, Tensor] = {}
_outgrown: list[Tensor] = []


@functools.cache
def _device(index: int | None) -> tuple[str, int, int]:
    """Name, compute capability and number of streaming multiprocessors."""
    if _INTERPRETED:
        return 'interpreter', 90, 4
    properties = torch.cuda.get_device_properties(index)
    capability = 10 * properties.major + properties.minor
    return properties.name, capability, properties.multi_processor_count


def rotary_table(size: tuple[int, int], head_dim: int, device: torch.device) -> Tensor:
    """Cosines and sines of positions 0, 1, ... for rows and columns alike, (2, length, d / 2).

    One table per device and head width, which grows to the next power of two when a map is larger
    than any before: sizes that change from batch to batch cost nothing. Outgrown tables stay
    (together they are smaller than the one in use): a CUDA graph may still read them.
    """
    longest = max(size)
    key = (device, head_dim)
    table = _tables.get(key)
    if table is None or table.shape[1] < longest:
        length = max(256, 1 << (longest - 1).bit_length())
        cos, sin, _, _ = rotary_tables((length, 1), head_dim, torch.float32, device)
        # the channels' first half turns by the row, the second by the column: same frequencies
        table = torch.stack([cos.repeat(1, 2), sin.repeat(1, 2)]).contiguous()
        if device.type == 'cuda' and torch.cuda.is_current_stream_capturing():
            return table  # not computed until the graph runs: of no use to anyone else
        if key in _tables:
            _outgrown.append(_tables[key])
        _tables[key] = table
    return table


def _unit(*numbers: int, most: int) -> int:
    """Largest power of two, at most ``most``, that divides all numbers."""
    unit = most
    while any(number % unit for number in numbers):
        unit //= 2
    return unit


def layout(x: Tensor) -> tuple[int, tuple[int, int, int, int]]:
    """Layout code and strides of (B, heads, N, d), as the kernels read them."""
    most = 16 // x.element_size()
    strides = x.stride()
    start = x.data_ptr() // x.element_size()
    if strides[3] == 1:
        order, others = 0, strides[:3]
    elif strides[2] == 1:
        order, others = 1, (*strides[:2], strides[3])
    else:
        order, others = 2, ()
    unit = _unit(start, *others, most=most) if others else 1
    # no tile is larger than 128 tokens by 128 channels
    wide = 128 * (strides[2] + strides[3]) >= 2**31
    code = 32 * wide + 8 * order + unit.bit_length() - 1
    return code, tuple(s // unit if s != 1 else 1 for s in strides)


class _Call:
    """One pass: collects what all kernels take, and launches."""

    def __init__(self, problem: Problem, q: Tensor):
        self.problem, self.q = problem, q
        self.batch, self.heads, self.tokens, self.head_dim = q.shape
        self.device, self.capability, self.multiprocessors = _device(q.device.index)
        self.token_major = q.stride(3) == 1
        self.table = rotary_table(problem.size, self.head_dim, q.device) if problem.rotary else q
        self.dot = precision(q.dtype)

    def plan(self, name: str) -> tuple[Config, int, int]:
        chosen = config(
            name, self.head_dim, self.q.dtype, self.token_major, self.device, self.capability
        )
        chunks, tiles = cut(chosen, self.batch * self.heads, self.tokens, self.multiprocessors)
        return chosen, chunks, tiles

    def empty(self, *shape: int) -> Tensor:
        return self.q.new_empty(self.batch * self.heads, *shape, dtype=torch.float32)

    def run(self, name: str, plan: tuple[Config, int, int], tensors: dict, **arguments) -> None:
        chosen, chunks, tiles = plan
        kernel = getattr(kernels, name)
        if unknown := set(arguments) - set(kernel.arg_names):
            raise TypeError(f'kernel {name} takes no {", ".join(sorted(unknown))}')
        codes = []
        for key, x in tensors.items():
            code, strides = (0, (1, 1, 1, 1)) if x is None else layout(x)
            codes.append(code)
            arguments[key] = self.q if x is None else x
            for axis, stride in zip('bhnd', strides):
                arguments[f'{key}_{axis}'] = stride
            arguments[key.upper()] = code
        adjacent = any(code // 8 % 4 == 1 for code in codes)
        unit = _unit(self.tokens, most=16 // self.q.element_size()) if adjacent else 1
        everything = {
            'table': self.table,
            'table_rows': self.table.shape[1],
            'heads': self.heads,
            'width': self.problem.width,
            'token_units': self.tokens // unit,
            'TOKEN_UNIT': unit,
            'chunks': chunks,
            'tiles': tiles,
            'stride': 0,
            'D': self.head_dim,
            'P': padded(self.head_dim),
            'BLOCK_N': chosen.block,
            'ROTARY': self.problem.rotary,
            **_FLAGS[self.problem.kind],
            **dict.fromkeys(('QUERIES', 'KEYS', 'VALUES', 'GLOBAL'), False),
            'DOT': self.dot,
            **arguments,
        }
        kernel[(self.batch * self.heads * chunks,)](
            **{key: everything[key] for key in kernel.arg_names},
            num_warps=chosen.warps,
            num_stages=chosen.stages,
        )

    def combine(
        self, part, chunks, rows, split, scale, tail_scale, result, stride, peak=None
    ) -> None:
        blocks = -(-rows // _COMBINE['BLOCK'])
        kernels.combine[(self.batch * self.heads * blocks,)](
            part,
            part if peak is None else peak,
            result,
            scale,
            tail_scale,
            chunks,
            rows,
            split,
            stride,
            WEIGHTED=peak is not None,
            **_COMBINE,
        )


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
    """Reduce the keys, combine, apply to the queries; RALA reduces the queries before."""
    call = _Call(problem, q)
    d, rala = call.head_dim, problem.kind == 'rala'
    stride = states.shape[2] * d
    states = states.view(-1, stride)
    query = states[:, (d + 2) * d :]
    if rala:
        plan = call.plan('reduce_queries')
        part = call.empty(plan[1], d)
        call.run('reduce_queries', plan, {'q': q}, part=part)
        call.combine(part, plan[1], d, d, 1 / call.tokens, 1.0, query, stride)
    plan = call.plan('reduce_keys')
    chunks, rows = plan[1], (d + 2) * d
    part = call.empty(chunks, rows)
    peak = call.empty(chunks, 2) if rala else None
    call.run(
        'reduce_keys',
        plan,
        {'k': k, 'v': v},
        part=part,
        peak=part if peak is None else peak,
        query=query if rala else part,
        scale=problem.scale,
        stride=stride,
    )
    weight = 1.0 if rala else problem.coefficient
    call.combine(part, chunks, rows, rows - d, weight, 1 / call.tokens, states, stride, peak)
    call.run(
        'apply_queries',
        call.plan('apply_queries'),
        {'q': q, 'y': out, 'l': lepe, 'o': gate, 'g': None, 'dl': None},
        states=states,
        eps=problem.eps,
        stride=stride,
        GATED=gate is not None,
        BACKWARD=False,
    )


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
    """The gate if there is one, the queries' side, combine, the keys' side.

    RALA's queries have a gradient through the global query too, which is known only after the keys:
    their side is parted in what is summed and what is written.
    """
    call = _Call(problem, q)
    d, rala = call.head_dim, problem.kind == 'rala'
    stride, rows = states.shape[2] * d, (d + 2) * d
    if gate is not None:
        call.run(
            'apply_queries',
            call.plan('apply_queries'),
            {'q': q, 'y': dgate, 'l': lepe, 'o': gate, 'g': grad, 'dl': dlepe},
            states=states,
            eps=problem.eps,
            stride=stride,
            GATED=True,
            BACKWARD=True,
        )
        grad = dlepe
    plan = call.plan('backward_queries')
    chunks = plan[1]
    part, dstates = call.empty(chunks, rows), call.empty(rows)
    dquery = call.empty(d)
    queries = functools.partial(
        call.run,
        'backward_queries',
        plan,
        {'q': q, 'g': grad, 'dq': dq},
        states=states,
        part=part,
        dquery=dquery,
        eps=problem.eps,
        stride=stride,
    )
    if plan[0].fused:
        queries(VALUES=True, KEYS=True, QUERIES=not rala)
    else:
        queries(VALUES=True)
        queries(KEYS=True, QUERIES=not rala)
    weight = 1.0 if rala else problem.coefficient
    call.combine(part, chunks, rows, rows - d, weight, 1 / call.tokens, dstates, rows)
    keys_plan = call.plan('backward_keys')
    share = call.empty(keys_plan[1], d) if rala else part
    keys = functools.partial(
        call.run,
        'backward_keys',
        keys_plan,
        {'k': k, 'v': v, 'dk': dk, 'dv': dv},
        states=states,
        dstates=dstates,
        part=share,
        scale=problem.scale,
        stride=stride,
    )
    if keys_plan[0].fused:
        keys(KEYS=True, VALUES=True)
    else:
        keys(VALUES=True)
        keys(KEYS=True)
    if rala:
        call.combine(share, keys_plan[1], d, d, problem.scale / call.tokens, 1.0, dquery, d)
        queries(QUERIES=True, GLOBAL=True)
