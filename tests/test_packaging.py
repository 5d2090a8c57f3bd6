"""The wheel: what it requires, what it carries, and that it works outside the checkout."""

import email
import json
import shutil
import subprocess
import sys
import zipfile

import pytest

from mala_mm import __version__

FOLDERS = ('mala_mm', 'configs', 'tools', 'requirements')
FILES = ('pyproject.toml', 'setup.py', 'MANIFEST.in', 'README.md', 'LICENSE', 'CHANGELOG.md')
FILES += ('model-index.yml',)


@pytest.fixture(scope='module')
def wheel(repo, tmp_path_factory):
    """A wheel built from a copy, because setuptools builds beside the source."""
    source = tmp_path_factory.mktemp('source')
    skip = shutil.ignore_patterns('__pycache__', '.mim', '*.egg-info')
    for name in FOLDERS:
        shutil.copytree(repo / name, source / name, ignore=skip)
    for name in FILES:
        shutil.copy(repo / name, source)
    command = [sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '--no-build-isolation']
    subprocess.run([*command, '-w', source / 'dist', source], check=True)
    (built,) = (source / 'dist').glob('*.whl')
    return built


def test_requirements_name_no_openmmlab_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith('.dist-info/METADATA'))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata['Version'] == __version__
    requires = metadata.get_all('Requires-Dist')
    assert not [text for text in requires if 'mm' in text and 'extra ==' not in text]
    assert [text for text in requires if text.startswith('onedl-mmcv==') and '"onedl"' in text]
    assert [text for text in requires if text.startswith('mmcv==') and '"upstream"' in text]


def test_wheel_carries_configs_and_tools(wheel, repo):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {
        f'mala_mm/{path.relative_to(repo / "mala_mm")}'
        for path in (repo / 'mala_mm').rglob('*.[ch]')
    }
    assert {'mala_mm/py.typed', 'mala_mm/ops/fused/cpu/kernels.c'} | sources <= names
    for folder in ('configs', 'tools'):
        files = [p.relative_to(repo) for p in (repo / folder).rglob('*.py')]
        assert files
        assert not {f'mala_mm/.mim/{path}' for path in files} - names
    assert 'mala_mm/.mim/model-index.yml' in names
    assert 'mala_mm/.mim/configs/det/mavit/metafile.yml' in names
    assert not [name for name in names if '__pycache__' in name or name.startswith('tests/')]


def test_wheel_works_outside_the_checkout(wheel, tmp_path):
    pytest.importorskip('mmdet')
    site = tmp_path / 'site'
    command = [sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--target', site, wheel]
    subprocess.run(command, check=True)
    code = """
import json, pathlib, torch
from mmengine.hub import get_config
from mmdet.registry import MODELS
model = MODELS.build(dict(type='mala_mm.MAViT', arch='tiny')).eval()
import mala_mm
root = pathlib.Path(mala_mm.__file__).parent
with torch.no_grad():
    strides = [64 // out.shape[-1] for out in model(torch.zeros(1, 3, 64, 64))]
config = get_config('mala_mm::det/mavit/mask-rcnn_mavit-t_fpn_amp-1x_coco.py')
config_root = config.filename.removesuffix('det/mavit/mask-rcnn_mavit-t_fpn_amp-1x_coco.py')
print(json.dumps([str(root), mala_mm.__version__, strides, config_root]))
"""
    result = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', code],
        cwd=tmp_path,
        env={'PYTHONPATH': str(site), 'PATH': '/usr/bin:/bin', 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    root, version, strides, config_root = json.loads(result.stdout.splitlines()[-1])
    assert root == str(site / 'mala_mm')
    assert version == __version__
    assert strides == [4, 8, 16, 32]
    assert config_root == f'{root}/.mim/configs/'
