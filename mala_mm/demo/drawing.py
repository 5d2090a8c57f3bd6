"""Images of what a model learned: predictions beside the truth, and the curves of a training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import cv2
import matplotlib
import numpy as np
import torch
from mmengine.structures import InstanceData, PixelData

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402, after the choice of a backend

CELL = 384  # pixels of a image's longer side in a sheet
GAP = 8


def _enlarge(image: np.ndarray) -> np.ndarray:
    factor = CELL / max(image.shape[:2])
    size = (round(image.shape[1] * factor), round(image.shape[0] * factor))
    return cv2.resize(image, size, interpolation=cv2.INTER_CUBIC)


def save_sheet(rows: Sequence[Sequence[np.ndarray]], labels: Sequence[str], path: Path) -> None:
    """Save rows of images as one PNG, with a label at the left of each row.

    Args:
        rows (Sequence[Sequence[ndarray]]): uint8 RGB images of shape (H, W, 3), rows of one
            length.
        labels (Sequence[str]): One label per row.
        path (Path): Where the PNG goes.
    """
    cell = CELL + GAP
    width, height = cell * len(rows[0]) + GAP, cell * len(rows) + GAP
    margin = 36
    sheet = np.full((height, width + margin, 3), 255, np.uint8)
    for r, (row, label) in enumerate(zip(rows, labels)):
        text = np.full((margin, CELL, 3), 255, np.uint8)
        (text_width, _), _ = cv2.getTextSize(label, cv2.FONT_HERSHEY_SIMPLEX, 0.8, 2)
        origin = ((CELL - text_width) // 2, margin - 10)
        cv2.putText(
            text, label, origin, cv2.FONT_HERSHEY_SIMPLEX, 0.8, (40, 40, 40), 2, cv2.LINE_AA
        )
        top = GAP + r * cell
        sheet[top : top + CELL, :margin] = cv2.rotate(text, cv2.ROTATE_90_COUNTERCLOCKWISE)
        for c, image in enumerate(row):
            # centred in its cell
            y = top + (CELL - image.shape[0]) // 2
            x = margin + GAP + c * cell + (CELL - image.shape[1]) // 2
            sheet[y : y + image.shape[0], x : x + image.shape[1]] = image
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), cv2.cvtColor(sheet, cv2.COLOR_RGB2BGR))


def draw_instances(image: np.ndarray, instances, metainfo: dict) -> np.ndarray:
    """Draw masks, boxes, class names and scores with mmdet's visualizer, enlarged.

    Args:
        image (ndarray): uint8 RGB of shape (H, W, 3).
        instances (InstanceData): ``bboxes`` (n, 4), ``labels`` (n, ), ``masks`` (n, H, W) and, for
            predictions, ``scores`` (n, ).
        metainfo (dict): ``classes`` and ``palette`` of the data set.

    Returns:
        ndarray: uint8 RGB, longer side :data:`CELL`.
    """
    from mmdet.visualization import DetLocalVisualizer

    large = _enlarge(image)
    enlarged = InstanceData()
    for key in ('labels', 'scores'):
        if key in instances:
            enlarged[key] = torch.as_tensor(instances[key])
    factor = torch.tensor([large.shape[1] / image.shape[1], large.shape[0] / image.shape[0]] * 2)
    enlarged.bboxes = torch.as_tensor(instances.bboxes).float().reshape(-1, 4) * factor
    masks = [
        cv2.resize(np.asarray(m, np.float32), large.shape[1::-1], interpolation=cv2.INTER_LINEAR)
        for m in instances.masks
    ]
    enlarged.masks = np.array([m > 0.5 for m in masks]).reshape(-1, *large.shape[:2])
    visualizer = DetLocalVisualizer(line_width=2, alpha=0.5)
    return visualizer._draw_instances(large, enlarged, metainfo['classes'], metainfo.get('palette'))


def draw_labels(image: np.ndarray, labels: np.ndarray, metainfo: dict) -> np.ndarray:
    """Draw a label map over an image with mmseg's visualizer, enlarged.

    Args:
        image (ndarray): uint8 RGB of shape (H, W, 3).
        labels (ndarray): Class indices of shape (H, W); 255 is left as it is.
        metainfo (dict): ``classes`` and ``palette`` of the data set.

    Returns:
        ndarray: uint8 RGB, longer side :data:`CELL`.
    """
    from mmseg.visualization import SegLocalVisualizer

    large = _enlarge(image)
    labels = cv2.resize(
        labels.astype(np.uint8), large.shape[1::-1], interpolation=cv2.INTER_NEAREST
    )
    visualizer = SegLocalVisualizer(alpha=0.65)
    drawn = visualizer._draw_sem_seg(
        large,
        PixelData(data=torch.from_numpy(labels)[None].long()),
        metainfo['classes'],
        metainfo['palette'],
    )
    return np.where((labels == 255)[..., None], large, drawn)


def read_scalars(path: Path) -> tuple[list[dict], list[dict]]:
    """Read mmengine's ``scalars.json``: the entries of training and those of validation."""
    entries = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [e for e in entries if 'loss' in e], [e for e in entries if 'loss' not in e]


def plot_training(
    runs: Sequence[tuple[str, Path, str, str]],
    path: Path,
) -> None:
    """Plot the loss and the validation figure of one or more trainings.

    Args:
        runs (Sequence[tuple]): Title, ``scalars.json``, key of the validation figure (such as
            ``coco/bbox_mAP_50``) and its name, for each training.
        path (Path): Where the PNG goes.
    """
    figure, axes = plt.subplots(1, len(runs), figsize=(6.5 * len(runs), 4), squeeze=False)
    for axis, (title, scalars, key, name) in zip(axes[0], runs):
        train, val = read_scalars(scalars)
        axis.plot([e['step'] for e in train], [e['loss'] for e in train], color='#1f5fa8')
        axis.set(title=title, xlabel='iteration', ylabel='training loss', ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.yaxis.label.set_color('#1f5fa8')
        if any(key in e for e in val):
            right = axis.twinx()
            right.plot(
                [e['step'] for e in val if key in e],
                [e[key] for e in val if key in e],
                marker='o',
                color='#c2571a',
            )
            right.set_ylabel(name, color='#c2571a')
            right.set_ylim(0, 100 if max(e.get(key, 0) for e in val) > 1 else 1)
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
