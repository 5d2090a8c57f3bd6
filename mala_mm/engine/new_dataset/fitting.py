"""Numbers of a config that follow from the data: anchors, samples, schedule, learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .recipes import SHORT, Task

SCALES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
RATIOS = (0.5, 1.0, 2.0)
RPN_STRIDES = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Anchors:
    """Anchors for a set of boxes.

    Attributes:
        scale (float): Side of the square anchor in strides.
        covered (float): Share of the boxes that some anchor of the same centre meets with an IoU
            of 0.5.
    """

    scale: float
    covered: float


def fit_anchors(
    boxes: np.ndarray,
    frames: np.ndarray,
    scale: tuple[int, int],
    strides: tuple[int, ...] = RPN_STRIDES,
    octaves: int = 1,
) -> Anchors:
    """Choose the scale of anchors whose shapes meet the boxes best.

    Args:
        boxes (ndarray): (n, 2) widths and heights in pixels of the files.
        frames (ndarray): (n, 2) widths and heights of the images they are in.
        scale (tuple[int, int]): What images are resized into, as in mmcv's ``Resize``.
        strides (tuple[int, ...]): Of the maps.
        octaves (int): Anchor sizes per octave, three in RetinaNet.
    """
    if not len(boxes):
        return Anchors(8, 0.0)
    short, long = min(scale), max(scale)
    factor = np.minimum(long / frames.max(1), short / frames.min(1))
    boxes = np.maximum(boxes * factor[:, None], 1e-3)
    fits = []
    for candidate in SCALES:
        sides = np.array(
            [candidate * s * 2 ** (k / octaves) for s in strides for k in range(octaves)]
        )
        shapes = np.array([(a / math.sqrt(r), a * math.sqrt(r)) for a in sides for r in RATIOS])
        overlap = np.minimum(boxes[:, None], shapes[None]).prod(-1)
        iou = overlap / (boxes.prod(-1)[:, None] + shapes.prod(-1)[None] - overlap)
        fits.append((candidate, iou.max(1)))
    best = max(iou.mean() for _, iou in fits)
    # Several fit nearly alike: take the one whose middle level has boxes of the median size.
    median = float(np.median(np.sqrt(boxes.prod(-1))))
    middle = strides[len(strides) // 2]
    scale, iou = min(
        (fit for fit in fits if fit[1].mean() > best - 0.02),
        key=lambda fit: abs(math.log(fit[0] * middle / median)),
    )
    return Anchors(scale, float((iou >= 0.5).mean()))


def samples_per_image(objects: np.ndarray) -> int:
    """Return how many regions a box head is to see per image: at most 512, as in COCO.

    A quarter of them may be positive: four for each object leave room for all.

    Args:
        objects (ndarray): Number of objects in each image.
    """
    busy = float(np.quantile(objects, 0.9)) if len(objects) else 0.0
    return min(512, max(32, 2 ** math.ceil(math.log2(max(4 * busy, 1)))))


@dataclass(frozen=True)
class Schedule:
    """How long a training is and how fast it goes.

    Attributes:
        batch_size (int): Images in a batch.
        max_iters (int): Length.
        epochs (float): How often each image is seen.
        warmup (int): Iterations until the learning rate stands.
        interval (int): Iterations between evaluations and checkpoints.
        lr (float): The learning rate.
        short (bool): Whether it is a short training.
    """

    batch_size: int
    max_iters: int
    epochs: float
    warmup: int
    interval: int
    lr: float
    short: bool


def fit_schedule(
    task: Task,
    images: int,
    recipe_lr: float,
    recipe_batch: int,
    batch_size: int | None = None,
    epochs: float | None = None,
) -> Schedule:
    """Scale a training to the number of images and the batch.

    The learning rate grows with the root of the batch, as suits Adam (Malladi et al., NeurIPS
    2022).

    Args:
        task (Task): What is trained.
        images (int): Number of images to train on.
        recipe_lr (float): Learning rate of the recipe, for
        recipe_batch (int): that batch.
        batch_size (int, optional): Images in a batch; the task's by default, or fewer where there
            are fewer.
        epochs (float, optional): Length; the task's by default.
    """
    batch = batch_size or max(min(task.batch_size, images), 2)
    if epochs is None:
        max_iters = max(math.ceil(task.epochs * images / batch), task.iterations)
    else:
        max_iters = max(math.ceil(epochs * images / batch), 1)
    step = 10 if max_iters >= 60 else 1  # round figures
    interval = step * math.ceil(max_iters / (6 if max_iters < SHORT else 12) / step)
    max_iters = interval * math.ceil(max_iters / interval)
    short = max_iters < SHORT
    base, at = (task.short_lr, 16) if short else (recipe_lr, recipe_batch)
    lr = float(f'{base * math.sqrt(batch / at):.2g}')
    warmup = min(500, max_iters // 5) if max_iters >= 5 else 0
    return Schedule(batch, max_iters, max_iters * batch / images, warmup, interval, lr, short)
