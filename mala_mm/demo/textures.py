"""Procedural textures and the backdrop (sky, ground, water, walls) of a generated scene.

Everything is float32 RGB in [0, 1] and drawn from the generator that the caller passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.random import Generator

from .classes import STUFF_CLASSES


@dataclass
class Backdrop:
    """What stands behind the objects.

    Attributes:
        image: RGB image, (H, W, 3) float32.
        labels: index in ``STUFF_CLASSES`` of each pixel, (H, W) uint8.
        horizon: row at which the ground begins.
    """

    image: np.ndarray
    labels: np.ndarray
    horizon: float

    def add(self, name: str, texture: np.ndarray, alpha: np.ndarray) -> None:
        """Lays ``texture`` of class ``name`` over the image where ``alpha`` (H, W) says so."""
        self.image += (texture - self.image) * alpha[..., None]
        self.labels[alpha >= 0.5] = STUFF_CLASSES.index(name)


def noise(
    rng: Generator, shape: tuple[int, int], cell: float, octaves: int = 3, stretch: float = 1.0
) -> np.ndarray:
    """Fractal value noise around 0.5.

    Args:
        rng: source of randomness.
        shape: height and width of the result.
        cell: size in pixels of the coarsest lattice cell, vertically.
        octaves: number of lattices; each is twice as fine and half as strong as the one before.
        stretch: width of a cell over its height.
    """
    h, w = shape
    total, weight, gain = np.zeros(shape, np.float32), 0.0, 1.0
    for octave in range(octaves):
        step = cell / 2**octave
        lattice = (int(h / step) + 2, int(w / (step * stretch)) + 2)
        grid = rng.random(lattice, dtype=np.float32)
        total += gain * cv2.resize(grid, (w, h), interpolation=cv2.INTER_CUBIC)
        weight += gain
        gain *= 0.5
    return total / weight


def mix(first, second, amount: np.ndarray) -> np.ndarray:
    """Colours between two; ``amount`` (H, W), clipped to [0, 1], is the second one's share."""
    first, second = np.float32(first), np.float32(second)
    return first + (second - first) * np.clip(amount, 0, 1)[..., None]


def curve(rng: Generator, width: int, level: float, height: float, cell: float) -> np.ndarray:
    """Return a wavy row (width,) around ``level``, as the border between two regions."""
    return level + height * (2 * noise(rng, (1, width), cell, octaves=3)[0] - 1)


def below(rows: np.ndarray, border: np.ndarray) -> np.ndarray:
    """Coverage (H, W) of the pixels under a border, anti-aliased."""
    return np.clip(rows - border[None] + 0.5, 0, 1)


class Ground:
    """Perspective coordinates of a plane that runs from the bottom row to the horizon."""

    def __init__(self, rng: Generator, shape: tuple[int, int], horizon: float) -> None:
        h, w = shape
        self.shape = shape
        rows = np.arange(h, dtype=np.float32)[:, None]
        self.near = np.clip((rows - horizon) / (h - horizon), 0, 1)  # 0 horizon .. 1 bottom
        self.depth = 1 / (self.near + 0.12)
        centre = w * rng.uniform(0.3, 0.7)
        self.x = (np.arange(w, dtype=np.float32)[None] - centre) / h * self.depth
        self.fade = np.sqrt(self.near)  # far away, texture melts into its mean colour

    def sample(self, tile: np.ndarray, across: float, along: float) -> np.ndarray:
        """Look a noise tile up on the plane; the factors set its density."""
        size = tile.shape[0]
        u = self.x * (across * size) + size / 2
        v = np.broadcast_to(self.depth * (along * size), self.shape)
        seen = cv2.remap(
            tile,
            u.astype(np.float32),
            np.ascontiguousarray(v, np.float32),
            cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_REFLECT_101,
        )
        return 0.5 + (seen - 0.5) * self.fade


def sky(rng: Generator, shape: tuple[int, int], horizon: float) -> np.ndarray:
    """Paint a sky with clouds, (H, W, 3), paler towards the row of the horizon."""
    h, w = shape
    tops = ((0.16, 0.38, 0.75), (0.30, 0.52, 0.85), (0.45, 0.50, 0.58), (0.25, 0.28, 0.52))
    lows = ((0.72, 0.86, 0.96), (0.85, 0.92, 0.96), (0.78, 0.79, 0.80), (0.98, 0.72, 0.50))
    kind = rng.choice(4, p=(0.4, 0.3, 0.15, 0.15))
    ramp = np.linspace(0, h / max(horizon, 1), h, dtype=np.float32)[:, None]
    image = mix(tops[kind], lows[kind], np.broadcast_to(ramp**1.2, shape))
    clouds = noise(rng, shape, h * rng.uniform(0.18, 0.35), octaves=5, stretch=2.2)
    cover = np.clip((clouds - rng.uniform(0.46, 0.58)) * rng.uniform(4, 9), 0, 1)
    lit = mix((0.80, 0.81, 0.85), (1.0, 0.99, 0.97), 1.6 * clouds - 0.2)
    return image + (lit - image) * (0.85 * cover)[..., None]


def mountain(rng: Generator, shape: tuple[int, int], ridge: np.ndarray, foot: float) -> np.ndarray:
    """Paint a rocky slope, (H, W, 3), with haze towards its foot."""
    h, w = shape
    rock = noise(rng, shape, h * 0.16, octaves=5, stretch=1.1)
    slope = cv2.Sobel(rock, cv2.CV_32F, 1, 0) + 0.5 * cv2.Sobel(rock, cv2.CV_32F, 0, 1)
    relief = 0.5 + slope * (h / 80)
    base = np.float32(rng.choice([(0.34, 0.36, 0.42), (0.42, 0.36, 0.33), (0.30, 0.40, 0.36)]))
    image = mix(base * 0.65, base * 1.5, 0.55 * relief + 0.45 * rock)
    rows = np.arange(h, dtype=np.float32)[:, None]
    if rng.random() < 0.5:
        top = ridge.min()
        snowline = top + (foot - top) * rng.uniform(0.2, 0.5)
        snow = np.clip((snowline - rows) / 6 + 5 * (rock - 0.5), 0, 1)
        image = image + (mix((0.72, 0.77, 0.86), (1, 1, 1), relief) - image) * snow[..., None]
    haze = np.clip((rows - ridge.min()) / max(foot - ridge.min(), 1), 0, 1) * 0.45
    return mix(image, (0.75, 0.80, 0.86), np.broadcast_to(haze, shape))


def grass(rng: Generator, ground: Ground) -> np.ndarray:
    """Paint a meadow on the ground, (H, W, 3), now and then with flowers."""
    h, w = ground.shape
    dark = np.float32(rng.choice([(0.16, 0.32, 0.10), (0.22, 0.34, 0.10), (0.12, 0.30, 0.14)]))
    light = dark * 1.7 + np.float32((0.16, 0.14, 0.04)) * rng.uniform(0.2, 1.3)
    meadow = ground.sample(noise(rng, (128, 128), 32, octaves=3), 0.35, 0.3)
    blades = noise(rng, ground.shape, 7, octaves=2, stretch=0.3)
    image = mix(dark, light, 0.25 + 0.5 * meadow + 1.1 * (blades - 0.5) * (0.3 + ground.near))
    if rng.random() < 0.4:  # flowers
        blossom = rng.choice([(1, 1, 0.9), (1, 0.85, 0.2), (0.95, 0.5, 0.7)])
        spots = (rng.random(ground.shape, dtype=np.float32) > 0.996) & (meadow > 0.5)
        spots = cv2.GaussianBlur(spots.astype(np.float32), (3, 3), 0) * 3 * ground.near
        image = mix(image, blossom, spots)
    return image


def sand(rng: Generator, ground: Ground) -> np.ndarray:
    """Sand with dunes and ripples, (H, W, 3)."""
    light = np.float32(rng.choice([(0.93, 0.84, 0.66), (0.88, 0.76, 0.58), (0.90, 0.85, 0.75)]))
    dunes = ground.sample(noise(rng, (128, 128), 40, octaves=3), 0.4, 0.3)
    phase = 30 * ground.depth + 16 * dunes + 4 * ground.x
    ripples = np.sin(phase * rng.uniform(0.8, 1.6)) * np.clip(ground.near - 0.1, 0, 1)
    grain = noise(rng, ground.shape, 2, octaves=1) - 0.5
    return mix(light * 0.72, light, 0.15 + 0.9 * dunes + 0.10 * ripples + 0.35 * grain)


def water(rng: Generator, ground: Ground) -> np.ndarray:
    """Water with swell and glints, (H, W, 3)."""
    deep = np.float32(rng.choice([(0.05, 0.25, 0.42), (0.08, 0.36, 0.45), (0.12, 0.28, 0.36)]))
    pale = np.float32((0.55, 0.74, 0.82)) * rng.uniform(0.85, 1.1)
    swell = ground.sample(noise(rng, (128, 128), 24, octaves=3, stretch=4), 0.35, 0.6)
    waves = ground.sample(noise(rng, (128, 128), 9, octaves=2, stretch=5), 0.8, 1.6)
    body = mix(deep, pale, 0.75 - 0.75 * ground.near + 0.9 * (swell - 0.5))
    glint = np.clip((waves + 0.6 * swell - 0.98) * 5, 0, 1) * (0.35 + 0.4 * ground.near)
    return mix(body, (0.93, 0.97, 1.0), glint)


def asphalt(rng: Generator, ground: Ground) -> np.ndarray:
    """Worn asphalt, (H, W, 3)."""
    tone = np.float32(rng.uniform(0.26, 0.44)) * np.float32((1, 1, 1.04))
    patches = ground.sample(noise(rng, (128, 128), 40, octaves=4), 0.5, 0.3)
    grain = rng.random(ground.shape, dtype=np.float32) - 0.5
    return mix(tone * 0.75, tone * 1.3, patches + 0.5 * grain * (0.3 + ground.near))


def brick(rng: Generator, shape: tuple[int, int]) -> np.ndarray:
    """Paint a brick wall, (H, W, 3), every other course shifted by half a brick."""
    h, w = shape
    course = max(5.0, h * rng.uniform(0.035, 0.06))  # height of one row of bricks
    length = course * rng.uniform(2.0, 2.6)
    rows = np.arange(h, dtype=np.float32)[:, None] / course
    row = np.floor(rows)
    cols = np.arange(w, dtype=np.float32)[None] / length + 0.5 * (row % 2)
    col = np.floor(cols)
    tones = rng.random((int(row.max()) + 1, int(col.max()) + 1), dtype=np.float32)
    tone = tones[row.astype(int), col.astype(int)]
    base = np.float32(
        rng.choice([(0.62, 0.30, 0.22), (0.70, 0.44, 0.30), (0.55, 0.50, 0.46), (0.66, 0.58, 0.46)])
    )
    wear = noise(rng, shape, 10, octaves=3)
    image = mix(base * 0.7, base * 1.25, 0.15 + 0.55 * tone + 0.5 * (wear - 0.3))
    fy, fx = rows - row, cols - col
    gap_y, gap_x = 1.2 / course, 1.2 / length
    edge_y = np.minimum(fy, 1 - fy) / gap_y
    edge_x = np.minimum(fx, 1 - fx) / gap_x
    joint = np.clip(1.3 - np.minimum(edge_y, edge_x), 0, 1)
    mortar = np.float32((0.74, 0.72, 0.68)) * rng.uniform(0.75, 1.05)
    stain = noise(rng, shape, h * 0.4, octaves=3)
    return mix(image, mortar, joint) * (0.75 + 0.5 * stain)[..., None]


def _road(rng: Generator, back: Backdrop, ground: Ground) -> None:
    """Paint a road that runs to the horizon, with a dashed centre line."""
    bend, offset = rng.uniform(-0.5, 0.5), rng.uniform(-0.5, 0.5)
    half = rng.uniform(0.45, 0.8)
    far = ground.depth / ground.depth.max()
    across = ground.x - offset - bend * (far * 3) ** 2 * 0.5
    per_pixel = ground.depth / ground.shape[0]  # width of one pixel on the plane
    cover = np.clip((half - np.abs(across)) / per_pixel + 0.5, 0, 1) * (ground.near > 0)
    image = asphalt(rng, ground)
    line = np.clip((0.028 - np.abs(across)) / per_pixel + 0.5, 0, 1)
    dash = (np.sin(7 * ground.depth + rng.uniform(0, 6)) > -0.2).astype(np.float32)
    kerb = np.clip((0.02 - np.abs(np.abs(across) - half * 0.9)) / per_pixel + 0.5, 0, 1)
    paint = rng.choice([(0.92, 0.92, 0.9), (0.93, 0.80, 0.35)])
    image = mix(image, paint, 0.85 * np.maximum(line * dash, kerb))
    back.add('road', image, cover.astype(np.float32))


def _pond(rng: Generator, back: Backdrop, ground: Ground) -> None:
    h, w = ground.shape
    depth = h - back.horizon
    centre = (w * rng.uniform(0.15, 0.85), back.horizon + depth * rng.uniform(0.3, 0.75))
    radius = (w * rng.uniform(0.22, 0.42), depth * rng.uniform(0.14, 0.26))
    rows, cols = np.mgrid[0:h, 0:w].astype(np.float32)
    r = np.hypot((cols - centre[0]) / radius[0], (rows - centre[1]) / radius[1])
    r += 0.5 * (noise(rng, (h, w), h * 0.2, octaves=2) - 0.5)
    shore = np.clip((1.10 - r) * radius[1] + 0.5, 0, 1)
    back.image *= 1 - 0.35 * (shore * (rows >= back.horizon))[..., None]
    cover = np.clip((1 - r) * radius[1] + 0.5, 0, 1) * (rows >= back.horizon)
    back.add('water', water(rng, ground), cover.astype(np.float32))


def backdrop(rng: Generator, shape: tuple[int, int], wet: bool = False) -> Backdrop:
    """Draws one of five surroundings: meadow, desert, beach, lake or street.

    Args:
        rng: source of randomness.
        shape: height and width.
        wet: there has to be water, because there are boats.
    """
    h, w = shape
    odds = (0.15, 0.1, 0.4, 0.35, 0) if wet else (0.32, 0.18, 0.12, 0.1, 0.28)
    kind = rng.choice(['meadow', 'desert', 'beach', 'lake', 'street'], p=odds)
    horizon = h * (rng.uniform(0.48, 0.64) if kind == 'street' else rng.uniform(0.3, 0.5))
    rows = np.arange(h, dtype=np.float32)[:, None]
    back = Backdrop(
        sky(rng, shape, horizon), np.full(shape, STUFF_CLASSES.index('sky'), np.uint8), horizon
    )
    ground = Ground(rng, shape, horizon)
    flat = np.full(w, horizon, np.float32)

    if kind == 'street':
        top = h * rng.uniform(-0.15, 0.22)
        lean = np.linspace(-1, 1, w, dtype=np.float32) * h * rng.uniform(-0.04, 0.04)
        back.add('wall', brick(rng, shape), below(rows, top + lean))
    elif kind != 'beach' and rng.random() < 0.75:
        ridge = curve(rng, w, horizon - h * 0.14, h * rng.uniform(0.10, 0.22), w * 0.45)
        ridge = np.minimum(ridge, horizon - 3)
        back.add('mountain', mountain(rng, shape, ridge, horizon), below(rows, ridge))

    if kind == 'meadow':
        back.add(
            'grass', grass(rng, ground), below(rows, curve(rng, w, horizon, h * 0.03, w * 0.4))
        )
    elif kind == 'desert':
        back.add('sand', sand(rng, ground), below(rows, curve(rng, w, horizon, h * 0.02, w * 0.4)))
    elif kind == 'street':
        back.add(*_pavement(rng, ground), below(rows, flat))
        kerb = horizon + (h - horizon) * rng.uniform(0.15, 0.35)
        back.add('road', asphalt(rng, ground), below(rows, np.full(w, kerb, np.float32)))
        line = np.exp(-(((rows - kerb - 0.02 * h) / 1.5) ** 2))
        back.image += (np.float32(0.85) - back.image) * (0.5 * line)[..., None]
    else:
        back.add('water', water(rng, ground), below(rows, flat))
        shore = curve(rng, w, horizon + (h - horizon) * rng.uniform(0.35, 0.6), h * 0.08, w * 0.6)
        near = ('sand', sand) if kind == 'beach' else ('grass', grass)
        wet = np.clip(1 - np.abs(rows - shore[None]) / (0.03 * h), 0, 1)
        back.add(near[0], near[1](rng, ground), below(rows, shore))
        if kind == 'beach':  # foam
            back.image += (np.float32(0.97) - back.image) * (0.8 * wet * (rows < shore + 2))[
                ..., None
            ]
        else:
            back.image *= 1 - 0.4 * wet[..., None]

    if kind in ('meadow', 'desert'):
        extra = rng.random()
        if extra < 0.55 and not wet:
            _road(rng, back, ground)
        elif extra < 0.75 or wet:
            _pond(rng, back, ground)
    return back


def _pavement(rng: Generator, ground: Ground) -> tuple[str, np.ndarray]:
    """Paint what lies between a wall and the road."""
    if rng.random() < 0.5:
        return 'grass', grass(rng, ground)
    return 'sand', sand(rng, ground)
