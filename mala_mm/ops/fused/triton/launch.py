"""The launches of the forward and the backward: described once per kind of call, then replayed.

``describe_forward`` and ``describe_backward`` say what runs, with which arguments. They are asked
when inputs of new shapes, strides, types or alignments come. What they say is kept as a
:class:`Plan` in which only addresses are open: a call fills these in and hands each launch to its
compiled kernel, past Triton's binder, which would look at every argument again. The first launch of
a kernel goes Triton's ordinary way, which compiles it; in the interpreter all do.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from .. import library
from ..library import Problem
from . import kernels
from .plan import Config, config, cut, padded, precision

try:
    from triton.knobs import runtime as _HOOKS
except ImportError:  # before Triton 3.4
    from triton.compiler import CompiledKernel as _HOOKS

_INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'
# What of the kernels each kind runs; a kind that is not here is no kind of theirs.
_FLAGS = {
    'mala': dict(MALA=True, WEIGHTED=False),
    'rala': dict(MALA=False, WEIGHTED=True),
    'linear': dict(MALA=False, WEIGHTED=False),
}
# All loads of a program are on their way at once. The interpreter is fastest with few programs.
_COMBINE = {'BLOCK': 2048 if _INTERPRETED else 64, 'CHUNKS': 128}
# Sizes of a detector's batches come again and again; one plan is a few KB.
_MOST_PLANS = 1024
_plans: dict[tuple, Plan] = {}
_compiled: dict[tuple, Any] = {}
_lock = threading.Lock()
_HERE = contextlib.nullcontext()
_runs: list[Run] | None = None


@functools.cache
def _device(index: int | None) -> tuple[str, int, int]:
    """Name, compute capability and number of streaming multiprocessors."""
    if _INTERPRETED:
        return 'interpreter', 90, 4
    properties = torch.cuda.get_device_properties(index)
    capability = 10 * properties.major + properties.minor
    return properties.name, capability, properties.multi_processor_count


def _unit(*numbers: int, most: int) -> int:
    """Largest power of two, at most ``most``, that divides all numbers."""
    unit = most
    while any(number % unit for number in numbers):
        unit //= 2
    return unit


def layout(x: Tensor, width: int) -> tuple[int, tuple[int, int, int, int]]:
    """Layout code and strides of (B, heads, N, d), as kernels read maps of ``width`` columns."""
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
    # no tile is larger than 16 rows by 128 columns by 128 channels
    wide = (16 * width + 128) * strides[2] + 128 * strides[3] >= 2**31
    code = 32 * wide + 8 * order + unit.bit_length() - 1
    return code, tuple(s // unit if s != 1 else 1 for s in strides)


# --- how launches are kept and replayed -----------------------------------------------------------


class Operand(NamedTuple):
    """Where a kernel's tensor lies, as a place in one of the tensors that every call brings along.

    Attributes:
        source (int): Which of the call's tensors; the last one is the plan's scratch memory.
        offset (int): Bytes from its start.
        view (Tensor | None): The tensor (B, heads, N, d) itself; None for memory without a layout.
    """

    source: int
    offset: int = 0
    view: Tensor | None = None

    def resolve(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """The tensor, for Triton's ordinary way, which looks at its type and alignment."""
        if self.view is not None:
            return self.view
        memory = tensors[self.source]
        return memory.view(-1)[self.offset // memory.element_size() :] if self.offset else memory


class Launch:
    """One launch of one kernel.

    Args:
        kernel: The Triton function.
        grid (tuple[int, ...]): Programs along up to three axes.
        arguments (dict): Every argument by name: operands, run-time numbers, and constants, whose
            names are in capitals.
        warps (int): Warps per program.
        stages (int): Tiles in flight.

    Raises:
        TypeError: If an argument is missing, or is none of the kernel's.
    """

    def __init__(
        self, kernel, grid: tuple[int, ...], arguments: dict, warps: int, stages: int
    ) -> None:
        wrong = arguments.keys() ^ set(kernel.arg_names)
        if wrong:
            raise TypeError(
                f'missing or unknown arguments of {kernel.__name__}: {", ".join(sorted(wrong))}; '
                f'it takes {", ".join(kernel.arg_names)}'
            )
        self.kernel, self.grid = kernel, (*grid, 1, 1)[:3]
        self.arguments = {name: arguments[name] for name in kernel.arg_names}
        self.options = {'num_warps': warps, 'num_stages': stages}

    def first(self, tensors: tuple[Tensor, ...], device: int | None) -> bool:
        """Launch, by Triton's ordinary way unless this kernel was compiled for another plan.

        Returns:
            bool: Whether the launch can be repeated for other tensors (not in the interpreter).
        """
        arguments = {
            name: x.resolve(tensors) if isinstance(x, Operand) else x
            for name, x in self.arguments.items()
        }
        traits = (_trait(name, x) for name, x in arguments.items())
        key = (device, self.kernel, *self.options.values(), *traits)
        known = _compiled.get(key)
        if known is None:
            compiled = self.kernel[self.grid](**arguments, **self.options)
            if getattr(compiled, 'function', None) is None:
                return False
            _compiled[key] = compiled
        self._bind(_compiled[key])
        if known is not None:
            self([x.data_ptr() for x in tensors], _stream(device))
        return True

    def _bind(self, compiled) -> None:
        """Keep what a launch of the compiled kernel takes, all but the addresses."""
        # Triton 3.2 leaves constants out of a launch, later ones want them.
        constants = 'constexpr' in compiled.src.signature.values()
        arguments = [x for n, x in self.arguments.items() if constants or not n.isupper()]
        self.places = [
            (i, x.source, x.offset) for i, x in enumerate(arguments) if isinstance(x, Operand)
        ]
        self.template = [None if isinstance(x, Operand) else x for x in arguments]
        self.compiled, self.run = compiled, compiled.run
        self.function, self.metadata = compiled.function, compiled.packed_metadata
        del self.arguments  # and with them the views of the first call's tensors

    def __call__(self, addresses: list[int], stream: int) -> None:
        """Launch the compiled kernel on the tensors at these addresses."""
        arguments = self.template.copy()
        for place, source, offset in self.places:
            arguments[place] = addresses[source] + offset
        if _watched():
            self.compiled[self.grid](*arguments, stream=stream)
        else:
            self.run(*self.grid, stream, self.function, self.metadata, None, None, None, *arguments)


def _trait(name: str, x) -> object:
    """What Triton compiles a kernel for, of an argument's value."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if name.isupper():
        return x
    return type(x), isinstance(x, int) and -(2**31) <= x < 2**31


def _watched() -> bool:
    """Whether a profiler hooks into Triton's launches."""
    hook = _HOOKS.launch_enter_hook
    return bool(getattr(hook, 'calls', hook))


def _stream(device: int | None) -> int:
    return driver.active.get_current_stream(device or 0)


def _on(device: int | None) -> contextlib.AbstractContextManager:
    """Launches go to the current device: make it that of the tensors."""
    if device is None or device == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


class Plan(NamedTuple):
    """What runs on tensors of one kind.

    Attributes:
        launches (list[Launch]): The launches of one pass, in order.
        scratch (int): Float32 numbers that they share, allocated in one piece.
    """

    launches: list[Launch]
    scratch: int


class Run(NamedTuple):
    """A plan on the tensors of one call, alive: its launches can be repeated one by one.

    Attributes:
        plan (Plan): What ran.
        tensors (tuple[Tensor, ...]): On what, the scratch memory last.
        addresses (list[int]): Where these lie.
        device (int | None): Index of the device.
    """

    plan: Plan
    tensors: tuple[Tensor, ...]
    addresses: list[int]
    device: int | None

    def repeat(self, launch: Launch) -> None:
        """Run one of the plan's launches again, on the current stream."""
        launch(self.addresses, _stream(self.device))


@contextlib.contextmanager
def recorded() -> Iterator[list[Run]]:
    """Collect what runs inside, for tools that look at single launches."""
    global _runs
    _runs, outer = [], _runs
    try:
        yield _runs
    finally:
        _runs = outer


def forget_plans() -> None:
    """Describe everything anew from now on, because what ``plan.py`` says has changed."""
    _plans.clear()


def _run(describe, problem: Problem, tensors: tuple[Tensor, ...], states: Tensor) -> None:
    """Run what ``describe`` says of tensors of this kind."""
    if not (states.numel() and problem.num_tokens):  # no image or no token: nothing to fill but
        states.zero_()
        return

    def plan() -> Plan:
        description = _Description(problem, states.shape, len(tensors))
        describe(description, tensors)
        return Plan(description.launches, description.scratch)

    replay((describe, problem, states.shape, precision(tensors[0].dtype)), plan, tensors)


def replay(kind: tuple, describe: Callable[[], Plan], tensors: tuple[Tensor, ...]) -> None:
    """Run a plan on ``tensors``, described when inputs of this kind come for the first time.

    Args:
        kind (tuple): Whatever the description depends on beside dtype, strides, alignment and
            device of the tensors.
        describe (Callable): Makes the plan.
        tensors (tuple[Tensor, ...]): What operands name by their places.
    """
    addresses, alignment = [], 0
    for x in tensors:
        address = x.data_ptr()
        addresses.append(address)
        alignment = alignment << 4 | address & 15
    device = tensors[0].device.index
    strides = [x.stride() for x in tensors]
    key = (*kind, tensors[0].dtype, device, alignment, *strides)
    with _on(device):
        plan = known = _plans.get(key)
        if known is None:
            plan = describe()
        memory = tensors[0].new_empty(plan.scratch, dtype=torch.float32)
        addresses.append(memory.data_ptr())
        if known is not None:
            stream = _stream(device)
            for launch in plan.launches:
                launch(addresses, stream)
        elif all([launch.first((*tensors, memory), device) for launch in plan.launches]):
            with _lock:
                while len(_plans) >= _MOST_PLANS:
                    del _plans[next(iter(_plans))]
                _plans[key] = plan
        if _runs is not None:
            _runs.append(Run(plan, (*tensors, memory), addresses, device))


# --- what is launched -----------------------------------------------------------------------------


class _Description:
    """Collects the launches of one pass, with what all kernels take."""

    def __init__(self, problem: Problem, states: torch.Size, sources: int) -> None:
        self.problem = problem
        self.batch, self.heads, self.state_rows, self.head_dim = states
        self.tokens = problem.num_tokens
        self.sources = sources
        self.launches: list[Launch] = []
        self.scratch = 0

    def take(self, q: Tensor) -> None:
        """Choose device, layout and precision by the queries."""
        self.dtype, self.token_major = q.dtype, q.stride(3) == 1
        self.device, self.capability, self.multiprocessors = _device(q.device.index)

    def empty(self, *shape: int) -> Operand:
        """Scratch memory for every image and head."""
        start = self.scratch
        # a multiple of 256 bytes, so that every piece is aligned
        self.scratch += -(-self.batch * self.heads * math.prod(shape) // 64) * 64
        return Operand(self.sources, 4 * start)

    def plan(self, name: str) -> tuple[Config, int, int, int]:
        """How a pass is compiled, chunks per head, pieces per strip and tiles per piece."""
        chosen = config(
            name, self.head_dim, self.dtype, self.token_major, self.device, self.capability
        )
        heads, size = self.batch * self.heads, self.problem.size
        strips, pieces, tiles = cut(chosen, heads, size, self.multiprocessors)
        return chosen, strips * pieces, pieces, tiles

    def run(
        self, name: str, plan: tuple[Config, int, int, int], tensors: dict, **arguments: Any
    ) -> None:
        """Launch a kernel that passes over the tokens.

        Args:
            name (str): Its name in ``kernels.py``.
            plan (tuple): How it is compiled and cut.
            tensors (dict[str, Operand | None]): The maps that it reads and writes.
            **arguments: What else it takes; flags that are not named are off.
        """
        chosen, chunks, pieces, tiles = plan
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
        unit = _unit(self.problem.width, most=16 // self.dtype.itemsize) if adjacent else 1
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
            'ROTARY': self.problem.rotary,
            **_FLAGS[self.problem.kind],
            **dict.fromkeys(('QUERIES', 'KEYS', 'VALUES', 'GLOBAL'), False),
            'DOT': precision(self.dtype),
        }
        arguments = {x: common[x] for x in kernel.arg_names if x in common} | arguments
        grid = (self.batch * self.heads, chunks)
        self.launches.append(Launch(kernel, grid, arguments, chosen.warps, chosen.stages))

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
        self.launches.append(Launch(kernels.combine, grid, arguments, warps=8, stages=3))


class _Maps(NamedTuple):
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


def _maps(source: int, tensors: tuple[Tensor, ...], heads: int) -> _Maps:
    """Of ``(q, k, v)`` or ``(qkvo, lepe)``, or their gradients, which are the call's from there."""
    if len(tensors) == 3:
        return _Maps(*(Operand(source + i, 0, x) for i, x in enumerate(tensors)))
    packed, lepe = tensors
    return _Maps(*_parts(source, packed, heads, 4), *_parts(source + 1, lepe, heads))


def describe_forward(call: _Description, tensors: tuple[Tensor, ...]) -> None:
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
        plan = call.plan('reduce_queries')
        part = call.empty(plan[1], d)
        call.run('reduce_queries', plan, {'q': maps.q}, part=part)
        call.combine(part, plan[1], d, d, 1 / call.tokens, 1.0, query, stride)
    plan = call.plan('reduce_keys')
    chunks = plan[1]
    part = call.empty(chunks, rows)
    peak = call.empty(chunks, 2) if rala else None
    call.run(
        'reduce_keys',
        plan,
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
        call.plan('apply_queries'),
        {'q': maps.q, 'l': maps.lepe, 'o': maps.gate, 'y': y},
        states=states,
        eps=problem.eps,
        GATED=maps.gate is not None,
    )


def describe_backward(call: _Description, tensors: tuple[Tensor, ...]) -> None:
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
    g = Operand(0, 0, grad)
    if maps.gate is not None:
        (g,) = _parts(0, grad, call.heads)
        call.run(
            'backward_gate',
            call.plan('backward_gate'),
            {
                'q': maps.q,
                'l': maps.lepe,
                'o': maps.gate,
                'g': g,
                'do': out.gate,
                'dl': out.lepe,
            },
            states=states,
            eps=problem.eps,
        )
        g = out.lepe
    plan = call.plan('backward_queries')
    chunks = plan[1]
    part, dstates = call.empty(chunks, rows), call.empty(rows)
    dquery = call.empty(d)
    queries = functools.partial(
        call.run,
        'backward_queries',
        plan,
        {'q': maps.q, 'g': g, 'dq': out.q},
        states=states,
        part=part,
        dquery=dquery,
        eps=problem.eps,
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
        {'k': maps.k, 'v': maps.v, 'dk': out.k, 'dv': out.v},
        states=states,
        dstates=dstates,
        part=share,
        scale=problem.scale,
    )
    if keys_plan[0].fused:
        keys(KEYS=True, VALUES=True)
    else:
        keys(VALUES=True)
        keys(KEYS=True)
    if rala:
        call.combine(share, keys_plan[1], d, d, problem.scale / call.tokens, 1.0, dquery, d)
        queries(QUERIES=True, GLOBAL=True)


# --- the backend ----------------------------------------------------------------------------------


def forward(problem: Problem, inputs: tuple[Tensor, ...], out: Tensor, states: Tensor) -> None:
    """Fill ``out`` and ``states``; the contract stands in :mod:`mala_mm.ops.fused.library`."""
    if len(inputs) == 2:
        inputs = tuple(map(_flattenable, inputs))
    tensors = (*inputs, out, states)
    _run(describe_forward, problem, tensors, states)


def backward(
    problem: Problem,
    grad: Tensor,
    inputs: tuple[Tensor, ...],
    states: Tensor,
    grads: tuple[Tensor, ...],
) -> None:
    """Fill ``grads``; the contract stands in :mod:`mala_mm.ops.fused.library`."""
    if len(inputs) == 2:
        inputs, grad = tuple(map(_flattenable, inputs)), _flattenable(grad)
    tensors = (grad, *inputs, states, *grads)
    _run(describe_backward, problem, tensors, states)


def _flattenable(x: Tensor) -> Tensor:
    """A map whose rows follow each other in memory, so that its tokens have one stride.

    Part of a larger map has not (a crop); it is copied.
    """
    _, channels, height, width = x.shape
    strides = x.stride()
    if strides[2] == width * strides[3] or height == 1 or width == 1:
        return x
    return library.empty_map(x, channels).copy_(x)
