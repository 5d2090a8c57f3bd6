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
