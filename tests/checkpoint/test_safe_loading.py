"""Under ``safe_loading`` no function of the field executes what a checkpoint brings along."""

import ast
import os
import re

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import CheckpointLoader

from mala_mm.checkpoint import load_checkpoint, safe_loading
from mala_mm.errors import UserError

from .test_files import Malicious

DET = 'mmdet::retinanet/retinanet_r18_fpn_1x_coco.py'
SEG = 'mmseg::fcn/fcn_r18b-d8_4xb2-80k_cityscapes-769x769.py'
CLS = 'resnet18_8xb32_in1k'


def det_config():
    from mmengine.hub import get_config

    cfg = get_config(DET)
    cfg.model.backbone.init_cfg = None
    return cfg


def seg_config():
    from mmengine.hub import get_config

    cfg = get_config(SEG)
    cfg.model.pretrained = None
    cfg.model.backbone.pretrained = None
    return cfg


def init_detector(path):
    from mmdet.apis import init_detector

    init_detector(det_config(), path, device='cpu')


def det_inferencer(path):
    from mmdet.apis import DetInferencer

    DetInferencer(det_config(), weights=path, device='cpu', show_progress=False)


def init_model(path):
    from mmseg.apis import init_model

    init_model(seg_config(), path, device='cpu')


def seg_inferencer(path):
    from mmseg.apis import MMSegInferencer

    MMSegInferencer(seg_config(), weights=path, device='cpu', classes=['a'], palette=[[0, 0, 0]])


def cls_inferencer(path):
    from mmpretrain import ImageClassificationInferencer

    ImageClassificationInferencer(CLS, pretrained=path, device='cpu')


def get_model(path):
    from mmpretrain import get_model

    get_model(CLS, pretrained=path)


def mmengine_load(path):
    from mmengine.runner import load_checkpoint

    load_checkpoint(torch.nn.Linear(1, 1), path)


def init_cfg(path):
    from mala_mm.models import MAViT

    arch = dict(embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))
    MAViT(arch, init_cfg=dict(type='Pretrained', checkpoint=path)).init_weights()


def torch_load(path):
    torch.load(path, weights_only=False)


WAYS = [
    *(init_detector, det_inferencer, init_model, seg_inferencer, cls_inferencer, get_model),
    *(mmengine_load, init_cfg, torch_load),
]


@pytest.mark.parametrize('way', WAYS, ids=lambda way: way.__name__)
def test_nothing_executes(tmp_path, way):
    for library in ('mmdet', 'mmseg', 'mmpretrain'):
        pytest.importorskip(library)
    path, trace = str(tmp_path / 'bad.pth'), tmp_path / 'executed'
    torch.save(dict(state_dict={}, meta={}, extra=Malicious(trace)), path)
    with safe_loading(), pytest.raises(Exception, match='was refused|Unsupported global'):
        way(path)
    assert not trace.exists()


def test_the_block_leaves_the_process_as_it_was(tmp_path):
    before = (
        dict(CheckpointLoader._schemes),
        dict(os.environ),
        set(torch.serialization.get_safe_globals()),
    )
    with pytest.raises(RuntimeError), safe_loading():
        with safe_loading():
            pass
        assert os.environ['TORCH_FORCE_WEIGHTS_ONLY_LOAD'] == '1'
        raise RuntimeError
    assert before == (
        dict(CheckpointLoader._schemes),
        dict(os.environ),
        set(torch.serialization.get_safe_globals()),
    )
    torch.save(dict(extra=Malicious(tmp_path / 'trace')), tmp_path / 'bad.pth')
    torch.load(tmp_path / 'bad.pth', weights_only=False)['extra'].close()  # as the user wants it


def test_a_damaged_file_is_still_named(tmp_path):
    (tmp_path / 'short.pth').write_bytes(b'PK')
    with safe_loading(), pytest.raises(UserError, match='short.pth is damaged'):
        load_checkpoint(tmp_path / 'short.pth')


LOADING = {way.__name__ for way in (init_detector, init_model, get_model)} | {
    *('DetInferencer', 'MMSegInferencer', 'ImageClassificationInferencer'),
    *('torch.load', 'CheckpointLoader.load_checkpoint'),
}


def unsafe_calls(node, safe=False):
    """The calls that read a checkpoint with the functions of others, outside of the block."""
    if isinstance(node, ast.With):
        safe = safe or 'safe_loading()' in {ast.unparse(i.context_expr) for i in node.items}
    if isinstance(node, ast.Call) and ast.unparse(node.func) in LOADING and not safe:
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from unsafe_calls(child, safe)


def test_tools_and_examples_load_safely(repo):
    """``mala_mm/checkpoint`` is what makes it safe; documents show the block."""
    for folder in ('mala_mm', 'tools', 'benchmarks', 'examples', 'docs'):
        for path in (repo / folder).rglob('*.py'):
            if 'mala_mm/checkpoint' not in str(path):
                assert [*unsafe_calls(ast.parse(path.read_text()))] == [], path
    for path in (repo / 'README.md', *(repo / 'docs').glob('*.md')):
        for block in re.findall(r'```python\n(.*?)```', path.read_text(), re.S):
            assert [*unsafe_calls(ast.parse(block))] == [], path
    assert [*unsafe_calls(ast.parse("with a:\n    init_model('c', 'w')"))] == [2]


def test_config_text_is_a_program(tmp_path):
    """As the documents say: mmengine runs the text that an inferencer finds in weights."""
    trace = tmp_path / 'ran'
    Config.fromstring(f"x = open({str(trace)!r}, 'w').close()", '.py')
    assert trace.exists()
