"""The session on a GPU must not fail on the day one is lent: it runs to its end here."""

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks.gpu import jobs, report
from benchmarks.gpu.session import Job, Session

pytest.importorskip('triton', reason='the Triton backend is optional')


def test_dry_run_reaches_the_end(tmp_path, repo):
    command = [sys.executable, '-m', 'benchmarks.gpu', '--dry-run', '--out', str(tmp_path)]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / 'session.json').read_text())
    parts = results['parts']
    assert list(parts) == list(jobs.PARTS) and all(parts.values())
    assert not any(results['left out'].values()), results['left out']
    assert all(check['passed'] for check in parts['checks'] + parts['more checks'])
    assert {'reduce_keys', 'combine', 'apply_queries', 'backward_queries', 'backward_keys'} <= {
        row['kernel'] for row in parts['kernels']
    }
    assert results['machine']['torch'] and results['machine']['triton']
    table = (tmp_path / 'session.md').read_text()
    assert '## Against rivals' in table and '## Left out' not in table


# --- jobs that the tests run ----------------------------------------------------------------------


def good(number):
    for i in range(number):
        yield {'number': i}


def crash():
    yield {'number': 0}
    os.abort()


def refuse():
    raise ValueError('no such variant')
    yield


def hang():
    yield {'number': 0}
    time.sleep(3600)


def job(function, seconds=120.0, **keywords):
    return Job(f'tests.benchmarks.test_gpu:{function.__name__}', keywords, seconds)


def test_a_fault_ends_one_job_alone(tmp_path):
    session = Session(tmp_path, 600, workers=4)
    session.run('part', [job(crash), job(refuse), job(hang, 40), job(good, number=3)], alone=False)
    written = json.loads((tmp_path / 'session.json').read_text())
    rows = [row['number'] for row in written['parts']['part']]
    assert sorted(rows) == [0, 0, 0, 1, 2]  # of crash and hang what came before
    reasons = dict(text.split('(): ', 1) for text in written['left out']['part'])
    assert reasons['hang'] == 'ended after its time'
    assert reasons['crash'].startswith('exit status -6')
    assert reasons['refuse'].endswith('ValueError: no such variant')


def test_the_budget_covers_every_part(tmp_path):
    session = Session(tmp_path, -1, workers=2)
    session.run('checks', [job(good, number=1)], alone=False)
    assert session.results['left out'] == {'checks': ['good(number=1): no time left']}
    assert session.rows('checks') == []


def test_a_second_session_keeps_other_parts(tmp_path):
    first = Session(tmp_path, 600, 1, in_process=True)
    first.run('kernels', [job(good, number=2)], alone=True)
    second = Session(tmp_path, 600, 1, in_process=True)
    second.run('models', [job(refuse), job(good, number=1)], alone=True)
    parts = json.loads((tmp_path / 'session.json').read_text())['parts']
    assert {name: len(rows) for name, rows in parts.items()} == {'kernels': 2, 'models': 1}


def test_what_failed_its_check_is_not_timed():
    row = dict(kind='mala', dtype='fp16', head_dim=64, token_major=True, way='accuracy')
    wrong = jobs.wrong([row | {'passed': False}, row | {'passed': True, 'dtype': 'bf16'}])
    todo = [*jobs.kernels(False), *jobs.operators(False)]
    refused = [str(job) for job in todo if jobs.variant(job) in wrong]
    assert refused and all('fp16' in text for text in refused)
    assert not any('base/large' in text or 'RALA' in text for text in refused)
    assert jobs.variant(jobs.host(False)[0]) == ('mala', 'bf16', 64)
    assert jobs.variant(jobs.models(False)[0]) is None


def test_published_variants_come_first():
    """And at detection's number of tokens too; every variant is checked once."""
    first, rest = jobs.checks(False), jobs.more_checks(False)
    first = [job for job in first if job.function == jobs.CHECK]  # the others: around the attention
    assert all(j.keywords['token_major'] and j.keywords['head_dim'] in (64, 96) for j in first)
    assert any(j.keywords['size'] == (200, 334) for j in first)
    rest = [job for job in rest if job.function == jobs.CHECK]
    variants = [tuple(map(str, j.keywords.values())) for j in first + rest]
    assert len(set(variants)) == len(variants) == 3 * 4 * 3 * 2 + 3 + 4


def test_a_failed_way_is_named():
    row = dict(kind='mala', form='published', dtype='bf16', head_dim=64, token_major=True,
               size=[3, 5])  # fmt: skip
    errors = {'out': [2e-3, 1e-3, 1.5e-3], 'dq': [float('nan'), 1e-3, 1.5e-3]}
    rows = [
        row | {'way': 'accuracy', 'passed': False, 'errors': errors},
        row | {'way': 'graph', 'passed': True, 'note': ''},
    ]
    (one,) = report.check_rows(rows)
    assert one['worst'] != one['worst'] and one['failed'] == ['accuracy'] and one['ways'] == 2
    text = report.summary({'parts': {'checks': rows}, 'left out': {'host': ['all of it']}})
    assert '0 of 1 variants passed' in text and 'left out: host: all of it' in text


def test_predicted_times_stand_beside_the_measured_ones():
    text = """
| kernel | shape | loop | issue us | met |
|---|---|---|---|---|
| apply_queries d64 bf16 sm_90 mala | 800x1333 | 300 | 4.0 | yes |
| apply_queries d64 bf16 sm_90 mala gated | 800x1333 | 500 | 6.5 | yes |
| reduce_keys d64 fp16 sm_90 mala | 800x1333 | 500 | 5.5 | no |

| kernel | loop |
|---|---|
| combine d64 bf16 sm_90 mala | 20 |
"""
    assert report.predictions(text) == {
        ('apply_queries', 'bf16', '800x1333'): 6.5,
        ('reduce_keys', 'fp16', '800x1333'): 5.5,
    }


def test_tuner_writes_what_the_heuristics_read(tmp_path, repo, monkeypatch):
    """Whatever it finds at a toy size, the file has the form that ``config`` takes."""
    import torch

    from mala_mm.ops.fused.triton import tiling

    path = tmp_path / 'tuned.json'
    path.write_text('{"another device": {"kept": {}}}')
    command = [sys.executable, '-m', 'benchmarks.tune', '--dry-run', '--out', str(path)]
    command += ['--head-dim', '32', '--passes', 'reduce_keys']
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'TRITON_INTERPRET': '1'}
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    tuned = json.loads(path.read_text())
    assert tuned['another device'] == {'kept': {}}

    key = tiling.key('reduce_keys', 32, torch.bfloat16, True)
    tuned['interpreter'] = {key: {'rows': 8, 'warps': 2}}
    path = tmp_path / 'other.json'
    path.write_text(json.dumps(tuned))
    monkeypatch.setenv('MALA_MM_TUNED', str(path))
    default = tiling.default_tiling('reduce_keys', 32, torch.bfloat16)
    found = tiling.tiling('reduce_keys', 32, torch.bfloat16, True, 'interpreter')
    assert (found.rows, found.warps, found.stages) == (8, 2, default.stages)
    assert tiling.tiling('reduce_keys', 32, torch.bfloat16, False, 'interpreter') == default
