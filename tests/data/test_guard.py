"""Transforms that fail name the image; an image of another size than annotated is refused."""

import numpy as np
import pytest
from mmcv.transforms import LoadImageFromFile
from PIL import Image

from mala_mm.data.guard import GuardedLoad
from mala_mm.errors import UserError


def test_boxes_of_another_frame_are_not_trained_on(tmp_path):
    path = tmp_path / 'turned.png'
    Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(path)
    load = GuardedLoad(LoadImageFromFile(), 'img_path')
    for stated in (dict(height=30, width=40), dict()):
        assert load(dict(img_path=str(path), **stated))['img_shape'] == (30, 40)
    with pytest.raises(UserError, match='turned.png has 40x30 pixels .* annotations say 30x40'):
        load(dict(img_path=str(path), height=40, width=30))
