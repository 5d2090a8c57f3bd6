"""The operators of one machine, side by side: time, memory, and where softmax attention loses.

    python -m benchmarks.operators --device cpu --threads 2
    python -m benchmarks.operators --device cuda --dtype bf16

For every size the results of every backend are checked against float64 first; what fails is named
and gets no time. All backends take turns in one loop, so that whatever else the machine does meets
them alike. Prints a table, and writes it with the raw figures and a drawing to ``--out``.

- `formula`: :mod:`mala_mm.ops.reference` as it stands, which makes its rotary tables in each call;
- `formula, tables kept`: the same with the (N, d) tables made before, as published models keep
  them. This is what all are compared with;
- `cpu, compiled` and `cpu, tiles`: the two engines of the CPU backend; `triton`: the GPU's;
- `softmax`: ``scaled_dot_product_attention`` on the same tokens, another function.

Memory is the most that is held at one time beyond the inputs and the results.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # the profiler's, read when torch loads

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import accuracy
from mala_mm import ops
from mala_mm.ops import rotary
from mala_mm.ops.fused import cpu, library, triton
from mala_mm.ops.fused.cpu import compiled, tiles
from mala_mm.ops.fused.dispatch import eager
from mala_mm.ops.rotary import rotary_tables

DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}
SIZES = ('8x8', '16x16', '32x32', '50x84', '100x167', '200x334')
LAYOUTS = ('contiguous', 'token-major', 'channel-first')
BASELINE = 'formula, tables kept'
COLUMNS = {
    'forward': 'forward ms',
    'both': 'forward + backward ms',
    'forward_memory': 'forward MiB',
    'both_memory': 'forward + backward MiB',
}
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


# --- what is compared -----------------------------------------------------------------------------


def formula(kind: str, size: tuple[int, int]) -> Function:
    """The equations as they stand, in the type of the inputs."""
    return functools.partial(eager, kind, size=size)


def formula_with_tables(kind: str, size: tuple[int, int], like: Tensor) -> Function:
    """The same, with the cosines and sines of all tokens at hand."""
    height, width = size
    dtype = torch.promote_types(like.dtype, torch.float32)
    tables = rotary_tables(size, like.shape[-1], dtype, like.device)
    cos, sin = (
        torch.cat([row[:, None].expand(-1, width, -1), column.expand(height, -1, -1)], -1)
        .flatten(0, 1)
        .to(like.dtype)
        for row, column in (tables[::2], tables[1::2])
    )

    def turn(x, _):
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

    def run(q, k, v):
        with mock.patch.object(rotary, 'apply_rotary', turn):
            return eager(kind, q, k, v, size)

    return run


def competitors(kind: str, size: tuple[int, int], like: Tensor, softmax: bool) -> dict:
    """The functions to compare, by name."""
    found = {'formula': formula(kind, size), BASELINE: formula_with_tables(kind, size, like)}
    attention = getattr(ops, f'{kind}_attention')
    if like.device.type == 'cpu':
        names = ['cpu, tiles'] + ['cpu, compiled'] * (compiled.why_not(like) is None)
        found |= dict.fromkeys(names, functools.partial(attention, size=size, backend='cpu'))
    elif triton.why_not(None, like) is None:
        found['triton'] = functools.partial(attention, size=size, backend='triton')
    if softmax:
        found['softmax'] = functools.partial(ops.softmax_attention, size=size)
    return found


def engine(name: str) -> contextlib.AbstractContextManager:
    """In which the CPU backend uses the engine that a competitor's name says, backward too."""
    engines = {'cpu, tiles': tiles, 'cpu, compiled': compiled}
    if name not in engines:
        return contextlib.nullcontext()
    return mock.patch.object(cpu, '_engine', lambda _: engines[name])


def inputs(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v and the gradient of the output, (B, heads, N, d); q, k, v as parts of qkvo or not."""
    batch, heads, tokens, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4, *shape, generator=generator)
    parts[2] += 1  # values with a mean, where MALA is a difference of large terms
    if layout == 'token-major':
        qkvo = torch.empty(batch, tokens, 4, heads, head_dim, dtype=dtype, device=device)
        views = qkvo.permute(2, 0, 3, 1, 4)
    elif layout == 'channel-first':
        qkvo = torch.empty(batch, 4, heads, head_dim, tokens, dtype=dtype, device=device)
        views = qkvo.permute(1, 0, 2, 4, 3)
    else:
        views = torch.empty(4, *shape, dtype=dtype, device=device)
    views.copy_(parts)
    grad = library.empty_tokens(views[0]).copy_(parts[3])
    return [*(x.requires_grad_() for x in views[:3].detach().unbind()), grad]


# --- correctness ----------------------------------------------------------------------------------


def outcomes(function: Function, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of q, k, v of a function computed in ``dtype``, as float64."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors[:3])
    out = function(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), tensors[3].to(dtype))
    return [x.detach().double() for x in (out, *grads)]


def worst_error(function: Function, tensors: list[Tensor], exact: list, plain: list) -> float:
    """The largest error of out, dq, dk or dv, in units of what the policy allows."""
    dtype = tensors[0].dtype
    ours = outcomes(function, tensors, dtype)
    measured = [accuracy.measure(*x, dtype) for x in zip(ours, plain, exact, strict=True)]
    ratios = [x.ratio for x in measured]
    return max(ratios) if all(r == r for r in ratios) else float('inf')


def worst_softmax_error(function: Function, tensors: list[Tensor], size: tuple[int, int]) -> float:
    """The same for some rows of softmax attention's output; the gradients are PyTorch's own."""
    q, k, v = (x.detach() for x in tensors[:3])
    turned = [ops.apply_rotary(x.double(), size) for x in (q, k)]
    scores = turned[0][..., :16, :] @ turned[1].mT * q.shape[-1] ** -0.5
    exact = scores.softmax(-1) @ v.double()
    with torch.no_grad():
        error = (function(q, k, v)[..., :16, :].double() - exact).norm() / exact.norm()
    # Inputs, turned inputs and scores are rounded to eps / 2 each; scores of up to 10 make a
    # relative error of ten times that.
    return (error / (30 * torch.finfo(q.dtype).eps)).item()


# --- time and memory ------------------------------------------------------------------------------


def forward(function: Function, tensors: list[Tensor]) -> Tensor:
    """One forward pass, without a graph."""
    with torch.no_grad():
        return function(*tensors[:3])


def forward_backward(function: Function, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """One forward and one backward pass."""
    out = function(*tensors[:3])
    return out, *torch.autograd.grad(out, tensors[:3], tensors[3])


PASSES = {'forward': forward, 'both': forward_backward}


def seconds(call: Callable[[], object], device: str) -> float:
    """How long a call takes, the work of the device included."""
    if device == 'cuda':
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter() - start


def extra_bytes(call: Callable[[], object], device: str) -> int:
    """Peak of what a call holds beyond its inputs, less its results.

    On the CPU the profiler reports every allocation and release of PyTorch's allocator in order;
    their running sum is what is held. (What the compiled kernels hold themselves are a few hundred
    KiB of stack per thread.) On a GPU the allocator keeps the peak by itself.
    """
    if device == 'cuda':
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            results = call()
        now = peak = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == '[memory]':
                now += event.nbytes()
                peak = max(peak, now)
    results = [results] if isinstance(results, Tensor) else results
    return peak - sum(x.untyped_storage().nbytes() for x in results)


def measure(arguments: argparse.Namespace, size: tuple[int, int]) -> list[dict]:
    """The rows of one size."""
    shape = (arguments.batch, arguments.heads, size[0] * size[1], arguments.head_dim)
    dtype = DTYPES[arguments.dtype]
    tensors = inputs(shape, arguments.layout, dtype, arguments.device)
    with_softmax = shape[2] <= arguments.softmax_tokens
    functions = competitors(arguments.operator, size, tensors[0].detach(), with_softmax)

    plain_function = formula(arguments.operator, size)
    exact = outcomes(plain_function, tensors, torch.float64)
    plain = outcomes(plain_function, tensors, dtype)
    rows = {}
    for name, function in functions.items():
        with engine(name):
            if name == 'softmax':
                error = worst_softmax_error(function, tensors, size)
            else:
                error = worst_error(function, tensors, exact, plain)
        rows[name] = dict(size=list(size), tokens=shape[2], backend=name, error=error)
    del exact, plain

    correct = {name: functions[name] for name, row in rows.items() if row['error'] <= 1}
    for kind, run in PASSES.items():
        calls = {name: functools.partial(run, f, tensors) for name, f in correct.items()}
        for name, call in calls.items():
            with engine(name):
                seconds(call, arguments.device)  # warm-up
                rows[name][f'{kind}_memory'] = extra_bytes(call, arguments.device)
        times = {name: [] for name in calls}
        for _ in range(arguments.rounds):
            for name, call in calls.items():
                with engine(name):
                    times[name].append(seconds(call, arguments.device))
        for name, taken in times.items():
            rows[name][kind] = statistics.median(taken)
            rows[name][f'{kind}_least'] = min(taken)
    if BASELINE in correct:
        for row in (rows[name] for name in correct):
            for kind in PASSES:
                row[f'{kind}_ratio'] = rows[BASELINE][kind] / row[kind]
                row[f'{kind}_least_ratio'] = rows[BASELINE][f'{kind}_least'] / row[f'{kind}_least']
    return list(rows.values())


# --- what is reported -----------------------------------------------------------------------------


def machine(device: str) -> str:
    """Processor or GPU, threads and versions."""
    if device == 'cuda':
        return f'{torch.cuda.get_device_name()}, torch {torch.__version__}'
    model = 'unknown processor'
    with contextlib.suppress(OSError):
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith('model name'):
                model = line.partition(':')[2].strip()
                break
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return f'{model} ({capability}), {threads} threads, torch {torch.__version__}'


def markdown(results: dict) -> str:
    """The results as a page with a table for each size."""
    lines = [
        f'# {results["title"]}',
        '',
        f'{results["machine"]}. Written by `{results["command"]}`.',
        '',
        f'Medians of {results["rounds"]} rounds in which the backends take turns; in brackets how '
        f'many times faster than `{BASELINE}`, by medians / by minima. Memory is held beyond '
        'inputs and results. Error: the worst of out, dq, dk, dv, where 1 is the most allowed.',
        '',
        '| size | tokens | dtype | backend | ' + ' | '.join(COLUMNS.values()) + ' | error |',
        '|' + '---|' * (5 + len(COLUMNS)),
    ]
    for row in results['rows']:
        cells = ['{}x{}'.format(*row['size']), row['tokens'], results['dtype'], row['backend']]
        for column in COLUMNS:
            if column not in row:
                cells.append('incorrect')
            elif column in PASSES:
                cell = f'{1e3 * row[column]:.3g}'
                if f'{column}_ratio' in row:
                    cell += ' (x{:.2f} / x{:.2f})'.format(
                        row[f'{column}_ratio'], row[f'{column}_least_ratio']
                    )
                cells.append(cell)
            else:
                cells.append(f'{row[column] / 2**20:.3g}')
        cells.append(f'{row["error"]:.2f}')
        lines.append('| ' + ' | '.join(map(str, cells)) + ' |')
    for text in results['crossovers']:
        lines += ['', text]
    return '\n'.join(lines) + '\n'


def crossover(rows: list[dict], kind: str, name: str) -> float | None:
    """The number of tokens from which on a backend beats softmax, between the sizes measured."""
    times = {
        x: {r['tokens']: r[kind] for r in rows if r['backend'] == x and kind in r}
        for x in (name, 'softmax')
    }
    shared = sorted(times[name].keys() & times['softmax'].keys())
    gains = [torch.tensor(times['softmax'][n] / times[name][n]).log2().item() for n in shared]
    for i in range(len(shared) - 1):
        if gains[i] <= 0 < min(gains[i + 1 :]):
            part = -gains[i] / (gains[i + 1] - gains[i])
            return shared[i] * (shared[i + 1] / shared[i]) ** part  # straight in logarithms
    return shared[0] if shared and min(gains) > 0 else None


def crossovers(rows: list[dict]) -> list[str]:
    """Where the fastest backend that is there overtakes softmax attention, in words."""
    texts = []
    for kind, title in (('forward', 'Forward'), ('both', 'Forward and backward')):
        name = fastest(rows)
        tokens = crossover(rows, kind, name) if name else None
        if tokens is not None:
            texts.append(
                f'{title}: `{name}` is faster than softmax attention {since(rows, tokens)}.'
            )
    return texts


def fastest(rows: list[dict]) -> str | None:
    """The backend that ``'auto'`` takes, of those that were measured."""
    names = {row['backend'] for row in rows if 'forward' in row}
    return next((n for n in ('triton', 'cpu, compiled', 'cpu, tiles') if n in names), None)


def since(rows: list[dict], tokens: float) -> str:
    """In words, from which number of tokens on something holds."""
    smallest = min(row['tokens'] for row in rows)
    return 'at every size measured' if tokens == smallest else f'from about N = {tokens:.0f} on'


def draw(results: dict, path: Path) -> None:
    """Time of both passes and memory over N, with the crossover against softmax attention."""
    from matplotlib.figure import Figure

    rows = results['rows']
    names = list(dict.fromkeys(row['backend'] for row in rows))
    figure = Figure(figsize=(15, 4.6), layout='constrained')
    panels = (
        ('forward', 1e3, 'forward, ms'),
        ('both', 1e3, 'forward + backward, ms'),
        ('both_memory', 2**-20, 'forward + backward, MiB beyond inputs and results'),
    )
    for axes, (column, unit, label) in zip(figure.subplots(1, 3), panels, strict=True):
        for index, name in enumerate(names):
            points = [
                (r['tokens'], unit * r[column])
                for r in rows
                if r['backend'] == name and column in r
            ]
            style = '--' if name == 'softmax' else '-'
            if points:
                axes.plot(*zip(*points), style, marker='o', ms=4, color=f'C{index}', label=name)
        best = fastest(rows)
        tokens = crossover(rows, column, best) if column in PASSES and best else None
        if tokens is not None:
            axes.axvline(tokens, color='grey', lw=0.8, ls=':')
            axes.annotate(
                f'{best} beats softmax\n{since(rows, tokens)}',
                (tokens, 0.97),
                xytext=(4, 0),
                xycoords=('data', 'axes fraction'),
                textcoords='offset points',
                va='top',
                fontsize=8,
            )
        axes.set(xscale='log', yscale='log', xlabel='tokens N', title=label)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8, loc='lower right')
    figure.suptitle(f'{results["title"]}: {results["machine"]}', fontsize=10)
    figure.savefig(path, dpi=90)


def size_from(text: str) -> tuple[int, int]:
    """The height and width that an argument names."""
    height, _, width = text.partition('x')
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise argparse.ArgumentTypeError(f'a size is HEIGHTxWIDTH such as 200x334, got {text!r}')
    return int(height), int(width)


def main(argv: list[str] | None = None) -> int:
    """Measure from the command line; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.operators',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    parser.add_argument('--sizes', type=size_from, nargs='+', default=[size_from(s) for s in SIZES])
    parser.add_argument('--dtype', choices=DTYPES, default='fp32')
    parser.add_argument('--operator', choices=library.KINDS, default='mala')
    parser.add_argument('--layout', choices=LAYOUTS, default=LAYOUTS[0], help='of q, k and v')
    parser.add_argument('--batch', type=int, default=1)
    parser.add_argument('--heads', type=int, default=1)
    parser.add_argument('--head-dim', type=int, default=64)
    parser.add_argument('--threads', type=int, help='of the CPU; default: as PyTorch finds them')
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument(
        '--softmax-tokens', type=int, default=4200, help='softmax attention up to this many'
    )
    parser.add_argument('--out', type=Path, default=Path('work_dirs/benchmarks'))
    arguments = parser.parse_args(argv)
    if arguments.device == 'cuda' and not torch.cuda.is_available():
        parser.error('--device cuda needs a GPU that PyTorch can use; this machine has none')
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    name = f'operators_{arguments.device}_{arguments.operator}_{arguments.dtype}_{arguments.layout}'
    results = dict(
        title=f'{arguments.operator.upper()}, {arguments.dtype}, B = {arguments.batch}, '
        f'heads = {arguments.heads}, d = {arguments.head_dim}, {arguments.layout}',
        machine=machine(arguments.device),
        command=' '.join(
            ['python -m benchmarks.operators', *(sys.argv[1:] if argv is None else argv)]
        ),
        dtype=arguments.dtype,
        rounds=arguments.rounds,
        rows=[],
        crossovers=[],
    )
    for size in sorted(arguments.sizes, key=lambda s: s[0] * s[1]):
        results['rows'] += measure(arguments, size)
    results['crossovers'] = crossovers(results['rows'])
    text = markdown(results)
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f'{name}.md').write_text(text)
    (arguments.out / f'{name}.json').write_text(json.dumps(results, indent=1) + '\n')
    draw(results, arguments.out / f'{name}.png')
    wrong = [row for row in results['rows'] if row['error'] > 1]
    for row in wrong:
        print('{} at {}x{} is incorrect and was not timed'.format(row['backend'], *row['size']))
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())
