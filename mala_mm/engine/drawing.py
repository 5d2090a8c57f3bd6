"""Pictures of predictions: lines and letters grow with the picture."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import cv2
import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

SMALLEST = 480  # pixels of the longer side, to which smaller pictures are enlarged
Colour = tuple[int, int, int]


def palette(count: int) -> list[Colour]:
    """Return colours (R, G, B) that are easy to tell apart.

    Args:
        count (int): How many; neighbours in the list are far apart on the colour wheel.
    """
    colours = []
    for i in range(count):
        rgb = colorsys.hsv_to_rgb(
            (0.02 + i * 0.618034) % 1, (0.75, 0.9)[i % 2], (0.95, 0.75)[i % 2]
        )
        colours.append(tuple(round(255 * c) for c in rgb))
    return colours


def enlarge(image: np.ndarray) -> tuple[np.ndarray, int]:
    """Enlarge a small picture by a whole number, and return that number too.

    Args:
        image (ndarray): uint8 of shape (H, W, 3).
    """
    factor = math.ceil(SMALLEST / max(image.shape[:2]))
    if factor == 1:
        return image.copy(), 1
    size = (image.shape[1] * factor, image.shape[0] * factor)
    return cv2.resize(image, size, interpolation=cv2.INTER_CUBIC), factor


def draw_instances(
    image: np.ndarray,
    boxes: np.ndarray,
    labels: Sequence[str],
    colours: Sequence[Colour],
    masks: np.ndarray | None = None,
) -> np.ndarray:
    """Draw boxes, masks and what they show.

    Args:
        image (ndarray): uint8 RGB of shape (H, W, 3).
        boxes (ndarray): (n, 4), x1, y1, x2, y2 in pixels; those drawn last lie on top.
        labels (Sequence[str]): What to write at each.
        colours (Sequence[Colour]): One (R, G, B) each.
        masks (ndarray, optional): bool of shape (n, H, W).

    Returns:
        ndarray: uint8 RGB; small pictures are enlarged.
    """
    canvas, factor = enlarge(image)
    unit = _unit(canvas)
    width = max(1, round(2 * unit))
    for i, colour in enumerate(colours if masks is not None else ()):
        mask = masks[i].astype(np.uint8)
        if factor > 1:
            mask = cv2.resize(mask, canvas.shape[1::-1], interpolation=cv2.INTER_NEAREST)
        inside = mask > 0
        canvas[inside] = (0.6 * canvas[inside] + 0.4 * np.array(colour)).astype(np.uint8)
        outlines, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(canvas, outlines, -1, colour, width, cv2.LINE_AA)
    corners = np.round(np.asarray(boxes).reshape(-1, 4) * factor).astype(int)
    if masks is None:
        for (x1, y1, x2, y2), colour in zip(corners, colours):
            cv2.rectangle(canvas, (x1, y1), (x2, y2), colour, width, cv2.LINE_AA)
    tags = [
        ((x1, y1), text, colour) for (x1, y1, *_), text, colour in zip(corners, labels, colours)
    ]
    return _write(canvas, tags, unit)


def draw_label_map(
    image: np.ndarray, labels: np.ndarray, names: Sequence[str], colours: Sequence[Colour]
) -> np.ndarray:
    """Colour the pixels by class, and write the names of large classes on them.

    Args:
        image (ndarray): uint8 RGB of shape (H, W, 3).
        labels (ndarray): Class indices of shape (H, W); others than those of ``names`` stay bare.
        names (Sequence[str]): Of the classes.
        colours (Sequence[Colour]): One (R, G, B) each.

    Returns:
        ndarray: uint8 RGB; small pictures are enlarged.
    """
    canvas, _ = enlarge(image)
    labels = cv2.resize(
        labels.astype(np.uint16), canvas.shape[1::-1], interpolation=cv2.INTER_NEAREST
    )
    known = labels < len(names)
    table = np.array([*colours, (0, 0, 0)], np.float32)
    overlay = table[np.where(known, labels, len(names))]
    canvas[known] = (0.45 * canvas[known] + 0.55 * overlay[known]).astype(np.uint8)
    tags = []
    for index in np.unique(labels[known]):
        region = np.pad(labels == index, 1).astype(np.uint8)
        if region.mean() > 0.01:
            depth = cv2.distanceTransform(region, cv2.DIST_L2, 3)[1:-1, 1:-1]
            y, x = np.unravel_index(depth.argmax(), depth.shape)
            tags.append(((int(x), int(y)), names[index], colours[index]))
    return _write(canvas, tags, _unit(canvas), centred=True)


def draw_lines(image: np.ndarray, lines: Sequence[str]) -> np.ndarray:
    """Write lines into the upper left corner.

    Args:
        image (ndarray): uint8 RGB of shape (H, W, 3).
        lines (Sequence[str]): One below the other.

    Returns:
        ndarray: uint8 RGB; small pictures are enlarged.
    """
    canvas, _ = enlarge(image)
    unit = _unit(canvas)
    step = _font(unit).size * 3 // 2
    tags = [((0, (i + 1) * step), line, (30, 30, 30)) for i, line in enumerate(lines)]
    return _write(canvas, tags, unit)


def _unit(image: np.ndarray) -> float:
    """Return how much larger a picture is than one of 640 x 480."""
    return math.sqrt(image.shape[0] * image.shape[1] / (640 * 480))


def _font(unit: float) -> ImageFont.FreeTypeFont:
    return _load_font(max(11, round(14 * unit)))


@lru_cache(maxsize=8)
def _load_font(size: int) -> ImageFont.FreeTypeFont:
    # Brought by matplotlib; it has the letters of most languages.
    return ImageFont.truetype(
        str(Path(matplotlib.get_data_path(), 'fonts/ttf/DejaVuSans.ttf')), size
    )


def _write(
    image: np.ndarray,
    tags: Sequence[tuple[tuple[int, int], str, Colour]],
    unit: float,
    centred: bool = False,
) -> np.ndarray:
    """Write tags with their lower left corner, or their centre, at a place; all stay inside."""
    picture = Image.fromarray(image)
    draw, font = ImageDraw.Draw(picture), _font(unit)
    pad = max(1, round(font.size / 6))
    for (x, y), text, colour in tags:
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        width, height = right - left + 2 * pad, bottom - top + 2 * pad
        x, y = (x - width // 2, y - height // 2) if centred else (x, y - height)
        x = max(0, min(x, picture.width - width))
        y = max(0, min(y, picture.height - height))
        draw.rectangle((x, y, x + width - 1, y + height - 1), fill=tuple(colour))
        light = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 140
        place = (x + pad - left, y + pad - top)
        draw.text(place, text, font=font, fill=(0, 0, 0) if light else (255, 255, 255))
    return np.asarray(picture)
