"""What importing the package loads, and under which names mmengine finds the models."""

import os
import subprocess
import sys

import pytest


def run(code, path=()):
    """Run code in a process of its own; returns what it printed."""
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', code],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_operators_load_no_models_and_a_bare_name_does(repo):
    run(
        """
import sys
import mala_mm.ops
assert not {'mmcv', 'mala_mm.models', 'mala_mm.checkpoint'} & set(sys.modules)
from mmengine.registry import MODELS
from mmdet.registry import MODELS as MMDET_MODELS
model = MMDET_MODELS.build(dict(type='MAViT', arch='t'))
from mala_mm.models import MAViT, RAVLT
assert type(model) is MAViT
# Loaded, the classes have taken the place of what stood in for them.
assert MODELS.get('MAViT') is MAViT and MMDET_MODELS.get('RAVLT') is RAVLT
assert MMDET_MODELS.get('mala_mm.MAViT') is MAViT
""",
        [repo],
    )


def test_the_name_of_another_package_is_not_taken():
    run("""
from mmengine.registry import MODELS
@MODELS.register_module()
class MAViT: pass
import mala_mm
assert 'MAViT is already registered' in str(mala_mm.registration_error)
assert MODELS.get('MAViT') is MAViT
""")


@pytest.mark.parametrize(
    ('content', 'heard'),
    [("raise OSError('no libmm.so')", True), ("raise ModuleNotFoundError('none')", False)],
)
def test_operators_work_beside_a_broken_mmengine(repo, tmp_path, content, heard):
    (tmp_path / 'mmengine.py').write_text(content)
    reason, warning = run(
        'import mala_mm.ops, torch; q = torch.ones(1, 1, 4, 8)\n'
        'mala_mm.ops.mala_attention(q, q, q, size=(2, 2))\n'
        'print(repr(mala_mm.registration_error))',
        [tmp_path, repo],
    )
    assert reason.startswith(('OSError', 'ModuleNotFoundError'))
    assert (
        'mmengine does not know the models of mala_mm (OSError: no libmm.so)' in warning
    ) == heard
    assert heard or warning == ''
