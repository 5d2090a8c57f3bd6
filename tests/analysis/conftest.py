"""A tiny classifier, its checkpoint and an image to look at it with."""

import cv2
import numpy as np
import pytest
import torch

CONFIG = """
default_scope = 'mmpretrain'
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        mean=[124, 116, 104], std=[58, 57, 57], to_rgb=True, num_classes=3),
    backbone=dict(
        type='mala_mm.MAViT',
        arch=dict(embed_dims=(8, 16, 16, 32), depths=(2, 1, 1, 1), num_heads=(1, 2, 2, 4)),
        out_indices=(3,), output_norm=False),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=3, in_channels=32))
test_dataloader = dict(dataset=dict(metainfo=dict(classes=('ball', 'car', 'tree'))))
"""


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
    """``tiny.py``, ``linear.pth`` (of linear attention in all stages) and ``photo.png``."""
    from mala_mm.analysis.inside import load_model

    folder = tmp_path_factory.mktemp('inside')
    (folder / 'tiny.py').write_text(CONFIG)
    noise = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    cv2.imwrite(str(folder / 'photo.png'), cv2.resize(noise, (90, 60)))
    options = {'model.backbone.attn_types': ['linear'] * 4}
    model = load_model(folder / 'tiny.py', options=options, seed=1)
    torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'linear.pth')
    return folder


@pytest.fixture(scope='session')
def model(folder):
    """The tiny classifier with random weights; MALA in stages 1 and 2, softmax in 3 and 4."""
    from mala_mm.analysis.inside import load_model

    return load_model(folder / 'tiny.py')


@pytest.fixture(scope='session')
def seen(folder, model):
    """What it held of the image, 64 x 96."""
    from mala_mm.analysis.inside import read_image, record

    return record(model, read_image(folder / 'photo.png', None)[0])


@pytest.fixture
def command(capsys, folder, monkeypatch):
    """Runs a command in the folder; returns its exit code, its output and its last error line."""
    from mala_mm.engine import cli

    def call(name, *args):
        monkeypatch.chdir(folder)
        try:
            code = cli.run(f'mala_mm.analysis.{name}', [str(a) for a in args])
        except SystemExit as stop:  # argparse
            code = stop.code
        captured = capsys.readouterr()
        assert 'Traceback' not in captured.err
        return code, captured.out, (captured.err.splitlines() or [''])[-1]

    return call
