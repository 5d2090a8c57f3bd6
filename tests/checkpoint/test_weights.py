"""Names of published weights stand for files that the user has put into a folder."""

import pytest
import torch
from mmengine.registry import MODELS

from mala_mm.checkpoint import load_checkpoint
from mala_mm.checkpoint.weights import PUBLISHED, resolve, table, weights_folder
from mala_mm.errors import UserError
from mala_mm.models import ARCHS, FAMILIES, MAViT

from .published import ARCHS as SIZES
from .published import random_weights


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv('MALA_MM_WEIGHTS', str(tmp_path / 'weights'))
    (tmp_path / 'weights').mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / 'weights'


def test_all_models_are_listed():
    assert list(PUBLISHED) == [f'{family}-{arch}' for family in FAMILIES for arch in ARCHS]


def test_a_name_stands_for_the_file_in_the_folder(folder):
    torch.save(random_weights(SIZES['tiny'], projection=2048), folder / 'mavit-tiny.pth')
    assert resolve('mavit-tiny') == str(folder / 'mavit-tiny.pth')
    cfg = dict(type='mala_mm.MAViT', init_cfg=dict(type='Pretrained', checkpoint='mavit-tiny'))
    backbone = MODELS.build(cfg)
    backbone.init_weights()
    found = load_checkpoint('mavit-tiny')['patch_embed.proj.0.weight']
    assert torch.equal(backbone.stem[0].weight, found)
    assert torch.equal(MAViT(pretrained='mavit-tiny').stem[0].weight, found)


def test_a_file_that_is_not_there_is_asked_for_in_one_sentence(folder):
    with pytest.raises(UserError) as error:
        load_checkpoint('ravlt-base')
    (sentence,) = str(error.value).splitlines()
    for part in (str(folder), 'RAVLT-base', 'https://github.com/qhfan/RALA', 'ravlt-base.pth'):
        assert part in sentence


def test_typing_errors_and_paths(folder):
    with pytest.raises(UserError, match='did you mean mavit-small'):
        load_checkpoint('mavit-smal')
    for path in ('mavit-tiny.pth', './mavit-tiny', 'https://host/mavit-tiny', 'weights'):
        assert resolve(path) == path
    open('mavit-tiny', 'w').close()
    assert resolve('mavit-tiny') == 'mavit-tiny'


def test_the_folder_is_in_the_cache(monkeypatch):
    monkeypatch.delenv('MALA_MM_WEIGHTS', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', '/cache')
    assert str(weights_folder()) == '/cache/mala_mm/weights'


def test_the_page_holds_the_table(repo):
    assert table() in (repo / 'docs/weights.md').read_text()


def test_parameters_are_those_of_the_specification():
    """A classifier's tensors, BatchNorm's statistics aside, as the oracle draws them."""
    for name, weights in PUBLISHED.items():
        width = FAMILIES[weights.family].tail_widths[weights.arch]
        drawn = random_weights(SIZES[weights.arch], projection=width, classes=1000)
        buffers = ('running_mean', 'running_var', 'num_batches_tracked', 'RoPE.angle')
        count = sum(t.numel() for n, t in drawn.items() if not n.endswith(buffers))
        assert count == weights.parameters, name
