"""Where a kernel's tensors lie, and how they are read there."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


def common_unit(*numbers: int, most: int) -> int:
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
    unit = common_unit(start, *others, most=most) if others else 1
    # no tile is larger than 16 rows by 128 columns by 128 channels
    wide = (16 * width + 128) * strides[2] + 128 * strides[3] >= 2**31
    code = 32 * wide + 8 * order + unit.bit_length() - 1
    return code, tuple(s // unit if s != 1 else 1 for s in strides)


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
