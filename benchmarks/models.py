"""Backbones side by side at inference: speed, memory, and how both grow with the image.

    python -m benchmarks.models --threads 2 --sizes 512x2048
    python -m benchmarks.models --threads 2 --sizes 224x224 --batch 16
    python -m benchmarks.models --threads 2 --sizes 512x2048 --amp bf16
    python -m benchmarks.models --device cuda --amp bf16 --sizes 512x2048 800x1333 --compile

Compared are our backbone with the published assignment of attention and with linear attention in
all stages; the published form of both (:mod:`benchmarks.published`), the former through
``torch.compile`` too (``--compile``); with ``--amp`` ours in float32 beside; and Swin, ConvNeXt and
PVTv2 as mmdetection and mmpretrain build them. Weights are random. At every size the outputs of our
models are held against those of the published form on the same weights first: what differs is named
and gets no time. All take turns in one loop, so that whatever else the machine does meets them
alike. Prints a table, and writes it with the raw figures and a drawing to ``--out``.

A model that took longer than ``--seconds`` at one size is left out of larger ones, and so is the
published form where its scores would take more than ``--gib``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from benchmarks.operators import extra_bytes, machine, seconds, size_from
from benchmarks.published import ARCHS, Backbone
from mala_mm.checkpoint.convert import FAMILIES, convert

PUBLISHED = 'published form'
HALF = {'bf16': torch.bfloat16, 'fp16': torch.float16}
# As the detection recipes of mmdetection and mmpretrain build them, weights left out.
PEERS = {
    'Swin-T': dict(type='mmdet.SwinTransformer', depths=(2, 2, 6, 2), drop_path_rate=0.2),
    'Swin-T of mmpretrain': dict(
        type='mmpretrain.SwinTransformer',
        arch='tiny',
        out_indices=(0, 1, 2, 3),
        drop_path_rate=0.2,
        pad_small_map=True,
    ),
    'Swin-S': dict(type='mmdet.SwinTransformer', depths=(2, 2, 18, 2), drop_path_rate=0.2),
    'ConvNeXt-T': dict(
        type='mmpretrain.ConvNeXt',
        arch='tiny',
        out_indices=(0, 1, 2, 3),
        drop_path_rate=0.4,
        layer_scale_init_value=1.0,
        gap_before_final_norm=False,
    ),
    'ConvNeXt-S': dict(
        type='mmpretrain.ConvNeXt',
        arch='small',
        out_indices=(0, 1, 2, 3),
        drop_path_rate=0.6,
        layer_scale_init_value=1.0,
        gap_before_final_norm=False,
    ),
    'PVTv2-B1': dict(
        type='mmdet.PyramidVisionTransformerV2', embed_dims=64, num_layers=(2, 2, 2, 2)
    ),
    'PVTv2-B2': dict(
        type='mmdet.PyramidVisionTransformerV2', embed_dims=64, num_layers=(3, 4, 6, 3)
    ),
}
# Outputs of two float32 computations of one network differ by about 1e-6 of their norm (PyTorch's
# convolutions and our operators sum in other orders); a term left out makes more than 1e-2.
TOLERANCE = 1e-4


# --- what is compared -----------------------------------------------------------------------------


@dataclass
class Competitor:
    """A backbone and what it is called.

    Attributes:
        name (str): Its name in tables.
        module (nn.Module): The backbone.
        yardstick (str | None): The competitor with the same weights whose outputs it has to have.
        scores (Callable): Bytes of the softmax scores that it holds for images (B, H, W).
        amp (bool): Whether it runs under the autocast that is asked for.
    """

    name: str
    module: nn.Module
    yardstick: str | None = None
    scores: Callable[[int, int, int], int] = lambda *_: 0
    amp: bool = True


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Move every weight and statistic away from its initial value."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point() or name.endswith('angle'):
            continue
        if tensor.dim() == 4 and 'gamma' not in name:
            tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)
        elif name.endswith(('bias', 'running_mean')):
            tensor.uniform_(-0.3, 0.3, generator=generator)
        else:
            tensor.uniform_(0.5, 1.5, generator=generator)


def assignments(family: str) -> dict[str, tuple[str, ...]]:
    """The published assignment of attention to stages, and the papers' text."""
    linear = FAMILIES[family].default_attn_types[0]
    return {
        '': FAMILIES[family].default_attn_types,
        f', {linear.upper()} in all stages': (linear,) * 4,
    }


def scores_bytes(arch: str, attn_types: Iterable[str]) -> Callable[[int, int, int], int]:
    """Bytes of the largest matrix of scores that the published form makes, with its softmax."""
    heads = ARCHS[arch][2]
    stages = [i for i, kind in enumerate(attn_types) if kind == 'softmax']

    def count(batch: int, height: int, width: int) -> int:
        tokens = [-(-height // 4 // 2**i) * -(-width // 4 // 2**i) for i in range(4)]
        return max([2 * 4 * batch * heads[i] * tokens[i] ** 2 for i in stages], default=0)

    return count


def build(
    family: str, arch: str, peers: Iterable[str], with_compiled: bool, amp: bool = False
) -> list[Competitor]:
    """All competitors, ours and the published form with the same weights."""
    title = f'{FAMILIES[family].__name__}-{arch[0].upper()}'
    found = []
    for suffix, attn_types in assignments(family).items():
        rate = FAMILIES[family].arch_zoo[arch]['drop_path_rate']
        published = Backbone(arch, attn_types, drop_path_rate=rate)
        randomise(published)
        ours = FAMILIES[family](arch, attn_types=attn_types)
        source = dict(model=published.state_dict())
        weights = convert(source, PUBLISHED, family, arch, attn_types=attn_types).state_dict
        ours.load_state_dict(weights)
        scores = scores_bytes(arch, attn_types)
        found += [
            Competitor(PUBLISHED + suffix, published, scores=scores),
            Competitor(title + suffix, ours, yardstick=PUBLISHED + suffix),
        ]
        if amp and not suffix:
            plain = dict(yardstick=PUBLISHED, amp=False)
            found.append(Competitor(f'{title}, float32', ours, **plain))
        if with_compiled and not suffix:
            module = torch.compile(published, dynamic=False)
            compiled = f'{PUBLISHED}, torch.compile'
            found.append(Competitor(compiled, module, yardstick=PUBLISHED, scores=scores))
    for name in peers:
        found.append(Competitor(name, MODELS.build(PEERS[name])))
    for norm in (m for c in found for m in c.module.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = 0.0  # the statistics of all stay the same, however often they train
    return found


# --- correctness and measurement ------------------------------------------------------------------


def relative_error(results: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest relative RMS error among some tensors; infinite if one is no number."""
    errors = [
        ((x.double() - y.double()).norm() / y.double().norm()).item()
        for x, y in zip(results, expected, strict=True)
    ]
    return max(errors) if all(e == e for e in errors) else float('inf')


def check(
    competitors: list[Competitor], run: Callable[[nn.Module], tuple[Tensor, ...]]
) -> dict[str, float]:
    """Errors of those that have a yardstick among ``competitors``, by name, in float32."""
    errors = {}
    for yardstick in competitors:
        held = [c for c in competitors if c.yardstick == yardstick.name]
        expected = run(yardstick.module) if held else ()
        for c in held:
            errors[c.name] = relative_error(run(c.module), expected)
    return errors


def autocast(arguments: argparse.Namespace) -> contextlib.AbstractContextManager:
    if arguments.amp is None:
        return contextlib.nullcontext()
    return torch.autocast(arguments.device, HALF[arguments.amp])


def affordable(
    competitors: Iterable[Competitor], arguments: argparse.Namespace, size: tuple[int, int]
) -> tuple[list[Competitor], dict[str, str]]:
    """Those that the limit of memory admits, and why the others are left out."""
    admitted, refused = [], {}
    for c in competitors:
        gib = c.scores(arguments.batch, *size) / 2**30
        if gib > arguments.gib:
            refused[c.name] = f'its softmax scores would take {gib:.0f} GiB'
        else:
            admitted.append(c)
    return admitted, refused


def take_turns(calls: dict[str, Callable], arguments: argparse.Namespace) -> dict[str, list]:
    """Seconds of every call, by name, one after the other in each round."""
    times = {name: [] for name in calls}
    for _ in range(arguments.rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, arguments.device))
    return times


def summary(times: list[float], batch: int) -> dict[str, float]:
    """Median, ninth decile and images per second."""
    deciles = statistics.quantiles(times, n=10, method='inclusive') if len(times) > 1 else times
    middle = statistics.median(times)
    return dict(times=times, p50=middle, p90=deciles[-1], images=batch / middle)


@torch.inference_mode()
def measure(
    competitors: list[Competitor], arguments: argparse.Namespace, size: tuple[int, int]
) -> list[dict]:
    """The rows of one size."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(arguments.batch, 3, *size, generator=generator).to(arguments.device)
    admitted, refused = affordable(competitors, arguments, size)
    for c in admitted:
        c.module.eval()
    errors = check(admitted, lambda module: module(images))
    admitted = [c for c in admitted if errors.get(c.name, 0) <= TOLERANCE]

    rows = {
        c.name: dict(size=list(size), name=c.name, error=errors.get(c.name)) for c in competitors
    }
    for name, reason in refused.items():
        rows[name]['left_out'] = reason
    calls = {c.name: functools.partial(infer, c, images, arguments) for c in admitted}
    for name, call in calls.items():  # also the warm-up
        rows[name]['memory'] = extra_bytes(call, arguments.device)
    for name, times in take_turns(calls, arguments).items():
        rows[name].update(summary(times, arguments.batch))
    return list(rows.values())


def infer(competitor: Competitor, images: Tensor, arguments: argparse.Namespace) -> object:
    """A call of a competitor, under autocast if it takes part in that."""
    with autocast(arguments) if competitor.amp else contextlib.nullcontext():
        return competitor.module(images)


# --- what is reported -----------------------------------------------------------------------------


INFERENCE = {
    'images/s': lambda row: f'{row["images"]:.3g}',
    'p50 ms': lambda row: f'{1e3 * row["p50"]:.0f}',
    'p90 ms': lambda row: f'{1e3 * row["p90"]:.0f}',
    'peak MiB': lambda row: f'{row["memory"] / 2**20:.0f}',
}


def markdown(results: dict, columns: dict[str, Callable[[dict], str]], notes: str) -> str:
    """A table with a section of rows per size; speed relative to the published form."""
    lines = [
        f'# {results["title"]}',
        '',
        f'{results["machine"]}. Written by `{results["command"]}`.',
        '',
        f'{results["rounds"]} rounds in which the models take turns. {notes} Error: relative RMS '
        'distance to the published form on the same weights, the worst tensor, in float32.',
        '',
        f'| size | model | {" | ".join(columns)} | speed | error |',
        '|' + '---|' * (4 + len(columns)),
    ]
    baseline = {
        tuple(row['size']): row['p50']
        for row in results['rows']
        if row['name'] == PUBLISHED and 'p50' in row
    }
    for row in results['rows']:
        cells = ['{}x{}'.format(*row['size']), row['name']]
        error = '' if row['error'] is None else f'{row["error"]:.0e}'
        base = baseline.get(tuple(row['size']))
        if 'p50' in row:
            cells += [column(row) for column in columns.values()]
            cells.append(f'{base / row["p50"]:.2f}x' if base else '')
        else:
            cells += [row.get('left_out', 'incorrect')] + [''] * len(columns)
        lines.append('| ' + ' | '.join([*cells, error]) + ' |')
    return '\n'.join(lines) + '\n'


def draw(results: dict, path: Path, panels: dict[str, Callable[[dict], float]]) -> None:
    """One panel per quantity over the number of pixels; bars where there is one size only."""
    from matplotlib.figure import Figure

    rows = [row for row in results['rows'] if 'p50' in row]
    names = list(dict.fromkeys(row['name'] for row in rows))
    sizes = sorted({tuple(row['size']) for row in rows}, key=lambda s: s[0] * s[1])
    figure = Figure(figsize=(5.5 * len(panels), 4.2), layout='constrained')
    for axes, (label, value) in zip(figure.subplots(1, len(panels)), panels.items()):
        for index, name in enumerate(names):
            of_name = [row for row in rows if row['name'] == name]
            if len(sizes) == 1:
                bars = axes.barh(index, [value(row) for row in of_name], color=f'C{index}')
                axes.bar_label(bars, fmt='%.3g', padding=3)
                continue
            points = [(row['size'][0] * row['size'][1], value(row)) for row in of_name]
            axes.plot(*zip(*points), marker='o', ms=4, color=f'C{index}', label=name)
        if len(sizes) == 1:
            axes.set_yticks(
                range(len(names)), names if axes is figure.axes[0] else [''] * len(names)
            )
            axes.invert_yaxis()
            axes.margins(x=0.15)
        else:
            axes.set(xscale='log', yscale='log')
            labels = ['{}x{}'.format(*size) for size in sizes]
            axes.set_xticks([h * w for h, w in sizes], labels, rotation=30, fontsize=8)
            axes.set_xticks([], minor=True)
            axes.grid(alpha=0.3)
        axes.set_title(label)
    if len(sizes) > 1:
        figure.axes[0].legend(fontsize=8)
    figure.suptitle(f'{results["title"]}: {results["machine"]}', fontsize=9)
    figure.savefig(path, dpi=90)


# --- command line ---------------------------------------------------------------------------------


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """The options that ``benchmarks.models`` and ``benchmarks.training`` share."""
    parser = argparse.ArgumentParser(
        prog=f'python -m benchmarks.{program}',
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--family', choices=FAMILIES, default='mavit')
    parser.add_argument('--arch', choices=ARCHS, default='tiny')
    parser.add_argument(
        '--peers', choices=PEERS, nargs='*', default=['Swin-T', 'ConvNeXt-T', 'PVTv2-B1']
    )
    parser.add_argument('--compile', action='store_true', help='the published form compiled, too')
    parser.add_argument('--sizes', type=size_from, nargs='+', default=[(224, 224)])
    parser.add_argument('--batch', type=int, default=1)
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    parser.add_argument('--amp', choices=HALF, help='under autocast with this type')
    parser.add_argument('--threads', type=int, help='of the CPU; default: as PyTorch finds them')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=float, default=20, help='limit of one call, see above')
    parser.add_argument('--gib', type=float, default=8, help='limit of softmax scores, see above')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/benchmarks'))
    return parser


def run(
    program: str,
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    measure: Callable[..., list[dict]],
    columns: dict[str, Callable[[dict], str]],
    notes: str,
    panels: dict[str, Callable[[dict], float]],
) -> int:
    """Measure every size and report; 1 if a result was wrong."""
    arguments = parser.parse_args(argv)
    if arguments.device == 'cuda' and not torch.cuda.is_available():
        parser.error('--device cuda needs a GPU that PyTorch can use; this machine has none')
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    competitors = build(
        arguments.family, arguments.arch, arguments.peers, arguments.compile, bool(arguments.amp)
    )
    for c in competitors:
        c.module.to(arguments.device)
    dtype = arguments.amp or 'fp32'
    results = dict(
        title=f'{program.capitalize()}, {arguments.family} {arguments.arch}, {dtype}, '
        f'batch {arguments.batch}',
        machine=machine(arguments.device),
        command=' '.join(
            [f'python -m benchmarks.{program}', *(sys.argv[1:] if argv is None else argv)]
        ),
        rounds=arguments.rounds,
        batch=arguments.batch,
        rows=[],
    )
    slow = {}
    for size in sorted(arguments.sizes, key=lambda s: s[0] * s[1]):
        rows = measure([c for c in competitors if c.name not in slow], arguments, size)
        for row in rows:
            if row.get('p50', 0) > arguments.seconds:
                slow[row['name']] = f'{row["p50"]:.0f} s at ' + '{}x{} already'.format(*size)
        done = {row['name'] for row in rows}
        rows += [
            dict(size=list(size), name=name, error=None, left_out=reason)
            for name, reason in slow.items()
            if name not in done
        ]
        results['rows'] += rows
    text = markdown(results, columns, notes)
    print(text)
    sizes = '_'.join('{}x{}'.format(*s) for s in (arguments.sizes[0], arguments.sizes[-1]))
    if len(arguments.sizes) == 1:
        sizes = '{}x{}'.format(*arguments.sizes[0])
    name = (
        f'{program}_{arguments.device}_{arguments.family}-{arguments.arch}_{dtype}'
        f'_{sizes}_b{arguments.batch}'
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f'{name}.md').write_text(text)
    (arguments.out / f'{name}.json').write_text(json.dumps(results, indent=1) + '\n')
    draw(results, arguments.out / f'{name}.png', panels)
    wrong = [row for row in results['rows'] if (row['error'] or 0) > TOLERANCE]
    for row in wrong:
        print('{} at {}x{} is incorrect and was not timed'.format(row['name'], *row['size']))
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    return run(
        'models',
        parser('models', __doc__),
        argv,
        measure,
        INFERENCE,
        'Peak memory is held beyond the images, the weights and the maps returned.',
        {
            'images per second': lambda row: row['images'],
            'peak MiB': lambda row: row['memory'] / 2**20,
        },
    )


if __name__ == '__main__':
    sys.exit(main())
