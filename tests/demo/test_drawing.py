import json

import cv2
import numpy as np
import pytest

from mala_mm.demo.drawing import CELL, GAP, draw_instances, draw_labels, plot_training, save_sheet

CLASSES = dict(classes=('one', 'two'), palette=[(255, 0, 0), (0, 0, 255)])


def test_instances_are_drawn_where_they_are():
    pytest.importorskip('mmdet')
    from mmengine.structures import InstanceData

    image = np.full((40, 60, 3), 128, np.uint8)
    mask = np.zeros((1, 40, 60), bool)
    mask[0, 10:30, 5:25] = True
    instances = InstanceData(
        bboxes=np.array([[5, 10, 25, 30]]), labels=np.array([0]), masks=mask, scores=np.ones(1)
    )
    drawn = draw_instances(image, instances, CLASSES)
    assert drawn.shape == (CELL * 40 // 60, CELL, 3)
    factor = CELL / 60
    inside = drawn[int(22 * factor), int(20 * factor)].astype(int)
    assert inside[0] > inside[2] + 50  # reddish
    assert (drawn[: int(6 * factor), int(30 * factor) :] == 128).all()  # untouched elsewhere


def test_nothing_found_leaves_the_image():
    pytest.importorskip('mmdet')
    from mmengine.structures import InstanceData

    image = np.full((40, 40, 3), 128, np.uint8)
    nothing = InstanceData(bboxes=np.zeros((0, 4)), labels=np.zeros(0, int), masks=[])
    assert (draw_instances(image, nothing, CLASSES) == 128).all()


def test_labels_are_drawn_in_their_colours_and_ignored_pixels_left():
    pytest.importorskip('mmseg')
    image = np.full((32, 32, 3), 128, np.uint8)
    labels = np.zeros((32, 32), np.uint8)
    labels[16:] = 1
    labels[:, 24:] = 255
    drawn = draw_labels(image, labels, CLASSES).astype(int)
    top, bottom = drawn[10, 10], drawn[CELL - 10, 10]
    assert top[0] > top[2] and bottom[2] > bottom[0]
    assert (drawn[:, CELL * 25 // 32 :] == 128).all()


def test_sheet_shows_each_image_in_its_cell_and_each_row_its_label(tmp_path):
    greys = np.array([[60, 80, 100], [120, 140, 160]])
    rows = [[np.full((CELL // 2, CELL, 3), grey, np.uint8) for grey in row] for row in greys]
    save_sheet(rows, ('above', ''), tmp_path / 'new/sheet.png')
    sheet = cv2.imread(str(tmp_path / 'new/sheet.png'))
    side = CELL + GAP
    margin = sheet.shape[1] - 3 * side - GAP
    assert sheet.shape[0] == 2 * side + GAP
    centres = sheet[GAP + CELL // 2 :: side, margin + GAP + CELL // 2 :: side, 0]
    assert np.array_equal(centres, greys)
    above, below = (sheet[GAP + r * side :][:CELL, :margin] for r in range(2))
    assert above.min() < 100 and (below == 255).all()


def test_curves_of_training_and_validation_are_drawn(tmp_path):
    def colours(*validation):
        scalars = tmp_path / 'scalars.json'
        entries = [*(dict(loss=1 / i, step=i) for i in range(1, 9)), *validation]
        scalars.write_text('\n'.join(map(json.dumps, entries)))
        plot_training([('title', scalars, 'mIoU', 'mIoU')], tmp_path / 'curves.png')
        plot = cv2.imread(str(tmp_path / 'curves.png'))[..., ::-1]
        # Columns in which a colour shows: the curve is wide, the axis's label is not.
        return [
            (plot == colour).all(-1).any(0).sum()
            for colour in ((0x1F, 0x5F, 0xA8), (0xC2, 0x57, 0x1A))
        ]

    loss, validation = colours()
    assert loss > 300 and validation == 0
    loss, validation = colours(dict(mIoU=20.0, step=4), dict(mIoU=50.0, step=8))
    assert loss > 300 and validation > 150
