"""The objects of a generated scene, each drawn as a shaded sprite with an alpha channel.

A painter gets a :class:`Canvas` with coordinates from -1 to 1 (x to the right, y down) and the
direction (x, y) in which the light stands. Colour, proportions and pattern vary inside a class, so
that shape and texture tell the classes apart, not colour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.random import Generator

from .canvas import Canvas, any_colour, edge, trim, vivid
from .textures import mix, noise


def ball(canvas: Canvas, rng: Generator, light: np.ndarray) -> None:
    """Paint a sphere: plain, striped, dotted or in sectors like a beach ball."""
    x, y = canvas.x / 0.97, canvas.y / 0.97
    r2 = x * x + y * y
    z = np.sqrt(np.clip(1 - r2, 0, 1))
    point = np.stack([x, y, z], -1) @ _rotation(rng)
    first, second = any_colour(rng), any_colour(rng)
    if np.abs(first - second).sum() < 0.6:
        second = 1 - first
    sharp = canvas.size / 4
    kind = rng.choice(4, p=(0.15, 0.25, 0.4, 0.2))
    if kind == 0:
        colour = np.broadcast_to(first, point.shape)
    elif kind == 1:
        band = np.cos(point[..., 1] * rng.uniform(5, 8))
        colour = mix(first, second, 0.5 + band * sharp / 6)
    elif kind == 2:
        longitude = np.arctan2(point[..., 0], point[..., 2])
        sector = np.sin(longitude * rng.integers(2, 5))
        colour = mix(first, second, 0.5 + sector * sharp / 6)
        cap = (np.abs(point[..., 1]) - 0.93) * sharp
        colour = mix(colour, (0.97, 0.97, 0.95), cap)
    else:
        centres = rng.normal(size=(10, 3)).astype(np.float32)
        centres /= np.linalg.norm(centres, axis=1, keepdims=True)
        nearest = (point @ centres.T).max(-1)
        colour = mix(first, second, 0.5 + (nearest - 0.93) * sharp)
    diffuse = 0.78 * (x * light[0] + y * light[1]) + 0.62 * z
    shine = np.clip(diffuse, 0, 1) ** rng.choice([12, 40]) * rng.uniform(0.2, 0.7)
    image = colour * (0.35 + 0.75 * np.clip(diffuse, 0, 1))[..., None] + shine[..., None]
    canvas.paint(edge(1 - np.sqrt(r2), canvas.size), np.clip(image, 0, 1))


def ring(canvas: Canvas, rng: Generator, light: np.ndarray) -> None:
    """Paint a torus seen from the front: a lifebuoy, a tyre, a hoop."""
    tube = rng.uniform(0.16, 0.27)
    radius = 0.97 - tube
    r = np.hypot(canvas.x, canvas.y)
    out = np.clip((r - radius) / tube, -1, 1)  # -1 inner rim .. 1 outer rim
    angle = np.arctan2(canvas.y, canvas.x)
    up = np.sqrt(1 - out * out)
    slope = 0.78 * out * (np.cos(angle) * light[0] + np.sin(angle) * light[1])
    first, second = any_colour(rng), any_colour(rng)
    if np.abs(first - second).sum() < 0.6:
        second = 1 - first
    kind = rng.choice(3, p=(0.3, 0.5, 0.2))
    if kind == 0:
        colour = np.broadcast_to(first, (*r.shape, 3))
    elif kind == 1:
        sectors = np.sin(angle * rng.integers(2, 7) + rng.uniform(0, 6))
        colour = mix(first, second, 0.5 + sectors * canvas.size / 12)
    else:
        groove = np.sin(angle * rng.integers(18, 30))
        colour = mix(first * 0.6, first, 0.5 + groove)
    diffuse = 0.62 * up + slope
    shine = np.clip(diffuse, 0, 1) ** 20 * rng.uniform(0.1, 0.5)
    image = colour * (0.35 + 0.8 * np.clip(diffuse, 0, 1))[..., None] + shine[..., None]
    canvas.paint(edge(tube - np.abs(r - radius), canvas.size), np.clip(image, 0, 1))


def star(canvas: Canvas, rng: Generator, light: np.ndarray) -> None:
    """Paint a five-pointed star, faceted or flat with a border."""
    angle = np.arange(10) * np.pi / 5 - np.pi / 2
    radius = np.where(np.arange(10) % 2 == 0, 0.97, rng.uniform(0.38, 0.52))
    tips = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    colour = vivid(rng, (0.75, 1.0))
    if rng.random() < 0.65:
        canvas.polygon(tips, colour)
        for i in range(10):
            a, b = tips[i], tips[(i + 1) % 10]
            normal = np.array([b[1] - a[1], a[0] - b[0]]) / np.linalg.norm(b - a)
            tone = 0.8 + 0.38 * (normal @ light)
            canvas.polygon([(0, 0), a, b], np.clip(colour * tone, 0, 1))
    else:
        canvas.polygon(tips, np.clip(any_colour(rng) * 0.8, 0, 1))
        canvas.polygon(tips * 0.78, colour)
        canvas.shade(np.clip(1.05 + 0.25 * (light[0] * canvas.x + light[1] * canvas.y), 0, 1.25))


def box(canvas: Canvas, rng: Generator, light: np.ndarray) -> None:
    """Paint a crate, carton or gift seen from the front, the top and one side."""
    side = rng.choice([-1, 1])
    dx, dy = 0.97 * rng.uniform(0.28, 0.5), rng.uniform(0.25, 0.42)
    x0, x1 = -0.95, 0.95 - dx
    y0, y1 = -0.9 + dy, min(0.95, -0.9 + dy + rng.uniform(0.75, 1.1) * (x1 - x0))
    wood = np.float32(rng.choice([(0.72, 0.52, 0.30), (0.58, 0.40, 0.24), (0.80, 0.64, 0.44)]))
    kind = rng.choice(3, p=(0.4, 0.3, 0.3))  # crate, carton, gift
    base = vivid(rng) if kind == 2 or rng.random() < 0.35 else wood
    grain = noise(rng, canvas.x.shape, canvas.size * 0.08, octaves=3, stretch=5)
    bright = 1.02 if side == np.sign(light[0]) else 0.62

    def at(x: float, y: float) -> tuple[float, float]:
        return (x * side, y)

    def face(points, tone: float) -> None:
        canvas.polygon(points, base * (tone * (0.82 + 0.36 * grain))[..., None])

    face([at(x0, y0), at(x1, y0), at(x1, y1), at(x0, y1)], 0.86)
    face([at(x0, y0), at(x1, y0), at(x1 + dx, y0 - dy), at(x0 + dx, y0 - dy)], 1.12)
    face([at(x1, y0), at(x1 + dx, y0 - dy), at(x1 + dx, y1 - dy), at(x1, y1)], bright)
    w, h = x1 - x0, y1 - y0
    if kind == 0:
        dark, frame = base * 0.42, 0.11 * w
        for i in range(1, rng.integers(4, 6)):
            y = y0 + h * i / 5
            canvas.line([at(x0, y), at(x1, y)], 0.03, dark)
            canvas.line([at(x1, y), at(x1 + dx, y - dy)], 0.03, dark * 0.8)
        beam = base * 0.98
        canvas.line([at(x0 + frame, y1 - frame), at(x1 - frame, y0 + frame)], 1.2 * frame, beam)
        for y in (y0 + frame / 2, y1 - frame / 2):
            canvas.line([at(x0, y), at(x1, y)], frame, beam)
        for x in (x0 + frame / 2, x1 - frame / 2):
            canvas.line([at(x, y0), at(x, y1)], frame, beam)
        canvas.line([at(x0, y0), at(x1, y0), at(x1, y1)], 0.025, dark)
    else:
        tape = np.clip(base * 1.35, 0, 1) if kind == 1 else any_colour(rng)
        t = 0.09 * w if kind == 1 else 0.12 * w
        middle = x0 + w / 2
        bottom = y0 + 0.3 * h if kind == 1 else y1
        canvas.polygon(
            [
                at(middle - t, y0),
                at(middle + t, y0),
                at(middle + t, bottom),
                at(middle - t, bottom),
            ],
            tape * 0.88,
        )
        canvas.polygon(
            [
                at(middle - t, y0),
                at(middle + t, y0),
                at(middle + t + dx, y0 - dy),
                at(middle - t + dx, y0 - dy),
            ],
            tape,
        )
        if kind == 2:
            across = y0 + h / 2
            ribbon = [
                at(x0, across - t),
                at(x1, across - t),
                at(x1, across + t),
                at(x0, across + t),
            ]
            canvas.polygon(ribbon, tape * 0.88)
            far = [at(x1 + dx, across - t - dy), at(x1 + dx, across + t - dy)]
            canvas.polygon([ribbon[1], *far, ribbon[2]], tape * bright * 0.85)
        canvas.line([at(x0, y0), at(x1, y0), at(x1, y1)], 0.02, base * 0.5)


def tree(canvas: Canvas, rng: Generator, light: np.ndarray) -> None:
    """Paint a conifer or a broad-leaved tree, green, autumnal or in blossom."""
    crowns = [
        (0.16, 0.42, 0.14),
        (0.30, 0.50, 0.14),
        (0.10, 0.34, 0.24),
        (0.72, 0.42, 0.10),
        (0.70, 0.20, 0.12),
        (0.90, 0.62, 0.72),
        (0.62, 0.60, 0.16),
    ]
    crown = np.float32(crowns[rng.choice(7, p=(0.25, 0.2, 0.15, 0.12, 0.1, 0.08, 0.1))])
    crown = np.clip(crown * rng.uniform(0.8, 1.2, 3), 0, 1).astype(np.float32)
    bark = np.float32((0.36, 0.25, 0.16)) * rng.uniform(0.7, 1.3)
    leaves = noise(rng, canvas.x.shape, canvas.size * 0.10, octaves=4)
    trunk = rng.uniform(0.06, 0.11)
    if rng.random() < 0.4:  # conifer
        canvas.polygon(
            [(-trunk, 0.4), (trunk, 0.4), (trunk * 1.3, 0.97), (-trunk * 1.3, 0.97)], bark
        )
        tiers, wide = rng.integers(3, 6), rng.uniform(0.48, 0.68)
        for i in range(tiers):
            low = 0.72 - i * 1.2 / tiers
            high = max(-0.97, low - 1.9 / tiers)
            half = wide * (1 - 0.72 * i / tiers)
            zigzag = np.linspace(-half, half, 9)
            drop = np.where(np.arange(9) % 2 == 0, 0.05, -0.03) + 0.06 * rng.random(9)
            skirt = [(x, low + d) for x, d in zip(zigzag, drop, strict=True)]
            depth = (low - canvas.y) / (low - high)
            tone = 1.15 - 0.65 * depth + 0.9 * (leaves - 0.5) + 0.5 * light[0] * canvas.x
            canvas.polygon([(0, high), *reversed(skirt)], np.clip(crown * tone[..., None], 0, 1))
        return
    canvas.polygon([(-trunk, -0.1), (trunk, -0.1), (trunk * 1.5, 0.97), (-trunk * 1.5, 0.97)], bark)
    canvas.line([(0, 0.35), (0.3 * rng.choice([-1, 1]), -0.1)], trunk, bark)
    blobs = rng.integers(7, 11)
    width, height = rng.uniform(0.42, 0.58), rng.uniform(0.36, 0.46)
    angle = np.arange(blobs) * 2 * np.pi / blobs + rng.uniform(0, 1)
    radius = rng.uniform(0.26, 0.36, blobs)
    far = rng.uniform(0.85, 1.0, blobs)
    xs, ys = width * far * np.cos(angle), -0.28 + height * far * np.sin(angle)
    xs, ys, radius = np.append(xs, 0), np.append(ys, -0.28), np.append(radius, 0.45)
    for i in np.argsort(ys)[::-1]:
        cx, cy, r = xs[i], ys[i], radius[i]
        facing = ((canvas.x - cx) * light[0] + (canvas.y - cy) * light[1]) / r
        whole = 0.3 * (canvas.x * light[0] + (canvas.y + 0.3) * light[1])
        tone = 0.92 + 0.22 * facing + whole + 1.3 * (leaves - 0.5)
        rough = np.hypot(canvas.x - cx, canvas.y - cy) + 0.16 * (leaves - 0.5)
        cover = edge(np.minimum(r - rough, 0.97 - np.abs(canvas.y)), canvas.size)
        canvas.paint(cover, np.clip(crown * tone[..., None], 0, 1))


def house(canvas: Canvas, rng: Generator, light: np.ndarray) -> None:
    """Paint a house with a gable or a long roof, door, windows and sometimes a chimney."""
    wall = np.float32(
        rng.choice(
            [
                (0.93, 0.90, 0.82),
                (0.85, 0.75, 0.60),
                (0.72, 0.36, 0.28),
                (0.65, 0.74, 0.82),
                (0.88, 0.80, 0.45),
                (0.60, 0.62, 0.60),
            ]
        )
    )
    wall = np.clip(wall * rng.uniform(0.85, 1.08), 0, 1)
    roof = np.float32(
        rng.choice(
            [
                (0.62, 0.22, 0.16),
                (0.32, 0.30, 0.34),
                (0.45, 0.30, 0.22),
                (0.20, 0.38, 0.40),
                (0.72, 0.40, 0.22),
            ]
        )
    ) * rng.uniform(0.85, 1.15)
    glass = np.float32((0.30, 0.42, 0.55)) if rng.random() < 0.7 else np.float32((1.0, 0.86, 0.48))
    eaves, half = rng.uniform(-0.25, 0.0), rng.uniform(0.72, 0.82)
    ridge = rng.uniform(-0.92, -0.72)
    rough = noise(rng, canvas.x.shape, canvas.size * 0.12, octaves=3)
    boards = 0.06 * np.sign(np.sin(canvas.y * rng.uniform(30, 45))) if rng.random() < 0.6 else 0
    plaster = wall * (0.9 + 0.2 * rough + boards)[..., None]
    tiles = (
        roof
        * (0.95 + 0.3 * (rough - 0.5) + 0.13 * np.sin(canvas.y * 50) * np.sin(canvas.x * 40))[
            ..., None
        ]
    )
    if rng.random() < 0.6:
        x = half * rng.uniform(0.35, 0.6) * rng.choice([-1, 1])
        canvas.rectangle(x - 0.09, -0.95, x + 0.09, eaves, np.float32((0.50, 0.30, 0.24)))
        canvas.rectangle(x - 0.11, -0.96, x + 0.11, -0.88, np.float32((0.40, 0.38, 0.36)))
    canvas.rectangle(-half, eaves - 0.02, half, 0.95, plaster)
    over = half + 0.13
    if rng.random() < 0.5:  # gable towards us
        canvas.polygon([(-half, eaves), (0, ridge), (half, eaves)], plaster * 0.97)
        for side in (-1, 1):
            tone = 1.1 if side == np.sign(light[0]) else 0.8
            band = [
                (0, ridge - 0.06),
                (side * over, eaves + 0.02),
                (side * (over - 0.06), eaves + 0.13),
                (0, ridge + 0.13),
            ]
            canvas.polygon(band, tiles * tone)
        canvas.ellipse(0, (ridge + 2 * eaves) / 3, 0.11, 0.11, (0.95, 0.95, 0.93))
        canvas.ellipse(0, (ridge + 2 * eaves) / 3, 0.08, 0.08, glass)
    else:
        slant = rng.uniform(0.12, 0.3)
        canvas.polygon(
            [
                (-over, eaves + 0.04),
                (-over + slant, ridge),
                (over - slant, ridge),
                (over, eaves + 0.04),
            ],
            tiles,
        )
        canvas.rectangle(-half, eaves + 0.04, half, eaves + 0.10, wall * 0.6)
    door = rng.choice([-0.42, 0.0, 0.42]) * half / 0.8
    canvas.rectangle(door - 0.15, 0.36, door + 0.15, 0.95, (0.93, 0.92, 0.90))
    canvas.rectangle(door - 0.12, 0.40, door + 0.12, 0.95, vivid(rng, (0.35, 0.7)))
    canvas.ellipse(door + 0.07, 0.68, 0.025, 0.025, (0.95, 0.85, 0.4))
    for x in (-0.46, 0.0, 0.46):
        x = x * half / 0.8
        if abs(x - door) > 0.2:
            top = eaves + 0.24
            canvas.rectangle(x - 0.16, top - 0.03, x + 0.16, top + 0.40, (0.96, 0.95, 0.93))
            canvas.rectangle(x - 0.13, top, x + 0.13, top + 0.36, glass)
            canvas.rectangle(x - 0.015, top, x + 0.015, top + 0.36, (0.96, 0.95, 0.93))
            canvas.rectangle(x - 0.13, top + 0.16, x + 0.13, top + 0.19, (0.96, 0.95, 0.93))
    canvas.rectangle(-half, 0.88, half, 0.95, wall * 0.55)
    canvas.shade(1.0 + 0.2 * light[0] * canvas.x)


def car(canvas: Canvas, rng: Generator, light: np.ndarray) -> None:
    """Paint a saloon, hatchback, van or pick-up seen from the side, facing right."""
    paint = any_colour(rng)
    kind = rng.choice(4)
    roof = (-0.42, -0.40, -0.55, -0.44)[kind]
    cabins = (
        [(-0.62, -0.08), (-0.36, roof), (0.22, roof), (0.52, -0.08)],
        [(-0.88, -0.08), (-0.78, roof), (0.12, roof), (0.46, -0.08)],
        [(-0.93, -0.08), (-0.91, roof), (0.50, roof), (0.72, -0.08)],
        [(-0.22, -0.08), (-0.20, roof), (0.28, roof), (0.52, -0.08)],
    )
    cabin = np.float32(cabins[kind])
    tone = np.clip(1.12 - 0.75 * (canvas.y + 0.1), 0.5, 1.25)
    body = np.clip(paint * tone[..., None], 0, 1)
    shine = np.exp(-(((canvas.y + 0.01) / 0.035) ** 2)) * 0.45
    body = np.clip(body + shine[..., None], 0, 1)
    canvas.polygon(cabin, body)
    nose = 0.04 if kind != 2 else -0.06
    canvas.polygon(
        [
            (-0.97, -0.06),
            (-0.90, -0.12),
            (0.55, -0.12),
            (0.88, nose),
            (0.97, 0.12),
            (0.95, 0.28),
            (-0.96, 0.28),
        ],
        body,
    )
    centre = cabin.mean(0)
    inner = centre + (cabin - centre) * (0.86, 0.72)
    sky = mix(
        (0.20, 0.26, 0.34),
        (0.72, 0.84, 0.92),
        0.5 - 2.2 * (canvas.y - roof / 2) + canvas.x * light[0],
    )
    canvas.polygon(inner, sky)
    pillar = float(inner[:, 0].mean()) - 0.02
    canvas.rectangle(pillar - 0.025, roof, pillar + 0.025, -0.06, body)
    if kind == 3:
        canvas.rectangle(-0.90, -0.13, -0.24, -0.07, paint * 0.45)
    canvas.line([(pillar, -0.08), (pillar, 0.22)], 0.015, paint * 0.45)
    canvas.rectangle(pillar + 0.05, 0.0, pillar + 0.14, 0.025, (0.85, 0.85, 0.85))
    canvas.rectangle(-0.96, 0.20, 0.96, 0.28, np.float32((0.16, 0.16, 0.17)))
    canvas.ellipse(0.89, 0.10, 0.06, 0.05, (1.0, 0.97, 0.80))
    canvas.rectangle(-0.97, 0.02, -0.90, 0.12, (0.85, 0.12, 0.10))
    wheel = rng.uniform(0.16, 0.20)
    for x in (-0.58, 0.58):
        canvas.ellipse(x, 0.26, wheel * 1.16, wheel * 1.16, (0.08, 0.08, 0.09))
        canvas.ellipse(x, 0.28, wheel, wheel, (0.15, 0.15, 0.16))
        canvas.ellipse(x, 0.28, wheel * 0.62, wheel * 0.62, (0.78, 0.79, 0.82))
        for turn in np.arange(5) * 2 * np.pi / 5 + rng.uniform(0, 1):
            spoke = (x + wheel * 0.55 * np.cos(turn), 0.28 + wheel * 0.55 * np.sin(turn))
            canvas.line([(x, 0.28), spoke], 0.03, (0.42, 0.43, 0.46))


def boat(canvas: Canvas, rng: Generator, light: np.ndarray) -> None:
    """Paint a sailing boat with one or two sails and a striped hull."""
    hull, stripe = any_colour(rng), any_colour(rng)
    sail = np.float32((0.97, 0.96, 0.92)) if rng.random() < 0.5 else vivid(rng, (0.75, 1.0))
    mast = rng.uniform(-0.15, 0.15)
    top, boom = rng.uniform(-0.95, -0.8), 0.36
    wood = np.float32((0.45, 0.31, 0.20))
    canvas.line([(mast, top), (mast, 0.55)], 0.05, wood)
    billow = np.linspace(0, 1, 12)
    back = rng.uniform(0.55, 0.8)
    leech = [
        (mast - 0.03 - back * t - 0.10 * np.sin(np.pi * t), top + 0.05 + (boom - top - 0.05) * t)
        for t in billow
    ]
    shade = np.clip(
        1.0 + 0.4 * light[0] * (canvas.x - mast) + 0.08 * np.sin(14 * canvas.y), 0.6, 1.15
    )
    cloth = np.clip(sail * shade[..., None], 0, 1)
    if rng.random() < 0.35:
        cloth = mix(cloth, np.clip(any_colour(rng), 0, 1), (np.sin(canvas.y * 16) > 0) * 0.9)
    canvas.polygon([*leech, (mast - 0.03, boom)], cloth)
    if rng.random() < 0.7:
        front = rng.uniform(0.5, 0.75)
        luff = [
            (
                mast + 0.03 + front * t + 0.05 * np.sin(np.pi * t),
                top + 0.15 + (boom - top - 0.15) * t,
            )
            for t in billow
        ]
        canvas.polygon([*luff, (mast + 0.03, boom)], np.clip(cloth * 0.88, 0, 1))
    canvas.line([(mast - back - 0.05, boom + 0.03), (mast + 0.05, boom + 0.03)], 0.04, wood)
    canvas.polygon([(mast, top - 0.02), (mast + 0.2, top + 0.04), (mast, top + 0.1)], stripe)
    deck, keel = 0.47, rng.uniform(0.86, 0.95)
    tone = np.clip(1.15 - 0.9 * (canvas.y - deck), 0.5, 1.2)
    outline = [
        (-0.92, deck),
        (0.97, deck - 0.06),
        (0.86, 0.64),
        (0.62, keel),
        (-0.66, keel),
        (-0.82, 0.72),
    ]
    canvas.polygon(outline, np.clip(hull * tone[..., None], 0, 1))
    canvas.polygon(
        [(-0.92, deck), (0.97, deck - 0.06), (0.93, deck + 0.05), (-0.89, deck + 0.09)], stripe
    )
    canvas.rectangle(-0.45, deck - 0.10, -0.02, deck + 0.005, np.float32((0.93, 0.92, 0.88)))
    canvas.rectangle(-0.36, deck - 0.07, -0.12, deck - 0.02, np.float32((0.25, 0.36, 0.46)))


def rock(canvas: Canvas, rng: Generator, light: np.ndarray) -> None:
    """Paint a boulder: clutter that belongs to no class."""
    count = rng.integers(8, 12)
    angle = np.arange(count) * 2 * np.pi / count
    radius = rng.uniform(0.68, 0.95, count)
    xs, ys = radius * np.cos(angle), np.minimum(radius * np.sin(angle) * 0.75, 0.5)
    tone = np.float32(rng.uniform(0.40, 0.62)) * np.float32((1.0, 0.97, 0.92))
    stone = noise(rng, canvas.x.shape, canvas.size * 0.25, octaves=4)
    lit = 0.75 + 0.45 * (canvas.x * light[0] + canvas.y * light[1]) + 0.9 * (stone - 0.5)
    canvas.polygon(np.stack([xs, ys], 1), np.clip(tone * lit[..., None], 0, 1))


@dataclass(frozen=True)
class Sprite:
    """How objects of one class stand in a scene.

    Attributes:
        paint: draws the object.
        turn: largest rotation in degrees, both ways.
        squash: range of width over height, before rotation.
        flip: may be mirrored.
        floats: probability of hanging in the air instead of standing on the ground.
        water: probability of looking for water; 0 keeps out of it.
    """

    paint: Callable[[Canvas, Generator, float], None]
    turn: float = 0.0
    squash: tuple[float, float] = (0.9, 1.1)
    flip: bool = True
    floats: float = 0.0
    water: float = 0.0


SPRITES = {
    'ball': Sprite(ball, 180, (0.97, 1.03), floats=0.25, water=0.1),
    'boat': Sprite(boat, 9, (0.8, 1.05), water=0.95),
    'box': Sprite(box, 14, (0.85, 1.2)),
    'car': Sprite(car, 9, (0.9, 1.1)),
    'house': Sprite(house, 3, (0.85, 1.25)),
    'ring': Sprite(ring, 180, (0.62, 1.0), floats=0.3, water=0.25),
    'star': Sprite(star, 180, (0.8, 1.0), floats=0.5),
    'tree': Sprite(tree, 5, (0.8, 1.1)),
    'rock': Sprite(rock, 12, (0.9, 1.3)),
}


def sprite(rng: Generator, name: str, size: float, light: float) -> np.ndarray:
    """Draws one object.

    Args:
        rng: source of randomness.
        name: a key of ``SPRITES``.
        size: longer side in pixels, about.
        light: -1 when the light comes from the left, 1 from the right.

    Returns:
        Premultiplied float32 RGBA in [0, 1], cropped to the object.
    """
    shape = SPRITES[name]
    flip = shape.flip and rng.random() < 0.5
    angle = np.deg2rad(rng.uniform(-shape.turn, shape.turn))
    ratio = rng.uniform(*shape.squash)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    mirror = np.array([-1.0 if flip else 1.0, 1.0])
    canvas = Canvas(max(24, int(2 * size)))
    shape.paint(canvas, rng, np.float32(np.array([0.6 * light, -0.8]) @ rotation * mirror))
    matrix = rotation * mirror * [min(ratio, 1), 1 / max(ratio, 1)] * (size / canvas.size)
    extent = int(size * 1.45) + 4
    shift = extent / 2 - 0.5 - matrix @ np.full(2, canvas.size / 2 - 0.5)
    warped = cv2.warpAffine(
        canvas.rgba, np.column_stack([matrix, shift]), (extent, extent), flags=cv2.INTER_LINEAR
    )
    return trim(np.clip(warped, 0, 1))


def _rotation(rng: Generator) -> np.ndarray:
    """Return a random rotation matrix (3, 3)."""
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    return (q * np.sign(np.diag(r))).astype(np.float32)
