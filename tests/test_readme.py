"""What the README shows has to work as it stands there."""

import re

import pytest
import torch

from mala_mm.models import ARCHS


@pytest.fixture(scope='module')
def blocks(repo):
    return re.findall(r'```python\n(.*?)```', (repo / 'README.md').read_text(), re.DOTALL)


def test_config_example_builds(blocks, tmp_path):
    pytest.importorskip('mmdet')
    from mmdet.registry import MODELS
    from mmengine.config import Config
    from mmengine.registry import init_default_scope

    (example,) = (block for block in blocks if '_base_' in block)
    assert len(example.strip().splitlines()) <= 12
    path = tmp_path / 'example.py'
    path.write_text(example)
    cfg = Config.fromfile(path)
    init_default_scope('mmdet')
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    assert type(model.backbone).__name__ == 'MAViT'
    assert list(model.backbone.embed_dims) == cfg.model.neck.in_channels


def test_python_examples_run(blocks):
    for block in blocks:
        if '_base_' in block:
            continue
        names = {}
        exec(block, names)  # noqa: S102
        if 'maps' in names:
            assert [m.shape[1] for m in names['maps']] == list(ARCHS['tiny']['embed_dims'])
        elif 'y' in names:
            assert names['y'].shape == names['q'].shape


def test_named_files_exist(repo):
    text = (repo / 'README.md').read_text()
    links = [link for link in re.findall(r'\]\(([^)]+)\)', text) if '://' not in link]
    commands = re.findall(r'(?:configs|tools)/[\w./-]+\.(?:py|sh)', text)
    assert links and commands
    for name in links + commands:
        assert (repo / name).exists(), name
