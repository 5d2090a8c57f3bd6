"""The session on a GPU must not fail on the day one is lent: it runs to its end here."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip('triton', reason='the Triton backend is optional')


def test_dry_run_reaches_the_end(tmp_path, repo):
    command = [sys.executable, '-m', 'benchmarks.gpu_session', '--dry-run']
    command += ['--out', str(tmp_path), '--minutes', '60']
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / 'gpu_session.json').read_text())
    assert results['checks'] and all(check['passed'] for check in results['checks'])
    assert {row['name'] for row in results['times']} >= {'mixer, triton', 'attention, triton'}
    assert len(results['sweep']) == 4 and results['left out'] == []
    table = (tmp_path / 'gpu_session.md').read_text()
    assert 'mixer, triton | forward + backward' in table


def test_tuner_writes_what_the_heuristics_read(tmp_path, repo, monkeypatch):
    """Whatever it finds at a toy size, the file has the form that ``config`` takes."""
    import torch

    from mala_mm.ops.fused.triton import plan

    path = tmp_path / 'tuned.json'
    path.write_text('{"another device": {"kept": {}}}')
    command = [sys.executable, '-m', 'benchmarks.tune', '--dry-run', '--out', str(path)]
    command += ['--head-dim', '32', '--passes', 'reduce_keys']
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'TRITON_INTERPRET': '1'}
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    tuned = json.loads(path.read_text())
    assert tuned['another device'] == {'kept': {}}

    key = plan.key('reduce_keys', 32, torch.bfloat16, True)
    tuned['interpreter'] = {key: {'block': 128, 'warps': 2}}
    path = tmp_path / 'other.json'
    path.write_text(json.dumps(tuned))
    monkeypatch.setenv('MALA_MM_TUNED', str(path))
    default = plan.default_config('reduce_keys', 32, torch.bfloat16)
    found = plan.config('reduce_keys', 32, torch.bfloat16, True, 'interpreter')
    assert (found.block, found.warps, found.stages) == (128, 2, default.stages)
    assert plan.config('reduce_keys', 32, torch.bfloat16, False, 'interpreter') == default
