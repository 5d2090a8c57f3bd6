"""Images and plots of what :mod:`mala_mm.analysis` finds inside of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import matplotlib
import numpy as np

from mala_mm.files import write_bytes

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402, after the choice of a backend

COLOURS = ('#1f5fa8', '#c2571a', '#2c8a4b', '#8a3fa0', '#7a7a00', '#b0315f', '#3aa0a8')
STYLES = ('-', '--', '-.', ':')
OPACITY = 0.72
POINT = dict(marker='o', markersize=7, markeredgecolor='white', markeredgewidth=1.6, color='red')


def colour(values: np.ndarray, signed: bool = False, top: float | None = None) -> np.ndarray:
    """Turn numbers into colours: black to yellow from 0 on, or blue to red around 0.

    Args:
        values (ndarray): Shape (h, w).
        signed (bool): Whether 0 is the middle (white) rather than the lower end.
        top (float, optional): The number of the last colour; the 99.9th percentile of the
            absolute values by default.

    Returns:
        ndarray: uint8 RGB of shape (h, w, 3).
    """
    if top is None:
        top = float(np.percentile(np.abs(values), 99.9))
    top = top or 1.0
    scaled = (values / top + 1) / 2 if signed else values / top
    colours = matplotlib.colormaps['RdBu_r' if signed else 'inferno'](np.clip(scaled, 0, 1))
    return (255 * colours[..., :3]).round().astype(np.uint8)


def overlay(image: np.ndarray, colours: np.ndarray, opacity: float = OPACITY) -> np.ndarray:
    """Lay colours over an image in gray, both uint8 RGB of shape (h, w, 3)."""
    gray = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None]
    return (opacity * colours + (1 - opacity) * gray).round().astype(np.uint8)


@dataclass(frozen=True)
class Panel:
    """One image of a sheet.

    Attributes:
        image (ndarray): uint8 RGB of shape (h, w, 3).
        title (str): Above it.
        note (str): Below it.
        point (tuple[float, float], optional): A pixel (x, y) to be marked.
    """

    image: np.ndarray
    title: str = ''
    note: str = ''
    point: tuple[float, float] | None = None


def save_panels(
    rows: Sequence[Sequence[Panel]], labels: Sequence[str], path: str | Path, width: float = 2.6
) -> None:
    """Save rows of images as one PNG or JPEG, with a label at the left of each row.

    Args:
        rows (Sequence[Sequence[Panel]]): The images; rows may differ in length.
        labels (Sequence[str]): One label per row.
        path (str | Path): Where it goes.
        width (float): Width of an image, in inches at 110 dots.
    """
    columns = max(map(len, rows))
    height, length = rows[0][0].image.shape[:2]
    figure, axes = plt.subplots(
        len(rows),
        columns,
        figsize=(width * columns + 0.3, (width * height / length + 0.42) * len(rows) + 0.1),
        squeeze=False,
        layout='constrained',
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for row, label, line in zip(rows, labels, axes):
        for panel, axis in zip(row, line):
            axis.set_axis_on()
            axis.set(xticks=[], yticks=[])
            axis.imshow(panel.image, interpolation='nearest')
            axis.set_title(panel.title, fontsize=9)
            axis.set_xlabel(panel.note, fontsize=7.5, labelpad=2)
            if panel.point is not None:
                axis.plot(*panel.point, **POINT)
        line[0].set_ylabel(label, fontsize=9)
    save_figure(figure, path)


def plot_lines(
    panels: Sequence[tuple[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]],
    path: str | Path,
    xlabel: str,
    ylabel: str,
    columns: int = 4,
    log_y: bool = False,
    zero: bool = False,
) -> None:
    """Plot curves, one panel beside the other, in one PNG or JPEG.

    Args:
        panels (Sequence): Title and curves by name, each x and y, for every panel.
        path (str | Path): Where it goes.
        xlabel (str): Name of the x axes.
        ylabel (str): Name of the y axes.
        columns (int): Panels in a row.
        log_y (bool): Whether the y axes are logarithmic.
        zero (bool): Whether a line marks y = 0.
    """
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(3.3 * columns, 2.7 * lines + 0.5),
        squeeze=False,
        layout='constrained',
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    names = list(dict.fromkeys(name for _, curves in panels for name in curves))
    handles = {}
    for (title, curves), axis in zip(panels, axes.flat):
        for name, (x, y) in curves.items():
            i = names.index(name)
            style = dict(color=COLOURS[i % len(COLOURS)], linestyle=STYLES[i % len(STYLES)])
            (handles[name],) = axis.plot(x, y, linewidth=1.6, **style)
        if log_y:
            axis.set_yscale('log')
        if zero:
            axis.axhline(0, color='black', linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    figure.legend(
        [handles[name] for name in names],
        names,
        loc='outside upper center',
        ncols=min(len(names), 6),
        fontsize=8,
    )
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel(ylabel, fontsize=9)
    save_figure(figure, path)


def markdown_table(rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Return a table in Markdown, aligned; the first row is its head.

    Args:
        rows (Sequence[Sequence[str]]): The cells.
        text_columns (int): How many columns, from the left, hold text rather than numbers.
    """
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append(f'| {" | ".join(cells)} |')
    rule = [
        '-' * width if i < text_columns else f'{"-" * (width - 1)}:'
        for i, width in enumerate(widths)
    ]
    lines.insert(1, f'| {" | ".join(rule)} |')
    return '\n'.join(lines)


def save_figure(figure: plt.Figure, path: str | Path) -> None:
    """Save a figure as PNG or JPEG, by its suffix, whole or not at all, and close it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.canvas.draw()
    image = np.ascontiguousarray(np.asarray(figure.canvas.buffer_rgba())[..., 2::-1])
    plt.close(figure)
    quality = [cv2.IMWRITE_PNG_COMPRESSION, 9, cv2.IMWRITE_JPEG_QUALITY, 88]
    write_bytes(path, cv2.imencode(path.suffix, image, quality)[1].tobytes())
