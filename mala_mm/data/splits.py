"""Splits of a data set into images to train on and images to hold out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence

import numpy as np

from mala_mm.errors import UserError


def stratified_split(
    labels: Sequence[Collection[Hashable]], held_out: float, seed: int = 0
) -> tuple[list[int], list[int]]:
    """Split images so that each class has its share on both sides.

    Iterative stratification (Sechidis et al., ECML PKDD 2011), which is the usual stratified split
    where each image has one class: the class with the fewest images left is dealt out first, each
    image to the side that lacks it most.

    Args:
        labels (Sequence[Collection[Hashable]]): The classes in each image, if any.
        held_out (float): A share below 1, or a number of images.
        seed (int): Decides what the shares leave open.

    Returns:
        tuple[list[int], list[int]]: Indices to train on and indices held out, both rising.

    Raises:
        UserError: If one side would be empty.
    """
    count = len(labels)
    chosen = round(count * held_out) if held_out < 1 else int(held_out)
    chosen = max(chosen, 1) if 0 < held_out < 1 else chosen
    if not 0 < chosen < count:
        raise UserError(
            f'{count} images cannot be split into some to train on and {chosen} held out; give '
            'more images, or another --val-split'
        )
    order = np.random.default_rng(seed).permutation(count).tolist()
    totals = Counter(label for image in labels for label in set(image))
    sizes = (count - chosen, chosen)
    room = list(sizes)
    lacks = [{label: n * size / count for label, n in totals.items()} for size in sizes]
    sides: tuple[list[int], list[int]] = ([], [])
    left = dict.fromkeys(order)

    def deal(image: int, label: Hashable | None) -> None:
        need = [(0.0 if label is None else lacks[s][label], room[s]) for s in (0, 1)]
        open_sides = [s for s in (0, 1) if room[s]]
        side = max(open_sides, key=need.__getitem__)
        sides[side].append(image)
        room[side] -= 1
        del left[image]
        for each in set(labels[image]):
            lacks[side][each] -= 1
            totals[each] -= 1

    while any(totals.values()):
        label = min((k for k in totals if totals[k]), key=lambda k: (totals[k], str(k)))
        for image in [i for i in left if label in labels[i]]:
            deal(image, label)
    for image in list(left):
        deal(image, None)
    return sorted(sides[0]), sorted(sides[1])
