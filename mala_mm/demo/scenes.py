"""Generated scenes: objects of eight classes in front of landscapes and streets.

:func:`make_scene` returns the image with an instance annotation and a scene label map. Image
``i`` of a split depends on ``(seed, split, i)`` alone: neither the number of images nor the order
in which they are made changes it, and training and validation never share a random stream.

What makes the scenes easier for a small detector: fewer ``thing_classes``, fewer and larger
``objects``, ``overlap = truncation = crowd = 0``, no ``clutter``. See :class:`SceneConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.random import Generator, SeedSequence, default_rng

from mala_mm.errors import UserError

from .canvas import trim
from .classes import STUFF_CLASSES, THING_CLASSES
from .shapes import SPRITES, sprite
from .textures import Backdrop, backdrop

SPLITS = ('train', 'val')
MIN_AREA = 12  # pixels that stay visible of anything annotated


@dataclass(frozen=True)
class SceneConfig:
    """What a scene holds. The default is a set worth looking at, and not an easy one.

    Args:
        sides: range of height and width in pixels, drawn separately.
        objects: range of the number of objects in an image that has any.
        object_size: range of an object's longer side as a fraction of the image's shorter side,
            drawn log-uniformly. Large means easy.
        thing_classes: the object classes in use; category ``i + 1`` and, in the label map,
            ``len(STUFF_CLASSES) + i + 1`` is the i-th of them.
        overlap: probability that an object may stand in front of others.
        truncation: probability that an object may stick out of the image.
        crowd: probability of a crowd, a cluster of small objects annotated as one region.
        empty: probability of an image without any object.
        clutter: largest number of rocks, which belong to no class (label 0).
        min_visible: least fraction of an object that others leave visible.

    Raises:
        UserError: a value out of range or an unknown class.
    """

    sides: tuple[int, int] = (224, 384)
    objects: tuple[int, int] = (2, 9)
    object_size: tuple[float, float] = (0.07, 0.55)
    thing_classes: tuple[str, ...] = THING_CLASSES
    overlap: float = 0.6
    truncation: float = 0.15
    crowd: float = 0.12
    empty: float = 0.06
    clutter: int = 3
    min_visible: float = 0.35

    def __post_init__(self) -> None:
        limits = {'sides': (32, 4096), 'objects': (1, 100), 'object_size': (0.02, 0.95)}
        for name, (least, most) in limits.items():
            value = tuple(getattr(self, name))
            if len(value) != 2 or not least <= value[0] <= value[1] <= most:
                raise UserError(
                    f'{name} must be two numbers, low and high, in {least}..{most}, got {value}'
                )
            object.__setattr__(self, name, value)
        for name in ('overlap', 'truncation', 'crowd', 'empty', 'min_visible'):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f'{name} must lie in 0..1, got {getattr(self, name)}')
        if not 0 <= self.clutter <= 100:
            raise UserError(f'clutter must lie in 0..100, got {self.clutter}')
        names = tuple(self.thing_classes)
        if not names or len(set(names)) < len(names) or not set(names) <= set(THING_CLASSES):
            raise UserError(f'thing_classes must be distinct names of {THING_CLASSES}, got {names}')
        object.__setattr__(self, 'thing_classes', names)

    @property
    def scene_classes(self) -> tuple[str, ...]:
        """Names of the labels 1, 2, ... of the label map."""
        return STUFF_CLASSES + self.thing_classes


@dataclass
class Instance:
    """One annotated object.

    Attributes:
        label: index in ``SceneConfig.thing_classes``.
        mask: the visible pixels, (H, W) bool.
        cover: anti-aliased coverage (H, W) float32, its 0.5 level is the outline of the mask.
        occluded: something stands in front of it.
        crowd: a region of many objects.
    """

    label: int
    mask: np.ndarray
    cover: np.ndarray
    occluded: bool = False
    crowd: bool = False

    @property
    def area(self) -> int:
        """Number of visible pixels."""
        return int(self.mask.sum())

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Tight (x, y, width, height)."""
        cols, rows = np.flatnonzero(self.mask.any(0)), np.flatnonzero(self.mask.any(1))
        x, y = int(cols[0]), int(rows[0])
        return x, y, int(cols[-1]) + 1 - x, int(rows[-1]) + 1 - y


@dataclass
class Scene:
    """A image with its annotations.

    Attributes:
        image: RGB, (H, W, 3) uint8.
        instances: the objects, from the back to the front.
        labels: (H, W) uint8; 0 other, then ``SceneConfig.scene_classes``.
    """

    image: np.ndarray
    labels: np.ndarray
    instances: list[Instance] = field(default_factory=list)


def make_scene(config: SceneConfig, seed: int, split: str, index: int) -> Scene:
    """Draws scene ``index`` of a split.

    Args:
        config: what the scene holds.
        seed: the set's seed.
        split: 'train' or 'val'.
        index: number of the image within the split, from 0.

    Raises:
        UserError: unknown split, negative seed or index.
    """
    return _Painter(config, _stream(seed, split, index)).scene()


def make_portrait(config: SceneConfig, seed: int, split: str, index: int, name: str) -> np.ndarray:
    """Draws a square image of a single object, for classification.

    Args:
        config (SceneConfig): Size of the scene from which the image is cut, and its clutter.
        seed (int): As for :func:`make_scene`, with random streams of their own.
        split (str): As for :func:`make_scene`.
        index (int): As for :func:`make_scene`.
        name (str): The class.

    Returns:
        np.ndarray: RGB, (S, S, 3) uint8.
    """
    alone = replace(config, thing_classes=(name,), crowd=0.0)
    return _Painter(alone, _stream(seed, split, index, 1)).portrait()


def _stream(seed: int, split: str, index: int, *purpose: int) -> Generator:
    if split not in SPLITS:
        raise UserError(f'split must be one of {SPLITS}, got {split!r}')
    if seed < 0 or index < 0:
        raise UserError(f'seed and index must not be negative, got {seed} and {index}')
    return default_rng(SeedSequence(seed, spawn_key=(SPLITS.index(split), index, *purpose)))


class _Painter:
    """Paints one scene from the back to the front."""

    def __init__(self, config: SceneConfig, rng: Generator) -> None:
        self.config, self.rng = config, rng
        self.height, self.width = (int(s) for s in rng.integers(*config.sides, 2, endpoint=True))
        self.short = min(self.height, self.width)
        self.light = float(rng.choice([-1, 1]))
        self.cast = self._cast()
        boats = any(name == 'boat' for name, *_ in self.cast)
        wet = boats and rng.random() < 0.85
        self.back: Backdrop = backdrop(rng, (self.height, self.width), wet)
        self.water = self.back.labels == STUFF_CLASSES.index('water')
        self.owner = np.zeros((self.height, self.width), np.int32)  # entry that shows, 0 backdrop
        self.entries: list[tuple[Instance | None, int]] = []  # what was drawn, its full area

    def scene(self) -> Scene:
        for name, size, crowd in self.cast:
            self._place(name, size, crowd)
        labels, instances = self.back.labels + 1, []
        for key, (instance, full) in enumerate(self.entries, 1):
            visible = self.owner == key
            if instance is None:
                labels[visible] = 0
                continue
            labels[visible] = len(STUFF_CLASSES) + 1 + instance.label
            instance.mask = visible
            instance.occluded = int(visible.sum()) < full
            instances.append(instance)
        return Scene(self._develop(), labels, instances)

    def portrait(self) -> np.ndarray:
        for name, size, crowd in self.cast:
            if name == 'rock':
                self._place(name, size, crowd)
        rng, name = self.rng, self.config.thing_classes[0]
        patch = sprite(rng, name, self.short * rng.uniform(0.4, 0.75), self.light)
        h, w = (min(side, self.short) for side in patch.shape[:2])
        patch = patch[:h, :w]
        x = int(rng.integers(0, self.width - w + 1))
        y = int((self.height - h) * rng.uniform(0.0 if SPRITES[name].floats else 0.7, 1.0))
        self._shadow(name, patch, x, y)
        self._draw(name, *self._clip(patch, x, y), crowd=False)
        side = min(int(max(h, w) * rng.uniform(1.1, 1.5)), self.short)
        left = int(np.clip(x + (w - side) / 2, 0, self.width - side))
        top = int(np.clip(y + (h - side) / 2, 0, self.height - side))
        return self._develop()[top : top + side, left : left + side]

    def _cast(self) -> list[tuple[str, float, bool]]:
        """Chooses (class, size in pixels, crowd) of everything to draw, from far to near."""
        config, rng = self.config, self.rng
        rocks = int(rng.integers(0, config.clutter + 1))
        cast = [('rock', self.short * rng.uniform(0.06, 0.25), False) for _ in range(rocks)]
        if rng.random() >= config.empty:
            for _ in range(rng.integers(*config.objects, endpoint=True)):
                cast.append((str(rng.choice(config.thing_classes)), self._size(), False))
            if rng.random() < config.crowd:
                name = str(rng.choice(config.thing_classes))
                cast.append((name, self.short * rng.uniform(0.06, 0.1), True))
        return sorted(cast, key=lambda entry: entry[1])

    def _size(self) -> float:
        low, high = np.log(self.config.object_size)
        return self.short * float(np.exp(self.rng.uniform(low, high)))

    def _crowd(self, name: str, size: float) -> np.ndarray:
        """Paint a cluster of 10 to 24 objects on one patch, premultiplied RGBA."""
        rng = self.rng
        count = int(rng.integers(10, 25))
        columns = int(np.ceil(np.sqrt(count) * 1.7))
        height, width = int(size * (count / columns * 0.45 + 2)), int(size * (columns * 0.62 + 2))
        patch = np.zeros((height, width, 4), np.float32)
        for i in range(count):
            one = sprite(rng, name, size * rng.uniform(0.85, 1.15), self.light)
            y = int(size * 0.45 * (i // columns + rng.uniform(0, 0.5)))
            x = int(size * 0.62 * (i % columns + rng.uniform(0, 0.6)))
            y, x = min(y, height - one.shape[0]), min(x, width - one.shape[1])
            window = patch[y : y + one.shape[0], x : x + one.shape[1]]
            window *= 1 - one[..., 3:]
            window += one
        return trim(patch)

    def _place(self, name: str, size: float, crowd: bool) -> None:
        """Draws an object where it hides nothing too much, or leaves it out."""
        config, rng = self.config, self.rng
        patch = self._crowd(name, size) if crowd else sprite(rng, name, size, self.light)
        floats = not crowd and rng.random() < SPRITES[name].floats
        overlap = bool(rng.random() < config.overlap)
        cut = rng.random() < config.truncation
        least = max(0.6 * (patch[..., 3] >= 0.5).sum(), MIN_AREA)
        for attempt in range(40):
            spot = self._spot(name, size, patch.shape, floats, cut, attempt)
            part = spot and self._clip(patch, *spot)
            if not part or (part[0][..., 3] >= 0.5).sum() < least or self._hides(*part, overlap):
                continue
            if not floats:
                self._shadow(name, patch, *spot)
            self._draw(name, *part, crowd)
            return

    def _spot(self, name, size, shape, floats, cut, attempt) -> tuple[int, int] | None:
        """Proposes the upper left corner of a patch, or None where the ground does not suit it."""
        rng, (h, w) = self.rng, shape[:2]
        if cut:
            x = int(rng.uniform(-0.35 * w, self.width - 0.65 * w))
        else:
            x = int(rng.uniform(0, max(1, self.width - w)))
        if floats:
            return x, int(rng.uniform(0, max(1, self.height * 0.75 - h)))
        low, high = np.log(self.config.object_size)
        near = (np.log(size / self.short) - low) / max(high - low, 1e-6)  # large is near
        near += max(0.0, h / size - 1) * 0.5  # a crowd takes room
        near = float(np.clip(rng.normal(near, 0.2 + 0.03 * attempt), 0, 1))
        ground = self.height - self.back.horizon
        base = self.back.horizon + (0.10 + 0.88 * near) * ground + (0.3 * h * near if cut else 0)
        row = int(np.clip(base, 0, self.height - 1))
        column = int(np.clip(x + w / 2, 0, self.width - 1))
        if self.water[row, column] != (rng.random() < SPRITES[name].water * self.water.any()):
            return None
        return x, int(base) - h

    def _clip(self, patch: np.ndarray, x: int, y: int):
        """Return the part of a patch inside the image and its window there, or None."""
        h, w = patch.shape[:2]
        y0, y1, x0, x1 = max(y, 0), min(y + h, self.height), max(x, 0), min(x + w, self.width)
        if y1 <= y0 or x1 <= x0:
            return None
        return patch[y0 - y : y1 - y, x0 - x : x1 - x], (slice(y0, y1), slice(x0, x1))

    def _hides(self, patch: np.ndarray, window, overlap: bool) -> bool:
        """Whether the patch would cover too much of something."""
        keys = self.owner[window][patch[..., 3] >= 0.5]
        hidden = np.bincount(keys, minlength=len(self.entries) + 1)
        for key in np.flatnonzero(hidden[1:]) + 1:
            full = self.entries[key - 1][1]
            visible = int((self.owner == key).sum()) - hidden[key]
            if not overlap or visible < max(self.config.min_visible * full, MIN_AREA):
                return True
        return False

    def _draw(self, name: str, patch: np.ndarray, window, crowd: bool) -> None:
        target = self.back.image[window]
        target *= 1 - patch[..., 3:]
        target += patch[..., :3]
        inside = patch[..., 3] >= 0.5
        self.owner[window][inside] = len(self.entries) + 1
        instance = None
        if name != 'rock':
            cover = np.zeros(self.owner.shape, np.float32)
            cover[window] = patch[..., 3]
            label = self.config.thing_classes.index(name)
            instance = Instance(label, cover >= 0.5, cover, crowd=crowd)
        self.entries.append((instance, int(inside.sum())))

    def _shadow(self, name: str, patch: np.ndarray, x: int, y: int) -> None:
        """Paint a soft shadow on what is behind, away from the light."""
        h, w = patch.shape[:2]
        foot = (patch[int(0.85 * h) :, :, 3] > 0.5).any(0)
        if not foot.any():
            return
        left, right = np.flatnonzero(foot)[[0, -1]]
        half = max((right - left) / 2, w * 0.22) * 1.08
        centre = (x + (left + right) / 2 - self.light * half * 0.35, y + h - max(1.0, 0.06 * half))
        thin = max(half * 0.20, 1.5)
        margin = int(thin * 2 + half) + 2
        x0, x1 = max(int(centre[0]) - margin, 0), min(int(centre[0]) + margin, self.width)
        y0, y1 = max(int(centre[1] - 3 * thin), 0), min(int(centre[1] + 3 * thin) + 1, self.height)
        if x1 <= x0 or y1 <= y0:
            return
        rows, cols = np.mgrid[y0:y1, x0:x1].astype(np.float32)
        r = np.hypot((cols - centre[0]) / half, (rows - centre[1]) / thin)
        strength = 0.55 if name != 'boat' else 0.4
        dark = strength * np.clip(1.35 - r, 0, 1)
        self.back.image[y0:y1, x0:x1] *= 1 - dark[..., None]

    def _develop(self) -> np.ndarray:
        """Exposure, tint, vignette and sensor noise."""
        rng, image = self.rng, self.back.image
        tint = np.float32(rng.uniform(0.94, 1.06, 3)) * np.float32(rng.uniform(0.8, 1.12))
        rows = np.linspace(-1, 1, self.height, dtype=np.float32)[:, None]
        cols = np.linspace(-1, 1, self.width, dtype=np.float32)[None]
        vignette = 1 - rng.uniform(0, 0.16) * (rows**2 + cols**2)
        image = np.clip(image, 0, 1) * tint * vignette[..., None]
        grain = rng.normal(0, rng.uniform(0.004, 0.016), (self.height, self.width, 1))
        image = (image + grain.astype(np.float32)) * 255
        return np.clip(np.round(image), 0, 255).astype(np.uint8)
