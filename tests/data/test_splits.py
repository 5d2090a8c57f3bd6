"""Splits hold out a share of each class, and the same one for the same seed."""

from collections import Counter

import numpy as np
import pytest

from mala_mm.data.splits import stratified_split
from mala_mm.errors import UserError


def test_each_class_has_its_share():
    labels = [{'common'}] * 80 + [{'rare'}] * 20
    train, held_out = stratified_split(labels, 0.2)
    assert sorted(train + held_out) == list(range(100)) and len(held_out) == 20
    assert sum('rare' in labels[i] for i in held_out) == 4


def test_images_with_several_classes():
    rng = np.random.default_rng(0)
    labels = [set(np.flatnonzero(rng.random(6) < 0.3).tolist()) for _ in range(200)]
    _, held_out = stratified_split(labels, 50, seed=1)
    counts = Counter(label for i in held_out for label in labels[i])
    for label, count in Counter(x for image in labels for x in image).items():
        # A random quarter differs by 3 (standard deviation) where a class has 60 images.
        assert abs(counts[label] - count / 4) <= 1.5, label
    assert len(held_out) == 50


def test_a_class_of_one_image_is_trained_on():
    labels = [{'a'}] * 9 + [{'a', 'once'}]
    for seed in range(5):
        assert 9 in stratified_split(labels, 0.3, seed)[0]


def test_the_seed_decides():
    labels = [{i % 3} for i in range(30)]
    assert stratified_split(labels, 0.3, 4) == stratified_split(labels, 0.3, 4)
    assert stratified_split(labels, 0.3, 4) != stratified_split(labels, 0.3, 5)


@pytest.mark.parametrize('count, held_out', [(1, 0.2), (5, 5), (5, 7)])
def test_both_sides_need_images(count, held_out):
    with pytest.raises(UserError, match='cannot be split'):
        stratified_split([{0}] * count, held_out)


def test_images_without_objects_are_dealt_out_too():
    train, held_out = stratified_split([set()] * 10, 0.3)
    assert (len(train), len(held_out)) == (7, 3)
