"""Reading COCO annotation files: whatever the bytes, content or one sentence."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from mala_mm.errors import UserError

from .annotations import Finding, inspect_content, shown

BYTE_ORDER_MARKS = (b'\xef\xbb\xbf', b'\xff\xfe', b'\xfe\xff')


class CocoSummary(NamedTuple):
    """What a run has to know about an annotation file.

    Attributes:
        categories: names of the categories.
        file_names: names of the image files, as far as images have one.
        findings: the faults, as :func:`mala_mm.data.annotations.inspect_content` lists them.
        num_annotations: number of annotations.
        outlined: number of annotations with a segmentation.
        without_outline: the place of the first annotation without one, or None.
        without_iscrowd: the place of the first annotation without that field, or None.
        largest: the shorter side of the image whose shorter side is longest, 0 if there is none.
    """

    categories: tuple[str, ...]
    file_names: tuple[str, ...]
    findings: tuple[Finding, ...]
    num_annotations: int
    outlined: int
    without_outline: str | None
    without_iscrowd: str | None
    largest: int


def read_coco(ann_file: str | os.PathLike) -> dict[str, Any]:
    """Parse an annotation file.

    Raises:
        UserError: it is missing, no JSON, or lacks the lists of images or categories.
    """
    path = Path(ann_file)
    if not path.is_file():
        raise UserError(
            f'The annotation file {path} does not exist; put it there or correct ann_file and '
            'data_root'
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f'The annotation file {path} cannot be read ({error}); correct its permissions'
        ) from None
    if data.startswith(BYTE_ORDER_MARKS):  # pycocotools opens the file as plain text
        raise UserError(
            f'The annotation file {path} starts with a byte-order mark; save it as UTF-8 without '
            'one'
        )
    try:
        content = json.loads(data.decode('utf-8'))
    # JSON and encoding errors, and numbers with thousands of digits, are all ValueErrors.
    except (ValueError, RecursionError) as error:
        why = 'nested too deeply' if isinstance(error, RecursionError) else error
        raise UserError(
            f'The annotation file {path} is not valid JSON ({why}); fetch or export it again'
        ) from None
    for key in ('images', 'categories'):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise UserError(
                f'The annotation file {path} has no list {key!r}, so it is not in COCO format; '
                'convert it or correct ann_file'
            )
    annotations = content.get('annotations', [])
    if not isinstance(annotations, list):
        raise UserError(
            f'The annotation file {path} has annotations={shown(annotations)}, which is no list; '
            'write a list, an empty one if there are none'
        )
    return content


def summarize_coco(ann_file: str | os.PathLike) -> CocoSummary:
    """Return what a run has to know; kept, so that asking twice parses once.

    Raises:
        UserError: as :func:`read_coco`.
    """
    path = Path(ann_file)
    if not path.is_file():
        read_coco(path)
    stat = path.stat()
    return _summarize(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _summarize(path: Path, mtime: int, size: int) -> CocoSummary:
    with _no_collection():
        return _summary(read_coco(path))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from looking for cycles, which parsed files have none of.

    It would go through millions of entries again and again, for half of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _summary(content: dict[str, Any]) -> CocoSummary:
    annotations = content.get('annotations', [])
    bare = [i for i, ann in enumerate(annotations) if not _field(ann, 'segmentation')]
    uncertain = (i for i, ann in enumerate(annotations) if _field(ann, 'iscrowd') is None)
    first_uncertain = next(uncertain, None)
    findings = tuple(inspect_content(content))
    sides = (min(_field(e, 'width'), _field(e, 'height')) for e in content['images'])
    return CocoSummary(
        tuple(str(_field(entry, 'name')) for entry in content['categories']),
        tuple(name for e in content['images'] if isinstance(name := _field(e, 'file_name'), str)),
        findings,
        len(annotations),
        len(annotations) - len(bare),
        f'annotations[{bare[0]}]' if bare else None,
        None if first_uncertain is None else f'annotations[{first_uncertain}]',
        max(sides, default=0) if all(f.tolerated for f in findings) else 0,
    )


def _field(entry: Any, name: str) -> Any:
    return entry.get(name) if isinstance(entry, dict) else None


def missing_files(folder: str | os.PathLike, names: Iterable[str]) -> list[str]:
    """Those of ``names`` (relative paths) that are not in ``folder``; lists each folder once."""
    present: dict[str, set[str]] = {}
    missing = []
    for name in names:
        parent, base = os.path.split(name)
        if parent not in present:
            try:
                present[parent] = set(os.listdir(os.path.join(folder, parent)))
            except (OSError, ValueError):  # ValueError: what no path can hold, such as a NUL
                present[parent] = set()
        if base not in present[parent]:
            missing.append(name)
    return missing


def validate_coco(
    ann_file: str | os.PathLike, image_dir: str | os.PathLike | None = None
) -> list[Finding]:
    """List the faults of an annotation file.

    Args:
        ann_file: the file.
        image_dir: with it, the images are looked up and read.

    Returns:
        The findings of :func:`mala_mm.data.annotations.inspect_content` and
        ``missing-segmentation`` where only some annotations have one; with ``image_dir`` also
        those of :func:`mala_mm.data.images.inspect_images`.

    Raises:
        UserError: the file cannot be read as COCO at all, or ``image_dir`` does not exist.
    """
    from .images import inspect_images

    summary = summarize_coco(ann_file)
    findings = list(summary.findings)
    if summary.outlined and summary.without_outline:
        lacking = summary.num_annotations - summary.outlined
        text = f'{lacking} of {summary.num_annotations} annotations have none, this is the first'
        findings.append(Finding('missing-segmentation', summary.without_outline, text))
    if image_dir is not None:
        if not Path(image_dir).is_dir():
            raise UserError(f'The image folder {image_dir} does not exist; correct the path')
        findings += inspect_images(Path(image_dir), read_coco(ann_file)['images'])
    return findings
