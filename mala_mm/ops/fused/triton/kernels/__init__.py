"""The Triton kernels. ``mala_mm/ops/README.md`` derives every line.

Conventions, in all kernels:

- A tile is a patch of ROWS x COLUMNS tokens of the feature map, BLOCK_N in all. A program walks
  down a strip of COLUMNS columns, so that what depends on the column stays what it is.
- The rotary embedding turns the first half of the channels by the row, the second by the column,
  in pairs of neighbours. So channels are held as four tiles (BLOCK_N, P / 4): even and odd ones of
  the row's half, ``re`` and ``ro``, and of the column's half, ``ce`` and ``co``; P / 2 is half of
  the head width D, rounded up to a power of two.
- Everything between a load and a store is float32, but for the operands of a dot (``operand``).
- A tensor ``x`` comes as a pointer, four strides ``x_b``, ``x_h``, ``x_n``, ``x_d`` and a layout
  code ``X``, ``32 * wide + 8 * order + log2(unit)``: order 0 has adjacent channels, 1 adjacent
  tokens, 2 neither. Strides (but that of 1) are in multiples of ``unit`` elements, so that the
  compiler knows how wide a load may be, whatever their values; ``wide`` says that a tile spans more
  than 2^31 elements. ``WIDTH_UNIT`` does the same for the number of columns.
- Run-time integers never specialise a kernel: a new H x W compiles nothing.
- The grid is (heads of all images, chunks of their tokens).
"""

from .backward import backward_keys, backward_queries
from .forward import apply_queries, combine, reduce_keys, reduce_queries
from .gate import backward_gate
from .tiles import RUNTIME_INTEGERS

__all__ = [
    'RUNTIME_INTEGERS',
    'apply_queries',
    'backward_gate',
    'backward_keys',
    'backward_queries',
    'combine',
    'reduce_keys',
    'reduce_queries',
]
