"""The converter accounts for every tensor, and refuses what it does not know."""

import hashlib
import re
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from torch._subclasses import FakeTensorMode

from mala_mm.checkpoint import load_checkpoint
from mala_mm.checkpoint.convert import convert, convert_file
from mala_mm.engine import cli
from mala_mm.errors import UserError
from mala_mm.models import MAViT
from mala_mm.version import __version__

from .published import ARCHS, PROJECTIONS, random_weights

HEADS = OrderedDict(
    {
        'neck.lateral_convs.0.conv.weight': torch.ones(4, 64, 1, 1),
        'rpn_head.rpn_conv.bias': torch.ones(4),
        'roi_head.bbox_head.fc_cls.bias': torch.ones(81),
    }
)


@pytest.fixture(scope='module')
def trunk():
    return random_weights(ARCHS['tiny'])


@pytest.fixture(scope='module')
def classifier():
    return random_weights(ARCHS['tiny'], projection=2048)


@pytest.fixture(scope='module')
def dense():
    return random_weights(ARCHS['tiny'], norms=(0, 1, 2, 3))


def prefixed(weights, prefix):
    return OrderedDict((prefix + name, tensor) for name, tensor in weights.items())


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def test_every_tensor_of_a_classifier_is_used_or_listed(classifier):
    conversion = convert(classifier, 'weights.pth', 'mavit', 'tiny')
    backbone = MAViT('tiny', output_norm=False)
    assert conversion.state_dict.keys() == backbone.state_dict().keys()
    assert set(conversion.unused) == {n for n in classifier if n.split('.')[0] in
                                      ('proj', 'norm', 'head')}  # fmt: skip
    assert conversion.angles == tuple(f'layers.{i}.RoPE.angle' for i in range(4))
    assert conversion.missing == tuple(f'norm{i}.{p}' for i in range(4) for p in ('weight', 'bias'))
    converted = len(conversion.state_dict)
    assert converted + len(conversion.unused) + len(conversion.angles) == len(classifier)
    assert f'{converted} tensors converted' in str(conversion)
    for name in (*conversion.unused, *conversion.angles, *conversion.missing):
        assert name in str(conversion)


def test_a_classifier_fills_the_tail(classifier):
    conversion = convert(classifier, 'weights.pth', 'mavit', 'tiny', to='classifier')
    assert not conversion.unused and not conversion.missing
    assert torch.equal(conversion.state_dict['head.fc.weight'],
                       classifier['head.weight'][:, :, 0, 0])  # fmt: skip
    assert torch.equal(conversion.state_dict['neck.norm.running_var'],
                       classifier['norm.running_var'])  # fmt: skip


@pytest.mark.parametrize('arch', ARCHS)
@pytest.mark.parametrize('family', PROJECTIONS)
def test_the_tail_of_every_size(family, arch):
    with FakeTensorMode():
        shapes = {
            name: tensor.shape
            for name, tensor in random_weights(ARCHS[arch], PROJECTIONS[family][arch]).items()
            if not name.endswith('angle')
        }
    weights = {name: torch.empty(shape, device='meta') for name, shape in shapes.items()}
    conversion = convert(weights, 'weights.pth', family, arch, to='classifier')
    assert not conversion.unused
    weights['proj.weight'] = weights['proj.weight'][:512]
    with pytest.raises(UserError, match=f'to 512 channels, that of {family} {arch} to'):
        convert(weights, 'weights.pth', family, arch, to='classifier')


@pytest.mark.parametrize(
    'container, prefix',
    [
        (None, ''),
        (None, 'module.'),
        (None, 'backbone.'),
        ('model', ''),
        ('model', 'module.'),
        ('model_ema', ''),
        ('model_ema', 'module.'),
        ('state_dict', 'backbone.'),
        ('state_dict', 'module.backbone.'),
    ],
)
def test_every_published_layout_gives_the_same(dense, container, prefix):
    weights = prefixed(dense, prefix)
    checkpoint = weights if container is None else {container: weights, 'epoch': 300}
    conversion = convert(checkpoint, 'weights.pth', 'mavit', 'tiny')
    assert equal(conversion.state_dict, convert(dense, 'weights.pth', 'mavit', 'tiny').state_dict)
    assert conversion.meta['mala_mm']['container'] == container
    assert conversion.entries == (() if container is None else ('epoch',))
    assert not conversion.unused and not conversion.missing


def test_one_of_several_sets_of_weights_is_chosen(dense):
    ema = OrderedDict((name, tensor + 1) for name, tensor in dense.items() if 'angle' not in name)
    checkpoint = dict(model=dense, model_ema=ema, optimizer={})
    for container, offset in ((None, 0), ('model', 0), ('model_ema', 1)):
        conversion = convert(checkpoint, 'weights.pth', 'mavit', 'tiny', container=container)
        assert torch.equal(conversion.state_dict['norm3.bias'],
                           dense['extra_norms.3.norm.bias'] + offset)  # fmt: skip
    with pytest.raises(
        UserError, match=r"no weights under 'state_dict', its keys are model, model_ema"
    ):
        convert(checkpoint, 'weights.pth', 'mavit', 'tiny', container='state_dict')


@pytest.mark.parametrize('to, heads', [
    ('detector', HEADS), ('segmentor', {'decode_head.conv_seg.bias': torch.ones(150)})
])  # fmt: skip
def test_heads_of_dense_models_are_taken_over(dense, to, heads):
    source = {'state_dict': prefixed(dense, 'backbone.') | heads}
    conversion = convert(source, 'weights.pth', 'mavit', 'tiny', to=to)
    assert set(conversion.copied) == set(heads)
    backbone = convert(dense, 'weights.pth', 'mavit', 'tiny').state_dict
    assert equal(conversion.state_dict, prefixed(backbone, 'backbone.') | heads)
    # A backbone alone leaves them aside, by name.
    conversion = convert(source, 'weights.pth', 'mavit', 'tiny')
    assert set(conversion.unused) == set(heads) and equal(conversion.state_dict, backbone)


def test_a_retinanet_has_three_output_norms(trunk):
    norms = {name: tensor for name, tensor in random_weights(ARCHS['tiny'], norms=(1, 2, 3)).items()
             if name.startswith('extra_norms')}  # fmt: skip
    conversion = convert(trunk | norms, 'weights.pth', 'mavit', 'tiny')
    assert conversion.missing == ('norm0.weight', 'norm0.bias')


def test_counters_that_an_old_file_lacks_become_zero(trunk):
    old = {name: t for name, t in trunk.items() if not name.endswith('num_batches_tracked')}
    conversion = convert(old, 'weights.pth', 'mavit', 'tiny')
    assert len(conversion.counters) == 7
    zero = torch.tensor(0)
    assert all(torch.equal(conversion.state_dict[name], zero) for name in conversion.counters)


def test_unknown_names_are_listed(trunk):
    conversion = convert(trunk | {'layers.0.foo': torch.ones(1)}, 'w.pth', 'mavit', 'tiny')
    assert conversion.unused == ('layers.0.foo',)


def changed(weights, **tensors):
    return weights | {name.replace('__', '.'): tensor for name, tensor in tensors.items()}


def without(weights, name):
    return {other: tensor for other, tensor in weights.items() if other != name}


BAD = {
    'family': (lambda w: w, dict(family='vit'), "family must be one of mavit, ravlt, got 'vit'"),
    'size': (lambda w: w, dict(arch='tinny'), 'arch must be one of tiny, small, base, large, got'),
    'target': (lambda w: w, dict(to='pose'), 'target must be one of backbone, classifier, det'),
    'attention': (
        lambda w: w,
        dict(attn_types=['mala']),
        "attn_types must name 4 operators, one per stage.*got .'mala'.",
    ),
    'another size': (
        lambda w: w,
        dict(arch='small'),
        r'w.pth looks like tiny \(embed_dims \(64, 128, .*, depths \(2, .*not like small',
    ),
    'another family': (
        lambda w: w,
        dict(family='ravlt'),
        'classifier in w.pth projects to 2048 channels, that of ravlt tiny to 1024; correct the fa',
    ),
    'shape': (
        lambda w: changed(w, layers__1__blocks__0__attn__lepe__weight=torch.ones(128, 1, 3, 3)),
        {},
        r'layers.1.blocks.0.attn.lepe.weight in w.pth has the shape \(128, 1, 3, 3\), mavit tiny '
        r'needs \(128, 1, 5, 5\)',
    ),
    'layer scale': (
        lambda w: changed(w, layers__0__blocks__0__gamma_1=torch.ones(64)),
        {},
        r'layers.0.blocks.0.gamma_1 in w.pth must have the shape \(1, C, 1, 1\).*got \(64,\)',
    ),
    'angle': (
        lambda w: changed(w, layers__2__RoPE__angle=w['layers.2.RoPE.angle'] * 1.0001),
        {},
        r'layers.2.RoPE.angle in w.pth is not 10000 \*\* -linspace\(0, 1, 16\), each twice',
    ),
    'incomplete': (
        lambda w: without(w, 'layers.3.blocks.1.pos.bias'),
        {},
        'w.pth lacks 1 of the tensors of a mavit tiny backbone, the first '
        'backbone.stages.3.1.pos.bias',
    ),
    'no detector': (lambda w: w, dict(to='detector'), 'w.pth has no detector in it, no name begi'),
    'no segmentor': (lambda w: w, dict(to='segmentor'), 'w.pth has no segmentor in it'),
    'not published': (
        lambda w: {'conv1.weight': torch.ones(3)},
        {},
        'w.pth is no published MAViT or RAVLT checkpoint, its names begin with conv1.weight',
    ),
    'no weights': (lambda w: dict(epoch=1), {}, r"w.pth holds no weights, only \['epoch'\]"),
}


@pytest.mark.parametrize('change, options, message', BAD.values(), ids=BAD)
def test_bad_input_is_refused_in_one_sentence(classifier, change, options, message):
    with pytest.raises(UserError, match=message) as error:
        convert(change(classifier), 'w.pth', **(dict(family='mavit', arch='tiny') | options))
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_stays_and_its_angles_pass(trunk, dtype):
    half = {name: t.to(dtype) if t.is_floating_point() else t for name, t in trunk.items()}
    conversion = convert(half, 'weights.pth', 'mavit', 'tiny')
    assert conversion.state_dict['stem.0.weight'].dtype == dtype


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_the_file_records_where_it_is_from(tmp_path, dense, suffix):
    source, destination = tmp_path / 'published.pth', tmp_path / f'converted{suffix}'
    torch.save({'model': dense}, source)
    conversion = convert_file(source, destination, 'ravlt', 'tiny')
    content = load_checkpoint(destination)
    assert equal(content['state_dict'], conversion.state_dict)
    assert content['meta']['mala_mm'] == dict(
        family='ravlt',
        arch='tiny',
        attn_types=['rala', 'rala', 'softmax', 'softmax'],
        target='backbone',
        source='published.pth',
        container='model',
        version=__version__,
        source_sha256=hashlib.sha256(source.read_bytes()).hexdigest(),
    )
    if suffix == '.pth':
        plain = torch.load(destination, weights_only=True)  # needs no allow-list
        assert plain['meta'] == content['meta']
    # Nothing but the tensors themselves: no storage that a view would drag along.
    assert destination.stat().st_size < source.stat().st_size * 1.01
    # A second conversion has nothing to do, and says so.
    with pytest.raises(UserError, match=r'is converted already \(ravlt tiny, backbone\); load it'):
        convert_file(destination, tmp_path / 'again.pth', 'ravlt', 'tiny')
    ours = {'state_dict': content['state_dict']}
    with pytest.raises(UserError, match='has the names of this package already'):
        convert(ours, 'ours.pth', 'ravlt', 'tiny')


COMMAND = 'mala_mm.checkpoint.convert'


def test_the_command_line(tmp_path, repo, classifier, capsys):
    source, destination = tmp_path / 'published.pth', tmp_path / 'converted.pth'
    torch.save({'model': classifier}, source)
    tool = repo / 'tools/convert_checkpoint.py'
    options = ['--family', 'mavit', '--arch', 'tiny', '--to', 'classifier']
    done = subprocess.run(
        [sys.executable, tool, source, destination, *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r'wrote .*converted.pth: mavit tiny classifier, attention mala, mala, softmax, softmax, '
        r'from the weights under model of published.pth \(sha256 \w{64}\)',
        done.stdout,
    )
    before = destination.read_bytes()

    arguments = [str(source), str(destination)]
    assert cli.run(COMMAND, [*arguments, *options]) == 1
    error = capsys.readouterr().err.strip()
    assert error.endswith(
        f'error: {destination} exists already; choose another name or pass --force'
    )
    assert '\n' not in error and destination.read_bytes() == before
    with pytest.raises(SystemExit, match='2'):
        cli.run(COMMAND, [*arguments, '--family', 'vit', '--arch', 'tiny'])
    assert "invalid choice: 'vit'" in capsys.readouterr().err
    assert cli.run(COMMAND, [*arguments, *options[:-2], '--force']) == 0
    assert destination.read_bytes() != before
    assert sorted(p.name for p in tmp_path.iterdir()) == ['converted.pth', 'published.pth']
