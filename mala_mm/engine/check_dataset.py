"""Lists what is wrong with a data set.

    python tools/check_dataset.py annotations/instances_train2017.json --images train2017
    python tools/check_dataset.py configs/det/mavit/mask-rcnn_mavit-t_fpn_amp-1x_coco.py

With a config, the data sets of its training, validation and test loaders are checked, every label
map is read, and class counts are compared with the model's heads. Exits with 1 on findings.

Training turns an image by its EXIF orientation as it reads it, so that boxes, outlines, width and
height have to be those of the turned image.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from mmengine.config import Config

from mala_mm.data.checks import check_dataset, check_num_classes, coco_files, validate_coco
from mala_mm.errors import UserError

from .arguments import add_config_options, make_parser
from .config import load_config, set_data_root


def main(argv: Sequence[str] | None = None) -> None:
    """Check one data set from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If an argument is wrong, or something was found.
    """
    parser = make_parser(__doc__)
    parser.add_argument('source', help='a COCO annotation file (.json) or a config (.py)')
    parser.add_argument('--images', help='folder of the images of an annotation file')
    parser.add_argument('--most', type=int, default=20, help='findings to print per file')
    add_config_options(parser)
    args = parser.parse_args(argv)
    if args.source.endswith('.json'):
        total = report(args.source, args.images, args.most)
    else:
        cfg = load_config(args.source, args.cfg_options)
        if args.data_root:
            set_data_root(cfg, args.data_root)
        total = check_config(cfg, args.most)
    if total:
        raise UserError(f'{total} findings in {args.source}; fix what is named above')


def report(ann_file: str, images: str | None, most: int) -> int:
    """Print the findings of one annotation file and return their number."""
    findings = validate_coco(ann_file, images)
    for finding in findings[:most]:
        print(f'  {finding}')
    if len(findings) > most:
        print(f'  ... {len(findings) - most} more')
    kinds = Counter(finding.kind for finding in findings)
    summary = ', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))
    print(f'{ann_file}: {summary or "no findings"}')
    return len(findings)


def check_config(cfg: Config, most: int) -> int:
    """Check every data loader of a config and return the number of findings."""
    scope, total, seen = cfg.get('default_scope'), 0, []
    for split in ('train', 'val', 'test'):
        loader = cfg.get(f'{split}_dataloader')
        if not loader or loader.dataset in seen:
            continue
        seen.append(loader.dataset)
        try:
            check_dataset(loader.dataset, scope, limit=None)
            if cfg.get('model'):
                check_num_classes(cfg.model, loader.dataset, scope)
        except UserError as error:
            print(f'{split}: {error}')
            total += 1
        else:
            print(f'{split}: paths and classes are right')
        for ann_file, images in coco_files(loader.dataset, scope):
            if os.path.isfile(ann_file) and os.path.isdir(images):
                total += report(ann_file, images, most)
    return total
