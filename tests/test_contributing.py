"""What CONTRIBUTING tells to do, done."""

import importlib.util
import re
import shutil
import textwrap

import pytest
import torch
import yaml

from mala_mm.ops import OPERATORS, build_operator

from .ops import test_operators as contract


@pytest.fixture(scope='module')
def sections(repo):
    """The text of every section by its title."""
    parts = re.split(r'^## (.+)\n', (repo / 'CONTRIBUTING.md').read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def code(section):
    return textwrap.dedent(re.search(r'```python\n(.*?)```', section, re.DOTALL)[1])


def test_instructions_are_short_and_name_what_is_there(sections, repo):
    instructions = {t: text for t, text in sections.items() if t.startswith(('Add', 'Change'))}
    assert len(instructions) == 5
    for title, text in instructions.items():
        prose = re.sub(r'```.*?```', '', text, flags=re.DOTALL)
        assert len([line for line in prose.splitlines() if line.strip()]) <= 10, title
        named = re.findall(r'`((?:mala_mm|configs|tests|benchmarks|tools)/[\w./-]+)`', prose)
        missing = {name for name in named if not (repo / name).exists()}
        assert missing <= {
            'configs/_base_/backbones/mavit-x.py',
            'configs/det/mavit/mask-rcnn_mavit-t_fpn_amp-2x_coco.py',
        }, title


def test_add_an_operator(sections, tmp_path):
    """The file of the example keeps the contract and trains in a stage."""
    from mala_mm.models import MAViT

    file = tmp_path / 'sima.py'
    file.write_text(code(sections['Add an operator']))
    spec = importlib.util.spec_from_file_location('mala_mm.ops.operators.sima', file)
    known = set(OPERATORS)
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        (name,) = set(OPERATORS) - known
        operator = build_operator(name, contract.HEADS, contract.HEAD_DIM)
        contract.test_any_strides_give_the_same(operator)
        contract.test_finite_at_any_magnitude(operator, torch.float32)
        contract.test_heads_are_exchangeable(operator)
        contract.test_gradients_reach_everything(operator)
        contract.test_multiply_adds_are_those_of_a_trace(operator)
        contract.test_gated_is_the_written_out_mixer(operator, torch.channels_last)
        contract.test_gradcheck(operator)
        arch = dict(embed_dims=(8, 16), depths=(1, 1), num_heads=(1, 2))
        model = MAViT(arch, attn_types=(name, 'mala'), out_indices=(0, 1))
        sum(x.square().mean() for x in model(torch.randn(2, 3, 64, 64))).backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        for name in set(OPERATORS) - known:
            del OPERATORS[name]


def test_add_a_recipe(sections, repo, tmp_path, monkeypatch):
    """The leaf of the example is counted, gets its header and appears in tables and metafile."""
    pytest.importorskip('mmdet')
    from mmengine.config import Config

    from mala_mm.analysis import model_zoo

    for folder in ('configs', 'docs'):
        shutil.copytree(repo / folder, tmp_path / folder)
    text = sections['Add a recipe']
    path = re.search(r'`(configs/det/mavit/[\w-]+\.py)`', text)[1]
    leaf = tmp_path / path
    assert not leaf.exists()
    leaf.write_text(code(text))
    cfg = Config.fromfile(leaf)
    assert [s.end for s in cfg.param_scheduler] == [500, 24]
    assert cfg.param_scheduler[1].milestones == [16, 22] and cfg.train_cfg.max_epochs == 24

    table = tmp_path / model_zoo.TABLE
    zoo = yaml.safe_load(table.read_text())
    like = next(r for r in zoo['recipes'] if r['title'] == 'Mask R-CNN, 1x')
    new = dict(like, title='Mask R-CNN, 2x', config=path.replace('mavit', '{family}'), epochs=24)
    new['config'] = new['config'].replace('{family}-t', '{family}-{size}')
    new['reported'] = {'mavit': {'t': like['reported']['mavit']['t']}}
    zoo['recipes'].append(new)
    table.write_text(yaml.safe_dump(zoo, sort_keys=False))

    counts, count = yaml.safe_load((repo / model_zoo.COUNTS).read_text()), model_zoo.count
    monkeypatch.setattr(model_zoo, 'ROOT', tmp_path)
    # only the new one is counted here; the others take minutes and have not changed
    monkeypatch.setattr(model_zoo, 'count', lambda m: counts.get(m.name) or count(m))
    model_zoo.main(['--count'])
    header = leaf.read_text().splitlines()[:3]
    assert 'box AP 47.6' in header[0] and 'Total batch' in header[1] and path in header[2]
    (entry,) = (
        model
        for model in yaml.safe_load((leaf.parent / 'metafile.yml').read_text())['Models']
        if model['Name'] == leaf.stem
    )
    same = counts['mask-rcnn_mavit-t_fpn_amp-1x_coco']
    assert entry['Metadata']['Parameters'] == same['params']
    assert f'mavit/{leaf.name}' in (tmp_path / 'configs/det/README.md').read_text()
    model_zoo.main(['--check'])
