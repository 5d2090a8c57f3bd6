"""Train on a handful of real images until they are overfitted.

A model that cannot learn eight images has a bug. ``det`` trains Mask R-CNN with MAViT-tiny on
eight COCO images (box AP50 > 0.9 on these eight), ``seg`` trains UperNet with MAViT-tiny on four
ADE20K scenes (pixel accuracy > 0.95 and mIoU over the classes present > 0.6). Everything starts
from random weights, with the configs in configs/overfit.

    python tools/overfit_check.py det --data-root data/coco
    python tools/overfit_check.py seg --data-root data/ade/ADEChallengeData2016
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from mala_mm.errors import UserError
from mala_mm.paths import ROOT

from .arguments import make_parser
from .config import load_config, set_data_root
from .runner import Runner

CONFIGS = dict(det='mask-rcnn_mavit-t_fpn_coco.py', seg='upernet_mavit-t_ade20k.py')
# The metrics' keys, what they are and what they have to exceed. mmseg's mean leaves out classes
# that are neither labelled nor predicted.
BARS = dict(
    det={'coco/bbox_mAP_50': ('box AP50', 0.9)},
    seg={'aAcc': ('pixel accuracy in %', 95), 'mIoU': ('mIoU over the classes present in %', 60)},
)
NUM_IMAGES = dict(det=8, seg=4)
MIN_OBJECT_SIDE = 20  # pixels of the resized image


def main(argv: Sequence[str] | None = None) -> None:
    """Overfit from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If the data are missing, or the images were not learned.
    """
    parser = make_parser(__doc__)
    parser.add_argument('task', choices=tuple(CONFIGS))
    parser.add_argument('--data-root', required=True, help='COCO or ADE20K in its official layout')
    parser.add_argument('--work-dir', help='default: work_dirs/overfit_{det,seg}')
    parser.add_argument('--iters', type=int, help="in place of the config's 300")
    parser.add_argument('--lr', type=float, help="in place of the config's (det 2e-4, seg 5e-4)")
    args = parser.parse_args(argv)
    data_root = Path(args.data_root).resolve()
    if not data_root.is_dir():
        raise UserError(f'There is no data at {data_root}; name the folder with --data-root')
    options = {} if args.lr is None else {'optim_wrapper.optimizer.lr': args.lr}
    if args.iters is not None:
        options['train_cfg.max_iters'] = options['default_hooks.checkpoint.interval'] = args.iters
        options['param_scheduler.1.milestones'] = [args.iters * 17 // 20]
    cfg = load_config(ROOT / 'configs/overfit' / CONFIGS[args.task], options)
    set_data_root(cfg, data_root)
    cfg.work_dir = args.work_dir or f'work_dirs/overfit_{args.task}'
    folder = Path(cfg.work_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if args.task == 'det':
        size = max(cfg.train_pipeline[2].scale)
        images = cfg.test_evaluator.ann_file = select_coco(data_root, folder, size)
    else:
        images = select_ade(data_root, folder)
    for loader in (cfg.train_dataloader, cfg.test_dataloader):
        loader.dataset.ann_file = images

    runner = Runner.from_cfg(cfg)
    runner.train()
    judge(args.task, runner.test())


def select_coco(data_root: Path, folder: Path, size: int) -> str:
    """Write the annotations of the first training images whose objects are all large enough.

    At least two objects each, no crowds, every object :data:`MIN_OBJECT_SIDE` pixels wide (root of
    its area) once the image's longer side is ``size``.

    Args:
        data_root (Path): COCO in its official layout.
        folder (Path): Where the annotation file goes.
        size (int): Pixels.

    Returns:
        str: The annotation file.

    Raises:
        UserError: If there are too few such images.
    """
    coco = json.loads((data_root / 'annotations/instances_train2017.json').read_text())
    objects = defaultdict(list)
    for annotation in coco['annotations']:
        objects[annotation['image_id']].append(annotation)

    def suits(image: dict) -> bool:
        least_area = (MIN_OBJECT_SIDE * max(image['width'], image['height']) / size) ** 2
        found = objects[image['id']]
        return len(found) >= 2 and all(not a['iscrowd'] and a['area'] >= least_area for a in found)

    coco['images'] = _first([i for i in coco['images'] if suits(i)], 'det', data_root)
    coco['annotations'] = [a for image in coco['images'] for a in objects[image['id']]]
    path = folder / 'instances.json'
    path.write_text(json.dumps(coco))
    return str(path)


def select_ade(data_root: Path, folder: Path) -> str:
    """Write the list of the training scenes with the fewest classes, and return its path."""
    paths = sorted((data_root / 'annotations/training').glob('*.png'))
    count = {p: len(np.setdiff1d(cv2.imread(str(p), cv2.IMREAD_UNCHANGED), [0])) for p in paths}
    chosen = _first(sorted(paths, key=count.__getitem__), 'seg', data_root)
    path = folder / 'scenes.txt'
    path.write_text(''.join(f'{p.stem}\n' for p in chosen))
    return str(path)


def _first(images: list, task: str, data_root: Path) -> list:
    if len(images) < NUM_IMAGES[task]:
        raise UserError(
            f'{data_root} has only {len(images)} suitable training images, {NUM_IMAGES[task]} are '
            'needed; name a whole data set with --data-root'
        )
    return images[: NUM_IMAGES[task]]


def judge(task: str, metrics: dict[str, float]) -> None:
    """Print the figures.

    Args:
        task (str): ``'det'`` or ``'seg'``.
        metrics (dict[str, float]): What the metric found, on the images of the training.

    Raises:
        UserError: If one of them is too low.
    """
    missed = []
    for key, (name, bar) in BARS[task].items():
        value = metrics.get(key, 0.0)  # mmdet leaves it out where nothing was detected
        print(f'{name}: {value:.3f} (to pass: more than {bar})')
        if not value > bar:
            missed.append(f'{name} is {value:.3f} and not above {bar}')
    if missed:
        raise UserError(
            f'The images were not learned, {", ".join(missed)}; look at the log of the run'
        )
