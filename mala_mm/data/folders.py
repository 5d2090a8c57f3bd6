"""Data sets in folders: label maps beside images, and one folder of images per class."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

from mala_mm.errors import UserError

from .coco import missing_files
from .datasets import Dataset, is_are, literal, read_lines, require_folder, some
from .images import incomplete, inspect_image

IMAGE_SUFFIXES = ('.jpg', '.jpeg', '.png', '.ppm', '.bmp', '.pgm', '.tif')
IGNORE = 255


def check_segmentation(dataset: Dataset, limit: int | None) -> None:
    """Check folders of images and label maps; ``limit`` as in ``check_dataset``."""
    require_folder(dataset.images, 'image')
    if dataset.labels is None:
        return  # a test set without labels
    require_folder(dataset.labels, 'label')
    image_suffix, label_suffix = dataset.option('img_suffix'), dataset.option('seg_map_suffix')
    if dataset.ann_file and not os.path.isdir(dataset.ann_file):
        if not os.path.isfile(dataset.ann_file):
            raise UserError(
                f'The list of images {dataset.ann_file} does not exist; put it there or correct '
                'ann_file'
            )
        stems = read_lines(dataset.ann_file)
        missing = missing_files(dataset.images, [stem + image_suffix for stem in stems])
        if missing:
            raise UserError(
                f'{len(missing)} of {len(stems)} images of {dataset.ann_file} are not in '
                f'{dataset.images}, the first is {missing[0]}; fetch them or fix the list'
            )
    else:
        paths = sorted(Path(dataset.images).rglob(f'*{image_suffix}'))
        stems = [str(p.relative_to(dataset.images))[: -len(image_suffix)] for p in paths]
    if not stems:
        raise UserError(
            f'There are no images *{image_suffix} in {dataset.images}; put them there or correct '
            'data_prefix and img_suffix'
        )
    missing = missing_files(dataset.labels, [stem + label_suffix for stem in stems])
    if missing:
        raise UserError(
            f'{len(missing)} of {len(stems)} images have no label map in {dataset.labels}, the '
            f'first is {missing[0]}; add them or take the images out'
        )
    names = dataset.classes
    if names is None:
        return
    fixed = dataset.default_classes
    foreign = [name for name in names if fixed and name not in fixed]
    if foreign:
        raise UserError(
            f'{dataset.name} has {len(fixed)} classes of its own and {some(foreign)} '
            f"{is_are(foreign)} not among them; use type='mmseg.BaseSegDataset' with "
            'reduce_zero_label and suffixes set for other classes'
        )
    # With a choice of its classes, the files still hold the labels of all of them.
    count = len(fixed or names)
    step = 1 if limit is None else max(1, -(-len(stems) // limit))
    for stem in stems[::step]:
        image = Path(dataset.images) / (stem + image_suffix)
        size = None if limit is not None else check_image(image)
        _check_label_map(Path(dataset.labels) / (stem + label_suffix), count, dataset, size)


def check_image(path: str | os.PathLike) -> tuple[int, int]:
    """Return (width, height) as training sees them; UserError if an image cannot be read whole."""
    size, remarks = inspect_image(Path(path))
    if size is None:
        raise UserError(
            f'The image {path} cannot be read ({remarks[0][1]}); replace it, or take it out of '
            'the data'
        )
    return size


def _check_label_map(
    path: Path, count: int, dataset: Dataset, size: tuple[int, int] | None
) -> None:
    import numpy as np
    from PIL import Image

    try:
        data = path.read_bytes()
        reason = incomplete(data)
        if reason:
            raise OSError(reason)
        with Image.open(io.BytesIO(data)) as file:
            labels = np.asarray(file)
    except Exception as error:  # Pillow's readers raise anything
        raise UserError(f'The label map {path} cannot be read ({error}); write it again') from None
    if labels.ndim != 2 or labels.dtype.kind not in 'buif':
        raise UserError(
            f'The label map {path} has {labels.shape[2] if labels.ndim > 2 else labels.ndim} '
            'channels; save it with one channel that holds the class index'
        )
    if size is not None and labels.shape[::-1] != size:
        raise UserError(
            f'The label map {path} has {labels.shape[1]}x{labels.shape[0]} pixels and its image '
            f'{size[0]}x{size[1]}; make them equal'
        )
    reduced = bool(dataset.option('reduce_zero_label'))
    highest = count if reduced else count - 1
    values = np.unique(labels)
    wrong = [
        v.item()
        for v in values
        if not (0 <= v <= highest and v == int(v))
        and v not in (IGNORE, dataset.option('ignore_index'))
    ]
    if wrong:
        raise UserError(
            f'The label map {path} has the value {wrong[0]}, but {dataset.name} with {count} '
            f'classes and reduce_zero_label={reduced} allows 0 to {highest} and {IGNORE}; correct '
            'the label maps, metainfo.classes or reduce_zero_label'
        )


def check_classification(dataset: Dataset, limit: int | None) -> None:
    """Check class folders or a list of images; ``limit`` as in ``check_dataset``."""
    require_folder(dataset.images, 'image')
    names = dataset.classes
    if dataset.ann_file:
        files = _check_cls_list(dataset, names)
        for name in files if limit is None else ():
            check_image(os.path.join(dataset.images, name))
        return
    if dataset.option('with_label') is False or dataset.cfg.get('split') == 'test':
        return
    folders = class_folders(dataset)
    if names is not None and len(names) != len(folders):
        raise UserError(
            f'The configuration of {dataset.name} has {len(names)} classes and {dataset.images} '
            f'has {len(folders)} class folders ({some(folders)}); set '
            f'metainfo=dict(classes={literal(folders)}) or correct data_root'
        )
    if names is not None and set(names) == set(folders) and list(names) != list(folders):
        raise UserError(
            f'The classes of {dataset.name} are listed as {some(names)}, but labels follow the '
            f'sorted folders of {dataset.images}; set metainfo=dict(classes={literal(folders)})'
        )
    for folder in folders:
        path = os.path.join(dataset.images, folder)
        images = _images_below(path)
        first = next(images, None)
        if first is None:
            raise UserError(f'The class folder {path} holds no image; fill or remove it')
        if limit is None:
            check_image(first)
            for image in images:
                check_image(image)


def _images_below(folder: str) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.lower().endswith(IMAGE_SUFFIXES):
                yield os.path.join(parent, name)


def _check_cls_list(dataset: Dataset, names: tuple[str, ...] | None) -> list[str]:
    path = dataset.ann_file
    if not os.path.isfile(path):
        raise UserError(f'The annotation file {path} does not exist; correct ann_file')
    files = []
    for number, line in enumerate(read_lines(path), 1):
        if dataset.option('with_label') is False:
            files.append(line.strip())
            continue
        name, _, label = line.strip().rpartition(' ')
        if not name or not (label.isascii() and label.isdigit()):
            raise UserError(
                f'Line {number} of {path} is {line!r}; each line has to be a file name, a space '
                'and a class index'
            )
        if names is not None and int(label) >= len(names):
            raise UserError(
                f'Line {number} of {path} has the class index {label}, but {dataset.name} has '
                f'{len(names)} classes; correct the file or metainfo.classes'
            )
        files.append(name)
    missing = missing_files(dataset.images, files)
    if missing:
        raise UserError(
            f'{len(missing)} of {len(files)} images of {path} are not in {dataset.images}, the '
            f'first is {missing[0]}; fetch them or correct data_prefix'
        )
    if not files:
        raise UserError(f'The annotation file {path} is empty; list the images in it')
    return files


def class_folders(dataset: Dataset) -> tuple[str, ...]:
    """Return the names of the class folders, sorted."""
    require_folder(dataset.images, 'image')
    folders = tuple(sorted(e.name for e in os.scandir(dataset.images) if e.is_dir()))
    if not folders:
        raise UserError(
            f'{dataset.images} has no class folders; put one folder per class there or correct '
            'data_root and data_prefix'
        )
    return folders
