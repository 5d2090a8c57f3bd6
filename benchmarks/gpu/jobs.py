"""The parts of a session and their jobs, the most important first."""

from __future__ import annotations

from benchmarks.gpu.session import Job
from benchmarks.traffic import SHAPES, Shape

CHECK = 'benchmarks.gpu.checks:check'
AROUND = 'benchmarks.gpu.checks:around'
MEASURE = 'benchmarks.gpu.measures:'
NAMES = [x.name for x in SHAPES]
# tiny/small and base/large at the sizes of detection and segmentation, stage 1
MAIN = [NAMES[0], NAMES[1], NAMES[3]]
TOGETHER = ('checks', 'more checks')
"""Parts whose jobs may run at a time: what takes long in them is compiling."""


def _check(kind, dtype, head_dim, token_major=True, size=(61, 67), form='published') -> Job:
    keywords = dict(
        kind=kind, form=form, dtype=dtype, head_dim=head_dim, token_major=token_major, size=size
    )
    return Job(CHECK, keywords, 180)


def _around(dtypes, channels, size) -> list[Job]:
    names = ('feed-forward', 'conditional position', 'local position', 'residual and norm')
    return [
        Job(AROUND, dict(layer=layer, dtype=dtype, channels=channels, size=size), 120)
        for layer in names
        for dtype in dtypes
    ]


def checks(dry_run: bool) -> list[Job]:
    """The published variants: MALA and RALA, d = 64 and 96, token-major; then at 66,800 tokens."""
    if dry_run:
        return [_check('mala', 'bf16', 32, size=(3, 5)), *_around(['fp32'], 8, (3, 5))]
    small = [
        _check(kind, dtype, head_dim)
        for head_dim in (64, 96)
        for kind in ('mala', 'rala')
        for dtype in ('bf16', 'fp16', 'fp32')
    ]
    large = [
        _check(kind, dtype, 64, size=(200, 334))
        for kind in ('mala', 'rala')
        for dtype in ('bf16', 'fp16')
    ]
    types = ('bf16', 'fp16', 'fp32')
    return small + large + _around(types, 224, (61, 67)) + _around(types[:2], 64, (200, 334))


def more_checks(dry_run: bool) -> list[Job]:
    """Every other kind, form, type, head width and layout."""
    if dry_run:
        return [_check('linear', 'fp16', 32, False, size=(3, 5))]
    known = {str(job) for job in checks(False)}
    found = [
        _check(kind, dtype, head_dim, token_major)
        for token_major in (True, False)
        for kind in ('mala', 'rala', 'linear')
        for head_dim in (64, 96, 32, 128)
        for dtype in ('bf16', 'fp16', 'fp32')
    ]
    found += [_check('mala', dtype, 64, form='paper') for dtype in ('bf16', 'fp16', 'fp32')]
    return [job for job in found if str(job) not in known]


def copies(dry_run: bool) -> list[Job]:
    """Copies from the size of one map to a gibibyte."""
    sizes = [2**12] if dry_run else [2**n for n in range(20, 31, 2)]
    return [Job(MEASURE + 'copies', dict(nbytes=sizes))]


def kernels(dry_run: bool) -> list[Job]:
    """Single kernels at every published shape."""
    if dry_run:
        return [Job(MEASURE + 'kernels', dict(shape='toy', dtype='bf16'))]
    return [
        Job(MEASURE + 'kernels', dict(shape=shape, dtype=dtype, kind=kind))
        for kind, shapes in (('mala', NAMES), ('rala', NAMES[:1]))
        for shape in shapes
        for dtype in ('bf16', 'fp16')
    ]


def operators(dry_run: bool) -> list[Job]:
    """Operators and mixers beside their rivals."""
    name = MEASURE + 'operator'
    if dry_run:
        kinds = ('mixer, kernels', 'mixer, published', 'attention, softmax (SDPA)')
        return [Job(name, dict(shape='toy', dtype='bf16', name=x)) for x in kinds] + [
            Job(MEASURE + 'crossover', dict(sizes=[[2, 3]], dtype='bf16'))
        ]
    ours = ('mixer, kernels', 'attention, kernels', 'RALA, kernels')
    rivals = ('mixer, published', 'mixer, published, compiled', 'attention, published',
              'attention, softmax (SDPA)')  # fmt: skip
    found = [
        Job(name, dict(shape=shape, dtype=dtype, name=x))
        for shape in NAMES
        for dtype in ('bf16', 'fp16')
        for x in ours
    ]
    found += [Job(name, dict(shape=s, dtype='bf16', name=x)) for s in MAIN for x in rivals]
    sizes = [[14, 14], [28, 28], [50, 84], [64, 128], [100, 167], [128, 256], [200, 334]]
    return [*found, Job(MEASURE + 'crossover', dict(sizes=sizes, dtype='bf16'))]


def host(dry_run: bool) -> list[Job]:
    """From which size on the device is what one waits for."""
    sizes = [[2, 3]] if dry_run else [[14, 14], [28, 28], [56, 56], [100, 167], [200, 334]]
    return [Job(MEASURE + 'host', dict(sizes=sizes, dtype='bf16'))]


def layers(dry_run: bool) -> list[Job]:
    """What stands around the attention in a block, and the block."""
    shapes = ['toy'] if dry_run else [NAMES[0], NAMES[2]]
    names = ('ours', 'published') if dry_run else ('ours', 'published', 'published, compiled')
    found = [Job(MEASURE + 'layers', dict(shape=s, dtype='bf16')) for s in shapes]
    found += [
        Job(MEASURE + 'around', dict(shape=s, dtype='bf16', layer=layer))
        for s in shapes
        for layer in ('feed-forward', 'conditional position', 'local position', 'residual and norm')
    ]
    return found + [
        Job(MEASURE + 'block', dict(shape=shape, dtype='bf16', name=name), 180)
        for shape in shapes
        for name in (names if not dry_run else ('published',))
    ]


def models(dry_run: bool) -> list[Job]:
    """Whole backbones: inference at the sizes of the tasks, training of a detector's."""
    peers = ['--peers', 'Swin-T of mmpretrain', 'ConvNeXt-T']  # mmdet needs mmcv's operators
    function = 'benchmarks.gpu.models:backbones'
    if dry_run:
        arguments = ['--sizes', '32x32', '--rounds', '1', '--peers']
        return [Job(function, dict(program='models', arguments=arguments))]
    common = ['--device', 'cuda', '--amp', 'fp16', '--rounds', '20', '--compile', '--gib', '60']
    inference, training = (
        [
            Job(function, dict(program=program, arguments=[*common, '--sizes', size, *rest, *of]))
            for size, rest in sizes
            for of in (peers, ['--peers'])  # without, should they not be importable here
        ]
        for program, sizes in (
            ('models', (('512x2048', []), ('224x224', ['--batch', '64']))),
            ('training', (('800x1333', ['--batch', '2']),)),
        )
    )
    found = [inference[0], training[0], inference[2], inference[1], training[1]]
    return [job._replace(seconds=150) for job in found]


def sweep(dry_run: bool) -> list[Job]:
    """Fifty sizes that were never seen."""
    return [Job(MEASURE + 'sweep', dict(number=1 if dry_run else 50, dtype='bf16'))]


def tests(dry_run: bool) -> list[Job]:
    """The tests of the kernels, whose fixture ``device`` is the GPU where there is one."""
    folder = 'tests/ops/fused/triton'
    # without the conftest of all tests, which needs more packages than the kernels do
    chosen = [f'--confcutdir={folder}', '-o', 'addopts=', folder]
    arguments = ['--version'] if dry_run else chosen
    return [Job('benchmarks.gpu.models:tests', dict(arguments=arguments), 240)]


def variant(job: Job) -> tuple[str, str, int] | None:
    """Kind, type and head width of the kernels that a job times, None if it times none."""
    keywords, function = job.keywords, job.function.removeprefix(MEASURE)
    if function in ('host', 'crossover', 'sweep'):
        return 'mala', keywords['dtype'], 64
    if function == 'operator' and 'kernels' not in keywords['name']:
        return None
    if function not in ('kernels', 'operator'):
        return None
    shapes: dict[str, Shape] = {x.name: x for x in SHAPES}
    rala = keywords.get('kind') == 'rala' or keywords.get('name', '').startswith('RALA')
    head_dim = shapes[keywords['shape']].head_dim if keywords['shape'] in shapes else 32
    return 'rala' if rala else 'mala', keywords['dtype'], head_dim


def wrong(rows: list[dict]) -> set[tuple[str, str, int]]:
    """The variants whose results were wrong in the checks so far."""
    return {
        (row['kind'], row['dtype'], row['head_dim'])
        for row in rows
        if not row['passed'] and row['token_major'] and row['way'] in ('accuracy', 'again')
    }


PARTS = {
    'checks': checks,
    'copies': copies,
    'kernels': kernels,
    'operators': operators,
    'host': host,
    'models': models,
    'layers': layers,
    'sweep': sweep,
    'more checks': more_checks,
    'tests': tests,
}
