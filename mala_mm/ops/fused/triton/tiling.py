"""What is launched, and how large: decided by device, head width, dtype, layout and pass.

Nothing here looks at B, H or W but the number of programs, which is a run-time number. No Triton is
needed, so that the traffic model and the tests of a machine without it read the same plan.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

HEAD_DIMS = (32, 64, 96, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PASSES = (
    'reduce_queries',
    'reduce_keys',
    'apply_queries',
    'backward_gate',
    'backward_queries',
    'backward_keys',
)


def reduced_float32() -> bool:
    """Whether the user allows float32 products of less than its precision.

    ``torch.get_float32_matmul_precision`` raises where that was said by backend.
    """
    try:
        return torch.get_float32_matmul_precision() != 'highest'
    except RuntimeError:
        return torch.backends.cuda.matmul.fp32_precision != 'ieee'


def precision(dtype: torch.dtype) -> str:
    """What a dot multiplies.

    Always on the tensor cores, with float32 sums. bf16 and fp16 go there as they are; what does not
    fit into the range of fp16 is scaled by a power of two. float32 is the sum of three bfloat16
    numbers, and the six products above its own rounding error are summed; of two where
    ``torch.set_float32_matmul_precision`` allows that ('high').
    """
    if dtype == torch.bfloat16:
        return 'bf16'
    if dtype == torch.float16:
        return 'fp16'
    return 'bf16x3' if reduced_float32() else 'bf16x6'


def shared_memory(capability: int) -> int:
    """KiB of shared memory that a program may have; 99 on consumer devices (8.6, 8.9, 12.0).

    Args:
        capability (int): Compute capability of the device, 80 for 8.0.
    """
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(capability, 99)


def lacks_memory(head_dim: int, dtype: torch.dtype, capability: int) -> str | None:
    """What a device lacks to hold a program's tiles; None if it holds them.

    Args:
        head_dim (int): Head width d.
        dtype (torch.dtype): Type of q, k and v.
        capability (int): Compute capability of the device, 80 for 8.0.
    """
    available = shared_memory(capability)
    if dtype == torch.float32 and padded(head_dim) == 128 and available < 104:
        return (
            'needs 104 KiB of shared memory per program for float32 at d > 64, got compute '
            f'capability {capability / 10}, which has {available} KiB'
        )
    return None


@dataclass(frozen=True)
class Tiling:
    """How the kernel of one pass is compiled, and the feature map cut for it.

    Attributes:
        rows: Rows of the feature map in a tile.
        columns: Columns of the feature map in a tile, and of the strip that a program walks down.
        warps: Warps per program.
        stages: Tiles in flight.
        residency: Programs that a streaming multiprocessor holds at once.
        least: Fewest tokens per program, so that what a program reads or writes once (a d x d
            state) is little beside its tokens.
        fused: Whether one launch of a backward pass makes all of its gradients. Where its two
            (d, d) matrices do not fit into the registers of a program, a launch makes the gradients
            that need one of them, and the tokens are read once more.
        follow: Whether a backward pass has its features follow the layout of a dot's result in the
            registers (``laid_out`` in ``kernels/arithmetic.py``), or the compiler choose.
    """

    rows: int
    columns: int = 16
    warps: int = 4
    stages: int = 2
    residency: int = 1
    least: int = 0
    fused: bool = True
    follow: bool = True

    @property
    def block(self) -> int:
        """Tokens per tile."""
        return self.rows * self.columns


def padded(head_dim: int) -> int:
    """Channels of a tile: Triton's tiles are powers of two."""
    return 1 << (head_dim - 1).bit_length()


# By (type and tensor cores, channels of a tile). Chosen so that nothing spills and that the loop is
# short (``benchmarks/results/aot.md``); nearly all registers are in use: of 64 Ki, 255 times 32 for
# each warp. Which of the tiles that fit are the fastest takes a device to tell:
# ``benchmarks/tune.py``.
_TILINGS = {
    ('half, wgmma', 32): {
        'reduce_queries': Tiling(rows=4, warps=4, stages=3, residency=4),
        'reduce_keys': Tiling(rows=4, warps=4, stages=3, residency=2),
        'apply_queries': Tiling(rows=4, warps=4, stages=3, residency=2),
        'backward_gate': Tiling(rows=4, warps=8, stages=3, residency=1),
        'backward_queries': Tiling(rows=4, warps=8, stages=2, residency=1),
        'backward_keys': Tiling(rows=4, warps=8, stages=2, residency=1),
    },
    ('half, wgmma', 64): {
        'reduce_queries': Tiling(rows=4, warps=4, stages=3, residency=4),
        'reduce_keys': Tiling(rows=4, warps=4, stages=3, residency=2),
        'apply_queries': Tiling(rows=4, warps=4, stages=3, residency=2),
        'backward_gate': Tiling(rows=4, warps=8, stages=3, residency=1),
        'backward_queries': Tiling(rows=8, warps=8, stages=2, residency=1),
        'backward_keys': Tiling(rows=4, warps=8, stages=2, residency=1, follow=False),
    },
    ('half, wgmma', 128): {
        'reduce_queries': Tiling(rows=4, warps=8, stages=3, residency=2),
        'reduce_keys': Tiling(rows=2, warps=4, stages=2, residency=2),
        'apply_queries': Tiling(rows=4, warps=8, stages=2, residency=1),
        'backward_gate': Tiling(rows=2, warps=8, stages=2, residency=1),
        'backward_queries': Tiling(rows=2, warps=8, stages=2, residency=1),
        'backward_keys': Tiling(rows=2, warps=8, stages=2, residency=1),
    },
    ('half, mma', 32): {
        'reduce_queries': Tiling(rows=4, warps=4, stages=3, residency=4),
        'reduce_keys': Tiling(rows=4, warps=4, stages=3, residency=2),
        'apply_queries': Tiling(rows=4, warps=8, stages=2, residency=1),
        'backward_gate': Tiling(rows=4, warps=8, stages=2, residency=1),
        'backward_queries': Tiling(rows=2, warps=8, stages=2, residency=1),
        'backward_keys': Tiling(rows=2, warps=8, stages=2, residency=1),
    },
    ('half, mma', 64): {
        'reduce_queries': Tiling(rows=4, warps=4, stages=3, residency=4),
        'reduce_keys': Tiling(rows=4, warps=4, stages=3, residency=2),
        'apply_queries': Tiling(rows=4, warps=8, stages=2, residency=1),
        'backward_gate': Tiling(rows=4, warps=8, stages=2, residency=1),
        'backward_queries': Tiling(rows=4, warps=8, stages=2, residency=1),
        'backward_keys': Tiling(rows=2, warps=8, stages=2, residency=1),
    },
    ('half, mma', 128): {
        'reduce_queries': Tiling(rows=2, warps=8, stages=2, residency=2),
        'reduce_keys': Tiling(rows=2, warps=8, stages=2, residency=1),
        'apply_queries': Tiling(rows=2, warps=8, stages=2, residency=1),
        'backward_gate': Tiling(rows=2, warps=8, stages=2, residency=1),
        'backward_queries': Tiling(rows=1, warps=8, stages=2, residency=1, fused=False),
        'backward_keys': Tiling(rows=1, warps=8, stages=2, residency=1),
    },
    ('float32', 32): {
        'reduce_queries': Tiling(rows=1, warps=4, stages=2, residency=4),
        'reduce_keys': Tiling(rows=1, warps=4, stages=2, residency=2),
        'apply_queries': Tiling(rows=1, warps=4, stages=2, residency=2),
        'backward_gate': Tiling(rows=1, warps=4, stages=2, residency=2),
        'backward_queries': Tiling(rows=1, warps=4, stages=2, residency=2),
        'backward_keys': Tiling(rows=1, warps=4, stages=2, residency=2),
    },
    ('float32', 64): {
        'reduce_queries': Tiling(rows=1, warps=4, stages=2, residency=4),
        'reduce_keys': Tiling(rows=1, warps=4, stages=2, residency=2),
        'apply_queries': Tiling(rows=1, warps=4, stages=2, residency=2),
        'backward_gate': Tiling(rows=1, warps=4, stages=2, residency=2),
        'backward_queries': Tiling(rows=1, warps=8, stages=2, residency=1),
        'backward_keys': Tiling(rows=1, warps=8, stages=2, residency=1),
    },
    ('float32', 128): {
        'reduce_queries': Tiling(rows=1, warps=8, stages=2, residency=2),
        'reduce_keys': Tiling(rows=1, warps=8, stages=2, residency=1),
        'apply_queries': Tiling(rows=1, warps=8, stages=1, residency=1),
        'backward_gate': Tiling(rows=1, warps=8, stages=1, residency=1),
        'backward_queries': Tiling(rows=1, warps=8, stages=1, residency=1, fused=False),
        'backward_keys': Tiling(rows=1, warps=8, stages=1, residency=1, fused=False),
    },
}


def default_tiling(name: str, head_dim: int, dtype: torch.dtype, capability: int = 90) -> Tiling:
    """The configuration of a pass where no tuned one is known.

    Args:
        name (str): One of :data:`PASSES`.
        head_dim (int): Head width d.
        dtype (torch.dtype): Type of q, k and v.
        capability (int): Compute capability of the device, 80 for 8.0.

    Returns:
        Tiling: The configuration.
    """
    wgmma = 90 <= capability < 100
    family = 'float32' if dtype == torch.float32 else f'half, {"wgmma" if wgmma else "mma"}'
    chosen = _TILINGS[family, padded(head_dim)][name]
    # A reduction writes d * d float32 per program, and the next launch reads them: with 8 d tokens
    # of 2 bytes that is an eighth of what the whole forward has to move.
    reduces = name in ('reduce_keys', 'backward_queries')
    return replace(chosen, least=8 * head_dim if reduces else 4 * head_dim)


@functools.cache
def _tuned(path: str) -> dict:
    return json.loads(Path(path).read_text())


def tiling(
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    token_major: bool,
    device: str = '',
    capability: int = 90,
) -> Tiling:
    """The configuration of a pass.

    Args:
        name (str): One of :data:`PASSES`.
        head_dim (int): Head width d.
        dtype (torch.dtype): Type of q, k and v.
        token_major (bool): Whether channels are adjacent in memory.
        device (str): Name of the device, as ``torch.cuda.get_device_name`` gives it. If the
            environment variable ``MALA_MM_TUNED`` names a file that ``benchmarks/tune.py`` wrote
            and the device stands in it, its entry replaces the default's fields.
        capability (int): Compute capability of the device, 80 for 8.0.

    Returns:
        Tiling: The configuration.
    """
    chosen = default_tiling(name, head_dim, dtype, capability)
    path = os.environ.get('MALA_MM_TUNED')
    if path:
        entry = _tuned(path).get(device, {}).get(key(name, head_dim, dtype, token_major), {})
        chosen = replace(chosen, **entry)
    return chosen


def key(name: str, head_dim: int, dtype: torch.dtype, token_major: bool) -> str:
    """Under which name a tuned configuration is kept."""
    layout = 'token-major' if token_major else 'channel-first'
    return f'{name}/{head_dim}/{str(dtype).removeprefix("torch.")}/{layout}'


def cut(
    tiling: Tiling, num_heads: int, size: tuple[int, int], multiprocessors: int
) -> tuple[int, int, int]:
    """How the tokens of each head are dealt out.

    The map is cut into strips of ``tiling.columns`` columns, and each strip into pieces of equally
    many tiles, so that all programs together fill the device once, or as few whole times as the
    strips alone need.

    Args:
        tiling (Tiling): Configuration of the pass.
        num_heads (int): Batch size times heads.
        size (tuple[int, int]): Height and width of the feature map.
        multiprocessors (int): Streaming multiprocessors of the device.

    Returns:
        tuple[int, int, int]: Strips, pieces per strip and tiles per piece.
    """
    height, width = size
    strips, rows = -(-width // tiling.columns), -(-height // tiling.rows)
    places = multiprocessors * tiling.residency
    rounds = -(-strips * num_heads // places)
    most = round(rows * tiling.block / max(tiling.least, tiling.block))
    pieces = max(1, min(rounds * places // (strips * num_heads), most))
    tiles = -(-rows // pieces)
    return strips, -(-rows // tiles), tiles
