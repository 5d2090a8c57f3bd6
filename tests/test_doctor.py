"""What the doctor says of a whole, a bare and a broken installation."""

import os
import re
import subprocess
import sys

import pytest

from mala_mm import doctor


def run(*options, path=()):
    return subprocess.run(
        [sys.executable, *options, '-m', 'mala_mm.doctor'],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
    )


def test_whole_installation(repo):
    result = run(path=[repo])
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    for package in doctor.PACKAGES:
        assert rows[package.module].endswith('ok')
    assert re.search('mmcv ops on cpu +ok', result.stdout)
    assert result.stdout.endswith('Training works here.\n')


def test_bare_python_is_told_what_to_install(repo):
    result = run('-S', path=[repo])  # without site-packages
    assert result.returncode == 1
    assert result.stderr == ''
    assert 'torch is not installed' in result.stdout
    assert 'python -m pip install torch\n' in result.stdout
    assert result.stdout.endswith('Training cannot work here.\n')


def test_broken_torch_is_the_only_cause_named(repo, tmp_path):
    (tmp_path / 'torch.py').write_text("raise OSError('libcudart.so: cannot open')")
    result = run(path=[tmp_path, repo])
    assert result.returncode == 1
    assert 'Traceback' not in result.stderr
    assert '1. torch cannot be imported (libcudart.so: cannot open).' in result.stdout
    assert len(re.findall(r'^\d+\. ', result.stdout, re.MULTILINE)) == 1
    assert 'not tried without torch' in result.stdout


def test_operators_that_do_not_work(monkeypatch):
    def fail(device):
        raise RuntimeError("No module named 'mmcv._ext'")

    monkeypatch.setattr(doctor, '_run_nms', fail)
    report = doctor.Report()
    doctor._try_operators('onedl', report)
    (defect,) = report.defects
    assert report.fatal
    assert "(No module named 'mmcv._ext')" in defect.text
    for part in ('MMCV_WITH_OPS=1', '--no-build-isolation', '--no-binary onedl-mmcv'):
        assert part in defect.fix


def test_wrong_result_of_nms_is_a_problem(monkeypatch):
    ops = pytest.importorskip('mmcv.ops')
    monkeypatch.setattr(ops, 'nms', lambda boxes, scores, iou_threshold: (boxes, scores.long()))
    with pytest.raises(RuntimeError, match='nms kept the boxes'):
        doctor._run_nms('cpu')


def test_both_lines_in_one_environment(monkeypatch):
    monkeypatch.setattr(doctor, '_version', lambda name: '1.0' if 'mm' in name else '')
    report = doctor.Report()
    assert doctor._find_line(report) == 'onedl'
    (defect,) = report.defects
    assert defect.fatal
    for name in ('onedl-mmcv', ' mmcv', 'onedl-mmdetection', ' mmdet'):
        assert name in defect.fix


def test_what_is_not_needed_for_training_is_no_failure(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, 'find_spec', lambda name: None)
    for package in doctor.PACKAGES:
        report = doctor.Report()
        doctor._try_package(package, 'upstream', set(), report)
        (defect,) = report.defects
        assert report.fatal == (package.serves == '')
        extra = package.serves == 'the tools'
        assert ('mala_mm[tools]' if extra else package.names[-1]) in defect.fix


@pytest.mark.parametrize(('module', 'fatal'), [('torchvision', True), ('triton', False)])
def test_a_broken_torchvision_is_worse_than_none(monkeypatch, module, fatal):
    """mmengine imports it wherever it is found."""
    monkeypatch.setattr(doctor.importlib.util, 'find_spec', lambda name: object())
    monkeypatch.setattr(doctor, '_failure', lambda action: 'no symbol')
    (package,) = (package for package in doctor.PACKAGES if package.module == module)
    report = doctor.Report()
    doctor._try_package(package, 'upstream', {'torch'}, report)
    assert report.fatal == fatal
    assert 'cannot be imported (no symbol)' in report.defects[0].text


def test_kernels_that_do_not_run_on_the_gpu(monkeypatch):
    torch = pytest.importorskip('torch')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda: 'a GPU')
    monkeypatch.setattr(
        doctor, '_failure', lambda action: None if action != doctor._run_kernel else 'x'
    )
    report = doctor.Report()
    doctor._try_gpu({'torch', 'triton'}, report)
    assert [defect.text for defect in report.defects] == ['The Triton kernels do not run (x).']
    assert ('kernels', '', 'broken') in report.rows


def test_remedy_for_torchvision_exists():
    assert (doctor._torchvision_cpu() / 'pyproject.toml').is_file()
