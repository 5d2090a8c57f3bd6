"""Write a config that trains on your own images, and print the commands to use it.

    python tools/new_dataset.py --coco annotations.json --images photos --recipe mask-rcnn_mavit-t
    python tools/new_dataset.py --ade scenes --classes road wall sky --recipe fpn_mavit-t
    python tools/new_dataset.py --imagenet flowers --recipe mavit-t --size 128

The data are checked first. Without images to validate on, some are held out, the same for the same
--seed and with a share of each class. docs/own_data.md tells more.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from mala_mm.checkpoint import enforce_safe_loading
from mala_mm.errors import UserError
from mala_mm.files import remove_parts, replacing_folder

from .. import arguments
from ..config import load_config
from ..validation import check_values
from .fitting import fit_schedule
from .recipes import TASKS, find_recipe
from .sources import Source, read_classification, read_detection, read_segmentation
from .writing import write_config


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = arguments.make_parser(__doc__)
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument('--coco', metavar='JSON', help='detection: an annotation file of COCO format')
    data.add_argument(
        '--ade',
        metavar='DIR',
        help='segmentation: a folder with images/ and annotations/ (label maps as PNG), each with '
        'training/ and validation/ below or without',
    )
    data.add_argument(
        '--imagenet',
        metavar='DIR',
        help='classification: a folder with one folder of images per class, or with such in '
        'train/ and val/',
    )
    parser.add_argument('--images', metavar='DIR', help='folder of the images of --coco')
    parser.add_argument('--val', metavar='JSON', help='annotation file of held-out images')
    parser.add_argument('--val-images', metavar='DIR', help='their folder, if not --images')
    parser.add_argument(
        '--val-split',
        type=float,
        default=0.2,
        metavar='SHARE',
        help='share, or number, of images to hold out where the data are not split (default: 0.2)',
    )
    parser.add_argument('--seed', type=int, default=0, help='of the split (default: 0)')
    parser.add_argument(
        '--classes', nargs='+', metavar='NAME', help='of --ade, in the order of their labels'
    )
    parser.add_argument(
        '--reduce-zero-label',
        action=argparse.BooleanOptionalAction,
        help='of --ade: whether 0 means no class (default: as the label maps suggest)',
    )
    parser.add_argument(
        '--recipe', required=True, help='a recipe of configs/, or the beginning of its name'
    )
    parser.add_argument(
        '--size',
        type=int,
        metavar='PIXELS',
        help='longer side of images in detection (default: 1333 x 800 as in COCO), side of crops '
        'in segmentation (512) and classification (224); try 320 or less without a GPU',
    )
    parser.add_argument('--batch-size', type=int, help='images in a batch, per process')
    parser.add_argument('--epochs', type=float, help='how often each image is seen')
    parser.add_argument(
        '--init', metavar='FILE', help='classifier or backbone to start from; strongly advised'
    )
    parser.add_argument(
        '--out', metavar='DIR', help='folder to make (default: named after the data)'
    )
    parser.add_argument('--force', action='store_true', help='replace an earlier output')
    args = parser.parse_args(argv)
    for name in ('size', 'batch_size', 'epochs', 'val_split'):
        value = getattr(args, name)
        if value is not None and not value > 0:
            parser.error(f'--{name.replace("_", "-")} must be above 0, got {value}')
    if args.coco and not args.images:
        parser.error('--coco needs --images, the folder of its images')
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Write a config from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If the data have faults, or an option is wrong; nothing is written then.
    """
    args = parse_args(argv)
    enforce_safe_loading()
    task = next(t for t, given in zip(TASKS, (args.coco, args.ade, args.imagenet)) if given)
    recipe = find_recipe(args.recipe, task)
    arguments.check_checkpoint(args.init)
    out = Path(args.out or _name(args)).expanduser()
    if out.exists():
        ours = (out / f'{out.name}.py').is_file()
        if not (args.force and ours):
            replace = ', or replace it with --force' if ours else ''
            raise UserError(f'{out} exists already; name another folder with --out{replace}')
    source = _read(args)
    base = load_config(recipe.base)
    schedule = fit_schedule(
        task,
        source.train.count,
        base.optim_wrapper.optimizer.lr,
        (base.get('auto_scale_lr') or {}).get('base_batch_size', 16),
        args.batch_size,
        args.epochs,
    )
    init = None if args.init is None else _absolute(args.init)
    given = 'tools/new_dataset.py ' + shlex.join(argv) if argv is not None else _command_line()
    text = write_config(source, recipe, base, schedule, args.size, init, given)
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_parts(out.parent, out.name)
    with replacing_folder(out) as folder:
        for name, content in source.files.items():
            (folder / name).write_text(content, encoding='utf-8')
        (folder / f'{out.name}.py').write_text(text, encoding='utf-8')
        cfg = load_config(folder / f'{out.name}.py')
        check_values(cfg)
        arguments.check_data(cfg, 'train', 'val')
    _report(source, recipe.name, out, schedule.max_iters)


def _name(args: argparse.Namespace) -> str:
    return Path(args.images or args.ade or args.imagenet).resolve().name


def _absolute(path: str) -> str:
    return path if '://' in path or not os.path.isfile(path) else os.path.abspath(path)


def _command_line() -> str:
    import sys

    return 'tools/new_dataset.py ' + shlex.join(sys.argv[1:])


def _read(args: argparse.Namespace) -> Source:
    if args.coco:
        return read_detection(
            args.coco, args.images, args.val, args.val_images, args.val_split, args.seed
        )
    if args.ade:
        return read_segmentation(
            args.ade, args.classes, args.reduce_zero_label, args.val_split, args.seed
        )
    return read_classification(args.imagenet, args.val_split, args.seed)


def _report(source: Source, recipe: str, out: Path, max_iters: int) -> None:
    config = out / f'{out.name}.py'
    work_dir = Path('work_dirs') / out.name
    checkpoint = work_dir / f'iter_{max_iters}.pth'
    images = Path(source.val.root)
    print(
        f'{config}: {recipe} for {len(source.classes)} classes, {source.train.count} images to '
        f'train on and {source.val.count} held out\n\n'
        f'train:    python tools/train.py {config}\n'
        f'test:     python tools/test.py {config} {checkpoint} --show-dir {work_dir / "images"}\n'
        f'predict:  python tools/image_demo.py {config} {checkpoint} {images}'
    )
