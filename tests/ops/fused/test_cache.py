"""The cache of compiled kernels loads what was compiled here by this user, and nothing else."""

import ctypes
import os
import stat
import subprocess
import sys

import pytest
import torch

from mala_mm.ops.fused.cpu import cache, compiled


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    loaded = []
    # Loading is recorded, not done: what must not be loaded would run.
    monkeypatch.setattr(ctypes, 'CDLL', lambda path: loaded.append(path) or path)
    return tmp_path / 'mala_mm' / 'kernels', loaded


def make(content=b'code'):
    calls = []

    def compiler():
        calls.append(content)
        return content

    return compiler, calls


def test_made_once_and_closed_to_others(place):
    folder, loaded = place
    compiler, calls = make()
    for _ in range(2):
        cache.load('a.so', compiler)
    assert calls == [b'code'] and loaded == [str(folder / 'a.so')] * 2
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {p.name for p in folder.iterdir()} == {'a.so', 'a.so.sha256'}


@pytest.mark.parametrize('mode', [0o777, 0o770, 0o720, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(place, mode):
    folder, loaded = place
    folder.mkdir(parents=True)
    folder.chmod(mode)
    compiler, calls = make()
    with pytest.raises(cache.CacheError, match='others may write to .*kernels'):
        cache.load('a.so', compiler)
    assert not loaded and not calls


def test_a_folder_of_another_user_is_refused(place, monkeypatch):
    folder, loaded = place
    cache.load('a.so', make()[0])
    loaded.clear()
    monkeypatch.setattr(os, 'geteuid', lambda: 12345)
    with pytest.raises(cache.CacheError, match='belongs to another user'):
        cache.load('a.so', make()[0])
    assert not loaded


def test_a_link_to_a_folder_elsewhere_is_refused(place, tmp_path):
    folder, loaded = place
    folder.parent.mkdir()
    (tmp_path / 'elsewhere').mkdir(mode=0o700)
    folder.symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(cache.CacheError, match='is no folder'):
        cache.load('a.so', make()[0])
    assert not loaded


def truncate(file, seal):
    file.write_bytes(file.read_bytes()[:2])


def flip(file, seal):
    file.write_bytes(b'Code')


def garbage(file, seal):
    file.write_bytes(b'')


def foreign(file, seal):
    seal.unlink()


def linked(file, seal):
    file.rename(file.with_name('other'))
    file.symlink_to(file.with_name('other'))


def open_to_others(file, seal):
    file.chmod(0o666)


@pytest.mark.parametrize('damage', [truncate, flip, garbage, foreign, linked, open_to_others])
def test_what_was_not_made_here_is_made_anew(place, damage):
    folder, loaded = place
    cache.load('a.so', make()[0])
    damage(folder / 'a.so', folder / 'a.so.sha256')
    compiler, calls = make()
    cache.load('a.so', compiler)
    assert calls == [b'code']
    assert (folder / 'a.so').read_bytes() == b'code' and not (folder / 'a.so').is_symlink()
    cache.load('a.so', compiler)
    assert calls == [b'code']


def test_a_kernel_that_was_cut_short_does_not_kill_the_process(tmp_path):
    """The whole way, in processes of their own: without the check this one ends in SIGBUS."""
    if compiled.why_not(torch.empty(1, 1, 1, 32)) is not None:
        pytest.skip('no C compiler here; the tiles compute')
    code = (
        'import torch\n'
        'from mala_mm.ops.fused.cpu import compiled\n'
        'print(compiled.why_not(torch.empty(1, 1, 1, 32)))\n'
    )
    env = dict(os.environ, XDG_CACHE_HOME=str(tmp_path))
    sizes = []
    for _ in range(2):
        done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, 'None\n'), done.stderr
        (library,) = tmp_path.rglob('*.so')
        sizes.append(library.stat().st_size)
        library.write_bytes(library.read_bytes()[:8192])
    assert sizes[0] == sizes[1] > 8192
