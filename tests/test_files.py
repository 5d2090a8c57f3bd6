"""Files appear whole or not at all, and what was killed half-way is cleared away."""

import ast
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mala_mm import files
from mala_mm.files import remove_parts, replacing, replacing_folder, write_bytes


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_file_takes_its_place_only_when_it_is_complete(tmp_path):
    path = tmp_path / 'file'
    path.write_text('old')
    with replacing(path) as part:
        part.write_text('half')
        assert path.read_text() == 'old'
        assert part.parent == tmp_path  # renaming across file systems is not atomic
        part.write_text('new')
    assert path.read_text() == 'new'
    assert names(tmp_path) == ['file']


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), KeyboardInterrupt()])
@pytest.mark.parametrize('before', [None, 'old'])
def test_what_fails_leaves_things_as_they_were(tmp_path, error, before):
    path = tmp_path / 'file'
    if before:
        path.write_text(before)
    with pytest.raises(type(error)), replacing(path) as part:
        part.write_text('half')
        raise error
    assert names(tmp_path) == (['file'] if before else [])
    assert not before or path.read_text() == before


def test_what_reads_back_wrong_does_not_take_its_place(tmp_path):
    path = tmp_path / 'file'
    path.write_text('old')

    def verify(part):
        assert path.read_text() == 'old'
        if part.read_text() != 'new':
            raise ValueError('damaged')

    with pytest.raises(ValueError, match='damaged'), replacing(path, verify) as part:
        part.write_text('ne')
    assert path.read_text() == 'old' and names(tmp_path) == ['file']
    with replacing(path, verify) as part:
        part.write_text('new')
    assert path.read_text() == 'new'


def test_file_and_folder_reach_the_disk_in_order(tmp_path, monkeypatch):
    """First the content, then the name: a power cut must not find the name over empty blocks."""
    events = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor):
        events.append('folder' if stat.S_ISDIR(os.fstat(descriptor).st_mode) else 'file')
        fsync(descriptor)

    def recorded_replace(*args, **kwargs):
        events.append('rename')
        replace(*args, **kwargs)

    monkeypatch.setattr(os, 'fsync', recorded_fsync)
    monkeypatch.setattr(os, 'replace', recorded_replace)
    write_bytes(tmp_path / 'file', b'content')
    assert events == ['file', 'rename', 'folder']


@pytest.mark.parametrize('mask', [0o022, 0o077])
def test_the_mode_is_that_of_any_new_file(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_bytes(tmp_path / 'ours', b'')
        (tmp_path / 'any').touch()
    finally:
        assert os.umask(before) == mask  # which is the whole process's, and not ours to change
    assert (tmp_path / 'ours').stat().st_mode == (tmp_path / 'any').stat().st_mode


def test_a_folder_takes_the_place_of_another(tmp_path):
    path = tmp_path / 'folder'
    for number in range(2):
        with replacing_folder(path) as part:
            (part / f'file{number}').touch()
            assert number == 0 or names(path) == ['file0']
    assert names(path) == ['file1']
    with pytest.raises(RuntimeError), replacing_folder(path) as part:
        (part / 'half').touch()
        raise RuntimeError
    assert names(path) == ['file1'] and names(tmp_path) == ['folder']


def test_parts_of_the_killed_are_removed_and_those_in_use_are_not(tmp_path):
    code = (
        'import os, signal, sys\n'
        'from mala_mm.files import replacing\n'
        'with replacing(sys.argv[1]) as part:\n'
        "    part.write_text('half')\n"
        '    os.kill(os.getpid(), signal.SIGKILL)\n'
    )
    killed = subprocess.run([sys.executable, '-c', code, str(tmp_path / 'file')])
    assert killed.returncode == -signal.SIGKILL
    (stale,) = tmp_path.iterdir()
    (tmp_path / '.of_somebody.part').touch()
    with replacing(tmp_path / 'file') as part, replacing_folder(tmp_path / 'folder'):
        assert remove_parts(tmp_path, 'other') == []
        assert remove_parts(tmp_path, 'file') == [stale]
        stale.touch()
        assert remove_parts(tmp_path) == [stale]
        part.write_text('new')
    assert names(tmp_path) == ['.of_somebody.part', 'file', 'folder']
    assert remove_parts(tmp_path / 'none') == []


def test_needs_the_standard_library_only():
    """The operators use it, which import nothing but torch and the standard library."""
    tree = ast.parse(Path(files.__file__).read_text())
    imported = {
        name.split('.')[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [n.name for n in node.names]
        )
    }
    assert imported <= sys.stdlib_module_names
