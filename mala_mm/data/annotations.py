"""What may be wrong inside a COCO annotation file, entry by entry.

Nothing here trusts a value before its type was looked at, and nothing is handed to pycocotools,
whose C code does not return from NaN and reads beyond its buffers in broken run lengths.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

BOUNDS_TOLERANCE = 1.0  # pixels; COCO's own boxes are rounded to a hundredth
MAX_PIXELS = 2**30  # OpenCV refuses to decode larger images
MAX_ID = 2**63  # NumPy's integers

# What training copes with: mmdet leaves such annotations out, or uses them as they are. All other
# findings end in an exception, a hang, or wrong boxes.
TOLERATED = frozenset(
    [
        *('unknown-image', 'unknown-category', 'no-annotations', 'missing-segmentation'),
        *('zero-area', 'out-of-bounds', 'degenerate-polygon', 'short-polygon'),
        *('crowd-without-rle', 'exif-rotated', 'unusual-mode'),
    ]
)


@dataclass(frozen=True)
class Finding:
    """One fault in an annotation file or of an image.

    Attributes:
        kind: short name of the fault, such as 'zero-area'.
        where: what is at fault, such as 'annotation 17'.
        message: what is wrong with it.
    """

    kind: str
    where: str
    message: str

    @property
    def tolerated(self) -> bool:
        """Whether training copes with it."""
        return self.kind in TOLERATED

    def __str__(self) -> str:
        return f'{self.kind}: {self.where}: {self.message}'


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_UNPRINTABLE = re.compile('[\x00-\x1f\x7f\ud800-\udfff]')


def shown(value: Any) -> str:
    """Return a value as a sentence can hold it: short and on one line."""
    return _short.repr(value)


def _is_integer(value: Any) -> bool:
    return type(value) is int and -MAX_ID <= value < MAX_ID


def _is_side(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_PIXELS


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != '' and not _UNPRINTABLE.search(value)


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return -MAX_ID <= value < MAX_ID
    return type(value) is float and math.isfinite(value)


def _is_box(value: Any) -> bool:
    return type(value) is list and len(value) == 4 and all(map(_is_number, value))


def _is_flag(value: Any) -> bool:
    return value is None or value in (0, 1)


def _is_outline(value: Any) -> bool:
    return value is None or isinstance(value, (list, dict))


class _Field(NamedTuple):
    accepts: Callable[[Any], bool]
    wanted: str
    required: bool = True


_ID = _Field(_is_integer, 'an integer')
FIELDS = dict(
    images=dict(
        id=_ID,
        file_name=_Field(_is_text, 'the name of a file'),
        height=_Field(_is_side, 'a positive integer'),
        width=_Field(_is_side, 'a positive integer'),
    ),
    categories=dict(id=_ID, name=_Field(_is_text, 'a text')),
    annotations=dict(
        id=_ID,
        image_id=_ID,
        category_id=_ID,
        bbox=_Field(_is_box, 'four finite numbers [x, y, width, height]'),
        area=_Field(_is_number, 'a finite number'),
        iscrowd=_Field(_is_flag, '0 or 1', required=False),
        ignore=_Field(_is_flag, '0 or 1', required=False),
        segmentation=_Field(_is_outline, 'polygons or run lengths', required=False),
    ),
)
SINGULAR = dict(images='image', categories='category', annotations='annotation')


def inspect_content(content: dict[str, Any]) -> Iterator[Finding]:
    """Find the faults of a parsed file with the lists ``images`` and ``categories``.

    Yields:
        Findings of these kinds. Form: ``missing-field``, ``wrong-type``. Identity:
        ``duplicate-id``, ``duplicate-name``, ``unknown-image``, ``unknown-category``,
        ``no-annotations``. Geometry: ``zero-area``, ``out-of-bounds``, ``far-out-of-bounds``,
        ``degenerate-polygon``, ``short-polygon``, ``bad-polygon``, ``bad-rle``, ``bad-size``,
        ``crowd-without-rle``.
    """
    tables: dict[str, dict[int, dict]] = {}
    for key in ('images', 'categories'):
        table = tables[key] = {}
        for number, entry in enumerate(content[key]):
            where, faults = _check_fields(key, number, entry)
            yield from faults
            if not isinstance(entry, dict) or not _is_integer(entry.get('id')):
                continue
            if entry['id'] in table:
                yield Finding('duplicate-id', where, 'is defined more than once')
            table[entry['id']] = entry if not faults else {}
            pixels = entry['width'] * entry['height'] if key == 'images' and not faults else 0
            if pixels > MAX_PIXELS:
                yield Finding('bad-size', where, f'{pixels} pixels are more than 2^30')
    names: set[str] = set()
    for number, entry in enumerate(content['categories']):
        name = entry.get('name') if isinstance(entry, dict) else None
        if isinstance(name, str):
            if name in names:
                text = f'the name {shown(name)} is taken by another category'
                yield Finding('duplicate-name', f'categories[{number}]', text)
            names.add(name)
    annotations = content.get('annotations', [])
    if 'annotations' in content and not annotations:
        yield Finding('no-annotations', 'annotations', 'there are none')
    seen: set[int] = set()
    for number, ann in enumerate(annotations):
        if isinstance(ann, dict) and 'segments_info' in ann:
            continue  # the panoptic format has other fields
        where, faults = _check_fields('annotations', number, ann)
        yield from faults
        if not isinstance(ann, dict):
            continue
        if _is_integer(ann.get('id')):
            if ann['id'] in seen:
                yield Finding('duplicate-id', where, 'is defined more than once')
            seen.add(ann['id'])
        if faults:
            continue
        image = tables['images'].get(ann['image_id'])
        if image is None:
            yield Finding('unknown-image', where, f'image_id {ann["image_id"]}')
        if ann['category_id'] not in tables['categories']:
            yield Finding('unknown-category', where, f'category_id {ann["category_id"]}')
        size = (image['height'], image['width']) if image else None
        for kind, text in _check_shape(ann, size):
            yield Finding(kind, where, text)


def _check_fields(key: str, number: int, entry: Any) -> tuple[str, list[Finding]]:
    """Return the place of an entry, and which of its fields are missing or of the wrong type."""
    where = f'{key}[{number}]'
    if type(entry) is not dict:
        return where, [Finding('wrong-type', where, f'is {shown(entry)}, not an object')]
    if _is_integer(entry.get('id')):
        where = f'{SINGULAR[key]} {entry["id"]}'
    faults, gaps = [], []
    for name, field in FIELDS[key].items():
        if name not in entry:
            # LVIS names its images by URL alone.
            if field.required and not (name == 'file_name' and 'coco_url' in entry):
                gaps.append(name)
        elif not field.accepts(entry[name]):
            text = f'{name} is {shown(entry[name])}, not {field.wanted}'
            faults.append(Finding('wrong-type', where, text))
    if gaps:
        faults.append(Finding('missing-field', where, f'has no {", ".join(gaps)}'))
    return where, faults


def _check_shape(ann: dict, size: tuple[int, int] | None) -> Iterator[tuple[str, str]]:
    """Yield (kind, message) for the box, area and outline; ``size`` is the image's (H, W)."""
    (x, y, w, h), area = ann['bbox'], ann['area']
    if w < 1 or h < 1 or area <= 0:
        yield (
            'zero-area',
            f'bbox {shown(ann["bbox"])}, area {area}; boxes under one pixel are left out',
        )
    if size is not None:
        outside = _outside(min(x, y), x + w - size[1], y + h - size[0], size)
        if outside:
            yield outside, f'bbox {ann["bbox"]} in an image of {size[1]}x{size[0]}'
    outline = ann.get('segmentation')
    if outline is None or outline == []:
        if ann.get('iscrowd'):
            yield 'crowd-without-rle', 'iscrowd is 1 and there is no segmentation'
    elif isinstance(outline, list):
        if ann.get('iscrowd'):
            yield 'crowd-without-rle', 'iscrowd is 1 and the segmentation is a polygon'
        yield from _check_polygons(outline, size)
    else:
        fault = check_rle(outline, size)
        if fault:
            yield 'bad-rle', fault


def _outside(low: float, right: float, bottom: float, size: tuple[int, int]) -> str | None:
    """Return the kind of finding for what leaves an image by so many pixels, or None."""
    most = max(-low, right, bottom)
    if most <= BOUNDS_TOLERANCE:
        return None
    return 'far-out-of-bounds' if most > max(size) else 'out-of-bounds'


def _check_polygons(polygons: list, size: tuple[int, int] | None) -> Iterator[tuple[str, str]]:
    for number, points in enumerate(polygons):
        if type(points) is not list or not all(map(_is_number, points)):
            yield 'bad-polygon', f'{shown(points)} is no list of finite numbers'
            continue
        if len(points) < 6 or len(points) % 2:
            # The first decides how pycocotools reads all of them: four numbers are a box.
            kind = 'short-polygon' if number == 0 else 'degenerate-polygon'
            yield kind, f'{len(points)} numbers; an outline has at least 3 pairs'
            continue
        xs, ys = points[0::2], points[1::2]
        doubled = sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs)))
        if abs(doubled) < 1e-6:
            yield 'degenerate-polygon', f'{len(xs)} points enclose no area'
        if size is not None:
            outside = _outside(min(points), max(xs) - size[1], max(ys) - size[0], size)
            if outside:
                yield outside, f'the polygon leaves an image of {size[1]}x{size[0]}'


def check_rle(outline: dict, size: tuple[int, int] | None) -> str | None:
    """Say what is wrong with run lengths, ``{'size': [H, W], 'counts': [...] or '...'}``, or None.

    Args:
        outline: the run lengths, plain or in pycocotools' compressed form.
        size: height and width of the image, if known.
    """
    stated, counts = outline.get('size'), outline.get('counts')
    if stated is None or counts is None:
        return 'run lengths need counts and size'
    if not (type(stated) is list and len(stated) == 2 and all(map(_is_side, stated))):
        return f'size is {shown(stated)}, not [height, width]'
    if size is not None and tuple(stated) != tuple(size):
        return f'size {stated} for an image of {list(size)} (height, width)'
    if isinstance(counts, str):
        counts = decode_counts(counts)
        if counts is None:
            return 'counts is a text that is no compressed form of run lengths'
    if type(counts) is not list or not all(map(_is_integer, counts)):
        return f'counts is {shown(counts)}, not a list of integers'
    if any(count < 0 for count in counts):
        return 'counts has negative numbers'
    if sum(counts) != math.prod(stated):
        return f'counts sum to {sum(counts)}, size {stated} has {math.prod(stated)} pixels'
    return None


def decode_counts(text: str) -> list[int] | None:
    """Return the run lengths behind pycocotools' compressed text, or None if it is none.

    A number is written in groups of five bits, lowest first, each in one character from '0' on;
    bit 5 says that another group follows, bit 4 of the last group is the sign. From the fourth
    number on, the difference to the number two before is written.
    """
    counts: list[int] = []
    value, shift = 0, 0
    for character in text:
        group = ord(character) - 48
        if not 0 <= group < 64 or shift > 30:
            return None
        value |= (group & 31) << shift
        shift += 5
        if group & 32:
            continue
        if group & 16:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value, shift = 0, 0
    return None if shift else counts
