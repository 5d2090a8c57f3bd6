r"""Counts parameters and multiply-adds of a classifier, detector, segmentor or backbone.

python tools/get_flops.py configs/det/mavit/mask-rcnn_mavit-s_fpn_amp-1x_coco.py --shape 800 1280
python tools/get_flops.py configs/_base_/backbones/mavit-s.py --shape 224
python tools/get_flops.py CONFIG --shape 512 2048 --cfg-options \
    model.backbone.attn_types="[mala,mala,mala,mala]"
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mala_mm.engine.arguments import add_config_options, make_parser
from mala_mm.engine.config import load_config

from .complexity import Complexity, build_on_meta, count_complexity

NOTE = (
    'One multiply-add counts once. "layers": convolutions and linear layers alone, as the papers '
    'count. "total": with the attention operators of the config. "all linear": with linear '
    'attention in every stage. Norms, activations, biases and resizing are not counted.'
)


def main(argv: Sequence[str] | None = None) -> None:
    """Count a model from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If the config, an option or the shape is wrong.
    """
    parser = make_parser(__doc__)
    parser.add_argument('config', help='config with a model, or a backbone fragment')
    parser.add_argument(
        '--shape',
        type=int,
        nargs='+',
        required=True,
        metavar='PIXELS',
        help='height and width of the image, or one number for both',
    )
    add_config_options(parser, data_root=False)
    args = parser.parse_args(argv)
    if len(args.shape) > 2:
        parser.error(f'--shape takes a height and a width, or one number, got {args.shape}')
    cfg = load_config(args.config, args.cfg_options)
    complexity = count_complexity(build_on_meta(cfg), (args.shape[0], args.shape[-1]))
    height, width = complexity.shape
    title = f'{Path(args.config).stem} at {height}x{width}'
    if complexity.attn_types:
        title += f', attention {", ".join(complexity.attn_types)}'
    show(complexity, title)


def show(complexity: Complexity, title: str) -> None:
    """Print the counts as a table."""
    table = Table()
    table.add_column('part')
    for column in ('params (M)', 'layers (G)', 'total (G)', 'all linear (G)'):
        table.add_column(column, justify='right')
    for part in (*complexity.parts, complexity.total):
        if part.name == 'total':
            table.add_section()
        macs = (part.layers, part.macs, part.macs_linear)
        table.add_row(part.name, f'{part.params / 1e6:.3f}', *(f'{x / 1e9:.2f}' for x in macs))
    console = Console(highlight=False)
    console.print(title, table, NOTE, sep='\n')
