"""Writes generated scenes in COCO, ADE20K and ImageNet layout.

python tools/make_demo_data.py --out data/demo --train 200 --val 40 --size 256
python tools/make_demo_data.py --out data/easy --scene-options objects=1,3 overlap=0 crowd=0
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress

from mala_mm.engine.arguments import make_parser
from mala_mm.errors import UserError

from .scenes import SceneConfig
from .writers import LAYOUTS, write_demo_data


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument(
        '--out', required=True, help='folder to make, with one sub-folder per layout'
    )
    parser.add_argument('--layout', nargs='+', choices=LAYOUTS, default=['coco', 'ade'])
    parser.add_argument('--train', type=int, default=64, help='number of training images')
    parser.add_argument('--val', type=int, default=16, help='number of validation images')
    parser.add_argument(
        '--size',
        type=int,
        nargs='+',
        metavar='PIXELS',
        help='side of every image, or the range of the sides (default: 224 384)',
    )
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--overwrite', action='store_true', help='replace an earlier output')
    parser.add_argument(
        '--scene-options',
        nargs='+',
        default=[],
        metavar='KEY=VALUE',
        help='fields of mala_mm.demo.scenes.SceneConfig, such as objects=1,3 or '
        'thing_classes=ball,car,star',
    )
    return parser.parse_args(argv)


def scene_config(args: argparse.Namespace) -> SceneConfig:
    """Read ``--size`` and ``--scene-options``."""
    defaults = SceneConfig()
    known = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    options = {}
    if args.size:
        if len(args.size) > 2:
            raise UserError(f'--size takes one or two numbers, got {args.size}; try --size 256')
        options['sides'] = (args.size[0], args.size[-1])
    for text in args.scene_options:
        key, _, value = text.partition('=')
        if key not in known:
            raise UserError(f'Scene option {text!r} is unknown; known are {", ".join(known)}')
        default = known[key]
        try:
            if isinstance(default, tuple):
                options[key] = tuple(type(default[0])(part) for part in value.split(','))
            else:
                options[key] = type(default)(value)
        except ValueError:
            raise UserError(f'Scene option {text!r} must look like {key}={default}') from None
    return SceneConfig(**options)


def main(argv: Sequence[str] | None = None) -> None:
    """Write a data set from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If an option is wrong, or the output is in the way.
    """
    args = parse_args(argv)
    config = scene_config(args)
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task('images', total=None)
        out = write_demo_data(
            args.out,
            layouts=args.layout,
            counts=dict(train=args.train, val=args.val),
            config=config,
            seed=args.seed,
            overwrite=args.overwrite,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    for layout in args.layout:
        print(f'{out / layout}: {args.train} training and {args.val} validation images')
