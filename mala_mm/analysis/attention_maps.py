r"""Draws the attention scores of one query over the image, mechanisms side by side.

The same image through several checkpoints, each with the operators that it was trained with:

python tools/attention_maps.py photo.jpg CONFIG mala.pth softmax.pth --point 320 200

The queries and keys of one checkpoint through several operators:

python tools/attention_maps.py photo.jpg CONFIG mala.pth --operators mala rala linear softmax
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mala_mm.engine.arguments import make_parser

from .arguments import add_layer_options, add_model_options, check_out, load_models
from .drawing import Panel, colour, overlay, save_panels
from .inside import AttentionLayer, Recording, read_image, record
from .scores import check_operators, score_rows


def main(argv: Sequence[str] | None = None) -> None:
    """Draw from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If the image, the config, a checkpoint or a place in the model is wrong.
    """
    parser = make_parser(__doc__)
    parser.add_argument('image', help='an image file')
    add_model_options(parser)
    parser.add_argument(
        '--point',
        type=int,
        nargs=2,
        metavar=('X', 'Y'),
        help='pixel of the query in the image file (default: its centre)',
    )
    add_layer_options(parser, block=-1)
    parser.add_argument('--head', type=int, help='head, from 1 (default: the mean of all)')
    parser.add_argument('--out', default='attention_maps.png', help='PNG or JPEG file to write')
    args = parser.parse_args(argv)
    check_out(args.out)
    check_operators(args.operators or ())
    image, point = read_image(args.image, args.size, args.point)
    columns = []
    for name, model in load_models(args):
        seen = record(model, image, predict=False)
        layers = seen.choose(args.stage, args.block)
        for operator in args.operators or (None,):
            columns.append(
                [draw_row(seen, layer, point, args.head, operator, name) for layer in layers]
            )
    rows = list(zip(*columns))
    labels = [f'stage {layer.stage}, block {layer.block}' for layer in layers]
    rows = [[Panel(image, 'query', point=point), *row] for row in rows]
    save_panels(rows, labels, args.out)
    print(f'{args.out}: scores times N over the image, N tokens; 1 is an even share')


def mean_row(
    layer: AttentionLayer, token: int, head: int | None, operator: str | None = None
) -> np.ndarray:
    """Return the scores (N, ) of one query, of one head (from 1) or the mean of all."""
    layer.check_head(head)
    other = None if operator is None else layer.with_operator(operator)
    scores = score_rows(layer, [token], other)[:, 0]
    return (scores.mean(0) if head is None else scores[head - 1]).numpy()


def draw_row(
    seen: Recording,
    layer: AttentionLayer,
    point: tuple[int, int],
    head: int | None = None,
    operator: str | None = None,
    name: str = '',
) -> Panel:
    """Draw the scores of the query under a pixel.

    Args:
        seen (Recording): Image and model.
        layer (AttentionLayer): One of its layers.
        point (tuple[int, int]): The pixel (x, y).
        head (int, optional): From 1; the mean of all heads by default.
        operator (str, optional): Another operator on the layer's queries and keys.
        name (str): Name of the model, for the title.

    Returns:
        Panel: Blue and red around 0 if a score is negative, black to yellow otherwise; below, the
        range of the scores times N.
    """
    token = seen.token_at(layer, point)
    row = mean_row(layer, token, head, operator) * layer.q.shape[2]
    signed = bool((row < 0).any())
    coloured = colour(seen.spread(layer, row), signed)
    shown = operator or layer.operator.name
    title = shown if name in ('', shown) else f'{shown} ({name})'
    note = f'{row.min():.2g} to {row.max():.3g}'
    if signed:
        note += f', {(row < 0).mean():.1%} negative'
    return Panel(overlay(seen.image, coloured), title, note, point)
