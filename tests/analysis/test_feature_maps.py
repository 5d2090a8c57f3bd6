"""Feature maps and class activation maps."""

import sys

import numpy as np
import pytest
import torch

from mala_mm.analysis.feature_maps import (
    class_activation,
    class_name,
    feature_maps,
    main_components,
    stage_modules,
)
from mala_mm.errors import UserError


def test_feature_maps_are_those_of_the_stages(model, seen):
    maps = feature_maps(model, seen.image)
    shapes = [(8, 16, 24), (16, 8, 12), (16, 4, 6), (32, 2, 3)]
    assert [tuple(m.shape) for m in maps] == shapes


def test_components_separate_what_differs():
    features = torch.zeros(5, 4, 6)
    features[2, :, :3] = 1
    colours = main_components(features).astype(int)
    left, right = colours[:, :3].reshape(-1, 3), colours[:, 3:].reshape(-1, 3)
    assert (left == left[0]).all() and (right == right[0]).all()
    assert abs(left[0, 0] - right[0, 0]) == 255


def test_class_activation_follows_the_evidence(model, seen):
    pytest.importorskip('pytorch_grad_cam', reason='class activation maps need grad-cam')
    stages = stage_modules(model)
    (found,), target = class_activation(model, seen.image, stages[-1:])
    assert target == int(seen.prediction.pred_score.argmax())
    assert found.shape == (64, 96) and 0 <= found.min() <= found.max() <= 1
    other = (target + 1) % 3
    (differs,), _ = class_activation(model, seen.image, stages[-1:], other, 'LayerCAM')
    assert not np.allclose(found, differs)
    assert class_name(model, 1) == 'car'
    with pytest.raises(UserError, match='the class must be from 0 to 2, got 3'):
        class_activation(model, seen.image, stages[-1:], 3)


def test_without_the_package_it_says_how_to_get_it(model, seen, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pytorch_grad_cam', None)
    with pytest.raises(UserError, match='pip install grad-cam'):
        class_activation(model, seen.image, stage_modules(model))


def test_the_command_draws(command, folder):
    code, printed, _ = command('feature_maps', 'photo.png', 'tiny.py', '--size', '64')
    assert code == 0 and 'norm, components of stages 1, 2, 3, 4' in printed
    assert (folder / 'feature_maps.png').stat().st_size > 5000


def test_unknown_stages_are_refused(command):
    code, _, error = command('feature_maps', 'photo.png', 'tiny.py', '--stage', '5')
    assert code == 1 and 'stage must be one of 1 to 4, got 5' in error
