"""The model zoo: generated files up to date, figures kept apart, counts true."""

import shutil
from pathlib import Path

import pytest
import yaml

from mala_mm.analysis import model_zoo
from mala_mm.errors import UserError

FAMILIES = ('mavit', 'ravlt')


@pytest.fixture(scope='module')
def zoo(repo):
    return yaml.safe_load((repo / 'configs' / 'model_zoo.yml').read_text())


@pytest.fixture(scope='module')
def counts(repo):
    return yaml.safe_load((repo / 'configs' / 'complexity.yml').read_text())


@pytest.fixture
def copy(repo, tmp_path, monkeypatch):
    """A copy of what the command reads and writes, on which it then works."""
    shutil.copytree(repo / 'configs', tmp_path / 'configs')
    (tmp_path / 'docs').mkdir()
    for name in ('docs/complexity.md', 'model-index.yml'):
        shutil.copy(repo / name, tmp_path / name)
    monkeypatch.setattr(model_zoo, 'ROOT', tmp_path)
    return tmp_path


def test_generated_files_are_up_to_date():
    assert model_zoo.update(check=True, recount=False) == []


@pytest.mark.parametrize(
    ('path', 'old', 'new'),
    [
        ('configs/det/README.md', '45.6', '45.7'),
        ('configs/cls/ravlt/metafile.yml', '82.8', '83.8'),
        ('docs/complexity.md', '56.974', '56.975'),
        ('model-index.yml', 'ravlt', 'other'),
        ('configs/seg/mavit/fpn_mavit-t_8xb2-80k_ade20k-512x512.py', 'mIoU 47.6', 'mIoU 48.6'),
        ('configs/det/ravlt/retinanet_ravlt-t_fpn_amp-1x_coco.py', ' 8 --cfg', ' 4 --cfg'),
    ],
)
def test_a_changed_file_is_found_and_restored(copy, path, old, new):
    good = (copy / path).read_text()
    bad = good.replace(old, new, 1)
    assert bad != good
    (copy / path).write_text(bad)
    with pytest.raises(UserError, match=f'{path} out of date'):
        model_zoo.main(['--check'])
    assert (copy / path).read_text() == bad
    model_zoo.main([])
    assert (copy / path).read_text() == good


def test_a_config_says_where_its_batch_is_from(copy):
    path = copy / 'configs/cls/mavit/mavit-t_8xb128_in1k.py'
    figure, batch, command, *code = path.read_text().splitlines(keepends=True)
    path.write_text(''.join([batch, *code]))  # all that a person has to write
    model_zoo.main([])
    assert path.read_text() == ''.join([figure, batch, command, *code])
    path.write_text(''.join([figure, command, *code]))
    with pytest.raises(UserError, match="mavit-t_8xb128_in1k.py must have .*'# Total batch 1024"):
        model_zoo.main(['--check'])


def test_measured_figures_have_columns_of_their_own(copy):
    table = copy / 'configs' / 'model_zoo.yml'
    name = 'mask-rcnn_mavit-t_fpn_amp-1x_coco'
    text = table.read_text()
    assert 'measured: {}' in text, 'measured by now: take another config here'
    table.write_text(
        text.replace('measured: {}', f'measured:\n  {name}:\n    metrics: {{box AP: 12.3}}')
    )
    model_zoo.main([])
    lines = (copy / 'configs/det/README.md').read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f'| [{name}]'))
    cells = [cell.strip() for cell in line.strip('|').split('|')]
    # box and mask AP as reported, then as measured: the mask AP was not
    assert cells[-4:] == ['47.6', '42.9', '12.3', '']
    models = yaml.safe_load((copy / 'configs/det/mavit/metafile.yml').read_text())['Models']
    (metrics,) = (m['Results'][0]['Metrics'] for m in models if m['Name'] == name)
    assert (metrics['reported box AP'], metrics['box AP']) == (47.6, 12.3)
    assert 'mask AP' not in metrics
    header = (copy / f'configs/det/mavit/{name}.py').read_text().splitlines()[0]
    assert header.endswith('219 GFLOPs; measured here: box AP 12.3.')


def test_configs_and_table_must_be_the_same_set(copy):
    (copy / 'configs/det/mavit/new.py').touch()
    with pytest.raises(UserError, match=r"disagree about \['configs/det/mavit/new.py'\]"):
        model_zoo.main(['--check'])


def test_measurements_must_name_a_config(copy):
    table = copy / 'configs' / 'model_zoo.yml'
    table.write_text(table.read_text().replace('measured: {}', 'measured: {typo: {metrics: {}}}'))
    with pytest.raises(UserError, match=r"measurements of \['typo'\]"):
        model_zoo.main(['--check'])


def test_a_file_without_markers_is_refused(copy):
    (copy / 'configs/seg/README.md').write_text('no table here\n')
    with pytest.raises(UserError, match='configs/seg/README.md must hold the lines'):
        model_zoo.main([])


def test_index_loads_with_the_field_s_own_reader(repo, zoo, counts):
    modelindex = pytest.importorskip('modelindex')
    index = modelindex.load(str(repo / 'model-index.yml'))
    index.check(silent=False)
    assert [c.name for c in index.collections] == ['MAViT', 'RAVLT']
    assert sorted(m.name for m in index.models) == sorted(counts)
    assert len(index.models) == 52
    listed = {model.name: model for model in model_zoo.list_models(zoo)}
    for model in index.models:
        assert model.config == listed[model.name].config
        assert (repo / model.config).is_file()
        assert model.in_collection in ('MAViT', 'RAVLT')
        assert model.metadata.data['Parameters'] == counts[model.name]['params']
        (result,) = model.results
        # Nothing has been measured, so every metric says whose it is.
        assert result.metrics and all(key.startswith('reported ') for key in result.metrics)


def test_mmengine_finds_the_index_of_an_editable_installation_too():
    # Its `.mim` lies in the checkout, not beside the distribution's metadata in site-packages.
    from mmengine.config.utils import MODULE2PACKAGE
    from mmengine.utils import get_installed_path, is_installed

    import mala_mm.registry

    assert is_installed(MODULE2PACKAGE['mala_mm'])
    assert get_installed_path(MODULE2PACKAGE['mala_mm']) == str(Path(mala_mm.__file__).parent)


def test_counts_hit_the_printed_columns(zoo, counts):
    models = model_zoo.list_models(zoo)
    digits_hit = set()
    for model in models:
        row, printed = counts[model.name], model.reported
        assert round(row['params'] / 1e6) == printed['params'], model.name
        # By the papers' convention to 2 %; layers alone, see docs/complexity.md, to 2.5 %.
        assert row['mmcv'] / 1e9 == pytest.approx(printed['FLOPs'], rel=0.02), model.name
        assert row['layers'] / 1e9 == pytest.approx(printed['FLOPs'], rel=0.025), model.name
        assert row['layers'] < row['all_linear'] < row['total'], model.name
        digits = 1 if model.recipe['task'] == 'Image Classification' else 0
        if round(row['mmcv'] / 1e9, digits) == printed['FLOPs']:
            digits_hit.add(model.name)
    # What docs/complexity.md says about the others.
    missed = {model.name for model in models} - digits_hit
    assert missed == {
        *('mavit-l_8xb128_in1k', 'ravlt-s_8xb128_in1k', 'ravlt-l_8xb128_in1k'),
        *(f'cascade-mask-rcnn_{f}-b_fpn_amp-ms-crop-3x_coco' for f in FAMILIES),
    }


@pytest.mark.parametrize(
    ('name', 'params'),
    zip(
        (f'{family}-{size}_8xb128_in1k' for family in FAMILIES for size in 'tsbl'),
        # Counted from the published definition, by nobody's code.
        (16449128, 27142568, 49792648, 97766088, 14897768, 25591208, 48241288, 95242440),
    ),
)
def test_classifiers_have_the_exact_number_of_parameters(counts, name, params):
    assert counts[name]['params'] == params


@pytest.mark.parametrize(
    ('size', 'layers', 'attention'),
    # Counted independently, in G: convolutions alone, and the attention as published.
    [('t', 2.44, 0.20), ('s', 4.53, 0.37), ('b', 9.83, 0.78), ('l', 16.14, 1.11)],
)
def test_classifiers_equal_independent_figures(counts, size, layers, attention):
    row = counts[f'mavit-{size}_8xb128_in1k']
    assert round(row['layers'] / 1e9, 2) == layers
    assert round((row['total'] - row['layers']) / 1e9, 2) == attention


def check_count_and_schedule(model, counts):
    """Count a model anew, and compare its config with what the table says about its training."""
    from mmengine.config import Config

    assert model_zoo.count(model) == counts[model.name], model.name
    cfg = Config.fromfile(model_zoo.ROOT / model.config)
    assert cfg.auto_scale_lr.base_batch_size == model.recipe['batch_size'], model.name
    if 'epochs' in model.recipe:
        assert cfg.train_cfg.max_epochs == model.recipe['epochs'], model.name
    else:
        assert cfg.train_cfg.max_iters == model.recipe['iterations'], model.name


@pytest.mark.parametrize('name', ['ravlt-t_8xb128_in1k', 'retinanet_mavit-l_fpn_amp-1x_coco'])
def test_count_and_schedule_are_true(zoo, counts, name):
    (model,) = (model for model in model_zoo.list_models(zoo) if model.name == name)
    check_count_and_schedule(model, counts)


@pytest.mark.slow
@pytest.mark.parametrize('recipe', range(7))
def test_all_counts_and_schedules_are_true(zoo, counts, recipe):
    recipe = zoo['recipes'][recipe]
    models = [model for model in model_zoo.list_models(zoo) if model.recipe == recipe]
    assert len(models) in (6, 8)
    for model in models:
        check_count_and_schedule(model, counts)
