import subprocess
import sys

import pytest


@pytest.mark.long
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize(('task', 'folder'), [('det', 'coco'), ('seg', 'ade20k')])
def test_tiny_models_learn_a_handful_of_real_images(task, folder, repo, real_data, tmp_path):
    command = [sys.executable, 'tools/overfit_check.py', task, '--work-dir', str(tmp_path)]
    result = subprocess.run(
        [*command, '--data-root', str(real_data / folder)], cwd=repo, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert 'FAILS' not in result.stdout


def test_missing_data_is_named(repo, tmp_path):
    command = [sys.executable, 'tools/overfit_check.py', 'det', '--data-root', 'nowhere']
    result = subprocess.run(command, cwd=repo, capture_output=True, text=True)
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert 'nowhere' in result.stderr and '--data-root' in result.stderr
