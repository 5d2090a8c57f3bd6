"""Train, evaluate and show a detector and a segmentor on generated images.

Every step is a command that can be run by hand; it is printed before it starts. A step whose
output stands already is not repeated: delete the output folder to start again.

    python tools/demo.py --out demo_out
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path

import mmcv
import numpy as np
from mmengine.config import Config
from mmengine.structures import InstanceData
from pycocotools.coco import COCO
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from mala_mm.checkpoint import safe_loading
from mala_mm.engine.arguments import make_parser
from mala_mm.errors import UserError
from mala_mm.paths import ROOT

from .classes import THING_CLASSES, THING_PALETTE
from .drawing import draw_instances, draw_labels, plot_training, save_sheet

CLS_CONFIG = 'configs/demo/mavit-t_scenes.py'
SEG_CONFIG = 'configs/demo/upernet_mavit-t_scenes.py'
DET_CONFIG = 'configs/demo/mask-rcnn_mavit-t_fpn_scenes.py'
CLASSES = 'thing_classes=ball,car,house,star,tree'
SCENES = [
    *('--layout', 'coco', 'ade', '--train', '600', '--val', '60', '--size', '112', '144'),
    *('--scene-options', CLASSES, 'objects=1,3', 'object_size=0.25,0.65'),
    *('crowd=0.04', 'empty=0.04', 'overlap=0.4'),
]
OBJECTS = [
    *('--layout', 'imagenet', '--train', '2000', '--val', '100', '--size', '64'),
    *('--scene-options', CLASSES),
]
NUM_IMAGES = 5
# What has to be reached for the demonstration to count as one.
BARS = {'box AP50': 0.5, 'mIoU': 0.6}

console = Console(highlight=False, soft_wrap=True)


def run(command: list[str], log: Path, max_iters: int | None = None) -> None:
    """Run a command with its output in a log; show the progress of a training.

    Raises:
        UserError: If the command fails.
    """
    shown = [part.replace(f'{ROOT}/', '') for part in command]
    console.print(f'  [dim]$ {shlex.join(shown)}[/dim]')
    columns = (
        TextColumn('  {task.description}'),
        BarColumn(),
        TextColumn('{task.completed:.0f}/{task.total:.0f} iterations'),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    log.parent.mkdir(parents=True, exist_ok=True)
    last_lines: deque[str] = deque(maxlen=15)
    progress = Progress(*columns, console=console, transient=True)
    with log.open('w', buffering=1) as file, progress if max_iters else nullcontext():
        task = progress.add_task('', total=max_iters)
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in process.stdout:
            file.write(line)
            last_lines.append(line)
            if 'Iter(train)' in line:
                done = int(line.split('Iter(train)')[1].split('[')[1].split('/')[0])
                loss = line.split(' loss: ')[1].split()[0]
                progress.update(task, completed=done, description=f'loss {loss}')
    if process.wait() != 0:
        console.print(''.join(last_lines), markup=False)
        raise UserError(f'The command above failed; its output is in {log}')


def train(config: str, out: Path, data: Path, pretrained: Path | None = None) -> Path:
    """Train unless that was done before; return the checkpoint."""
    max_iters = Config.fromfile(ROOT / config).train_cfg.max_iters
    checkpoint = out / f'iter_{max_iters}.pth'
    if checkpoint.exists():
        console.print(f'  trained before: {checkpoint}')
        return checkpoint
    command = ['tools/train.py', config, '--work-dir', str(out), '--data-root', str(data)]
    if pretrained is not None:
        command += [
            *('--cfg-options', 'model.backbone.init_cfg.type=Pretrained'),
            f'model.backbone.init_cfg.checkpoint={pretrained}',
            'model.backbone.init_cfg.prefix=backbone.',
        ]
    run(command, out / 'train.log', max_iters)
    return checkpoint


def evaluate(config: str, checkpoint: Path, out: Path, data: Path) -> dict[str, float]:
    """Evaluate with ``tools/test.py``; return all figures of its metric."""
    command = ['tools/test.py', config, str(checkpoint), '--work-dir', str(out)]
    run([*command, '--data-root', str(data)], out / 'test.log')
    return json.loads(max(out.glob('*/*.json')).read_text())


def scalars_of(out: Path) -> Path:
    """Find the scalars that a training wrote."""
    return max(out.glob('*/vis_data/scalars.json'))


def draw_detections(checkpoint: Path, data: Path, path: Path) -> None:
    """Draw held-out images with their annotation above and the prediction below."""
    from mmdet.apis import inference_detector, init_detector

    with safe_loading():
        model = init_detector(str(ROOT / DET_CONFIG), str(checkpoint), device='cpu')
    classes = model.dataset_meta['classes']
    palette = [THING_PALETTE[THING_CLASSES.index(name)] for name in classes]
    metainfo = dict(classes=classes, palette=palette)
    coco = COCO(str(data / 'annotations/instances_val2017.json'))
    label_of = {category: i for i, category in enumerate(coco.getCatIds(catNms=classes))}
    rows: list[list[np.ndarray]] = [[], []]
    busiest = sorted(coco.imgs, key=lambda i: -len(coco.getAnnIds(i, iscrowd=False)))
    for image_id in sorted(busiest[: 3 * NUM_IMAGES])[::3]:
        file = data / 'val2017' / coco.imgs[image_id]['file_name']
        image = mmcv.imread(str(file), channel_order='rgb')
        annotations = coco.loadAnns(coco.getAnnIds(image_id, iscrowd=False))
        boxes = np.array([a['bbox'] for a in annotations], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        truth = InstanceData(
            bboxes=boxes,
            labels=np.array([label_of[a['category_id']] for a in annotations], np.int64),
            masks=np.array([coco.annToMask(a) for a in annotations]),
        )
        predicted = inference_detector(model, str(file)).pred_instances.cpu().numpy()
        predicted = predicted[predicted.scores > 0.5]
        for row, instances in zip(rows, (truth, predicted)):
            row.append(draw_instances(image, instances, metainfo))
    save_sheet(rows, ('annotation', 'prediction'), path)


def draw_scenes(checkpoint: Path, data: Path, path: Path) -> None:
    """Draw held-out scenes with their label map above and the prediction below."""
    from mmseg.apis import inference_model, init_model

    with safe_loading():
        model = init_model(str(ROOT / SEG_CONFIG), str(checkpoint), device='cpu')
    rows: list[list[np.ndarray]] = [[], []]
    for file in sorted((data / 'images/validation').glob('*.jpg'))[:NUM_IMAGES]:
        image = mmcv.imread(str(file), channel_order='rgb')
        labels = mmcv.imread(
            str(data / 'annotations/validation' / f'{file.stem}.png'), flag='unchanged'
        )
        predicted = inference_model(model, str(file)).pred_sem_seg.data[0].cpu().numpy()
        for row, label_map in zip(rows, (labels - 1, predicted)):  # 0 turns into 255
            row.append(draw_labels(image, label_map, model.dataset_meta))
    save_sheet(rows, ('labels', 'prediction'), path)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demonstration from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If a step fails, or a figure is below what is expected.
    """
    parser = make_parser(__doc__)
    parser.add_argument('--out', default='demo_out', help='output folder (default: demo_out)')
    out = Path(parser.parse_args(argv).out).resolve()
    begin = time.time()

    def step(number: int, text: str) -> None:
        minutes, seconds = divmod(int(time.time() - begin), 60)
        console.print(f'[bold]\\[{number}/7 {minutes:2d}:{seconds:02d}] {text}[/bold]')

    step(1, 'Write 660 scenes with instances and scene labels, and 2100 single objects')
    scenes, objects = out / 'data/scenes', out / 'data/objects'
    for folder, options in ((scenes, SCENES), (objects, OBJECTS)):
        if (folder / 'demo_data.json').exists():
            console.print(f'  written before: {folder}')
        else:
            command = ['tools/make_demo_data.py', '--out', str(folder), *options]
            run(command, out / f'{folder.name}.log')
    coco, ade, imagenet = scenes / 'coco', scenes / 'ade', objects / 'imagenet'

    step(2, 'Pretrain MAViT-tiny as a classifier of single objects, in place of ImageNet')
    classifier = train(CLS_CONFIG, out / 'cls', imagenet)

    step(3, 'Train a detector, Mask R-CNN with MAViT-tiny')
    detector = train(DET_CONFIG, out / 'det', coco, classifier)
    step(4, 'Evaluate it on held-out images with the COCO metric')
    det_figures = evaluate(DET_CONFIG, detector, out / 'det', coco)

    step(5, 'Train a segmentor, UperNet with MAViT-tiny')
    segmentor = train(SEG_CONFIG, out / 'seg', ade, classifier)
    step(6, 'Evaluate it on held-out scenes')
    seg_figures = evaluate(SEG_CONFIG, segmentor, out / 'seg', ade)

    step(7, 'Draw predictions and curves')
    images = out / 'images'
    # The libraries greet and warn a good deal while they load.
    with (out / 'images.log').open('w') as log, redirect_stdout(log), redirect_stderr(log):
        draw_detections(detector, coco, images / 'detections.png')
        draw_scenes(segmentor, ade, images / 'scenes.png')
    plot_training(
        [
            ('Mask R-CNN, MAViT-tiny', scalars_of(out / 'det'), 'coco/bbox_mAP_50', 'box AP50'),
            ('UperNet, MAViT-tiny', scalars_of(out / 'seg'), 'mIoU', 'mIoU'),
        ],
        images / 'training.png',
    )

    figures = {
        'box AP': det_figures['coco/bbox_mAP'],
        'box AP50': det_figures['coco/bbox_mAP_50'],
        'mask AP': det_figures['coco/segm_mAP'],
        'mask AP50': det_figures['coco/segm_mAP_50'],
        'mIoU': seg_figures['mIoU'] / 100,
        'pixel accuracy': seg_figures['aAcc'] / 100,
    }
    table = Table('held-out figure', 'reached', 'expected', title=None)
    for name, value in figures.items():
        table.add_row(name, f'{value:.3f}', f'>= {BARS[name]}' if name in BARS else '')
    console.print(table)
    console.print(f'The demonstration took {(time.time() - begin) / 60:.1f} minutes. Look at')
    for file in sorted(images.glob('*.png')):
        console.print(f'  {file}')
    missed = [name for name, bar in BARS.items() if figures[name] < bar]
    if missed:
        raise UserError(f'Below what is expected: {", ".join(missed)}; the logs are in {out}')
