"""Measure configurations of the Triton kernels on this device and keep the fastest.

    python -m benchmarks.tune --out tuned.json [--head-dim 64 96] [--dtype bfloat16] [--minutes 20]
    MALA_MM_TUNED=tuned.json python train.py ...

Writes, per device, what differs from the defaults of ``mala_mm/ops/fused/triton/plan.py``. A pass
is tuned over three sizes at once (the geometric mean of their times): no size decides alone.
Entries of other devices in an existing file are kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch

from mala_mm.ops.fused import library
from mala_mm.ops.fused.triton import plan

SIZES = ((200, 334), (128, 512), (50, 84))
GRID = {'block': (16, 32, 64, 128), 'warps': (4, 8), 'stages': (1, 2, 3, 4), 'waves': (1, 2, 4)}
FEW = {'block': (32, 64), 'warps': (4,), 'stages': (2,), 'waves': (2,)}


def candidates(name: str, head_dim: int, dtype: torch.dtype, grid: dict) -> list[plan.Config]:
    """The default and all of the grid."""
    default = plan.default_config(name, head_dim, dtype)
    found = [default]
    for block, warps, stages, waves in itertools.product(*grid.values()):
        found.append(plan.Config(block, warps, stages, waves, max(default.least, block)))
    return found


def run_time(call, device: str) -> float:
    """Median seconds of a call, nothing else running."""
    call()
    times = []
    for _ in range(2 if device == 'cpu' else 20):
        if device == 'cuda':
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == 'cuda':
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def calls(name: str, head_dim: int, dtype: torch.dtype, token_major: bool, sizes, device: str):
    """Per size, a forward or backward with everything in place."""
    from mala_mm.ops.fused.triton import launch

    kind = 'rala' if name == 'reduce_queries' else 'mala'
    found = []
    for height, width in sizes:
        shape = (2, 1, height * width, head_dim)
        tensors = [torch.randn(shape, device=device, dtype=dtype) for _ in range(8)]
        if not token_major:
            tensors = [x.mT.contiguous().mT for x in tensors]
        q, k, v, grad, out, dq, dk, dv = tensors
        states = torch.empty(
            2, 1, library.state_rows(kind, head_dim), head_dim, device=device, dtype=torch.float32
        )
        problem = library.Problem(kind, 'published', height, width, head_dim**-0.5, 1e-6, True)
        launch.forward(problem, q, k, v, out, states)
        if name.startswith('backward'):
            arguments = (problem, grad, q, k, v, states, dq, dk, dv)
            found.append((launch.backward, arguments))
        else:
            found.append((launch.forward, (problem, q, k, v, out, states)))
    return found


def tune(name, head_dim, dtype, token_major, sizes, grid, device, end) -> dict:
    """The fields in which the fastest configuration differs from the default."""
    todo = calls(name, head_dim, dtype, token_major, sizes, device)
    original = plan.default_config
    default = original(name, head_dim, dtype)
    best, best_time = default, math.inf
    for chosen in candidates(name, head_dim, dtype, grid):
        if time.perf_counter() > end:
            break

        def configured(other, *rest, chosen=chosen):
            return chosen if other == name else original(other, *rest)

        plan.default_config = configured
        try:
            times = [run_time(lambda f=f, a=a: f(*a), device) for f, a in todo]
        except Exception as error:  # too much shared memory, say: not a candidate here
            print(f'  {chosen}: {type(error).__name__}')
            continue
        finally:
            plan.default_config = original
        mean = math.exp(statistics.fmean(map(math.log, times)))
        if mean < 0.98 * best_time:  # what is within the noise does not replace the default
            best, best_time = chosen, mean
    print(f'{plan.key(name, head_dim, dtype, token_major)}: {best}, {1e6 * best_time:.1f} us')
    return {key: value for key, value in asdict(best).items() if value != getattr(default, key)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--head-dim', type=int, nargs='+', default=plan.HEAD_DIMS)
    parser.add_argument('--dtype', nargs='+', default=['bfloat16'])
    parser.add_argument('--passes', nargs='+', choices=plan.PASSES, default=plan.PASSES)
    parser.add_argument('--minutes', type=float, default=30)
    parser.add_argument('--dry-run', action='store_true', help='interpreted, at one toy size')
    args = parser.parse_args()
    if args.dry_run and os.environ.get('TRITON_INTERPRET') != '1':
        parser.error('--dry-run needs TRITON_INTERPRET=1 in the environment')
    if not args.dry_run and not torch.cuda.is_available():
        parser.error('no CUDA device here')
    os.environ.pop('MALA_MM_TUNED', None)  # measure against the defaults
    device, name = (
        ('cpu', 'interpreter') if args.dry_run else ('cuda', torch.cuda.get_device_name())
    )
    sizes, grid = (((3, 5),), FEW) if args.dry_run else (SIZES, GRID)
    end = time.perf_counter() + 60 * args.minutes
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    mine = known.setdefault(name, {})
    for dtype, head_dim, token_major, one in itertools.product(
        args.dtype, args.head_dim, (True, False), args.passes
    ):
        kind = getattr(torch, dtype)
        better = tune(one, head_dim, kind, token_major, sizes, grid, device, end)
        if better:
            mine[plan.key(one, head_dim, kind, token_major)] = better
        args.out.write_text(json.dumps(known, indent=1))
        if time.perf_counter() > end:
            print('time is up: what is not listed above keeps its default')
            break


if __name__ == '__main__':
    main()
