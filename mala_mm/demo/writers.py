"""Writes generated scenes in the layouts of COCO, ADE20K and ImageNet.

::

    coco/train2017/*.jpg, coco/val2017/*.jpg, coco/annotations/instances_{train,val}2017.json
    ade/images/{training,validation}/*.jpg, ade/annotations/{training,validation}/*.png
    ade/objectInfo.txt
    imagenet/{train,val}/<class>/*.jpg
    demo_data.json  what the folder holds, and the mark that it may be overwritten
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import contourpy
import cv2
import numpy as np
from pycocotools import mask as mask_utils

from mala_mm.errors import UserError
from mala_mm.files import remove_parts, replacing_folder
from mala_mm.version import __version__

from .scenes import SPLITS, Instance, Scene, SceneConfig, make_portrait, make_scene

LAYOUTS = ('coco', 'ade', 'imagenet')
MARK = 'demo_data.json'
JPEG_QUALITY = 92


def write_demo_data(
    out: str | os.PathLike,
    layouts: Sequence[str] = ('coco', 'ade'),
    counts: dict[str, int] | None = None,
    config: SceneConfig | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Generate a data set.

    Everything is written to a temporary folder beside ``out``, which takes its place at the end, so
    that ``out`` is either complete or untouched.

    Args:
        out: the folder to make; one sub-folder per layout.
        layouts: some of 'coco', 'ade', 'imagenet'.
        counts: number of images per split, ``dict(train=..., val=...)``.
        config: what the scenes hold.
        seed: all randomness comes from it.
        overwrite: replace a folder that this function wrote before.
        progress: called with the number of images done and in total.

    Raises:
        UserError: unknown layout, counts below one, or ``out`` is in the way.
    """
    out = Path(out)
    config = config or SceneConfig()
    counts = dict(train=64, val=16) if counts is None else dict(counts)
    unknown = sorted(set(layouts) - set(LAYOUTS))
    if unknown or not layouts:
        raise UserError(f'Layouts must be some of {", ".join(LAYOUTS)}, got {list(layouts)}')
    if set(counts) != set(SPLITS) or min(counts.values()) < 1:
        raise UserError(f'Each of {" and ".join(SPLITS)} must have an image or more, got {counts}')
    total = sum(counts.values()) * (('imagenet' in layouts) + bool({'coco', 'ade'} & set(layouts)))
    done = 0
    _check_free(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_parts(out.parent, out.name)
    with replacing_folder(out) as folder:
        writers: list[_CocoWriter | _AdeWriter] = []
        if 'coco' in layouts:
            writers.append(_CocoWriter(folder / 'coco', config, seed))
        if 'ade' in layouts:
            writers.append(_AdeWriter(folder / 'ade', config))
        for split in SPLITS:
            for index in range(counts[split]):
                if writers:
                    scene = make_scene(config, seed, split, index)
                    jpeg = _jpeg(scene.image)
                    for writer in writers:
                        writer.add(split, index, scene, jpeg)
                    done += 1
                if 'imagenet' in layouts:
                    _add_portrait(folder / 'imagenet', config, seed, split, index)
                    done += 1
                if progress:
                    progress(done, total)
        for writer in writers:
            writer.close()
        mark = dict(
            generator=f'mala_mm {__version__}',
            layouts=list(layouts),
            counts=counts,
            seed=seed,
            config=asdict(config),
        )
        _write_json(folder / MARK, mark, indent=1)
    return out


def rle(mask: np.ndarray) -> dict[str, Any]:
    """COCO's run lengths of a mask (H, W), as text that JSON can hold."""
    code = mask_utils.encode(np.asfortranarray(mask, np.uint8))
    return dict(size=code['size'], counts=code['counts'].decode())


def polygon(cover: np.ndarray) -> list[float] | None:
    """Return the outline of a coverage map at its 0.5 level as x1, y1, x2, y2, ...

    Pixel (i, j) covers the square from (j, i) to (j + 1, i + 1), as COCO counts.

    Returns:
        None unless the outline is a single closed curve, without holes.
    """
    generator = contourpy.contour_generator(z=np.pad(cover, 1))
    lines = generator.lines(0.5)
    if len(lines) != 1:
        return None
    points = cv2.approxPolyDP(np.float32(lines[0][:-1]), 0.25, True)[:, 0] - 0.5
    points = np.clip(points, 0, (cover.shape[1], cover.shape[0]))
    return [round(float(value), 2) for value in points.ravel()] if len(points) > 2 else None


class _CocoWriter:
    def __init__(self, root: Path, config: SceneConfig, seed: int) -> None:
        self.root = root
        info = dict(
            description='Generated scenes',
            url='',
            version=__version__,
            year=2026,
            contributor='mala_mm',
            date_created='',
            seed=seed,
        )
        licence = dict(
            id=1, name='Apache License 2.0', url='https://www.apache.org/licenses/LICENSE-2.0'
        )
        categories = [
            dict(supercategory='thing', id=i, name=name)
            for i, name in enumerate(config.thing_classes, 1)
        ]
        self.files = {
            split: dict(
                info=info, licenses=[licence], images=[], annotations=[], categories=categories
            )
            for split in SPLITS
        }
        for split in SPLITS:
            (root / f'{split}2017').mkdir(parents=True)

    def add(self, split: str, index: int, scene: Scene, jpeg: bytes) -> None:
        image_id = 1_000_000 * SPLITS.index(split) + index + 1
        name = f'{image_id:012d}.jpg'
        (self.root / f'{split}2017' / name).write_bytes(jpeg)
        height, width = scene.labels.shape
        content = self.files[split]
        content['images'].append(
            dict(
                license=1, file_name=name, height=height, width=width, date_captured='', id=image_id
            )
        )
        for number, instance in enumerate(scene.instances):
            content['annotations'].append(
                dict(
                    segmentation=_segmentation(instance),
                    area=instance.area,
                    iscrowd=int(instance.crowd),
                    image_id=image_id,
                    bbox=list(instance.box),
                    category_id=instance.label + 1,
                    id=image_id * 1000 + number,
                )
            )

    def close(self) -> None:
        (self.root / 'annotations').mkdir()
        for split, content in self.files.items():
            _write_json(self.root / 'annotations' / f'instances_{split}2017.json', content)


def _segmentation(instance: Instance) -> list[list[float]] | dict[str, Any]:
    """Return a polygon where the object shows in one piece, run lengths otherwise."""
    if not (instance.crowd or instance.occluded):
        outline = polygon(instance.cover)
        if outline:
            return [outline]
    return rle(instance.mask)


class _AdeWriter:
    FOLDERS = dict(train='training', val='validation')

    def __init__(self, root: Path, config: SceneConfig) -> None:
        self.root, self.names = root, config.scene_classes
        self.pixels = np.zeros(len(self.names) + 1, np.int64)
        self.images = {split: np.zeros(len(self.names) + 1, np.int64) for split in SPLITS}
        for kind in ('images', 'annotations'):
            for folder in self.FOLDERS.values():
                (root / kind / folder).mkdir(parents=True)

    def add(self, split: str, index: int, scene: Scene, jpeg: bytes) -> None:
        name, folder = f'scene_{split}_{index + 1:08d}', self.FOLDERS[split]
        (self.root / 'images' / folder / f'{name}.jpg').write_bytes(jpeg)
        labels = cv2.imencode('.png', scene.labels)[1].tobytes()
        (self.root / 'annotations' / folder / f'{name}.png').write_bytes(labels)
        counts = np.bincount(scene.labels.ravel(), minlength=len(self.pixels))
        self.pixels += counts
        self.images[split] += counts > 0

    def close(self) -> None:
        """Write the class list: share of the labelled pixels, images per split, name."""
        ratio = self.pixels / max(self.pixels[1:].sum(), 1)
        rows = ['Idx\tRatio\tTrain\tVal\tName']
        for i, name in enumerate(self.names, 1):
            train, val = (int(self.images[split][i]) for split in SPLITS)
            rows.append(f'{i}\t{ratio[i]:.4f}\t{train}\t{val}\t{name}')
        (self.root / 'objectInfo.txt').write_text('\n'.join(rows) + '\n')


def _add_portrait(root: Path, config: SceneConfig, seed: int, split: str, index: int) -> None:
    """Write an image of a single object; the classes take turns."""
    name = config.thing_classes[index % len(config.thing_classes)]
    path = root / split / name / f'{name}_{split}_{index + 1:08d}.jpg'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_jpeg(make_portrait(config, seed, split, index, name)))


def _jpeg(image: np.ndarray) -> bytes:
    options = [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
    return cv2.imencode('.jpg', image[..., ::-1], options)[1].tobytes()


def _write_json(path: Path, content: dict, indent: int | None = None) -> None:
    path.write_text(json.dumps(content, indent=indent) + '\n')


def _check_free(out: Path, overwrite: bool) -> None:
    """Refuse a folder that this module did not write, or that it may not overwrite."""
    if out.exists() and not out.is_dir():
        raise UserError(f'{out} is a file; name a folder')
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise UserError(f'{out} is not empty; name another folder or pass --overwrite')
        if not (out / MARK).is_file():
            raise UserError(
                f'{out} was not written by this tool (it has no {MARK}), so it is not overwritten; '
                'name another folder'
            )
