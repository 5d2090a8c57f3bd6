"""A run that is killed again and again loses nothing, and ends where an undisturbed one does."""

import json
import random
import subprocess
import sys

import pytest
import torch

from mala_mm.checkpoint import load_checkpoint

from .kill_driver import PLACES


@pytest.mark.slow
def test_kill_minus_nine_loses_nothing(tmp_path, repo):
    """Ten times at random moments, and in six places of a save that stands still there."""
    seed = str(random.randrange(1000))  # which moments; shown if it fails
    command = [sys.executable, '-m', 'tests.engine.kill_driver', str(tmp_path), seed, '10', *PLACES]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, (seed, done.stderr[-2000:])
    report = json.loads(done.stdout)

    newest = 0
    for entry in report['random'] + report['inside']:
        numbers = [int(name.removeprefix('iter_').removesuffix('.pth')) for name in entry['names']]
        assert entry['found'] == max(numbers) > 0, (seed, entry)
        # Between the renaming of the new one and the removal of the old one there are two.
        assert len(numbers) <= 2, (seed, entry)
        assert entry['found'] >= newest, (seed, entry)
        newest = entry['found']
    # A save that has not come to its renaming leaves the one before, as if it had never begun.
    found = {
        entry['place']: entry['found'] - report['random'][-1]['found'] for entry in report['inside']
    }
    assert [found[place] for place in PLACES] == [0, 0, 0, 0, 1, 2]

    assert report['codes'] == [0, 0], (tmp_path / 'killed.log').read_text()[-2000:]
    whole, killed = (
        load_checkpoint(tmp_path / name / f'iter_{report["end"]}.pth')
        for name in ('whole', 'killed')
    )
    for part in ('state_dict', 'optimizer'):
        assert str(whole[part]) == str(killed[part])
    for name, tensor in whole['state_dict'].items():
        assert torch.equal(tensor, killed['state_dict'][name]), name
    # What the killed runs left is gone.
    names = {p.name for p in (tmp_path / 'killed').iterdir() if p.is_file()}
    assert names == {f'iter_{report["end"]}.pth', 'last_checkpoint', 'toy.py'}
