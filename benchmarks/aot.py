"""What the compiler makes of the Triton kernels: needs no GPU.

    python -m benchmarks.aot [--arch 90] [--head-dim 64 96] [--dtype bf16 fp16] [--all]
    python -m benchmarks.aot --case 'reduce_keys d64 bf16 sm_90 mala' ...    # prints only these

Every kernel is compiled to machine code for the given architectures, as the heuristics configure
it. What can be read from the result is printed and written to ``benchmarks/results/aot.md``:
registers, shared memory, spills, programs per multiprocessor, length of the loop over the tiles,
and loads by width. Beside them, for the published models' shapes on an H100 or H200, stand the
time in which the loop's instructions issue, perfectly, and the least in which the bytes move.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.traffic import SHAPES, Shape
from mala_mm.ops.fused.triton import tiling

DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}
FLOAT32_POINTERS = ('part', 'peak', 'query', 'states', 'dstates', 'dquery', 'result')
MAPS = ('q', 'k', 'v', 'o', 'y', 'lepe', 'dq', 'dk', 'dv', 'do', 'dy', 'dlepe')
FLOATS = ('scale', 'tail_scale', 'eps')
RESULTS = Path(__file__).parent / 'results' / 'aot.md'
# What a launch makes, of all that its kernel can.
PARTS = {
    '': ('QUERIES', 'KEYS', 'VALUES'),
    'sums': ('KEYS', 'VALUES'),
    'dKV': ('VALUES',),
    'dkbar': ('KEYS',),
    'dkbar, dq': ('KEYS', 'QUERIES'),
    'dq': ('QUERIES', 'GLOBAL'),
    'dk': ('KEYS',),
    'dv': ('VALUES',),
}
# The device of the predictions: an H200's multiprocessors, schedulers, clock and copy bandwidth.
MULTIPROCESSORS, SCHEDULERS, CLOCK, BANDWIDTH = 132, 4, 1.98e9, 4.3e12
# Tensors (B, heads, N, d) that a pass reads and writes at least, and the share of their time that
# its instructions may take.
FLOORS = {
    'reduce_queries': (1, 0.6),
    'reduce_keys': (2, 0.6),
    'apply_queries': (2, 0.6),
    'backward_gate': (6, 0.8),
    'backward_queries': (3, 0.8),
    'backward_keys': (4, 0.8),
}


@dataclass(frozen=True)
class Case:
    """One compilation: a pass of one operator for one type, layout and architecture."""

    name: str
    head_dim: int
    dtype: str
    arch: int
    kind: str = 'mala'
    gated: bool = False
    token_major: bool = True
    aligned: bool = True
    part: str = ''  # one of PARTS

    def __str__(self) -> str:
        words = [self.name, f'd{self.head_dim}', self.dtype, f'sm_{self.arch}', self.kind]
        words += [self.part] if self.part else []
        words += ['gated'] if self.gated else []
        words += [] if self.token_major else ['channel-first']
        words += [] if self.aligned else ['unaligned']
        return ' '.join(words)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case of a name as the table has it."""
        name, head_dim, dtype, arch, kind, *rest = text.split()
        others = {'gated', 'channel-first', 'unaligned'}
        return cls(
            name,
            int(head_dim.removeprefix('d')),
            dtype,
            int(arch.removeprefix('sm_')),
            kind,
            gated='gated' in rest,
            token_major='channel-first' not in rest,
            aligned='unaligned' not in rest,
            part=' '.join(word for word in rest if word not in others),
        )


@dataclass(frozen=True)
class Report:
    """What the machine code shows.

    Attributes:
        registers: Per thread.
        spills: Bytes of local memory and stack per thread; 0 means that nothing was spilled.
        shared: Bytes of shared memory per program.
        resident: Programs that fit into a multiprocessor.
        loop: Instructions of the loop over the tiles.
        bare: Loads in that loop that a thread waits for, past the pipeline.
        dots: Dots in the kernel.
        tensor_core: Tensor-core instructions (mma or wgmma).
        loads: Global loads (copies to shared memory too) by width in bytes.
        swallows: Minima and maxima that return the number where one operand is NaN.
        rows, columns, warps, stages: The configuration.
    """

    registers: int
    spills: int
    shared: int
    resident: int
    loop: int
    bare: int
    dots: int
    tensor_core: int
    loads: dict[int, int]
    swallows: int
    rows: int
    columns: int
    warps: int
    stages: int


def cases(archs=(80, 90), head_dims=(32, 64, 96, 128), dtypes=('bf16', 'fp16', 'fp32')):
    """Everything that the heuristics can pick, with all tensors in one of two layouts."""
    for arch in archs:
        for dtype in dtypes:
            for head_dim in head_dims:
                yield from _passes(head_dim, dtype, arch)


def published(archs=(90,), head_dims=(64, 96), dtypes=('bf16', 'fp16')) -> Iterator[Case]:
    """What the published models run on dense prediction."""
    for arch in archs:
        for dtype in dtypes:
            for head_dim in head_dims:
                for name in FLOORS:
                    if name == 'reduce_queries':
                        yield Case(name, head_dim, dtype, arch, kind='rala')
                        continue
                    fused = tiling.default_tiling(name, head_dim, DTYPES[dtype], arch).fused
                    parts = {
                        'backward_queries': ('dKV', 'dkbar, dq'),
                        'backward_keys': ('dv', 'dk'),
                    }
                    for part in ('',) if fused else parts[name]:
                        yield Case(name, head_dim, dtype, arch, part=part)
                    if name == 'apply_queries':
                        yield Case(name, head_dim, dtype, arch, gated=True)


def _passes(head_dim: int, dtype: str, arch: int) -> Iterator[Case]:
    def fused(name: str) -> bool:
        return tiling.default_tiling(name, head_dim, DTYPES[dtype], arch).fused

    for kind, token_major in (('mala', True), ('rala', True), ('mala', False)):
        common = {'head_dim': head_dim, 'dtype': dtype, 'arch': arch}
        common |= {'kind': kind, 'token_major': token_major}
        rala = kind == 'rala'
        if rala:
            yield Case('reduce_queries', **common)
        yield Case('reduce_keys', **common)
        if not rala:  # RALA's is that of MALA less a term
            yield Case('apply_queries', **common)
            yield Case('apply_queries', gated=True, **common)
            yield Case('backward_gate', **common)
        if fused('backward_queries'):
            parts = ('sums', 'dq') if rala else ('',)
        else:
            parts = ('dKV', 'dkbar', 'dq') if rala else ('dKV', 'dkbar, dq')
        for part in parts:
            yield Case('backward_queries', part=part, **common)
        for part in ('',) if fused('backward_keys') else ('dk', 'dv'):
            yield Case('backward_keys', part=part, **common)


def compile_case(case: Case, chosen: tiling.Tiling | None = None):
    """Compile without a device.

    Args:
        case (Case): What to compile.
        chosen (Tiling, optional): Replaces the heuristics' choice.

    Returns:
        tuple: Triton's compiled kernel and the tiling.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mala_mm.ops.fused.triton import kernels

    dtype = DTYPES[case.dtype]
    unit = 16 // dtype.itemsize if case.aligned else 1
    chosen = chosen or tiling.default_tiling(case.name, case.head_dim, dtype, case.arch)
    layout = (0 if case.token_major else 8) + unit.bit_length() - 1
    kernel = getattr(kernels, case.name)
    flags = {
        'D': case.head_dim,
        'P': tiling.padded(case.head_dim),
        'ROWS': chosen.rows,
        'COLUMNS': chosen.columns,
        'STAGES': chosen.stages,
        'FOLLOW': chosen.follow,
        'WIDTH_UNIT': 1 if case.token_major else unit,
        'ROTARY': True,
        'MALA': case.kind == 'mala',
        'WEIGHTED': case.kind == 'rala',
        'GATED': case.gated,
        'DOT': tiling.precision(dtype),
    }
    flags |= {name: name in PARTS[case.part] for parts in PARTS.values() for name in parts}
    signature, constants, attributes = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument.isupper():
            signature[argument] = 'constexpr'
            constants[argument] = flags.get(argument, layout)
        elif argument in kernels.RUNTIME_INTEGERS:
            signature[argument] = 'i32'
        elif argument in FLOATS:
            signature[argument] = 'fp32'
        else:
            signature[argument] = '*fp32' if argument in FLOAT32_POINTERS else f'*{case.dtype}'
            attributes[(index,)] = [['tt.divisibility', 16]]
    try:  # Triton 3.2
        from triton.backends.compiler import AttrsDescriptor
    except ImportError:
        pass
    else:
        attributes = AttrsDescriptor.from_hints({index: 16 for (index,) in attributes})
        signature = {name: kind for name, kind in signature.items() if kind != 'constexpr'}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {'num_warps': chosen.warps, 'num_stages': chosen.stages}
    return triton.compile(source, target=GPUTarget('cuda', case.arch, 32), options=options), chosen


def longest_loop(code: str) -> list[str]:
    """Instructions of the longest loop of a disassembled kernel."""
    instructions = {
        int(address, 16): text
        for address, text in re.findall(r'/\*([0-9a-f]{4,5})\*/\s+([^;]*);', code)
    }
    loop: tuple[int, int] = (1, 0)
    for address, text in instructions.items():
        found = re.search(r'\bBRA\b.*?0x([0-9a-f]+)', text)
        if found and int(found[1], 16) < address:  # backwards
            loop = max(loop, (int(found[1], 16), address), key=lambda x: x[1] - x[0])
    return [text for address, text in instructions.items() if loop[0] <= address <= loop[1]]


def residency(registers: int, warps: int, shared: int, arch: int) -> int:
    """Programs that fit into a multiprocessor: 64 Ki registers, handed out by 8 a thread."""
    capacity = {80: 164, 87: 164, 90: 228, 100: 228, 103: 228}.get(arch, 100)
    threads = {80: 2048, 87: 1536, 86: 1536, 89: 1536, 120: 1536}.get(arch, 2048)
    return min(
        65536 // (-(-registers // 8) * 8 * 32 * warps),
        capacity * 1024 // (shared + 1024),
        threads // (32 * warps),
    )


def inspect(case: Case, compiled, chosen) -> Report:
    """Read registers, memory and instructions out of a compiled kernel."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / 'bin' / 'cuobjdump'
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / 'kernel.cubin'
        cubin.write_bytes(compiled.asm['cubin'])
        usage, code = (
            subprocess.run([tool, flag, cubin], capture_output=True, text=True, check=True).stdout
            for flag in ('--dump-resource-usage', '--dump-sass')
        )
    numbers = {key: int(value) for key, value in re.findall(r'(REG|STACK|LOCAL):(\d+)', usage)}
    loads: dict[int, int] = {}
    for line in code.splitlines():
        found = re.search(r'\b(LDG|LDGSTS)\.(\S+)', line)
        if found:
            bits = re.search(r'\.(128|64|U16|S16|U8)\b', f'.{found[2]}')
            width = {'128': 16, '64': 8, 'U16': 2, 'S16': 2, 'U8': 1}[bits[1]] if bits else 4
            loads[width] = loads.get(width, 0) + 1
    loop = longest_loop(code)
    shared = compiled.metadata.shared
    return Report(
        registers=numbers['REG'],
        spills=numbers['STACK'] + numbers['LOCAL'],
        shared=shared,
        resident=residency(numbers['REG'], chosen.warps, shared, case.arch),
        loop=len(loop),
        bare=sum(bool(re.search(r'\bLDG\b', text)) for text in loop),
        dots=len(re.findall(r'= tt\.dot\b', compiled.asm['ttir'])),
        tensor_core=len(re.findall(r'\b(?:HMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA)\b', code)),
        loads=dict(sorted(loads.items(), reverse=True)),
        swallows=len(re.findall(r'\b(?:min|max)\.(?:ftz\.)?f32', compiled.asm['ptx'])),
        rows=chosen.rows,
        columns=chosen.columns,
        warps=chosen.warps,
        stages=chosen.stages,
    )


def issue(report: Report, shape: Shape) -> float:
    """Seconds in which the loop's instructions of all tiles issue, one a cycle and scheduler."""
    tiles = -(-shape.height // report.rows) * -(-shape.width // report.columns)
    tiles *= shape.batch * shape.heads
    return report.loop * report.warps * tiles / (MULTIPROCESSORS * SCHEDULERS) / CLOCK


def floor(case: Case, shape: Shape) -> float:
    """Seconds in which the tensors that a pass needs can be moved."""
    tensors = FLOORS[case.name][0] + 2 * case.gated
    return tensors * shape.unit(DTYPES[case.dtype]) / BANDWIDTH


TABLE = (
    '| kernel | tile | warps | stages | registers | spilled bytes | shared KiB | programs per SM '
    '| loop | bare loads in it | dots | tensor-core instructions | global loads by width |\n'
    + '|---' * 13
    + '|'
)
BARS = (
    '| kernel | shape | loop | programs per SM | issue us | DRAM floor us | ratio | bar | met |\n'
    + '|---' * 9
    + '|'
)

PREDICTION = (
    'Issue is loop x warps x tiles / (132 multiprocessors x 4 schedulers) at 1.98 GHz; the floor '
    'is the least that the pass moves at 4.3 TB/s, the copy bandwidth of an H200.'
)


def row(case: Case, report: Report) -> str:
    """One line of the table of kernels."""
    loads = ', '.join(f'{number} x {width} B' for width, number in report.loads.items())
    return (
        f'| {case} | {report.rows} x {report.columns} | {report.warps} | {report.stages} '
        f'| {report.registers} | {report.spills} | {report.shared / 1024:.1f} | {report.resident} '
        f'| {report.loop} | {report.bare} | {report.dots} | {report.tensor_core} | {loads} |'
    )


def bar(case: Case, report: Report, shape: Shape) -> str:
    """One line of the table of predicted times."""
    seconds, least = issue(report, shape), floor(case, shape)
    most = FLOORS[case.name][1]
    met = 'yes' if seconds <= most * least else 'no'
    return (
        f'| {case} | {shape.name} | {report.loop} | {report.resident} | {1e6 * seconds:.1f} '
        f'| {1e6 * least:.1f} | {seconds / least:.2f} | {most} | {met} |'
    )


def write(found: list[tuple[Case, Report]], path: Path) -> None:
    """Write both tables."""
    import triton

    command = ' '.join(['python -m benchmarks.aot', *sys.argv[1:]])
    bars = [
        bar(case, report, shape)
        for case, report in found
        if case.arch == 90 and case.token_major and case.dtype != 'fp32'
        for shape in SHAPES
        if case.kind == 'mala' and shape.head_dim == case.head_dim
    ]
    text = [
        '# What the compiler makes of the kernels',
        '',
        f'Written by `{command}` with Triton {triton.__version__}; needs no GPU.',
        '',
        *(['## Instructions beside bytes', '', PREDICTION, '', BARS, *bars, ''] if bars else []),
        '## All kernels',
        '',
        'Registers are per thread, spills are local memory and stack per thread (what they cost is '
        'in the loop), shared memory is per program '
        f'(limits: {tiling.shared_memory(80)} KiB on sm_80, {tiling.shared_memory(90)} KiB on '
        'sm_90). The loop is counted in instructions; bare loads are those past the pipeline.',
        '',
        TABLE,
        *(row(case, report) for case, report in found),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join(text) + '\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--arch', type=int, nargs='+', default=(90,))
    parser.add_argument('--head-dim', type=int, nargs='+', default=(64, 96))
    parser.add_argument('--dtype', nargs='+', choices=DTYPES, default=('bf16', 'fp16'))
    parser.add_argument('--all', action='store_true', help='every operator, layout and part')
    parser.add_argument('--case', nargs='+', help='only these, as the table names them')
    parser.add_argument('--out', type=Path, help=f'default: {RESULTS}, none with --case')
    parser.add_argument('--json', type=Path, help='where to add the reports, one a line')
    args = parser.parse_args()
    if os.environ.get('TRITON_INTERPRET') == '1':
        parser.error('with TRITON_INTERPRET=1 nothing is compiled')
    if args.case:
        chosen = [Case.parse(text) for text in args.case]
    else:
        chosen = (cases if args.all else published)(args.arch, args.head_dim, args.dtype)
    found = []
    print(TABLE)
    for case in chosen:
        report = inspect(case, *compile_case(case))
        found.append((case, report))
        print(row(case, report), flush=True)
        if args.json:
            with args.json.open('a') as file:
                entry = {'case': str(case), 'line': row(case, report)} | asdict(report)
                file.write(json.dumps(entry) + '\n')
    if args.out or not args.case:
        write(found, args.out or RESULTS)


if __name__ == '__main__':
    main()
