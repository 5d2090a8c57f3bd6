"""What a data set holds: its classes, its images, and which of them are held out."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mala_mm.data.coco import read_coco, summarize_coco, validate_coco
from mala_mm.data.datasets import read_lines
from mala_mm.data.folders import IMAGE_SUFFIXES
from mala_mm.data.splits import stratified_split
from mala_mm.errors import UserError

MOST_DECODED = 2000  # images; of larger data sets tools/check_dataset.py reads all


@dataclass
class Split:
    """One side of a data set, as a config names it.

    Attributes:
        count (int): Number of images.
        root (str): The ``data_root``.
        prefix (dict[str, str] | str): The ``data_prefix``.
        ann_file (str): A path, or the name of one of :attr:`Source.files`; empty for none.
    """

    count: int
    root: str
    prefix: dict[str, str] | str
    ann_file: str = ''


@dataclass
class Source:
    """A data set.

    Attributes:
        classes (tuple[str, ...]): The names, in the order of the labels.
        train (Split): What is trained on.
        val (Split): What is held out.
        files (dict[str, str]): Annotation files to write beside the config, by name.
        options (dict[str, Any]): Further arguments of the data sets.
        boxes (ndarray): (n, 2) widths and heights in pixels, and
        frames (ndarray): (n, 2) those of their images; of detection.
        objects (ndarray): Number of objects per image; of detection.
        outlined (bool): Whether all objects have outlines.
    """

    classes: tuple[str, ...]
    train: Split
    val: Split
    files: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    boxes: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    frames: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    objects: np.ndarray = field(default_factory=lambda: np.zeros(0))
    outlined: bool = False


def read_detection(
    ann_file: str,
    images: str,
    val_file: str | None = None,
    val_images: str | None = None,
    held_out: float = 0.2,
    seed: int = 0,
) -> Source:
    """Read COCO annotations, and split them if there is no validation file.

    Args:
        ann_file (str): The annotation file.
        images (str): The folder of its images.
        val_file (str, optional): The annotation file of held-out images.
        val_images (str, optional): Their folder, ``images`` by default.
        held_out (float): Share or number of images to hold out, without a validation file.
        seed (int): Of the split.

    Raises:
        UserError: If a file is missing or has faults that training would break on.
    """
    sides = [(ann_file, images)]
    if val_file:
        sides.append((val_file, val_images or images))
    for path, folder in sides:
        _check_coco(path, folder)
    content = read_coco(ann_file)
    # mmdet numbers labels in the order of the file, whatever that of metainfo.
    classes = summarize_coco(ann_file).categories
    per_image: dict[int, list[dict]] = {image['id']: [] for image in content['images']}
    for annotation in content.get('annotations', []):
        if annotation['image_id'] in per_image:
            per_image[annotation['image_id']].append(annotation)
    root = os.path.abspath(images)
    if val_file:
        if summarize_coco(val_file).categories != classes:
            raise UserError(
                f'{val_file} has other categories than {ann_file}, or in another order, by which '
                'mmdet numbers them; make them equal'
            )
        train = Split(len(per_image), root, dict(img=''), os.path.abspath(ann_file))
        val = Split(
            len(read_coco(val_file)['images']),
            os.path.abspath(val_images or images),
            dict(img=''),
            os.path.abspath(val_file),
        )
        files, trained = {}, list(per_image)
    else:
        ids = list(per_image)
        labels = [{a['category_id'] for a in per_image[i]} for i in ids]
        sets = [[ids[i] for i in side] for side in stratified_split(labels, held_out, seed)]
        files = {
            name: _part_of_coco(content, set(side), per_image)
            for name, side in zip(('train.json', 'val.json'), sets)
        }
        trained = sets[0]
        train = Split(len(sets[0]), root, dict(img=''), 'train.json')
        val = Split(len(sets[1]), root, dict(img=''), 'val.json')
    sizes = {image['id']: (image['width'], image['height']) for image in content['images']}
    real = [a for i in trained for a in per_image[i] if not a.get('iscrowd')]
    return Source(
        classes,
        train,
        val,
        files,
        boxes=np.array([a['bbox'][2:] for a in real], float).reshape(-1, 2),
        frames=np.array([sizes[a['image_id']] for a in real], float).reshape(-1, 2),
        objects=np.array([len(per_image[i]) for i in trained]),
        outlined=all(a.get('segmentation') for a in real),
    )


def _check_coco(path: str, folder: str) -> None:
    decode = len(summarize_coco(path).file_names) <= MOST_DECODED
    findings = [f for f in validate_coco(path, folder if decode else None) if not f.tolerated]
    if findings:
        raise UserError(
            f'{path} has {len(findings)} fault{"s" if len(findings) > 1 else ""} that training '
            f'would break on, the first is {findings[0]}; `python tools/check_dataset.py {path} '
            f'--images {folder}` lists all'
        )


def _part_of_coco(content: dict, ids: set[int], per_image: dict[int, list[dict]]) -> str:
    part = {
        **content,
        'images': [image for image in content['images'] if image['id'] in ids],
        # The evaluation needs iscrowd.
        'annotations': [
            {'iscrowd': 0, **a} for i, listed in per_image.items() if i in ids for a in listed
        ],
    }
    return json.dumps(part)


def read_segmentation(
    root: str,
    classes: Sequence[str] | None = None,
    reduce_zero_label: bool | None = None,
    held_out: float = 0.2,
    seed: int = 0,
) -> Source:
    """Read folders of images and label maps, in ADE20K's layout with or without its two splits.

    ``images/training`` and ``images/validation`` with ``annotations/training`` and
    ``annotations/validation``; or ``images`` and ``annotations`` alone, which are split.

    Args:
        root (str): The folder that holds ``images`` and ``annotations``.
        classes (Sequence[str], optional): The names; those of ``objectInfo*.txt`` by default.
        reduce_zero_label (bool, optional): Whether 0 means no class and 1 the first one. By default
            it does where the label maps go up to the number of classes.
        held_out (float): Share or number of images to hold out, where there is one folder.
        seed (int): Of the split.

    Raises:
        UserError: If something is missing.
    """
    base = Path(root).resolve()
    for name in ('images', 'annotations'):
        if not (base / name).is_dir():
            raise UserError(
                f'{base} has no folder {name}; arrange it as images/*.jpg beside '
                'annotations/*.png, or with training and validation below each'
            )
    names = tuple(classes) if classes else _class_list(base)
    split = (base / 'images/training').is_dir() and (base / 'images/validation').is_dir()
    folders = ('training', 'validation') if split else ('',)
    suffix, stems = _image_stems(base / 'images', folders)
    found = {}
    for folder, listed in zip(folders, stems):
        for stem in listed:
            path = base / 'annotations' / folder / f'{stem}.png'
            found[folder, stem] = _labels_in(path)
    highest = max((v for values in found.values() for v in values if v != 255), default=0)
    if reduce_zero_label is None:
        reduce_zero_label = highest == len(names)
    if highest > len(names) - (not reduce_zero_label):
        raise UserError(
            f'The label maps in {base / "annotations"} go up to {highest}, but {len(names)} '
            f'classes with reduce_zero_label={reduce_zero_label} allow '
            f'{len(names) - (not reduce_zero_label)}; name all classes in --classes'
        )
    options = dict(img_suffix=suffix, seg_map_suffix='.png', reduce_zero_label=reduce_zero_label)

    def side(folder: str, count: int, ann_file: str = '') -> Split:
        prefix = dict(
            img_path=os.path.join('images', folder).rstrip('/'),
            seg_map_path=os.path.join('annotations', folder).rstrip('/'),
        )
        return Split(count, str(base), prefix, ann_file)

    if split:
        sides = [side(folder, len(listed)) for folder, listed in zip(folders, stems)]
        return Source(names, *sides, options=options)
    labels = [found['', stem] - {255, 0 if reduce_zero_label else 255} for stem in stems[0]]
    sets = [[stems[0][i] for i in part] for part in stratified_split(labels, held_out, seed)]
    files = {
        name: ''.join(f'{stem}\n' for stem in part)
        for name, part in zip(('train.txt', 'val.txt'), sets)
    }
    sides = [side('', len(part), name) for name, part in zip(files, sets)]
    return Source(names, *sides, files=files, options=options)


def _class_list(base: Path) -> tuple[str, ...]:
    """Read ADE20K's ``objectInfo*.txt``: a table whose last column holds names and synonyms."""
    tables = sorted(base.glob('objectInfo*.txt'))
    if not tables:
        raise UserError(
            f'The classes of {base} are not known; name them in the order of their labels: '
            '--classes road wall sky'
        )
    rows = [line.split('\t') for line in read_lines(str(tables[0])) if line]
    names = [row[-1].split(',')[0].strip() for row in rows if row[0].isdigit()]
    # Synonyms tell classes with one first name apart.
    twice = {name for name, n in Counter(names).items() if n > 1}
    rows = [row for row in rows if row[0].isdigit()]
    return tuple(row[-1].strip() if name in twice else name for row, name in zip(rows, names))


def _image_stems(folder: Path, parts: Iterable[str]) -> tuple[str, list[list[str]]]:
    """Return the suffix that the images share and, by folder, their paths without it."""
    files = [
        [p for p in sorted((folder / part).rglob('*')) if p.suffix.lower() in IMAGE_SUFFIXES]
        for part in parts
    ]
    suffixes = Counter(p.suffix for listed in files for p in listed)
    if not suffixes:
        raise UserError(f'There are no images in {folder}; put them there')
    if len(suffixes) > 1:
        found = ', '.join(f'{n} {suffix}' for suffix, n in suffixes.most_common())
        raise UserError(
            f'The images in {folder} have several suffixes ({found}), of which a data set of '
            'mmseg reads one; convert them to one format'
        )
    (suffix,) = suffixes
    return suffix, [
        [str(p.relative_to(folder / part))[: -len(suffix)] for p in listed]
        for part, listed in zip(parts, files)
    ]


def _labels_in(path: Path) -> set[int]:
    from PIL import Image

    try:
        with Image.open(path) as file:
            return set(np.unique(np.asarray(file)).tolist())
    except (OSError, ValueError) as error:
        raise UserError(
            f'The label map {path} cannot be read ({error}); write one for each image, or take '
            'the image out'
        ) from None


def read_classification(root: str, held_out: float = 0.2, seed: int = 0) -> Source:
    """Read one folder of images per class, below ``train`` and ``val`` or at once.

    Args:
        root (str): The folder.
        held_out (float): Share or number of images to hold out, where there is no ``val``.
        seed (int): Of the split.

    Raises:
        UserError: If there are no class folders, or those of the two splits differ.
    """
    base = Path(root).resolve()
    if not base.is_dir():
        raise UserError(f'The folder {base} does not exist; name one with a folder per class')
    split = (base / 'train').is_dir() and (base / 'val').is_dir()
    parts = [base / 'train', base / 'val'] if split else [base]
    listed = [_class_images(part) for part in parts]
    classes = tuple(sorted(listed[0]))
    if split and classes != tuple(sorted(listed[1])):
        raise UserError(f'{parts[0]} and {parts[1]} have different class folders; make them equal')
    if split:
        counts = [sum(map(len, found.values())) for found in listed]
        sides = [Split(n, str(base), part.name) for n, part in zip(counts, parts)]
        return Source(classes, *sides)
    images = [(path, label) for label, name in enumerate(classes) for path in listed[0][name]]
    sets = stratified_split([{label} for _, label in images], held_out, seed)
    files = {
        name: ''.join(f'{images[i][0]} {images[i][1]}\n' for i in part)
        for name, part in zip(('train.txt', 'val.txt'), sets)
    }
    sides = [Split(len(part), str(base), '', name) for name, part in zip(files, sets)]
    return Source(classes, *sides, files=files)


def _class_images(folder: Path) -> dict[str, list[str]]:
    """Return, by class folder, the paths of the images below, as seen from ``folder``."""
    found = {
        entry.name: sorted(
            str(p.relative_to(folder))
            for p in Path(entry.path).rglob('*')
            if p.suffix.lower() in IMAGE_SUFFIXES
        )
        for entry in os.scandir(folder)
        if entry.is_dir()
    }
    if len(found) < 2:
        raise UserError(
            f'{folder} has {len(found)} class folders; a classifier needs at least two, with '
            'the images of one class in each'
        )
    empty = [name for name in sorted(found) if not found[name]]
    if empty:
        raise UserError(f'The class folder {folder / empty[0]} holds no image; fill or remove it')
    return found
