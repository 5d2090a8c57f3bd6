"""Everything worth knowing about the Triton kernels on one GPU, in one command.

    python -m benchmarks.gpu_session [--out DIR] [--minutes 7.5]
    python -m benchmarks.gpu_session --dry-run     # on the CPU, interpreted, at toy sizes

Needs torch and triton alone. First every variant is checked against float64 (a failed one is never
timed), then come the times at the published models' shapes beside the eager formula, its
``torch.compile`` and fused softmax attention, the share of the measured copy bandwidth, peak
memory, and a sweep over random sizes. Results are written as they come, to ``gpu_session.json`` and
``gpu_session.md``; what the time did not suffice for is named there.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from pathlib import Path

# Kernels are interpreted or compiled by what stands here when Triton loads.
if __name__ == '__main__' and '--dry-run' in sys.argv:
    os.environ['TRITON_INTERPRET'] = '1'

import torch
import torch.nn.functional as F

from benchmarks.traffic import SHAPES, Shape, floor
from mala_mm import ops
from mala_mm.ops.fused import library
from mala_mm.ops.fused.dispatch import eager as formula

DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}
RESULTS = ('out', 'dq', 'dk', 'dv', 'do', 'dlepe')


def eager(qkvo, lepe, heads, kind='mala', form='published'):
    """The formula as it is written, in the type of its inputs."""
    q, k, v, gate = (library.split_heads(x, heads) for x in qkvo.chunk(4, 1))
    y = formula(kind, q, k, v, tuple(qkvo.shape[2:]), form=form)
    y = (y + library.split_heads(lepe, heads)) * gate
    return y.transpose(2, 3).reshape(lepe.shape)


def fused(qkvo, lepe, heads, kind='mala', form='published'):
    return ops.gated_attention(qkvo, lepe, heads, kind=kind, form=form, backend='triton')


# --- correctness ----------------------------------------------------------------------------------


def variants(dry_run: bool) -> list[dict]:
    """Every kind, type, head width and layout; a few of them in a dry run."""
    found = []
    for kind, form in (('mala', 'published'), ('mala', 'paper'), ('rala', ''), ('linear', '')):
        for dtype in DTYPES:
            for head_dim in (32,) if dry_run else (32, 64, 96, 128):
                for token_major in (True, False):
                    if form == 'paper' and (head_dim > 64 or not token_major):
                        continue  # the kernels of the published form with another number
                    if dry_run and (dtype == 'fp16' or not token_major):
                        continue
                    found.append(
                        dict(
                            kind=kind,
                            form=form or 'published',
                            dtype=dtype,
                            head_dim=head_dim,
                            token_major=token_major,
                        )
                    )
    return found


def check(variant: dict, device: str, size: tuple[int, int]) -> dict:
    """Errors of the kernels and of the eager formula against float64, and whether all is well."""
    dtype = DTYPES[variant['dtype']]
    heads, channels = 2, 2 * variant['head_dim']
    generator = torch.Generator().manual_seed(0)
    qkvo = torch.randn(2, 4 * channels, *size, generator=generator)
    qkvo[:, 2 * channels : 3 * channels] += 1  # values with a mean: MALA cancels
    lepe, grad = (torch.randn(2, channels, *size, generator=generator) for _ in range(2))
    tensors = [x.to(device, dtype) for x in (qkvo, lepe, grad)]
    if variant['token_major']:
        tensors = [x.to(memory_format=torch.channels_last) for x in tensors]

    def run(function, dtype):
        qkvo, lepe, grad = (x.detach().to(dtype, copy=True) for x in tensors)
        qkvo.requires_grad_(), lepe.requires_grad_()
        out = function(qkvo, lepe, heads, variant['kind'], variant['form'])
        out.backward(grad)
        return [x.detach().double() for x in (out, *qkvo.grad.chunk(4, 1), lepe.grad)]

    exact = run(eager, torch.float64)
    ours, again, plain = run(fused, dtype), run(fused, dtype), run(eager, dtype)
    row = {**variant, 'repeatable': all(map(torch.equal, ours, again)), 'errors': {}}
    row['passed'] = row['repeatable']
    for name, a, b, c in zip(RESULTS, ours, plain, exact):
        error, allowed = (((x - c).norm() / c.norm()).item() for x in (a, b))
        row['errors'][name] = [error, allowed]
        # half a unit in the last place is what rounding an exact result may cost
        row['passed'] &= error <= max(1.5 * allowed, torch.finfo(dtype).eps / 2)
    return row


def _checked(variant, device, size):
    try:
        return check(variant, device, size)
    except Exception as error:  # a kernel that does not build must not end the session
        return {**variant, 'passed': False, 'failure': f'{type(error).__name__}: {error}'[:500]}


def check_all(session: Session) -> None:
    """In many processes: what takes long is compiling, and the compiled kernels stay on disk."""
    todo = variants(session.dry_run)
    size = (3, 5) if session.dry_run else (61, 67)
    run = functools.partial(_checked, device=session.device, size=size)
    if session.dry_run:
        rows = map(run, todo)
        session.results['checks'] = list(rows)
    else:
        workers = max(1, min(12, (os.cpu_count() or 2) - 2))
        context = multiprocessing.get_context('spawn')
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            session.results['checks'] = list(pool.map(run, todo))
    session.write()


# --- time and memory ------------------------------------------------------------------------------


class Session:
    """What all measurements share: device, clock, results and where they go."""

    def __init__(self, out: Path, minutes: float, dry_run: bool):
        self.out, self.dry_run = out, dry_run
        self.end = time.perf_counter() + 60 * minutes
        self.device = 'cpu' if dry_run else 'cuda'
        self.repeats = 1 if dry_run else 30
        name = 'interpreter' if dry_run else torch.cuda.get_device_name()
        self.results: dict = {
            'device': name,
            'torch': torch.__version__,
            'checks': [],
            'copy GB/s': None,
            'times': [],
            'sweep': [],
            'left out': [],
        }

    def late(self, what: str) -> bool:
        """Whether the time is up; notes what is left out for it."""
        if time.perf_counter() < self.end:
            return False
        self.results['left out'].append(f'{what}: no time left')
        return True

    def synchronize(self) -> None:
        if not self.dry_run:
            torch.cuda.synchronize()

    def seconds(self, calls: list) -> tuple[float, float]:
        """Median device time and median wall time of a call; ``calls`` are taken in turn.

        The calls work on different memory, more together than a cache holds.
        """
        for call in calls[:2]:
            call()
        self.synchronize()
        walls, events = [], []
        for i in range(self.repeats):
            start = time.perf_counter()
            if not self.dry_run:
                events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
                events[-1][0].record()
            calls[i % len(calls)]()
            if not self.dry_run:
                events[-1][1].record()
            self.synchronize()
            walls.append(time.perf_counter() - start)
        wall = statistics.median(walls)
        if self.dry_run:
            return wall, wall
        return statistics.median(a.elapsed_time(b) for a, b in events) / 1e3, wall

    def graph_seconds(self, calls: list) -> float | None:
        """Time of a call in a CUDA graph that holds one of each: the device's time alone."""
        if self.dry_run:
            return None
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return self.seconds([graph.replay])[0] / len(calls)

    def peak(self, call) -> int | None:
        """Bytes beyond what was allocated before."""
        if self.dry_run:
            return None
        self.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / 'gpu_session.json').write_text(json.dumps(self.results, indent=1))
        (self.out / 'gpu_session.md').write_text(markdown(self.results))


def copy_bandwidth(session: Session) -> None:
    """GB/s of a plain copy, read and written bytes together."""
    x = torch.zeros(
        2**12 if session.dry_run else 2**29, dtype=torch.bfloat16, device=session.device
    )
    y = torch.empty_like(x)
    seconds, _ = session.seconds([lambda: y.copy_(x)])
    session.results['copy GB/s'] = 2 * x.nbytes / seconds / 1e9
    session.write()


def inputs(session: Session, shape: Shape, dtype: torch.dtype, token_major: bool) -> list:
    """Several sets of (qkvo, lepe, gradient), together larger than the cache."""
    channels = shape.heads * shape.head_dim
    sets = 1 if session.dry_run else max(2, min(8, -(-(2**28) // (6 * shape.unit(dtype)))))
    form = torch.channels_last if token_major else torch.contiguous_format
    size = (shape.height, shape.width)
    return [
        [
            torch.randn(shape.batch, n * channels, *size, device=session.device, dtype=dtype)
            .to(memory_format=form)
            .requires_grad_(n != 1 or i == 1)
            for i, n in enumerate((4, 1, 1))
        ]
        for _ in range(sets)
    ]


def core(function, heads):
    """Attention without gate and local position, from the packed projection."""

    def run(qkvo, _):
        q, k, v, _ = (library.split_heads(x, heads) for x in qkvo.chunk(4, 1))
        return function(q, k, v)

    return run


def peers(session: Session, shape: Shape, first: bool) -> dict:
    """What is timed: the packed mixer, the attention alone, and each one's rivals."""
    size, heads = (shape.height, shape.width), shape.heads
    found = {
        'mixer, triton': functools.partial(fused, heads=heads),
        'mixer, eager': functools.partial(eager, heads=heads),
        'attention, triton': core(
            functools.partial(ops.mala_attention, size=size, backend='triton'), heads
        ),
        'attention, eager': core(functools.partial(formula, 'mala', size=size), heads),
        'rala attention, triton': core(
            functools.partial(ops.rala_attention, size=size, backend='triton'), heads
        ),
        'attention, softmax (SDPA)': core(F.scaled_dot_product_attention, heads),
    }
    if first and not session.dry_run:  # compiling for every shape would take the whole session
        found['mixer, eager compiled'] = torch.compile(found['mixer, eager'])
    return found


def time_all(session: Session) -> None:
    shapes = SHAPES if not session.dry_run else (Shape('toy', 1, 3, 5, 1, 32),)
    failed = {
        (c['kind'], c['dtype'], c['head_dim']) for c in session.results['checks'] if not c['passed']
    }
    for token_major in (True, False):
        for number, shape in enumerate(shapes):
            layout = 'token-major' if token_major else 'channel-first'
            sets = inputs(session, shape, torch.bfloat16, token_major)
            for name, function in peers(session, shape, number == 0 and token_major).items():
                what = f'{name}, {shape.name}, {layout}'
                kind = 'rala' if name.startswith('rala') else 'mala'
                if 'triton' in name and (kind, 'bf16', shape.head_dim) in failed:
                    session.results['left out'].append(f'{what}: its check failed')
                    continue
                if session.late(what):
                    continue
                row = {'name': name, 'shape': shape.name, 'layout': layout}
                try:
                    row.update(measure(session, shape, function, sets, name))
                except Exception as error:  # out of memory, say: the others still count
                    session.results['left out'].append(f'{what}: {error}'[:300])
                    continue
                session.results['times'].append(row)
                session.write()


def measure(session: Session, shape: Shape, function, sets: list, name: str) -> dict:
    gated = name.startswith('mixer')

    def forward(qkvo, lepe):
        with torch.no_grad():
            return function(qkvo, lepe)

    def both(qkvo, lepe, grad):
        out = function(qkvo, lepe)
        if gated:
            return torch.autograd.grad(out, (qkvo, lepe), grad)
        return torch.autograd.grad(out, qkvo, library.split_heads(grad, shape.heads))

    kind = 'rala' if name.startswith('rala') else 'mala'
    t = shape.unit(torch.bfloat16)
    row: dict = {}
    for label, least, calls in (
        (
            'forward',
            floor('forward', kind, gated),
            [functools.partial(forward, *s[:2]) for s in sets],
        ),
        (
            'forward + backward',
            floor('forward', kind, gated) + floor('backward', kind, gated),
            [functools.partial(both, *s) for s in sets],
        ),
    ):
        device, wall = session.seconds(calls)
        graph = session.graph_seconds(calls) if 'triton' in name else None
        best = min(x for x in (device, graph) if x is not None)
        row[label] = {
            'device us': 1e6 * device,
            'graph us': None if graph is None else 1e6 * graph,
            'wall us': 1e6 * wall,
            'share of copy': least * t / best / 1e9 / session.results['copy GB/s'],
            'peak MB': None if session.dry_run else session.peak(calls[0]) / 1e6,
        }
    return row


def sweep(session: Session) -> None:
    """Random sizes, each seen for the first time: neither retuned nor compiled anew."""
    chance = random.Random(0)
    sizes = [
        (chance.randint(2, 6), chance.randint(2, 6))
        if session.dry_run
        else (chance.randint(40, 300), chance.randint(40, 300))
        for _ in range(4 if session.dry_run else 50)
    ]
    for height, width in sorted(sizes, key=lambda size: size[0] * size[1]):
        if session.late('rest of the sweep'):
            break
        shape = Shape('sweep', 2, height, width, 1, 32 if session.dry_run else 64)
        sets = inputs(session, shape, torch.bfloat16, True)
        start = time.perf_counter()
        fused(*sets[0][:2], heads=1)
        session.synchronize()
        first = time.perf_counter() - start
        row = measure(session, shape, functools.partial(fused, heads=1), sets, 'mixer, triton')
        both = row['forward + backward']
        session.results['sweep'].append(
            {
                'height': height,
                'width': width,
                'us': both['graph us'] or both['device us'],
                'first call ms': 1e3 * first,
            }
        )
    rows = session.results['sweep']
    for before, row, after in zip(rows, rows[1:], rows[2:]):
        # the neighbours' trend: the line between their times, over the number of tokens
        low, here, high = (r['height'] * r['width'] for r in (before, row, after))
        weight = (here - low) / (high - low) if high > low else 0.5
        row['of trend'] = row['us'] / ((1 - weight) * before['us'] + weight * after['us'])
    session.write()


# --- report ---------------------------------------------------------------------------------------


def markdown(results: dict) -> str:
    checks = results['checks']
    lines = [
        f'# Triton kernels on {results["device"]}',
        '',
        f'torch {results["torch"]}. Written by `python -m benchmarks.gpu_session`.',
        '',
        f'Against float64: {sum(c["passed"] for c in checks)} of {len(checks)} variants pass.',
    ]
    for check in checks:
        if not check['passed']:
            lines.append(f'- FAILED: {check}')
    if results['copy GB/s']:
        lines += ['', f'Copy bandwidth: {results["copy GB/s"]:.0f} GB/s, read and write together.']
    if results['times']:
        lines += [
            '',
            '| shape | layout | what | direction | device us | graph us | wall us '
            '| floor / time, of copy | peak MB |',
            '|---' * 9 + '|',
        ]
    for row in results['times']:
        for direction in ('forward', 'forward + backward'):
            part = row[direction]
            graph, peak = (
                '' if part[key] is None else f'{part[key]:.1f}' for key in ('graph us', 'peak MB')
            )
            lines.append(
                f'| {row["shape"]} | {row["layout"]} | {row["name"]} | {direction} '
                f'| {part["device us"]:.1f} | {graph} | {part["wall us"]:.1f} '
                f'| {part["share of copy"]:.0%} | {peak} |'
            )
    trend = [row['of trend'] for row in results['sweep'] if 'of trend' in row]
    if trend:
        slowest = max(row['first call ms'] for row in results['sweep'])
        lines += [
            '',
            f'Sweep of {len(results["sweep"])} random sizes: slowest {max(trend):.2f} x of the '
            f"neighbours' trend; longest first call at a new size {slowest:.1f} ms.",
        ]
    if results['left out']:
        lines += ['', 'Left out:', *(f'- {what}' for what in results['left out'])]
    return '\n'.join(lines) + '\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--out', type=Path, default=Path(__file__).parent / 'results')
    parser.add_argument('--minutes', type=float, default=7.5, help='when to start nothing new')
    parser.add_argument('--dry-run', action='store_true', help='on the CPU at toy sizes')
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        parser.error('no CUDA device here; --dry-run runs interpreted on the CPU')
    session = Session(args.out, args.minutes, args.dry_run)
    for step in (check_all, copy_bandwidth, time_all, sweep):
        step(session)
    session.write()
    print(markdown(session.results))
    return 0 if all(check['passed'] for check in session.results['checks']) else 1


if __name__ == '__main__':
    raise SystemExit(main())
