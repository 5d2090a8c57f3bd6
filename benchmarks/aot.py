"""What the compiler makes of the Triton kernels: needs no GPU.

    python -m benchmarks.aot [--arch 80 90] [--head-dim 32 64 96 128] [--dtype bf16 fp16 fp32]

Every kernel is compiled to machine code for the given architectures, as the heuristics configure
it, and what can be read from the result is printed as a table and written to
``benchmarks/results/aot.md``: registers, shared memory, spills, tensor-core and load instructions.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mala_mm.ops.fused.triton import plan

DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}
FLOAT32_POINTERS = ('part', 'peak', 'query', 'states', 'dstates', 'dquery', 'table', 'result')
FLOATS = ('scale', 'tail_scale', 'eps')
RESULTS = Path(__file__).parent / 'results' / 'aot.md'
# What a launch makes, of all that its kernel can.
PARTS = {
    '': ('QUERIES', 'KEYS', 'VALUES'),
    'backward': ('BACKWARD',),
    'sums': ('KEYS', 'VALUES'),
    'dKV': ('VALUES',),
    'dkbar': ('KEYS',),
    'dkbar, dq': ('KEYS', 'QUERIES'),
    'dq': ('QUERIES', 'GLOBAL'),
    'dk': ('KEYS',),
    'dv': ('VALUES',),
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


@dataclass(frozen=True)
class Report:
    """What the machine code shows.

    Attributes:
        registers: Per thread.
        spills: Bytes of local memory and stack per thread; 0 means that nothing was spilled.
        shared: Bytes of shared memory per program.
        dots: Dots in the kernel.
        tensor_core: Tensor-core instructions (mma or wgmma).
        loads: Global loads (copies to shared memory too) by width in bytes.
        block, warps, stages: The configuration.
    """

    registers: int
    spills: int
    shared: int
    dots: int
    tensor_core: int
    loads: dict[int, int]
    block: int
    warps: int
    stages: int


def cases(archs=(80, 90), head_dims=(32, 64, 96, 128), dtypes=('bf16', 'fp16', 'fp32')):
    """Everything that the heuristics can pick, with all tensors in one of two layouts."""
    for arch in archs:
        for dtype in dtypes:
            for head_dim in head_dims:
                yield from _passes(head_dim, dtype, arch)


def _passes(head_dim: int, dtype: str, arch: int) -> Iterator[Case]:
    def fused(name: str) -> bool:
        return plan.default_config(name, head_dim, DTYPES[dtype], arch).fused

    for kind, token_major in (('mala', True), ('rala', True), ('mala', False)):
        common = {'head_dim': head_dim, 'dtype': dtype, 'arch': arch}
        common |= {'kind': kind, 'token_major': token_major}
        rala = kind == 'rala'
        if rala:
            yield Case('reduce_queries', **common)
        yield Case('reduce_keys', **common)
        if not rala:  # RALA's is that of MALA less a term
            yield Case('apply_queries', gated=True, **common)
            yield Case('apply_queries', gated=True, part='backward', **common)
        if fused('backward_queries'):
            parts = ('sums', 'dq') if rala else ('',)
        else:
            parts = ('dKV', 'dkbar', 'dq') if rala else ('dKV', 'dkbar, dq')
        for part in parts:
            yield Case('backward_queries', part=part, **common)
        for part in ('',) if fused('backward_keys') else ('dk', 'dv'):
            yield Case('backward_keys', part=part, **common)


def compile_case(case: Case, config=None):
    """Compile without a device.

    Args:
        case (Case): What to compile.
        config (Config, optional): Replaces the heuristics' choice.

    Returns:
        tuple: Triton's compiled kernel and the configuration.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mala_mm.ops.fused.triton import kernels

    dtype = DTYPES[case.dtype]
    unit = 16 // dtype.itemsize if case.aligned else 1
    chosen = config or plan.default_config(case.name, case.head_dim, dtype, case.arch)
    layout = (0 if case.token_major else 8) + unit.bit_length() - 1
    kernel = getattr(kernels, case.name)
    rala = case.kind == 'rala'
    flags = {
        'D': case.head_dim,
        'P': plan.padded(case.head_dim),
        'BLOCK_N': chosen.block,
        'TOKEN_UNIT': 1 if case.token_major else unit,
        'ROTARY': True,
        'MALA': case.kind == 'mala',
        'WEIGHTED': rala,
        'GATED': case.gated,
        'DOT': plan.precision(dtype),
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
    source = ASTSource(kernel, signature, constants, attributes)
    options = {'num_warps': chosen.warps, 'num_stages': chosen.stages}
    return triton.compile(source, target=GPUTarget('cuda', case.arch, 32), options=options), chosen


def inspect(compiled, chosen) -> Report:
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
    return Report(
        registers=numbers['REG'],
        spills=numbers['STACK'] + numbers['LOCAL'],
        shared=compiled.metadata.shared,
        dots=len(re.findall(r'= tt\.dot\b', compiled.asm['ttir'])),
        tensor_core=len(re.findall(r'\b(?:HMMA|HGMMA)\.', code)),
        loads=dict(sorted(loads.items(), reverse=True)),
        block=chosen.block,
        warps=chosen.warps,
        stages=chosen.stages,
    )


HEADER = (
    '| kernel | block | warps | stages | registers | spilled bytes | shared KiB | dots '
    '| tensor-core instructions | global loads by width |\n' + '|---' * 10 + '|'
)


def row(case: Case, report: Report) -> str:
    """One line of the table."""
    loads = ', '.join(f'{number} x {width} B' for width, number in report.loads.items())
    return (
        f'| {case} | {report.block} | {report.warps} | {report.stages} | {report.registers} '
        f'| {report.spills} | {report.shared / 1024:.1f} | {report.dots} '
        f'| {report.tensor_core} | {loads} |'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--arch', type=int, nargs='+', default=(80, 90))
    parser.add_argument('--head-dim', type=int, nargs='+', default=(32, 64, 96, 128))
    parser.add_argument('--dtype', nargs='+', choices=DTYPES, default=tuple(DTYPES))
    parser.add_argument('--out', type=Path, default=RESULTS)
    args = parser.parse_args()
    lines = [
        '# What the compiler makes of the kernels',
        '',
        'Written by `python -m benchmarks.aot`; needs no GPU. Registers are per thread, spills are '
        'local memory and stack per thread, shared memory is per program (limits: '
        f'{plan.shared_memory(80)} KiB on sm_80, {plan.shared_memory(90)} KiB on sm_90).',
        '',
        HEADER,
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    print(HEADER)
    for case in cases(args.arch, args.head_dim, args.dtype):
        line = row(case, inspect(*compile_case(case)))
        print(line, flush=True)
        lines.append(line)
        args.out.write_text('\n'.join(lines) + '\n')


if __name__ == '__main__':
    main()
