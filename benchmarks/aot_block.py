"""What the compiler makes of the Triton kernels around the attention: needs no GPU.

    python -m benchmarks.aot_block [--arch 80 90] [--dtype bf16 fp16 fp32]

As :mod:`benchmarks.aot` for those of the attention: the kernels of ``stencil.py`` and ``rows.py``
are compiled as a block of the published models launches them. What can be read from the machine
code is printed and written to ``benchmarks/results/aot_block.md``; beside it, at 800x1333, stage 1,
batch 2, on an H100 or H200, the time in which the loop's instructions issue, perfectly, and the
least in which the bytes move.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from benchmarks import aot

RESULTS = Path(__file__).parent / 'results' / 'aot_block.md'
SIZE = (2, 200, 334)
# Layer: kernel, size of the convolution, GELU, residual; channels are 64, the hidden ones 224.
CONVOLUTIONS = {
    'feed-forward': (3, True, True, 224),
    'conditional position': (3, False, True, 64),
    'local position': (5, False, False, 64),
}
NORM = 'residual and norm'


@dataclass(frozen=True)
class Case:
    """One compilation: a pass of one layer for one type and architecture."""

    layer: str
    backward: bool
    dtype: str
    arch: int

    def __str__(self) -> str:
        direction = 'backward' if self.backward else 'forward'
        return f'{self.layer}, {direction}, {self.dtype}, sm_{self.arch}'


def cases(archs=(80, 90), dtypes=('bf16', 'fp16', 'fp32')) -> Iterator[Case]:
    """Yield every pass of every layer."""
    for arch in archs:
        for dtype in dtypes:
            for layer in (*CONVOLUTIONS, NORM):
                yield from (Case(layer, backward, dtype, arch) for backward in (False, True))


def _launch(case: Case) -> tuple[object, dict[str, torch.Tensor]]:
    """The launch as the backend describes it, of tensors without memory, and its tensors."""
    from mala_mm.ops.fused.triton import depthwise, norm

    dtype, found = aot.DTYPES[case.dtype], []
    shape = (SIZE[0], CONVOLUTIONS.get(case.layer, (0, 0, 0, 64))[3], *SIZE[1:])
    tensors = [
        torch.empty(shape, dtype=dtype, device='meta').to(memory_format=torch.channels_last)
        for _ in range(4)
    ]
    vector = torch.empty(shape[1], device='meta')
    if case.layer == NORM:
        keep = torch.empty(SIZE[0], 1, 1, 1, dtype=dtype, device='meta')
        x, branch, total, y = tensors
        module, arguments = norm, (x, branch, keep, vector, vector, 1e-6, total, y)
        if case.backward:
            arguments = (x, branch, total, keep, vector, 1e-6, y, torch.empty_like(y))
    else:
        taps, gelu, residual, _ = CONVOLUTIONS[case.layer]
        weight = torch.empty(shape[1], 1, taps, taps, device='meta')
        module, arguments = depthwise, (tensors[0], weight, vector, gelu, residual, tensors[1])
        if case.backward:
            arguments = (tensors[0], tensors[1], weight, gelu, residual, tensors[2])

    def replay(kind, describe, present):
        found.append((describe().launches[0], present))

    device = ('H200', case.arch, aot.MULTIPROCESSORS)
    with (
        mock.patch.object(module, 'replay', replay),
        mock.patch.object(module, '_device', lambda index: device),
    ):
        (module.backward if case.backward else module.forward)(*arguments)
    return found[0]


def compile_case(case: Case) -> tuple[aot.Report, float, int, int]:
    """Compile without a device.

    Returns:
        tuple[Report, float, int, int]: What the machine code shows, the seconds in which its
        loop's instructions issue, one a cycle and scheduler, and the bytes of the maps that the
        launch has to move, and of the partial sums that it writes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mala_mm.ops.fused.triton.launch import Operand

    launch, tensors = _launch(case)
    names = {torch.float32: 'fp32', torch.bfloat16: 'bf16', torch.float16: 'fp16'}
    signature, constants, attributes = {}, {}, {}
    for index, (name, value) in enumerate(launch.arguments.items()):
        if name.isupper():
            signature[name] = 'constexpr'
            constants[name] = value
        elif isinstance(value, Operand):
            signature[name] = f'*{names[tensors[value.source].dtype]}'
            attributes[(index,)] = [['tt.divisibility', 16]]
        else:
            signature[name] = 'fp32' if isinstance(value, float) else 'i32'
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget('cuda', case.arch, 32)
    compiled = triton.compile(source, target=target, options=launch.options)
    arguments, warps = launch.arguments, launch.options['num_warps']
    if case.layer == NORM:
        tile = (arguments['TOKENS'], arguments['P'])
        steps = launch.grid[0] * arguments['tiles']
    else:
        tile = (arguments['STRIPS'], arguments['COLUMNS'])
        steps = launch.grid[0] * (arguments['rows'] + arguments['TAPS'] - 1)
    chosen = SimpleNamespace(rows=tile[0], columns=tile[1], warps=warps, stages=1)
    report = aot.inspect(case, compiled, chosen)
    issue = report.loop * warps * steps / (aot.MULTIPROCESSORS * aot.SCHEDULERS) / aot.CLOCK
    moved = sum(x.nbytes for x in tensors if x.dim() == 4 and x.shape[0] == SIZE[0])
    sums = sum(x.nbytes for x in tensors if x.dim() == 2)
    return report, issue, moved, sums


TABLE = (
    '| kernel | tile | warps | registers | spilled bytes | programs per SM | loop '
    '| global loads by width | partial sums KiB | issue us | DRAM floor us | ratio |\n'
    + '|---' * 12
    + '|'
)


def row(case: Case, report: aot.Report, issue: float, moved: int, sums: int) -> str:
    """Return one line of the table."""
    loads = ', '.join(f'{number} x {width} B' for width, number in report.loads.items())
    floor = moved / aot.BANDWIDTH
    return (
        f'| {case} | {report.rows} x {report.columns} | {report.warps} | {report.registers} '
        f'| {report.spills} | {report.resident} | {report.loop} | {loads} | {sums / 1024:.0f} '
        f'| {1e6 * issue:.1f} | {1e6 * floor:.1f} | {issue / floor:.2f} |'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--arch', type=int, nargs='+', default=(80, 90))
    parser.add_argument('--dtype', nargs='+', choices=aot.DTYPES, default=tuple(aot.DTYPES))
    parser.add_argument('--out', type=Path, default=RESULTS)
    args = parser.parse_args()
    if os.environ.get('TRITON_INTERPRET') == '1':
        parser.error('with TRITON_INTERPRET=1 nothing is compiled')
    import triton

    lines = []
    print(TABLE)
    for case in cases(args.arch, args.dtype):
        lines.append(row(case, *compile_case(case)))
        print(lines[-1], flush=True)
    text = [
        '# What the compiler makes of the kernels around the attention',
        '',
        f'Written by `python -m benchmarks.aot_block` with Triton {triton.__version__}; needs no '
        'GPU. Issue and floor as in [aot.md](aot.md), at 800x1333, stage 1, batch 2, tiny and '
        'small. A tile is strips x columns (times 32 channels) or tokens x channels; the loop is '
        'one over rows or tiles, counted in instructions.',
        '',
        TABLE,
        *lines,
    ]
    args.out.write_text('\n'.join(text) + '\n')


if __name__ == '__main__':
    main()
