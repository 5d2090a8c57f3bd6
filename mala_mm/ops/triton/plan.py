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

    bf16 goes to the tensor cores as it is. The range of fp16 is too small for KV and its gradient:
    there float32 operands are split into two bfloat16 parts (which hold every fp16 number), and the
    three products that matter are summed. float32 is multiplied in full precision, on the tensor
    cores only if ``torch.set_float32_matmul_precision`` allows two bfloat16 parts ('high').
    """
    if dtype == torch.bfloat16:
        return 'bf16'
    if dtype == torch.float16 or torch.get_float32_matmul_precision() != 'highest':
        return 'bf16x3'
    return 'ieee'


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
    """

    block: int
    warps: int
    stages: int
    waves: int
    least: int


def padded(head_dim: int) -> int:
    """Channels of a tile: Triton's tiles are powers of two."""
    return 1 << (head_dim - 1).bit_length()


def default_config(name: str, head_dim: int, dtype: torch.dtype, capability: int = 90) -> Config:
    """The configuration of a pass where no tuned one is known.

    In bf16 chosen so that nothing spills (``benchmarks/results/aot.md``); which of the
    configurations that fit is the fastest takes a device: ``benchmarks/tune.py``. Full-precision
    float32 has no tensor cores to go to and spills in the backward at widths 96 and 128.
    """
    wide = padded(head_dim) == 128
    backward = name.startswith('backward')
    if dtype == torch.bfloat16:
        block, warps, stages = 64, 8 if wide or backward else 4, 2 if backward else 3
        if wide:
            stages = 3 if name == 'reduce_keys' else 2
            if backward:
                block = 16 if capability < 90 and name == 'backward_queries' else 32
    else:
        block, warps, stages = 32, 8 if wide or backward else 4, 1 if wide else 2
        if wide and backward:
            block = 16
        if dtype == torch.float32 and name != 'reduce_keys':
            # multiplied without tensor cores: a thread holds whole rows of its operands
            if wide and name != 'reduce_queries':
                block, warps = 16, 16
            elif name == 'backward_keys':
                block, stages = 16, 1
    # A reduction writes d * d float32 per program, and the next launch reads them: with 8 d tokens
    # of 2 bytes that is an eighth of what the whole forward has to move.
    reduces = name in ('reduce_keys', 'backward_queries')
    least = 8 * head_dim if reduces else 4 * head_dim
    return Config(block, warps, stages, waves=2, least=max(least, block))


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
