import json

import cv2
import numpy as np
import pytest

from mala_mm.demo.drawing import CELL, draw_instances, draw_labels, plot_training, save_sheet

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


def test_sheet_and_curves_are_written(tmp_path):
    cells = [[np.full((CELL, 100, 3), 10 * i, np.uint8) for i in range(3)]] * 2
    save_sheet(cells, ('above', 'below'), tmp_path / 'new/sheet.png')
    sheet = cv2.imread(str(tmp_path / 'new/sheet.png'))
    assert sheet.shape[0] > 2 * CELL and sheet.shape[1] > 3 * CELL
    scalars = tmp_path / 'scalars.json'
    lines = [dict(loss=1 / i, step=i) for i in range(1, 9)] + [dict(mIoU=50.0, step=8)]
    scalars.write_text('\n'.join(map(json.dumps, lines)))
    plot_training([('title', scalars, 'mIoU', 'mIoU')], tmp_path / 'curves.png')
    curves = cv2.imread(str(tmp_path / 'curves.png'))
    assert curves.std() > 10
