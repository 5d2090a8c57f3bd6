"""What a call of the fused operators costs the host: no GPU is needed.

    python -m benchmarks.launch [--against 372ef81] [--rounds 3] [--out FILE]

Everything runs that runs on a machine with a GPU (checks, plans, allocation, autograd, Triton's own
path to a kernel, compiled for sm_90) but for the driver: a stub takes its place, so that a launch
ends where the driver's begins. The commit named by ``--against`` is measured in turn with this
tree, in processes of their own, with the same code. Times are the processor time of one thread per
call, the least of many batches. What a GPU adds is the driver's launch (about 2 us each) and
the hop to autograd's thread of the device.

By part: what is left when launches do nothing is planning and all before; what is left when the
backend does nothing is checks, views, autograd and the memory of the results. Below the table is
what autograd takes for a function of the same tensors that only allocates: less no operator can.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

REPO = Path(__file__).resolve().parents[1]
LEVELS = ('everything', 'no launches', 'no backend')
CALLS = ('forward', 'forward + backward')
OPERATORS = ('gated_attention', 'mala_attention', 'rala_attention')


# --- what runs in a process of its own, with either tree's mala_mm --------------------------------


class _Driver:
    """Triton's view of a device that is not there."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget('cuda', 90, 32)
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (0, 0, 32, 0, 1024),
            get_device_properties=lambda _: {'max_shared_mem': 232448, 'multiprocessor_count': 132},
        )

    def launcher_cls(self, src, metadata):
        return lambda *arguments: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        return self.target


def _modules() -> tuple:
    """The backend, its launches and the dispatcher, wherever this tree keeps them."""
    for folder in ('mala_mm.ops.fused', 'mala_mm.ops'):
        names = [f'{folder}.{name}' for name in ('triton', 'triton.launch', 'dispatch')]
        with contextlib.suppress(ModuleNotFoundError):
            return tuple(map(importlib.import_module, names))
    raise ImportError(f'no Triton backend in {os.environ["PYTHONPATH"]}')


@contextlib.contextmanager
def stubbed(level: str):
    """The Triton backend on CPU tensors, up to where ``level`` says that it ends."""
    backend, launch, dispatch = _modules()
    changes = [
        mock.patch.dict(dispatch._WHY_NOT, {'triton': lambda *_: None}),
        mock.patch.object(launch, '_device', lambda *_: ('stub', 90, 132)),
    ]
    if level == 'no backend':
        changes += [
            mock.patch.object(backend, name, lambda *_, **__: None)
            for name in ('forward', 'backward')
        ]
    elif level == 'no launches':
        from triton.runtime.jit import JITFunction

        changes.append(mock.patch.object(JITFunction, 'run', lambda *_, **__: None))
        if hasattr(launch, 'Launch'):
            changes.append(mock.patch.object(launch.Launch, '__call__', lambda *_, **__: None))
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


def _calls(operator: str) -> dict:
    """Forward, and forward with backward, of one operator at a small size."""
    import torch

    from mala_mm import ops

    size, heads, head_dim = (6, 8), 2, 64
    channels = heads * head_dim
    packed, lepe, grad = (
        torch.randn(2, n * channels, *size, dtype=torch.bfloat16).to(
            memory_format=torch.channels_last
        )
        for n in (4, 1, 1)
    )
    if operator == 'gated_attention':
        inputs = [packed, lepe]

        def run():
            return ops.gated_attention(*inputs, heads, backend='triton')
    else:
        inputs = [
            x.flatten(2).unflatten(1, (heads, -1)).transpose(2, 3) for x in packed.chunk(4, 1)[:3]
        ]
        grad = grad.flatten(2).unflatten(1, (heads, -1)).transpose(2, 3)
        function = getattr(ops, operator)

        def run():
            return function(*inputs, size=size, backend='triton')

    def forward():
        with torch.no_grad():
            run()

    def both():
        torch.autograd.grad(run(), inputs, grad)

    for x in inputs:
        x.requires_grad_()
    return dict(zip(CALLS, (forward, both), strict=True))


def microseconds(call, seconds: float = 0.4) -> float:
    """Processor time of one call: the least of batches of ten, as other programs only add."""
    for _ in range(20):
        call()
    gc.collect()
    gc.disable()
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < 3:
        start = time.process_time_ns()
        for _ in range(10):
            call()
        taken.append((time.process_time_ns() - start) / 10e3)
    gc.enable()
    return min(taken)


def empty_function() -> float:
    """Forward and backward of a function that does nothing but allocate, in microseconds."""
    import torch

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return torch.empty_like(inputs[-1])

        @staticmethod
        def backward(ctx, grad):
            return tuple(map(torch.empty_like, ctx.saved_tensors))

    inputs = [torch.randn(2, n * 128, 6, 8, requires_grad=True) for n in (4, 1)]
    grad = torch.randn(2, 128, 6, 8)
    return microseconds(lambda: torch.autograd.grad(Empty.apply(*inputs), inputs, grad))


def probe() -> dict:
    """Times of this process's tree, by operator, call and level."""
    import torch
    import triton

    torch.set_num_threads(1)
    triton.runtime.driver.set_active(_Driver())
    times: dict = {}
    for operator in OPERATORS:
        for name, call in _calls(operator).items():
            for level in LEVELS:
                with stubbed(level):
                    times.setdefault(operator, {}).setdefault(name, {})[level] = microseconds(call)
    times['empty'] = empty_function()
    launch = _modules()[1]
    if hasattr(launch, 'forget_plans'):
        calls = _calls('gated_attention')

        def described(name: str) -> None:
            launch.forget_plans()
            calls[name]()

        with stubbed('everything'):
            times['new size'] = [microseconds(lambda name=name: described(name)) for name in CALLS]
    return times


# --- the comparison -------------------------------------------------------------------------------


@contextlib.contextmanager
def checkout(commit: str):
    """A folder with the tree of a commit."""
    try:
        archive = subprocess.run(
            ['git', 'archive', commit, 'mala_mm'], cwd=REPO, check=True, capture_output=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, 'stderr', b'') or str(error).encode()
        raise SystemExit(
            f'--against {commit} needs a git checkout that holds this commit: '
            f'{reason.decode().strip()}'
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter='data')
        yield folder


def measure(tree: str) -> dict:
    """The times of one tree, in a process of its own."""
    environment = {**os.environ, 'PYTHONPATH': tree, 'OMP_NUM_THREADS': '1'}
    environment.pop('TRITON_INTERPRET', None)
    done = subprocess.run(
        [sys.executable, __file__, '--probe'],
        env=environment,
        cwd=tree,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f'measuring {tree} failed:\n{done.stderr[-3000:]}')
    return json.loads(done.stdout.splitlines()[-1])


def least(rounds: list[dict]) -> dict:
    """The smallest of each time."""
    return {
        operator: {
            call: {level: min(r[operator][call][level] for r in rounds) for level in LEVELS}
            for call in CALLS
        }
        for operator in OPERATORS
    }


def table(times: dict[str, dict]) -> str:
    """Markdown: one line per operator, call and tree."""
    lines = [
        '| operator | call | tree | us per call | launches | planning | all before the backend |',
        '|---' * 7 + '|',
    ]
    for operator in OPERATORS:
        for call in CALLS:
            first = None
            for tree, found in times.items():
                whole, planned, outside = (found[operator][call][level] for level in LEVELS)
                share = '' if first is None else f' ({whole / first:.2f} of it)'
                first = first or whole
                lines.append(
                    f'| {operator} | {call} | {tree} | {whole:.0f}{share} | {whole - planned:.0f} '
                    f'| {planned - outside:.0f} | {outside:.0f} |'
                )
    return '\n'.join(lines)


def processor() -> str:
    """The processor, torch and Triton of this machine."""
    from importlib.metadata import version

    model = 'unknown processor'
    with contextlib.suppress(OSError):
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith('model name'):
                model = line.partition(':')[2].strip()
    return f'{model}, torch {version("torch")}, triton {version("triton")}'


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--against', default='372ef81', metavar='COMMIT', help='what to compare')
    parser.add_argument('--rounds', type=int, default=3, help='how often the trees take turns')
    parser.add_argument('--out', type=Path, help='also write the table there')
    parser.add_argument('--probe', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.probe:
        print(json.dumps(probe()))
        return
    with checkout(args.against) as folder:
        trees = {args.against: folder, 'this tree': str(REPO)}
        rounds = [{name: measure(tree) for name, tree in trees.items()} for _ in range(args.rounds)]
    empty = min(found['empty'] for r in rounds for found in r.values())
    new = [min(x) for x in zip(*(r['this tree']['new size'] for r in rounds))]
    text = [
        '# What a call costs the host',
        '',
        f'`python -m benchmarks.launch --against {args.against} --rounds {args.rounds}`, '
        f'{processor()}. Processor time of one thread, without the driver; bf16, token-major, '
        'd = 64.',
        '',
        table({name: least([r[name] for r in rounds]) for name in trees}),
        '',
        'Forward + backward of an empty `autograd.Function` on the same tensors, through '
        f'`torch.autograd.grad`: {empty:.0f} us. A gated call of a size that was not seen before, '
        f'whose kernels were: forward {new[0]:.0f} us, forward + backward {new[1]:.0f} us.',
    ]
    print('\n'.join(text))
    if args.out:
        args.out.write_text('\n'.join(text) + '\n')


if __name__ == '__main__':
    main()
