"""Measure configurations of the Triton kernels on this device and keep the fastest.

    python -m benchmarks.tune --out tuned.json [--head-dim 64 96] [--dtype bfloat16] [--minutes 20]
    MALA_MM_TUNED=tuned.json python train.py ...

Writes, per device, what differs from the defaults of ``mala_mm/ops/fused/triton/tiling.py``. A pass
is tuned over three sizes at once (the geometric mean of its kernel's times, replayed in a graph):
no size decides alone.
Entries of other devices in an existing file are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import torch

from mala_mm.ops.fused import library
from mala_mm.ops.fused.triton import launch, tiling

SIZES = ((200, 334), (128, 512), (50, 84))
GRID = {'rows': (1, 2, 4, 8), 'warps': (4, 8), 'stages': (1, 2, 3, 4), 'residency': (1, 2, 3, 4)}
FEW = {'rows': (2, 4), 'warps': (4,), 'stages': (2,), 'residency': (2,)}


def candidates(default: tiling.Tiling, grid: dict) -> list[tiling.Tiling]:
    """The default and all of the grid; what is fused stays as the default has it."""
    found = [default]
    for values in itertools.product(*grid.values()):
        chosen = replace(default, **dict(zip(grid, values)))
        found.append(replace(chosen, least=max(chosen.least, chosen.block)))
    return found


def run_time(runs: list[launch.Run], name: str, device: str) -> float:
    """Median seconds of the launches of one kernel, all of the given passes in turn.

    On a GPU a graph holds twenty rounds of them, so that the host takes no part.
    """
    todo = [(r, x) for r in runs for x in r.plan.launches if x.kernel.__name__ == name]

    def rounds(number: int) -> None:
        for _ in range(number):
            for r, x in todo:
                r.repeat(x)

    if device == 'cpu':  # interpreted: what is kept of a launch is how to make it anew
        start = time.perf_counter()
        for r, x in todo:
            x.first(r.tensors, r.device)
        return time.perf_counter() - start
    rounds(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rounds(20)
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 20e3)
    return statistics.median(times)


def calls(
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    token_major: bool,
    size: tuple[int, int],
    device: str,
) -> Callable[[], None]:
    """A forward or a backward that runs the pass, with everything in place."""
    kind = 'rala' if name == 'reduce_queries' else 'mala'
    shape = (2, 1, size[0] * size[1], head_dim)
    tensors = [torch.randn(shape, device=device, dtype=dtype) for _ in range(8)]
    if not token_major:
        tensors = [x.mT.contiguous().mT for x in tensors]
    q, k, v, grad, out, dq, dk, dv = tensors
    rows = library.state_rows(kind, head_dim)
    states = torch.empty(2, 1, rows, head_dim, device=device, dtype=torch.float32)
    problem = library.make_problem(kind, head_dim, size)
    launch.forward(problem, (q, k, v), out, states)
    if name.startswith('backward'):
        return lambda: launch.backward(problem, grad, (q, k, v), states, (dq, dk, dv))
    return lambda: launch.forward(problem, (q, k, v), out, states)


@contextlib.contextmanager
def configured(name: str, chosen: tiling.Tiling) -> Iterator[None]:
    """Inside, ``chosen`` is what the heuristics say of a pass."""
    original = tiling.default_tiling

    def default_tiling(other: str, *rest) -> tiling.Tiling:
        return chosen if other == name else original(other, *rest)

    launch.forget_plans()
    with mock.patch.object(tiling, 'default_tiling', default_tiling):
        yield
    launch.forget_plans()


def tune(name, head_dim, dtype, token_major, sizes, grid, device, capability, end) -> dict:
    """The fields in which the fastest configuration differs from the default."""
    todo = [calls(name, head_dim, dtype, token_major, size, device) for size in sizes]
    default = tiling.default_tiling(name, head_dim, dtype, capability)
    best, best_time = default, math.inf
    for chosen in candidates(default, grid):
        if time.perf_counter() > end:
            break
        times = []
        try:
            with configured(name, chosen):
                for call in todo:
                    with launch.recorded() as runs:
                        call()
                    times.append(run_time(runs, name, device))
        except Exception as error:  # too much shared memory, say: not a candidate here
            print(f'  {chosen}: {type(error).__name__}')
            continue
        mean = math.exp(statistics.fmean(map(math.log, times)))
        if mean < 0.98 * best_time:  # what is within the noise does not replace the default
            best, best_time = chosen, mean
    print(f'{tiling.key(name, head_dim, dtype, token_major)}: {best}, {1e6 * best_time:.1f} us')
    return {key: value for key, value in asdict(best).items() if value != getattr(default, key)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--head-dim', type=int, nargs='+', default=tiling.HEAD_DIMS)
    parser.add_argument('--dtype', nargs='+', default=['bfloat16'])
    parser.add_argument('--passes', nargs='+', choices=tiling.PASSES, default=tiling.PASSES)
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
    capability = 90
    if not args.dry_run:
        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
    sizes, grid = (((3, 5),), FEW) if args.dry_run else (SIZES, GRID)
    end = time.perf_counter() + 60 * args.minutes
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    mine = known.setdefault(name, {})
    for dtype, head_dim, token_major, one in itertools.product(
        args.dtype, args.head_dim, (True, False), args.passes
    ):
        kind = getattr(torch, dtype)
        better = tune(one, head_dim, kind, token_major, sizes, grid, device, capability, end)
        if better:
            mine[tiling.key(one, head_dim, kind, token_major)] = better
        args.out.write_text(json.dumps(known, indent=1))
        if time.perf_counter() > end:
            print('time is up: what is not listed above keeps its default')
            break


if __name__ == '__main__':
    main()
