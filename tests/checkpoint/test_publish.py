"""Published files hold the weights, what describes them, and a name that tells a damaged one."""

import hashlib

import pytest
import torch

from mala_mm.checkpoint import load_checkpoint, load_into
from mala_mm.checkpoint.publish import main, publish
from mala_mm.errors import UserError
from mala_mm.models import RAVLT

ARCH = dict(embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = RAVLT(ARCH)
        self.head = torch.nn.Linear(16, 3)


@pytest.fixture
def trained(tmp_path):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    path = tmp_path / 'iter_9.pth'
    meta = dict(dataset_meta=dict(classes=('a', 'b', 'c'), palette=[(1, 2, 3)]), cfg='x = 1')
    torch.save(
        dict(state_dict=model.state_dict(), optimizer=optimizer.state_dict(), meta=meta), path
    )
    return model, path


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_weights_and_description_are_kept(suffix, trained, tmp_path, recwarn):
    model, source = trained
    path = publish(source, tmp_path / f'model{suffix}')
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.name == f'model-{digest[:8]}{suffix}'
    # Two moments of each weight are left out.
    assert path.stat().st_size < 0.45 * source.stat().st_size
    content = load_checkpoint(path)
    assert set(content) == {'meta', 'state_dict'} and set(content['meta']) == {
        'dataset_meta',
        'mala_mm',
    }
    assert list(content['meta']['dataset_meta']['classes']) == ['a', 'b', 'c']
    other = Model()
    load_into(other, path)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert not recwarn


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_the_backbone_alone_remembers_its_attention(suffix, trained, tmp_path):
    model, source = trained
    path = publish(source, tmp_path / f'backbone{suffix}', backbone=True)
    backbone = RAVLT(ARCH, pretrained=str(path))
    assert torch.equal(backbone.stem[0].weight, model.backbone.stem[0].weight)
    with pytest.warns(UserWarning, match='RAVLT with attention rala'):
        RAVLT(ARCH, attn_types=('mala', 'mala', 'softmax', 'softmax'), pretrained=str(path))


def test_nothing_else_is_left(trained, tmp_path):
    path = publish(trained[1], tmp_path / 'model.safetensors')
    assert set(tmp_path.iterdir()) == {path, trained[1]}


@pytest.mark.parametrize(
    'destination, sentence',
    [('model.txt', 'must end in .pth'), ('absent/model.pth', 'is no folder')],
)
def test_wrong_names(destination, sentence, trained, tmp_path):
    with pytest.raises(UserError, match=sentence):
        publish(trained[1], tmp_path / destination)


def test_weights_that_are_not_finite_are_not_published(trained, tmp_path):
    content = torch.load(trained[1])
    content['state_dict']['head.bias'][1] = float('nan')
    torch.save(content, trained[1])
    with pytest.raises(UserError, match='not finite, the first in head.bias'):
        publish(trained[1], tmp_path / 'model.pth')
    assert [p.name for p in tmp_path.iterdir()] == ['iter_9.pth']


def test_the_command_says_what_it_saved(trained, tmp_path, capsys):
    main([str(trained[1]), str(tmp_path / 'model.pth')])
    assert 'MB, from' in capsys.readouterr().out
