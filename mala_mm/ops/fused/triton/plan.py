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
PASSES = ('reduce_queries', 'reduce_keys', 'apply_queries', 'backward_queries', 'backward_keys')


def precision(dtype: torch.dtype) -> str:
    """What a dot multiplies.

    Always on the tensor cores, with float32 sums. bf16 goes there as it is. float32 is the sum of
    three bfloat16 numbers, and the six products above its own rounding error are summed; of two
    where ``torch.set_float32_matmul_precision`` allows that ('high'). fp16 is the sum of two: as
    a type of operands its range is too small for KV and its gradient.
    """
    if dtype == torch.bfloat16:
        return 'bf16'
    if dtype == torch.float16 or torch.get_float32_matmul_precision() != 'highest':
        return 'bf16x3'
    return 'bf16x6'


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
    if dtype == torch.float32 and padded(head_dim) == 128 and available < 120:
        return (
            'needs 120 KiB of shared memory per program for float32 at d > 64, got compute '
            f'capability {capability / 10}, which has {available} KiB'
        )
    return None


@dataclass(frozen=True)
class Config:
    """How one kernel is compiled and cut.

    Attributes:
        block: Tokens per tile.
        warps: Warps per program.
        stages: Tiles in flight.
        waves: Programs per streaming multiprocessor to aim at.
        least: Fewest tokens per program, so that what a program reads or writes once (a d x d
            state) is little beside its tokens.
        fused: Whether one launch of a backward pass makes all of its gradients. Where its two
            (d, d) matrices do not fit into the registers of a program, a launch makes the gradients
            that need one of them, and the tokens are read once more.
    """

    block: int
    warps: int
    stages: int
    waves: int
    least: int
    fused: bool = True


def padded(head_dim: int) -> int:
    """Channels of a tile: Triton's tiles are powers of two."""
    return 1 << (head_dim - 1).bit_length()


# Tokens per tile, warps and tiles in flight of each of the PASSES, and the passes that are not
# fused, by (dtype, whether the device has wgmma, channels of a tile). Chosen so that nothing spills
# (``benchmarks/results/aot.md``). With wgmma (H100, H200) up to four tiles are in flight where they
# fit: by Little's law 4.3 TB/s times 1 us, 33 KB per multiprocessor, keep the memory busy. Without
# it, the 99 KiB of shared memory of consumer devices suffice, but for the last row. Which of the
# tiles that fit are the fastest takes a device to tell: ``benchmarks/tune.py``.
_BF16_WGMMA = ((64, 4, 4), (64, 4, 3), (64, 8, 4), (64, 8, 4), (64, 8, 4))
_BF16 = ((64, 4, 3), (64, 4, 3), (64, 8, 3), (64, 8, 2), (64, 8, 2))
_TILES = {
    ('bfloat16', True, 32): (_BF16_WGMMA, ()),
    ('bfloat16', True, 64): (_BF16_WGMMA, ()),
    ('bfloat16', True, 128): (((64, 8, 4), (64, 8, 3), (64, 8, 3), (32, 8, 4), (32, 8, 4)), ()),
    ('bfloat16', False, 32): (_BF16, ()),
    ('bfloat16', False, 64): (_BF16, ()),
    ('bfloat16', False, 128): (((64, 8, 2), (64, 8, 2), (32, 8, 3), (16, 8, 2), (32, 8, 1)), ()),
    ('float16', True, 32): (((64, 4, 4), (32, 4, 4), (32, 4, 4), (32, 4, 2), (32, 4, 4)), ()),
    ('float16', True, 64): (((64, 4, 4), (32, 4, 4), (32, 4, 4), (32, 8, 4), (32, 8, 4)), ()),
    ('float16', True, 128): (((64, 8, 4), (16, 8, 4), (16, 8, 4), (16, 8, 4), (16, 8, 4)), ()),
    ('float16', False, 32): (((64, 4, 3), (32, 4, 2), (32, 4, 2), (32, 4, 2), (32, 4, 2)), ()),
    ('float16', False, 64): (((64, 4, 3), (32, 4, 2), (32, 4, 2), (32, 8, 2), (32, 8, 2)), ()),
    ('float16', False, 128): (
        ((64, 8, 2), (16, 8, 2), (16, 8, 2), (16, 8, 2), (16, 8, 2)),
        ('backward_queries', 'backward_keys'),
    ),
    ('float32', True, 32): (((32, 4, 4), (32, 8, 4), (32, 4, 4), (16, 4, 4), (16, 4, 4)), ()),
    ('float32', True, 64): (((32, 4, 4), (32, 8, 3), (16, 4, 4), (16, 8, 3), (32, 8, 3)), ()),
    ('float32', True, 128): (
        ((32, 8, 4), (16, 8, 4), (16, 8, 1), (16, 8, 3), (16, 8, 1)),
        ('backward_queries',),
    ),
    ('float32', False, 32): (((32, 4, 2), (16, 4, 2), (32, 4, 2), (16, 4, 2), (16, 4, 2)), ()),
    ('float32', False, 64): (((32, 4, 2), (16, 4, 2), (16, 4, 2), (16, 8, 2), (32, 8, 2)), ()),
    ('float32', False, 128): (
        ((32, 8, 2), (16, 8, 2), (16, 8, 1), (16, 8, 3), (16, 8, 1)),
        ('backward_queries', 'backward_keys'),
    ),
}


def default_config(name: str, head_dim: int, dtype: torch.dtype, capability: int = 90) -> Config:
    """The configuration of a pass where no tuned one is known.

    Args:
        name (str): One of :data:`PASSES`.
        head_dim (int): Head width d.
        dtype (torch.dtype): Type of q, k and v.
        capability (int): Compute capability of the device, 80 for 8.0.

    Returns:
        Config: The configuration.
    """
    wgmma = 90 <= capability < 120
    tiles, parted = _TILES[str(dtype).removeprefix('torch.'), wgmma, padded(head_dim)]
    block, warps, stages = tiles[PASSES.index(name)]
    # A reduction writes d * d float32 per program, and the next launch reads them: with 8 d tokens
    # of 2 bytes that is an eighth of what the whole forward has to move.
    reduces = name in ('reduce_keys', 'backward_queries')
    least = max(8 * head_dim if reduces else 4 * head_dim, block)
    return Config(block, warps, stages, waves=2, least=least, fused=name not in parted)


@functools.cache
def _tuned(path: str) -> dict:
    return json.loads(Path(path).read_text())


def config(
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    token_major: bool,
    device: str = '',
    capability: int = 90,
) -> Config:
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
        Config: The configuration.
    """
    chosen = default_config(name, head_dim, dtype, capability)
    path = os.environ.get('MALA_MM_TUNED')
    if path:
        entry = _tuned(path).get(device, {}).get(key(name, head_dim, dtype, token_major), {})
        chosen = replace(chosen, **entry)
    return chosen


def key(name: str, head_dim: int, dtype: torch.dtype, token_major: bool) -> str:
    """Under which name a tuned configuration is kept."""
    layout = 'token-major' if token_major else 'channel-first'
    return f'{name}/{head_dim}/{str(dtype).removeprefix("torch.")}/{layout}'


def cut(config: Config, num_heads: int, num_tokens: int, multiprocessors: int) -> tuple[int, int]:
    """How the tokens of each head are dealt out.

    Args:
        config (Config): Configuration of the pass.
        num_heads (int): Batch size times heads.
        num_tokens (int): N.
        multiprocessors (int): Streaming multiprocessors of the device.

    Returns:
        tuple[int, int]: Programs per head and tiles per program.
    """
    wanted = -(-num_heads * num_tokens // (config.waves * multiprocessors))
    tiles = -(-max(wanted, config.least) // config.block)
    tiles = min(tiles, -(-num_tokens // config.block))
    return -(-num_tokens // (tiles * config.block)), tiles
