"""The launches of the forward and the backward: described once per kind of call, then replayed.

``passes.py`` says what runs, with which arguments. It is asked when inputs of new shapes, strides,
types or alignments come. What it says is kept as a :class:`Plan` in which only addresses are open:
a call fills these in and hands each launch to its compiled kernel, past Triton's binder, which
would look at every argument again. The first launch of a kernel goes Triton's ordinary way, which
compiles it; in the interpreter all do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from .. import library
from ..library import Problem
from .layout import Operand
from .passes import Description, describe_backward, describe_forward
from .tiling import precision

try:
    from triton.knobs import runtime as _HOOKS
except ImportError:  # before Triton 3.4
    from triton.compiler import CompiledKernel as _HOOKS

_INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'
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
    """Describe everything anew from now on, because what ``tiling.py`` says has changed."""
    _plans.clear()


def _run(describe, problem: Problem, tensors: tuple[Tensor, ...], states: Tensor) -> None:
    """Run what ``describe`` says of tensors of this kind."""
    if not (states.numel() and problem.num_tokens):  # no image or no token: nothing to fill but
        states.zero_()
        return

    def plan() -> Plan:
        device = _device(tensors[0].device.index)
        description = Description(problem, states.shape, len(tensors), device)
        describe(description, tensors)
        return Plan([Launch(*x) for x in description.launches], description.scratch)

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
