"""Trains one small vision transformer with each attention mechanism and says how they compare.

python tools/compare_attention.py --out compare_out             # accuracy, time and memory
python tools/compare_attention.py --out compare_out --only time # measure again, keep the accuracy
python tools/compare_attention.py --out compare_out --seeds 5   # two more seeds, from where it was
python tools/compare_attention.py --names softmax mala --seeds 1 --epochs 2

The host is mmpretrain's VisionTransformer with a class token, no convolution and no rotation: the
mechanism is all that mixes tokens. It learns to name the object in painted images, the same ones
in the same order for all; seeds change the weights and the order. Time and memory are those of one
image at inference, weights as they start. Written are
compare_attention.{json,md,png}, and the images, which another call takes again.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from mala_mm.demo.classes import THING_CLASSES
from mala_mm.demo.scenes import SceneConfig, make_portrait
from mala_mm.engine.arguments import make_parser
from mala_mm.errors import UserError
from mala_mm.models import replace_attention

matplotlib.use('agg')
import matplotlib.pyplot as plt  # noqa: E402

SIDE = 64
HOST = dict(
    arch=dict(embed_dims=64, num_layers=2, num_heads=2, feedforward_channels=128),
    img_size=SIDE,
    patch_size=8,
)
SIZES = ((224, 224), (512, 512), (800, 1333))
NAMES: dict[str, tuple[str, dict]] = {
    'softmax': ('softmax', {}),
    'softmax, unit query': ('softmax', dict(unit_query=True)),
    'linear': ('linear', {}),
    'hydra': ('hydra', {}),
    'efficient': ('efficient', {}),
    'angular': ('angular', {}),
    'enhanced': ('enhanced', {}),
    'focused': ('focused', {}),
    'inline': ('inline', {}),
    'rala': ('rala', {}),
    'mala': ('mala', {}),
    'mala, relu': ('mala', dict(kernel='relu')),
    'mala, exp': ('mala', dict(kernel='exp')),
    'mala, unit query': ('mala', dict(unit_query=True)),
    'mala, no beta': ('mala', dict(beta='none')),
    'mala, no gamma': ('mala', dict(gamma='none')),
    'mala, learned': ('mala', dict(beta='learned', gamma='learned')),
    'mala, paper form': ('mala', dict(form='paper')),
    'mala, paper form, no beta': ('mala', dict(form='paper', beta='none')),
    'mala, paper form, no gamma': ('mala', dict(form='paper', gamma='none')),
}
"""What is compared: the operator and its options, by the name in the table."""


class Data(NamedTuple):
    """Images (n, 3, SIDE, SIDE), float32 of mean 0 and deviation 1, and their classes (n, )."""

    images: Tensor
    labels: Tensor


def paint(split: str, number: int) -> tuple[Tensor, Tensor]:
    """Paint images of single objects, (n, 3, SIDE, SIDE) uint8, the classes in turn.

    Args:
        split (str): ``'train'`` or ``'val'``.
        number (int): How many.
    """
    config = SceneConfig(sides=(SIDE, SIDE))
    images = np.empty((number, SIDE, SIDE, 3), np.uint8)
    labels = np.arange(number) % len(THING_CLASSES)
    for i, label in enumerate(labels):
        portrait = make_portrait(config, 0, split, i, THING_CLASSES[label])
        images[i] = cv2.resize(portrait, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)


def images(out: Path, number: int) -> tuple[Data, Data]:
    """Return images to train on and 1024 others, painted once for each folder."""
    file = out / f'images_{number}.npz'
    if not file.is_file():
        out.mkdir(parents=True, exist_ok=True)
        painted = [x.numpy() for part in (('train', number), ('val', 1024)) for x in paint(*part)]
        np.savez(file, *painted)
    sets = []
    with np.load(file) as arrays:
        parts = [torch.from_numpy(arrays[f'arr_{i}']) for i in range(4)]
    for images, labels in (parts[:2], parts[2:]):
        pixels = images.float()
        sets.append(Data((pixels - pixels.mean()) / pixels.std(), labels))
    return tuple(sets)


def build(name: str, seed: int = 0) -> nn.Sequential:
    """Build the model of a row, initialised as in DeiT's recipe.

    Args:
        name (str): One of :data:`NAMES`.
        seed (int): Of the weights.
    """
    torch.manual_seed(seed)
    operator, options = NAMES[name]
    backbone = replace_attention('VisionTransformer', operator, options, **HOST)
    model = nn.Sequential(backbone, nn.Linear(backbone.embed_dims, len(THING_CLASSES)))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
    nn.init.trunc_normal_(backbone.pos_embed, std=0.02)
    return model


def logits(model: nn.Sequential, images: Tensor) -> Tensor:
    """Return the scores of the classes (n, 8)."""
    return model[1](model[0](images)[0])


def train(name: str, seed: int, epochs: int, data: Data, val: Data) -> dict:
    """Train and evaluate one model.

    Returns:
        dict: ``accuracy`` in percent, ``loss`` of the last epoch, and ``diverged``: the step at
        which the loss was no number any more, or None.
    """
    model = build(name, seed)
    order = torch.Generator().manual_seed(seed)
    batch = 32
    per_epoch = len(data.labels) // batch
    # Norms, biases and what is learned in place of beta and gamma have one axis, or none.
    decayed = [p for p in model.parameters() if p.dim() > 1]
    spared = [p for p in model.parameters() if p.dim() <= 1]
    groups = [dict(params=decayed, weight_decay=0.05), dict(params=spared, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 2e-3, total_steps=epochs * per_epoch, pct_start=0.1, cycle_momentum=False
    )
    step, losses = 0, []
    for _ in range(epochs):
        losses = []
        for index in torch.randperm(len(data.labels), generator=order).split(batch)[:per_epoch]:
            images = data.images[index]
            if torch.rand((), generator=order) < 0.5:
                images = images.flip(3)
            loss = F.cross_entropy(logits(model, images), data.labels[index])
            if not loss.isfinite():
                return dict(accuracy=None, loss=None, diverged=step)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            step += 1
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([logits(model, part).argmax(1) for part in val.images.split(256)])
    accuracy = 100 * (guesses == val.labels).float().mean().item()
    return dict(accuracy=accuracy, loss=statistics.fmean(losses), diverged=None)


def measure(names: Sequence[str], rounds: int) -> dict[str, dict]:
    """Measure one image at inference, all models in turn.

    Returns:
        dict[str, dict]: By name, ``ms`` (median) and ``mib`` (peak beyond image and weights), by
        size.
    """
    models = {name: build(name).eval() for name in names}
    measured: dict[str, dict] = {name: dict(ms={}, mib={}) for name in names}
    for size in SIZES:
        key = f'{size[0]}x{size[1]}'
        image = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
        times: dict[str, list[float]] = {name: [] for name in names}
        with torch.no_grad():
            for name, model in models.items():  # also the warm-up
                measured[name]['mib'][key] = _peak(model[0], image) / 2**20
            for _ in range(rounds):
                for name, model in models.items():
                    start = time.perf_counter()
                    model[0](image)
                    times[name].append(1e3 * (time.perf_counter() - start))
        for name in names:
            measured[name]['ms'][key] = statistics.median(times[name])
    return measured


def _peak(model: nn.Module, image: Tensor) -> int:
    """Bytes that PyTorch's allocator holds at most: the running sum of what it reports."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(image)
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == '[memory]':
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def render(results: dict) -> str:
    """Render the table in Markdown."""
    sizes = [f'{height}x{width}' for height, width in SIZES]
    header = ['mechanism', 'accuracy %', 'spread', 'seeds', 'loss', 'parameters']
    header += [f'ms at {size}' for size in sizes] + [f'MiB at {size}' for size in sizes]
    lines = [header, ['---', *['---:'] * (len(header) - 1)]]
    for name, row in results['rows'].items():
        accuracies = [run['accuracy'] for run in row.get('runs', ())]
        lost = [run['diverged'] for run in row.get('runs', ()) if run['accuracy'] is None]
        cells = ['', '', '', '']
        if lost:
            cells = ['diverged', f'in {len(lost)}, from step {min(lost)}', str(len(accuracies)), '']
        elif accuracies:
            spread = f'{max(accuracies) - min(accuracies):.1f}' if len(accuracies) > 1 else ''
            losses = statistics.fmean(run['loss'] for run in row['runs'])
            cells = [f'{statistics.fmean(accuracies):.1f}', spread, str(len(accuracies))]
            cells.append(f'{losses:.2f}')
        cells.append(f'{row["params"]:,}')
        for key, digits in (('ms', 1), ('mib', 0)):
            values = [row.get(key, {}).get(size) for size in sizes]
            cells += ['' if value is None else f'{value:.{digits}f}' for value in values]
        lines.append([name, *cells])
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def draw(results: dict, path: Path) -> None:
    """Draw accuracy with every seed as a dot, and time over pixels."""
    rows = results['rows']
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 0.3 * len(rows) + 2))
    for i, row in enumerate(rows.values()):
        accuracies = [run['accuracy'] for run in row.get('runs', ()) if run['accuracy'] is not None]
        if accuracies:
            left.barh(i, statistics.fmean(accuracies), color='#9fc3e6')
            left.plot(accuracies, [i] * len(accuracies), 'o', color='#1f5fa8', markersize=4)
    left.set_yticks(range(len(rows)), list(rows))
    left.invert_yaxis()
    left.set(xlabel='accuracy on unseen images, %; a dot is a seed', xlim=(0, 100))
    left.axvline(100 / len(THING_CLASSES), color='grey', linestyle=':')
    right.set_prop_cycle(color=plt.get_cmap('tab20').colors)
    for name, row in rows.items():
        if 'ms' in row and ('mala' not in name or name == 'mala'):
            pixels = [height * width for height, width in SIZES]
            right.loglog(pixels, list(row['ms'].values()), marker='o', label=name)
    right.set(xlabel='pixels', ylabel='ms per image')
    if right.has_data():
        right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(results: dict, out: Path) -> str:
    """Write the three files, and return the page."""
    out.mkdir(parents=True, exist_ok=True)
    (out / 'compare_attention.json').write_text(json.dumps(results, indent=1) + '\n')
    draw(results, out / 'compare_attention.png')
    notes = '\n'.join(f'- {text}' for text in results['how'].values())
    page = (
        '# Attention mechanisms in one small vision transformer\n\n'
        f'{notes}\n\n{render(results)}\n\n![Accuracy and time](compare_attention.png)\n'
    )
    (out / 'compare_attention.md').write_text(page)
    return page


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument('--names', nargs='+', default=list(NAMES), metavar='NAME')
    parser.add_argument('--seeds', type=int, default=3, help='trainings of each (default: 3)')
    parser.add_argument('--epochs', type=int, default=3, help='passes over the images (default: 3)')
    parser.add_argument(
        '--images', type=int, default=4096, help='images to train on (default: 4096)'
    )
    parser.add_argument('--rounds', type=int, default=3, help='timings of each (default: 3)')
    parser.add_argument('--only', choices=['accuracy', 'time'], help='leave the other out')
    parser.add_argument('--out', type=Path, default=Path('compare_out'), metavar='DIR')
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in NAMES:
            raise UserError(f'--names must be some of {list(NAMES)}, got {name!r}')
    for option, least in (('seeds', 1), ('epochs', 1), ('images', 64), ('rounds', 1)):
        if getattr(args, option) < least:
            raise UserError(f'--{option} must be {least} or more, got {getattr(args, option)}')
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Compare from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If an option is wrong.
    """
    args = parse_args(argv)
    file = args.out / 'compare_attention.json'
    results = json.loads(file.read_text()) if file.is_file() else dict(how={}, rows={})
    rows = {name: results['rows'].get(name, {}) for name in NAMES}
    for name in args.names:
        rows[name]['params'] = sum(p.numel() for p in build(name).parameters())
    results['rows'] = rows = {name: row for name, row in rows.items() if row}
    budget = dict(epochs=args.epochs, images=args.images)
    if results.setdefault('budget', budget) != budget and args.only != 'time':
        raise UserError(
            f'{file} holds trainings with {results["budget"]}, these would have {budget}; give '
            'another --out, or the same --epochs and --images'
        )
    command = shlex.join(['python', 'tools/compare_attention.py', *(argv or sys.argv[1:])])
    machine = f'{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}'
    if args.only != 'time':
        data, val = images(args.out, args.images)
        results['how']['accuracy'] = (
            f'Accuracy on {len(val.labels)} unseen images of {len(THING_CLASSES)} classes, mean '
            f'and range over seeds, after {args.epochs} epochs of {len(data.labels)} '
            f'images of {SIDE}x{SIDE}; chance is {100 / len(THING_CLASSES)} %. `{command}`'
        )
        for seed in range(args.seeds):  # a table of all rows is there after the first
            for name in args.names:
                if seed < len(rows[name].setdefault('runs', [])):
                    continue
                rows[name]['runs'].append(run := train(name, seed, args.epochs, data, val))
                print(f'seed {seed}, {name}: {run}', flush=True)
                write(results, args.out)
    if args.only != 'accuracy':
        results['how']['time'] = (
            f'Median of {args.rounds} timings of one image at inference, all in turn, and peak '
            f'memory beyond image and weights; {machine}. `{command}`'
        )
        for name, row in measure(args.names, args.rounds).items():
            rows[name].update(row)
    print(write(results, args.out))
