"""The recipes that a data set can be trained with."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from mala_mm.errors import UserError
from mala_mm.models import FAMILIES
from mala_mm.paths import ROOT

SHORT = 2000  # iterations, below which a training is a short one


@dataclass(frozen=True)
class Task:
    """What the recipes of a task share.

    Attributes:
        folder (str): Of its configs.
        kind (str): What it is called.
        size (int): Pixels, without ``--size``.
        batch_size (int): Images in a batch, without ``--batch-size``.
        epochs (int): Length of a training on many images, and
        iterations (int): of one on few: whichever is longer.
        short_lr (float): Learning rate of a short training, in which that of the recipe would
            hardly move the weights, for a batch of 16. Detection's is the recipe's own, the others
            are near those of the demonstration.
    """

    folder: str
    kind: str
    size: int
    batch_size: int
    epochs: int
    iterations: int
    short_lr: float


TASKS = (
    Task('det', 'detection', 800, 4, 12, 240, 4e-4),
    Task('seg', 'segmentation', 512, 4, 64, 300, 1.4e-3),
    Task('cls', 'classification', 224, 32, 30, 300, 7e-4),
)


@dataclass(frozen=True)
class Recipe:
    """A config of this package.

    Attributes:
        name (str): Its name, without ``.py``.
        base (str): The file. A path, since types in configs of ``mala_mm::`` are looked up in this
            package's registries alone.
        task (Task): What it is for.
        form (str): ``'mask-rcnn'``, ``'cascade'``, ``'retinanet'``, ``'fpn'``, ``'upernet'`` or
            ``'classifier'``.
    """

    name: str
    base: str
    task: Task
    form: str


def find_recipe(name: str, task: Task) -> Recipe:
    """Find a recipe by its name or the beginning of it.

    Args:
        name (str): Such as ``'mask-rcnn_mavit-t'``; the shortest name that begins so is taken.
        task (Task): What the data are for.

    Raises:
        UserError: If there is none.
    """
    paths = {
        path.stem: str(path)
        for path in (
            p for f in FAMILIES for p in sorted((ROOT / 'configs' / task.folder / f).glob('*.py'))
        )
    }
    name = name.removesuffix('.py').rsplit('/', 1)[-1]
    found = sorted((stem for stem in paths if f'{stem}_'.startswith(f'{name}_')), key=len)
    if not found:
        short = sorted({stem.split('_fpn')[0].split('_8x')[0] for stem in paths})
        if task.folder == 'seg':
            short = sorted({'_'.join(stem.split('_')[:2]) for stem in paths})
        close = difflib.get_close_matches(name, [*short, *paths], n=1)
        advice = f'did you mean {close[0]}?' if close else f'choose from {", ".join(short)}'
        raise UserError(f'There is no recipe {name} for {task.kind}; {advice}')
    stem = found[0]
    form = stem.split('_')[0].replace('cascade-mask-rcnn', 'cascade')
    return Recipe(stem, paths[stem], task, 'classifier' if task.folder == 'cls' else form)
