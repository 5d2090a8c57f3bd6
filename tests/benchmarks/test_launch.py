"""The host's share, measured without a GPU."""

import shutil
import subprocess

import pytest

pytest.importorskip('triton', reason='the Triton backend is optional')

from benchmarks import launch


def found(whole, planned, outside):
    times = dict(zip(launch.LEVELS, (whole, planned, outside), strict=True))
    return {name: dict.fromkeys(launch.CALLS, times) for name in launch.OPERATORS}


def test_parts_are_differences_and_trees_stand_side_by_side():
    text = launch.table({'old': found(200, 120, 80), 'new': found(50, 40, 30)})
    assert '| gated_attention | forward | old | 200 | 80 | 40 | 80 |' in text
    assert '| gated_attention | forward | new | 50 (0.25 of it) | 10 | 10 | 30 |' in text


def test_the_least_of_the_rounds_counts():
    merged = launch.least([found(5, 4, 3), found(4, 5, 2)])
    assert merged['mala_attention']['forward'] == {
        'everything': 4,
        'no launches': 4,
        'no backend': 2,
    }


def test_an_unknown_commit_is_named():
    refused = pytest.raises(SystemExit, match='--against no-such-commit needs a git checkout')
    with refused, launch.checkout('no-such-commit'):
        pass


def test_a_commit_is_unpacked(repo):
    git = shutil.which('git')
    if git is None or subprocess.run([git, 'rev-parse', 'HEAD'], cwd=repo).returncode:
        pytest.skip('no git checkout here')
    with launch.checkout('HEAD') as folder:
        assert (launch.Path(folder) / 'mala_mm' / 'ops' / '__init__.py').exists()


@pytest.mark.slow
def test_the_stub_ends_where_the_driver_begins(repo):
    """Kernels are compiled for a device that is not there, and every level takes its part."""
    times = launch.measure(str(repo))
    for operator in launch.OPERATORS:
        for call in launch.CALLS:
            whole, _, outside = (times[operator][call][level] for level in launch.LEVELS)
            assert 0 < outside < whole
