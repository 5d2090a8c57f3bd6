"""Whether image files can be read whole, and in which frame training sees them.

Training decodes with OpenCV, which turns an image by its EXIF orientation, so that boxes belong to
the turned frame; makes grayscale, palette and CMYK images BGR, and 16 bits 8; and fills what a
truncated JPEG lacks with gray, without an error.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .annotations import Finding

MAX_DECODED = 10**8  # pixels; of larger images the checker reads the header alone
ORIENTATION = 0x0112  # the EXIF tag


def incomplete(data: bytes) -> str | None:
    """Say what an image file lacks, or None: of empty files and of truncated JPEG and PNG."""
    if not data:
        return 'the file is empty'
    # No marker can occur by chance in JPEG's coded data: the last scan ends with the last marker.
    if data.startswith(b'\xff\xd8') and data.rfind(b'\xff\xd9') < max(data.rfind(b'\xff\xda'), 2):
        return 'the JPEG is truncated'
    if data.startswith(b'\x89PNG') and b'IEND' not in data:
        return 'the PNG is truncated'
    return None


def inspect_image(path: Path) -> tuple[tuple[int, int] | None, list[tuple[str, str]]]:
    """Read an image as training does.

    Returns:
        Its (width, height) in training, None if it cannot be read; and (kind, message) of what is
        to be said of it: ``unreadable-image``, ``exif-rotated``, ``unusual-mode``.
    """
    import cv2
    import numpy as np
    from PIL import Image

    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        return None, [('unreadable-image', str(error))]
    reason = incomplete(data)
    if reason:
        return None, [('unreadable-image', reason)]
    size, orientation, mode = None, 1, ''
    try:
        with Image.open(io.BytesIO(data)) as file:
            size, mode = file.size, file.mode
            orientation = file.getexif().get(ORIENTATION, 1)
    except Exception:  # Pillow's readers raise anything; OpenCV has the last word
        pass
    if size is None or size[0] * size[1] <= MAX_DECODED:
        try:
            decoded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        except cv2.error as error:
            decoded, reason = None, ' '.join(str(error).split())
        if decoded is None:
            return None, [('unreadable-image', reason or 'it cannot be decoded')]
        size = decoded.shape[1::-1]
    remarks = []
    if orientation in range(2, 9):
        text = f'EXIF orientation {orientation}: training turns it, and boxes have to be in the '
        remarks.append(('exif-rotated', f'{text}turned frame, {size[0]}x{size[1]}'))
    if mode not in ('RGB', 'L', ''):
        remarks.append(('unusual-mode', f'mode {mode}, which training reads as 8-bit BGR'))
    return size, remarks


def inspect_images(folder: Path, images: Iterable[Any]) -> Iterator[Finding]:
    """Look up and decode the images of an annotation file.

    Yields:
        ``missing-image``, ``wrong-size`` and what :func:`inspect_image` says.
    """
    from .coco import missing_files

    named = [e for e in images if isinstance(e, dict) and isinstance(e.get('file_name'), str)]
    missing = set(missing_files(folder, [image['file_name'] for image in named]))
    present = (image for image in named if image['file_name'] not in missing)
    with ThreadPoolExecutor() as pool:
        read = pool.map(inspect_image, [folder / image['file_name'] for image in present])
        for image in named:
            where, path = f'image {image.get("id")}', folder / image['file_name']
            if image['file_name'] in missing:
                yield Finding('missing-image', where, f'{str(path)!r} does not exist')
                continue
            size, remarks = next(read)
            for kind, text in remarks:
                yield Finding(kind, where, f'{path}: {text}')
            stated = image.get('width'), image.get('height')
            if size is not None and stated != size and None not in stated:
                found = f'{path} has {size[0]}x{size[1]} pixels'
                text = f'{found}, the file says {stated[0]}x{stated[1]}'
                yield Finding('wrong-size', where, text)
