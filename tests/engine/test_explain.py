"""Mistakes of the user's are told in a sentence; bugs keep their traceback."""

import pytest
import torch

from mala_mm.engine.explain import explain
from mala_mm.errors import UserError

from .toy import Toy, make_runner


def test_mistakes_in_configs_and_bugs_are_told_apart():
    from mmengine.registry import MODELS

    def error_of(**cfg):
        with pytest.raises(Exception) as caught:  # noqa: B017, any error is under test
            MODELS.build(cfg)
        return caught.value

    sentence = explain(error_of(type='mala_mm.MAViT', arch='tinny'))
    assert sentence.startswith('The config does not fit MAViT: arch must be one of')
    sentence = explain(error_of(type='mala_mm.MAViT', depth=3))
    assert "unexpected keyword argument 'depth'" in sentence
    sentence = explain(error_of(type='mala_mm.MaViT'))
    assert 'MaViT is not in the' in sentence and len(sentence) < 120
    assert explain(UserError('a sentence')) == 'a sentence'
    for bug in (
        ValueError('x'),
        TypeError('f() got an unexpected keyword argument'),
        KeyError('x'),
    ):
        assert explain(bug) is None


def test_a_full_disk_is_nobodys_bug():
    """The system's own refusal: this device is always full."""
    with pytest.raises(OSError) as caught, open('/dev/full', 'w') as log:
        log.write('loss: 1.0')
        log.flush()
    assert explain(caught.value).startswith('The disk is full, there is no room; make some')
    assert explain(OSError(28, 'full', 'vis_data/log.json')).count('for vis_data/log.json;') == 1
    assert explain(PermissionError(13, 'denied')) is None


class Breaking(Toy):
    """A model whose part breaks on some batch, as parts of mmdet's do."""

    def __init__(self, at):
        super().__init__()
        self.backbone = Part(at)


class Part(torch.nn.Linear):
    def __init__(self, at):
        super().__init__(4, 1)
        self.batches_left = at

    def forward(self, x):
        if self.batches_left == 0:
            raise RuntimeError('mat1 and mat2 shapes\ncannot be multiplied')
        self.batches_left -= 1
        return super().forward(x)


@pytest.mark.parametrize('package', ['mmdet.models', 'users_own'])
@pytest.mark.parametrize('at', [0, 1, 4])  # an epoch has four batches
def test_only_the_first_batch_is_the_configs_fault(tmp_path, monkeypatch, package, at):
    monkeypatch.setattr(Part, '__module__', package)
    with pytest.raises(RuntimeError) as caught:
        make_runner(
            tmp_path, model=Breaking(at), train_cfg=dict(by_epoch=True, max_epochs=2)
        ).train()
    sentence = explain(caught.value)
    if at or package == 'users_own':
        assert sentence is None
    else:
        assert sentence.startswith(
            'The first batch fails in model.backbone (Part), RuntimeError: mat1 and mat2 shapes '
            'cannot be multiplied; correct '
        )
