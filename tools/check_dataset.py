#!/usr/bin/env python
"""Lists what is wrong with a data set.

    python tools/check_dataset.py annotations/instances_train2017.json --images train2017
    python tools/check_dataset.py configs/det/mavit/mask-rcnn_mavit-t_fpn_1x_coco.py

With a config, the data sets of its training, validation and test loaders are checked, every label
map is read, and class counts are compared with the model's heads. Exits with 1 on findings.
"""

import argparse
import os
import sys
from collections import Counter

from mmengine.config import Config, DictAction

from mala_mm.data.checks import check_dataset, check_num_classes, coco_files, validate_coco
from mala_mm.engine.errors import UserError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('source', help='a COCO annotation file (.json) or a config (.py)')
    parser.add_argument('--images', help='folder of the images of an annotation file')
    parser.add_argument('--most', type=int, default=20, help='findings to print per file')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='changes of a config')
    return parser.parse_args(argv)


def report(ann_file: str, images: str | None, most: int) -> int:
    """Prints the findings of one annotation file and returns their number."""
    findings = validate_coco(ann_file, images)
    for finding in findings[:most]:
        print(f'  {finding}')
    if len(findings) > most:
        print(f'  ... {len(findings) - most} more')
    kinds = Counter(finding.kind for finding in findings)
    summary = ', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))
    print(f'{ann_file}: {summary or "no findings"}')
    return len(findings)


def check_config(args: argparse.Namespace) -> int:
    """Checks every data loader of a config and returns the number of findings."""
    if not os.path.isfile(args.source):
        raise UserError(f'The config {args.source} does not exist; correct the path.')
    cfg = Config.fromfile(args.source)
    cfg.merge_from_dict(args.cfg_options or {})
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
            continue
        print(f'{split}: paths and classes are right')
        for ann_file, images in coco_files(loader.dataset, scope):
            total += report(ann_file, images, args.most)
    return total


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.source.endswith('.py'):
            return int(check_config(args) > 0)
        return int(report(args.source, args.images, args.most) > 0)
    except UserError as error:
        print(f'check_dataset: {error}', file=sys.stderr)
        return 1


if __name__ == '__main__':
    sys.exit(main())
