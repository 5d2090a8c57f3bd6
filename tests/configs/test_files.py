"""The files: which there are, how they name and introduce themselves, how they inherit."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from mmengine.config import Config

from mala_mm.engine.options import RUNNER_KEYS
from mala_mm.models import ARCHS, FAMILIES

from .recipe_grid import CONFIGS, GRID, RECIPES, SIZES

# Variables of our own base files that leaves take values from.
OWN_VARIABLES = {'backbone', 'stage_channels', 'ms_crop_pipeline', 'schedule_3x'}

# What may differ between the sizes of one family, and between the families.
SIZE_KEYS = {
    *('backbone.arch', 'model.backbone.arch', 'stage_channels'),
    *('model.neck.in_channels', 'model.decode_head.in_channels'),
    *('model.auxiliary_head.in_channels', 'model.neck.out_channels', 'model.head.in_channels'),
    'optim_wrapper.optimizer.lr',
}
FAMILY_KEYS = {
    *('backbone.type', 'model.backbone.type'),
    *('model.neck.out_channels', 'model.head.in_channels', 'optim_wrapper.optimizer.lr'),
}


def leaves(node, path=''):
    """All values of a config by dotted key; lists count as values."""
    if not isinstance(node, dict):
        return {path: node}
    found = {}
    for key, value in node.items():
        found.update(leaves(value, f'{path}.{key}' if path else key))
    return found


def differing_keys(first, second):
    first, second = leaves(first.to_dict()), leaves(second.to_dict())
    return {key for key in {*first, *second} if first.get(key, ...) != second.get(key, ...)}


def base_files(path):
    """The entries of ``_base_`` in a config file."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '_base_':
            bases = ast.literal_eval(node.value)
            return bases if isinstance(bases, list) else [bases]
    return []


def depth(path):
    """How many files stand behind one another. Those of other packages have no base themselves."""
    heights = [
        1 if '::' in base else depth((path.parent / base).resolve()) for base in base_files(path)
    ]
    return 1 + max(heights, default=0)


def foreign_bases(path):
    """The files of other packages that a config inherits from, however far up."""
    found = set()
    for base in base_files(path):
        found |= {base} if '::' in base else foreign_bases((path.parent / base).resolve())
    return found


def test_files_are_the_grid():
    found = {
        str(path.relative_to(CONFIGS))
        for task in ('det', 'seg', 'cls')
        for path in (CONFIGS / task).glob('*/*.py')
        # the comparison has a table and a test of its own
        if path.parent.name not in ('_base_', 'linear_attention')
    }
    assert found == {entry.file for entry in GRID}
    assert len([e for e in GRID if e.recipe.task != 'cls']) == 44
    assert len(GRID) == 52


@pytest.mark.parametrize('entry', GRID, ids=str)
def test_leaf(entry):
    """A leaf says where batch and learning rate are from, and inherits the rest."""
    path = CONFIGS / entry.file
    _, batch, _, *code = path.read_text().splitlines()  # model_zoo.py writes the other two
    assert batch.startswith(f'# Total batch {entry.recipe.batch} (8 GPUs x ')
    assert f'{entry.lr:.0e}'.replace('e-0', 'e-') in batch
    assert len(code) <= 9
    assert not any(line.startswith('#') for line in code)
    assert depth(path) == 3


@pytest.mark.parametrize('recipe', RECIPES.values(), ids=lambda r: r.name.format('backbone'))
def test_no_helper_variable_is_left_over(recipe):
    """All that stands in a config is written into the work dir: what nobody reads misleads."""
    entries = [entry for entry in GRID if entry.recipe == recipe]
    bases = sorted(foreign_bases(CONFIGS / entries[0].file))
    inherited = Config.fromstring(f'_base_ = {bases!r}', '.py')
    for entry in entries:
        assert set(entry.load()) <= {*inherited, *RUNNER_KEYS, *OWN_VARIABLES}, entry


@pytest.mark.parametrize('recipe', RECIPES.values(), ids=lambda r: r.name.format('backbone'))
def test_sizes_and_families_differ_in_little(recipe):
    entries = [entry for entry in GRID if entry.recipe == recipe]
    first = entries[0]
    for entry in entries[1:]:
        differing = differing_keys(first.load(), entry.load())
        allowed = set()
        if entry.size != first.size:
            allowed |= SIZE_KEYS
            assert 'model.backbone.arch' in differing
        if entry.family != first.family:
            allowed |= FAMILY_KEYS
            assert 'model.backbone.type' in differing
        assert differing <= allowed, entry


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('size', SIZES)
def test_backbone_fragment(family, size):
    namespace = {}
    exec((CONFIGS / '_base_' / 'backbones' / f'{family}-{size}.py').read_text(), namespace)
    assert namespace['backbone'] == dict(
        type=f'mala_mm.{FAMILIES[family].__name__}', arch=SIZES[size]
    )
    assert namespace['stage_channels'] == list(ARCHS[SIZES[size]]['embed_dims'])


def test_parses_in_a_fresh_process(tmp_path):
    """From anywhere, without importing anything first, and without pip."""
    script = tmp_path / 'parse.py'
    files = [str(CONFIGS / next(e for e in GRID if e.recipe == r).file) for r in RECIPES.values()]
    script.write_text(
        'import subprocess, sys\n'
        'import torch\n'  # which may ask ldconfig for its libraries
        'def refuse(*args, **kwargs):\n'
        '    raise AssertionError(f"a config started {args}")\n'
        'subprocess.Popen.__init__ = refuse\n'
        'from mmengine.config import Config\n'
        f'for file in {files!r}:\n'
        '    cfg = Config.fromfile(file)\n'
        '    assert Config.fromstring(cfg.pretty_text, ".py").model == cfg.model, file\n'
        'assert not {"mmdet", "mmseg", "mmpretrain"} & set(sys.modules)\n'
    )
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', script],
        cwd=Path(tmp_path.anchor),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
