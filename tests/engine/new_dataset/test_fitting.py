"""Numbers that follow from the data."""

import numpy as np
import pytest

from mala_mm.engine.new_dataset.fitting import fit_anchors, fit_schedule, samples_per_image
from mala_mm.engine.new_dataset.recipes import TASKS

DET, SEG, CLS = TASKS


@pytest.mark.parametrize('side, scale', [(4, 1), (64, 4), (128, 8), (190, 12)])
def test_anchors_have_the_size_of_the_boxes_after_resizing(side, scale):
    # Twice as large in the file as in training.
    boxes = np.full((9, 2), 2.0 * side) * np.linspace(0.9, 1.1, 9)[:, None]
    anchors = fit_anchors(boxes, np.tile([1600.0, 1200.0], (9, 1)), (800, 800))
    assert anchors.scale == scale if side > 4 else anchors.scale <= scale
    assert anchors.covered == 1.0


def test_elongated_boxes_are_counted_as_not_covered():
    boxes = np.array([[100.0, 100.0], [400.0, 20.0]])
    anchors = fit_anchors(boxes, np.tile([800.0, 800.0], (2, 1)), (800, 800))
    assert anchors.covered == 0.5


def test_no_boxes():
    assert fit_anchors(np.zeros((0, 2)), np.zeros((0, 2)), (800, 800)).scale == 8


@pytest.mark.parametrize('objects, samples', [([], 32), ([1, 1], 32), ([12] * 9, 64), ([500], 512)])
def test_samples(objects, samples):
    assert samples_per_image(np.array(objects)) == samples


def test_few_images_are_seen_often_and_many_as_often_as_in_the_recipe():
    few = fit_schedule(DET, 12, 4e-4, 16)
    assert few.batch_size == 4 and few.max_iters == DET.iterations and few.short
    assert few.epochs == DET.iterations * 4 / 12
    many = fit_schedule(DET, 20000, 4e-4, 16)
    assert many.max_iters == 60000 and many.epochs == 12 and not many.short
    for schedule in (few, many):
        assert schedule.warmup * 5 <= schedule.max_iters and schedule.warmup <= 500
        assert schedule.max_iters % schedule.interval == 0
        assert schedule.max_iters / schedule.interval <= 12


def test_learning_rate_grows_with_the_root_of_the_batch():
    rates = [fit_schedule(DET, 20000, 4e-4, 16, batch_size=b).lr for b in (4, 16, 64)]
    assert rates == [2e-4, 4e-4, 8e-4]


def test_options_win():
    schedule = fit_schedule(CLS, 1000, 1e-3, 1024, batch_size=10, epochs=3)
    assert (schedule.batch_size, schedule.max_iters, schedule.epochs) == (10, 300, 3)


def test_a_batch_needs_no_more_than_there_is_but_norms_need_two():
    assert fit_schedule(SEG, 3, 1e-4, 16).batch_size == 3
    assert fit_schedule(SEG, 1, 1e-4, 16).batch_size == 2
