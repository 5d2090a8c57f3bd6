r"""Measures how attention scores are distributed, and what becomes of them as queries grow.

python tools/score_distribution.py CONFIG mala.pth softmax.pth --images photos/
python tools/score_distribution.py CONFIG --images photo.jpg --operators mala linear softmax

Means over images, queries and blocks. A row of scores has N numbers s_j; shares are of their
absolute mass, p_j = |s_j| / sum |s|. "entropy" is -sum p log p / log N (1: flat), "peak" N times
the largest p (1: flat), "row sum" the sum of all s_j, "negative" the share of the scores below 0,
"mass" their share of the mass, "least" N times the lowest score of all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from mala_mm.engine.arguments import make_parser
from mala_mm.errors import UserError
from mala_mm.files import write_bytes

from .arguments import (
    add_image_options,
    add_layer_options,
    add_model_options,
    check_out,
    load_models,
)
from .drawing import markdown_table, plot_lines
from .inside import AttentionLayer, find_images, read_image, record
from .scores import (
    FACTORS,
    LENGTHS,
    Distribution,
    check_operators,
    distributions,
    lengthen,
    mean_distribution,
    score_rows,
    spread_rows,
)

HEAD = (
    *('model', 'operator', 'rotary', 'stage', 'a', 'entropy', 'peak', 'row sum'),
    *('negative', 'mass', 'least'),
)
CURVE = 64  # points of a curve of sorted scores


@dataclass
class Measured:
    """The distribution of one head's scores in one layer, at one length of the queries.

    Attributes:
        model (str): Name of the checkpoint.
        operator (str): Name of the operator.
        rotary (bool): Whether queries and keys were turned.
        stage (int): From 1.
        block (int): From 1.
        head (int): From 1.
        factor (float): By how much the queries were lengthened.
        distribution (Distribution): Mean over images and queries.
        curve (list[float]): Scores times N in falling order, at even steps, mean likewise.
    """

    model: str
    operator: str
    rotary: bool
    stage: int
    block: int
    head: int
    factor: float
    distribution: Distribution
    curve: list[float]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If an image, the config, a checkpoint or an option is wrong.
    """
    parser = make_parser(__doc__)
    add_model_options(parser)
    add_image_options(parser)
    add_layer_options(parser)
    parser.add_argument(
        '--factors',
        type=float,
        nargs='+',
        default=FACTORS,
        metavar='A',
        help='by how much queries are lengthened (default: 1 2 4 8)',
    )
    parser.add_argument(
        '--length',
        choices=LENGTHS,
        default='q',
        help='whose length: that of q, or of phi(q) as in the proofs (default: q)',
    )
    parser.add_argument(
        '--queries', type=int, default=32, help='queries per image, evenly spread (default: 32)'
    )
    parser.add_argument('--out', default='scores.png', help='PNG or JPEG; a JSON lies beside it')
    args = parser.parse_args(argv)
    check_out(args.out)
    check_operators(args.operators or ())
    if args.queries < 1 or min(args.factors) <= 0:
        raise UserError(
            f'--queries and --factors must be positive, got {args.queries} and {args.factors}'
        )
    images = find_images(args.images)[: args.limit]
    measured: list[Measured] = []
    for name, model in load_models(args):
        found: dict[tuple, list[tuple[Distribution, np.ndarray]]] = {}
        for path in images:
            seen = record(model, read_image(path, args.size)[0], predict=False)
            for layer in seen.choose(args.stage, args.block):
                for operator in args.operators or (layer.operator.name,):
                    for rotary in (True, False):
                        _measure(layer, operator, rotary, args, found)
        for key, parts in found.items():
            distribution = mean_distribution([d for d, _ in parts])
            curve = np.mean([c for _, c in parts], 0).tolist()
            measured.append(Measured(name, *key, distribution, curve))
    show(measured)
    plot(measured, args.out)
    content = json.dumps([asdict(m) for m in measured], indent=1)
    write_bytes(Path(args.out).with_suffix('.json'), content.encode())
    print(f'{args.out}: scores in falling order; {Path(args.out).with_suffix(".json")}: every head')


@torch.no_grad()
def _measure(layer: AttentionLayer, operator: str, rotary: bool, args, found: dict) -> None:
    other = layer.with_operator(operator, rotary=rotary)
    rows = spread_rows(layer.q.shape[2], args.queries)
    for factor in args.factors:
        q = lengthen(layer.q, rows, factor, args.length)
        scores = score_rows(layer, rows, other, q)
        falling = scores.sort(-1, descending=True).values.mean(1) * scores.shape[-1]
        picked = falling[:, torch.linspace(0, scores.shape[-1] - 1, CURVE).round().long()]
        for head, distribution in enumerate(distributions(scores)):
            key = (operator, rotary, layer.stage, layer.block, head + 1, factor)
            found.setdefault(key, []).append((distribution, picked[head].numpy()))


def show(measured: Sequence[Measured]) -> None:
    """Print one line per model, operator, rotation, stage and factor."""
    groups: dict[tuple, list[Distribution]] = {}
    for m in measured:
        key = (m.model, m.operator, not m.rotary, m.stage, m.factor)
        groups.setdefault(key, []).append(m.distribution)
    order = list(dict.fromkeys((m.model, m.operator) for m in measured))
    rows: list[Sequence[str]] = [HEAD]
    for key in sorted(groups, key=lambda key: (order.index(key[:2]), *key[2:])):
        model, operator, unturned, stage, factor = key
        d = mean_distribution(groups[key])
        rows.append(
            [
                *(model, operator, 'no' if unturned else 'yes', str(stage), f'{factor:g}'),
                *(f'{d.entropy:.3f}', f'{d.peak:.3g}', f'{d.total:.3g}'),
                *(f'{d.negative_share:.1%}', f'{d.negative_mass:.1%}', f'{d.lowest:.3g}'),
            ]
        )
    print(markdown_table(rows, text_columns=3))


def plot(measured: Sequence[Measured], path: str) -> None:
    """Plot the sorted scores of the first stage and the last: a curve per length of the query."""
    stages = sorted({m.stage for m in measured})
    several = len({m.model for m in measured}) > 1
    panels = []
    for stage in sorted({stages[0], stages[-1]}):
        for key in dict.fromkeys((m.model, m.operator, m.rotary) for m in measured):
            curves = {}
            for factor in dict.fromkeys(m.factor for m in measured):
                parts = [
                    m.curve
                    for m in measured
                    if (m.model, m.operator, m.rotary, m.stage, m.factor) == (*key, stage, factor)
                ]
                if parts:
                    y = np.mean(parts, 0)
                    curves[f'a = {factor:g}'] = (np.linspace(0, 100, len(y)), y)
            if curves:
                model, operator, rotary = key
                title = ', '.join(
                    part
                    for part in (
                        operator,
                        '' if rotary else 'no rotation',
                        f'stage {stage}',
                        model if several and model != operator else '',
                    )
                    if part
                )
                panels.append((title, curves))
    columns = len(panels) // len({stages[0], stages[-1]})
    plot_lines(
        panels, path, 'keys in falling order, %', 'score times N', min(columns, 4), zero=True
    )
