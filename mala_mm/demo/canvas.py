"""A small canvas with premultiplied alpha, on which :mod:`.shapes` paints its objects."""

from __future__ import annotations

import colorsys

import cv2
import numpy as np
from numpy.random import Generator

Colour = np.ndarray | tuple[float, float, float]


class Canvas:
    """A square image with premultiplied alpha, painted part by part.

    Args:
        size: side in pixels.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rgba = np.zeros((size, size, 4), np.float32)
        axis = (np.arange(size, dtype=np.float32) + 0.5) * (2 / size) - 1
        self.x, self.y = np.meshgrid(axis, axis)

    def paint(self, cover: np.ndarray, colour: Colour) -> None:
        """Lays a colour, or a texture (size, size, 3), over the covered part (size, size)."""
        self._over((slice(None), slice(None)), cover, colour)

    def polygon(self, points, colour: Colour, cover: float = 1.0) -> None:
        """Fill a polygon given as (x, y) pairs."""
        pixels = (np.float32(points) + 1) * (self.size / 2) - 0.5
        self._fill(pixels, colour, cover)

    def rectangle(self, x0: float, y0: float, x1: float, y1: float, colour: Colour) -> None:
        """Fill a rectangle between two corners, in canvas units."""
        self.polygon([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], colour)

    def ellipse(self, x: float, y: float, rx: float, ry: float, colour: Colour, cover=1.0) -> None:
        """Fill an ellipse about (x, y), in canvas units."""
        angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
        self.polygon(np.stack([x + rx * np.cos(angle), y + ry * np.sin(angle)], 1), colour, cover)

    def line(self, points, width: float, colour: Colour) -> None:
        """Draws a polyline; ``width`` in canvas units."""
        for (x0, y0), (x1, y1) in zip(points[:-1], points[1:], strict=True):
            length = max(np.hypot(x1 - x0, y1 - y0), 1e-6)
            nx, ny = (y0 - y1) / length * width / 2, (x1 - x0) / length * width / 2
            self.polygon(
                [(x0 + nx, y0 + ny), (x1 + nx, y1 + ny), (x1 - nx, y1 - ny), (x0 - nx, y0 - ny)],
                colour,
            )

    def shade(self, factor: np.ndarray) -> None:
        """Multiplies the colours by a field (size, size)."""
        self.rgba[..., :3] *= factor[..., None]

    def _fill(self, pixels: np.ndarray, colour: Colour, cover: float) -> None:
        low = np.clip(np.floor(pixels.min(0)).astype(int) - 1, 0, self.size)
        high = np.clip(np.ceil(pixels.max(0)).astype(int) + 2, 0, self.size)
        if (high <= low).any():
            return
        mask = np.zeros((high[1] - low[1], high[0] - low[0]), np.uint8)
        corners = np.round((pixels - low) * 16).astype(np.int32)
        cv2.fillPoly(mask, [corners], 255, cv2.LINE_AA, shift=4)
        window = (slice(low[1], high[1]), slice(low[0], high[0]))
        self._over(window, mask * np.float32(cover / 255), colour)

    def _over(self, window, cover: np.ndarray, colour: Colour) -> None:
        colour = np.asarray(colour, np.float32)
        if colour.ndim == 3:
            colour = colour[window]
        target = self.rgba[window]
        target *= 1 - cover[..., None]
        target[..., :3] += cover[..., None] * colour
        target[..., 3] += cover


def edge(inside: np.ndarray, size: int) -> np.ndarray:
    """Coverage from the signed distance to an outline, in canvas units."""
    return np.clip(inside * (size / 2) + 0.5, 0, 1)


def trim(rgba: np.ndarray) -> np.ndarray:
    """Crops the empty borders off."""
    rows = np.flatnonzero(rgba[..., 3].max(1) > 0.02)
    cols = np.flatnonzero(rgba[..., 3].max(0) > 0.02)
    return rgba[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]


def vivid(rng: Generator, value: tuple[float, float] = (0.6, 0.98)) -> np.ndarray:
    """Return a saturated colour of any hue."""
    return np.float32(
        colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.5, 0.95), rng.uniform(*value))
    )


def any_colour(rng: Generator) -> np.ndarray:
    """Mostly vivid, sometimes white, grey or nearly black."""
    if rng.random() < 0.75:
        return vivid(rng)
    return np.float32(rng.choice([0.95, 0.7, 0.35, 0.16])) * np.float32(rng.uniform(0.94, 1.0, 3))
