"""Reading COCO annotation files with clear errors, and listing what is wrong inside them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from mala_mm.errors import UserError

BOUNDS_TOLERANCE = 1.0  # pixels; COCO's own boxes are rounded to a hundredth


class CocoSummary(NamedTuple):
    """What a training run has to know about an annotation file."""

    categories: tuple[str, ...]
    file_names: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """One fault in an annotation file.

    Attributes:
        kind: short name of the fault, such as 'zero-area'.
        where: what is at fault, such as 'annotation 17'.
        message: what is wrong with it.
    """

    kind: str
    where: str
    message: str

    def __str__(self) -> str:
        return f'{self.kind}: {self.where}: {self.message}'


def read_coco(ann_file: str | os.PathLike) -> dict[str, Any]:
    """Parses an annotation file.

    Raises:
        UserError: it is missing, no JSON, or lacks the lists of images or categories.
    """
    path = Path(ann_file)
    if not path.is_file():
        raise UserError(
            f'The annotation file {path} does not exist; put it there or correct ann_file and '
            'data_root.'
        )
    try:
        content = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f'The annotation file {path} is not valid JSON ({error}); fetch or export it again.'
        ) from None
    for key in ('images', 'categories'):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise UserError(
                f'The annotation file {path} has no list {key!r}, so it is not in COCO format; '
                'convert it or correct ann_file.'
            )
    return content


def summarize_coco(ann_file: str | os.PathLike) -> CocoSummary:
    """Names of the categories and of the image files; kept, so that asking twice parses once.

    Raises:
        UserError: as :func:`read_coco`, or an entry has no name.
    """
    path = Path(ann_file)
    if not path.is_file():
        read_coco(path)
    stat = path.stat()
    return _summarize(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _summarize(path: Path, mtime: int, size: int) -> CocoSummary:
    content = read_coco(path)
    try:
        categories = tuple(str(entry['name']) for entry in content['categories'])
        # LVIS names its images by URL alone.
        names = tuple(
            e['file_name'] for e in content['images'] if 'coco_url' not in e or 'file_name' in e
        )
    except (KeyError, TypeError):
        raise UserError(
            f'The annotation file {path} has categories without a name or images without a '
            'file_name; run tools/check_dataset.py on it and fix the entries.'
        ) from None
    return CocoSummary(categories, names)


def missing_files(folder: str | os.PathLike, names: Iterable[str]) -> list[str]:
    """Those of ``names`` (relative paths) that are not in ``folder``; lists each folder once."""
    present: dict[str, set[str]] = {}
    missing = []
    for name in names:
        parent, base = os.path.split(name)
        if parent not in present:
            try:
                present[parent] = set(os.listdir(os.path.join(folder, parent)))
            except OSError:
                present[parent] = set()
        if base not in present[parent]:
            missing.append(name)
    return missing


def validate_coco(
    ann_file: str | os.PathLike, image_dir: str | os.PathLike | None = None
) -> list[Finding]:
    """Lists the faults of an annotation file.

    Args:
        ann_file: the JSON file.
        image_dir: with it, the images are looked up, and their headers read.

    Returns:
        Findings of these kinds. Identity: ``duplicate-id``, ``unknown-image``,
        ``unknown-category``, ``missing-field``. Geometry: ``zero-area``, ``out-of-bounds``,
        ``degenerate-polygon``, ``bad-rle``, ``crowd-without-rle``. Files: ``missing-image``,
        ``unreadable-image``, ``wrong-size``.

    Raises:
        UserError: the file cannot be read as COCO at all, or ``image_dir`` does not exist.
    """
    content = read_coco(ann_file)
    if image_dir is not None and not Path(image_dir).is_dir():
        raise UserError(f'The image folder {image_dir} does not exist; correct the path.')
    findings = []
    images, categories = {}, {}
    for name, table in (('image', images), ('category', categories)):
        key = {'image': 'images', 'category': 'categories'}[name]
        wanted = ('id', 'file_name', 'height', 'width') if name == 'image' else ('id', 'name')
        for number, entry in enumerate(content[key]):
            gaps = [field for field in wanted if not isinstance(entry, dict) or field not in entry]
            where = f'{name} {entry["id"]}' if 'id' not in gaps else f'{key}[{number}]'
            if gaps:
                findings.append(Finding('missing-field', where, f'has no {", ".join(gaps)}'))
            if 'id' in gaps:
                continue
            if entry['id'] in table:
                findings.append(Finding('duplicate-id', where, 'is defined more than once'))
            table[entry['id']] = entry
    if image_dir is not None:
        findings += _check_images(Path(image_dir), images.values())
    seen = set()
    for number, ann in enumerate(content.get('annotations', [])):
        known = isinstance(ann, dict) and 'id' in ann
        where = f'annotation {ann["id"]}' if known else f'annotations[{number}]'
        wanted = ('id', 'image_id', 'category_id', 'bbox', 'area')
        gaps = [field for field in wanted if not isinstance(ann, dict) or field not in ann]
        if gaps:
            findings.append(Finding('missing-field', where, f'has no {", ".join(gaps)}'))
            continue
        if ann['id'] in seen:
            findings.append(Finding('duplicate-id', where, 'is defined more than once'))
        seen.add(ann['id'])
        image = images.get(ann['image_id'])
        if image is None:
            findings.append(Finding('unknown-image', where, f'image_id {ann["image_id"]}'))
        if ann['category_id'] not in categories:
            text = f'category_id {ann["category_id"]}'
            findings.append(Finding('unknown-category', where, text))
        size = None
        if image is not None and 'height' in image and 'width' in image:
            size = image['height'], image['width']
        findings += [Finding(kind, where, text) for kind, text in _check_shape(ann, size)]
    return findings


def _check_images(folder: Path, images: Iterable[dict]) -> list[Finding]:
    from PIL import Image, UnidentifiedImageError

    findings = []
    images = [image for image in images if 'file_name' in image]
    missing = set(missing_files(folder, [image['file_name'] for image in images]))
    for image in images:
        where, path = f'image {image["id"]}', folder / image['file_name']
        if image['file_name'] in missing:
            findings.append(Finding('missing-image', where, f'{path} does not exist'))
            continue
        try:
            with Image.open(path) as file:
                width, height = file.size
        except (UnidentifiedImageError, OSError) as error:
            findings.append(Finding('unreadable-image', where, f'{path}: {error}'))
            continue
        stated = (image.get('width'), image.get('height'))
        if stated != (width, height) and None not in stated:
            text = f'{path} has {width}x{height} pixels, the file says {stated[0]}x{stated[1]}'
            findings.append(Finding('wrong-size', where, text))
    return findings


def _check_shape(ann: dict, size: tuple[int, int] | None) -> Iterator[tuple[str, str]]:
    """Yields (kind, message) for the box, area and outline; ``size`` is the image's (H, W)."""
    box, area = ann['bbox'], ann['area']
    if not _numbers(box, 4) or not _numbers([area], 1):
        yield 'zero-area', f'bbox {box} and area {area} must be finite numbers'
        return
    x, y, w, h = box
    if w < 1 or h < 1 or area <= 0:
        yield 'zero-area', f'bbox {box}, area {area}; boxes under one pixel are left out'
    if size is not None:
        height, width = size
        slack = BOUNDS_TOLERANCE
        if min(x, y) < -slack or x + w > width + slack or y + h > height + slack:
            yield 'out-of-bounds', f'bbox {box} in an image of {width}x{height}'
    outline = ann.get('segmentation')
    if outline is None or outline == []:
        if ann.get('iscrowd'):
            yield 'crowd-without-rle', 'iscrowd is 1 and there is no segmentation'
        return
    if isinstance(outline, list):
        if ann.get('iscrowd'):
            yield 'crowd-without-rle', 'iscrowd is 1 and the segmentation is a polygon'
        yield from _check_polygons(outline, size)
    else:
        yield from _check_rle(outline, size)


def _check_polygons(polygons: list, size: tuple[int, int] | None) -> Iterator[tuple[str, str]]:
    for points in polygons:
        if not isinstance(points, list) or len(points) < 6 or len(points) % 2:
            count = len(points) if isinstance(points, list) else type(points).__name__
            yield 'degenerate-polygon', f'{count} numbers; an outline has at least 3 pairs'
            continue
        if not _numbers(points, len(points)):
            yield 'degenerate-polygon', 'coordinates are not finite numbers'
            continue
        xs, ys = points[0::2], points[1::2]
        doubled = sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs)))
        if abs(doubled) < 1e-6:
            yield 'degenerate-polygon', f'{len(xs)} points enclose no area'
        if size is not None:
            low, right, bottom = min(xs + ys), max(xs) - size[1], max(ys) - size[0]
            if max(-low, right, bottom) > BOUNDS_TOLERANCE:
                yield 'out-of-bounds', f'the polygon leaves an image of {size[1]}x{size[0]}'


def _check_rle(outline: Any, size: tuple[int, int] | None) -> Iterator[tuple[str, str]]:
    if not isinstance(outline, dict) or {'counts', 'size'} - set(outline):
        yield 'bad-rle', 'run lengths need counts and size'
        return
    if size is not None and list(outline['size']) != list(size):
        yield 'bad-rle', f'size {outline["size"]} for an image of {list(size)} (height, width)'
    counts = outline['counts']
    if isinstance(counts, list) and sum(counts) != math.prod(outline['size']):
        yield 'bad-rle', f'counts sum to {sum(counts)}, size {outline["size"]} has other'


def _numbers(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)
    )
