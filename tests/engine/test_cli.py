"""Commands: what is missing is named in one sentence."""

import json
import sys

import pytest

from mala_mm.engine import cli


@pytest.mark.parametrize(
    ('module', 'command', 'remedy'),
    [
        ('matplotlib', 'mala_mm.demo.demonstration', "python -m pip install 'mala_mm[tools]'"),
        ('mmcv', 'mala_mm.analysis.get_flops', 'python -m mala_mm.doctor'),
    ],
)
def test_missing_package_names_what_installs_it(module, command, remedy, monkeypatch, capsys):
    for name in [m for m in sys.modules if m.startswith(('mala_mm.demo', 'mala_mm.analysis'))]:
        monkeypatch.delitem(sys.modules, name)
    for name in [m for m in sys.modules if m.split('.')[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.run(command, []) == 1
    assert capsys.readouterr().err.endswith(
        f'error: The module {module} is not installed; run {remedy}\n'
    )


def test_an_error_is_told_once(monkeypatch, tmp_path, capsys):
    """By the launcher, if there is one; else the first process is ahead of the others."""
    (tmp_path / 'refusing.py').write_text(
        'from mala_mm.errors import UserError\ndef main(argv): raise UserError("no data")'
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ('RANK', 'SLURM_PROCID', 'LOCAL_RANK', 'TORCHELASTIC_ERROR_FILE', cli.LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    waited = []
    monkeypatch.setattr(cli.time, 'sleep', waited.append)
    for variables, waits in (
        (dict(), False),
        (dict(RANK='0', LOCAL_RANK='0'), False),
        (dict(RANK='8', LOCAL_RANK='0'), True),  # the first of the second machine
        (dict(SLURM_PROCID='3'), True),
    ):
        waited.clear()
        with monkeypatch.context() as context:
            for name, value in variables.items():
                context.setenv(name, value)
            assert cli.run('refusing', []) == 1
        assert capsys.readouterr().err.endswith('error: no data\n')
        assert bool(waited) == waits
    record = tmp_path / 'error.json'
    monkeypatch.setenv('TORCHELASTIC_ERROR_FILE', str(record))
    monkeypatch.setenv(cli.LAUNCHED, '1')
    assert cli.run('refusing', []) == 1
    assert capsys.readouterr().err == ''
    first = json.loads(record.read_text())
    assert first['message'] == 'no data'
    # What another process ended is never the first cause, whoever writes first.
    (tmp_path / 'ended.py').write_text(
        'def main(argv): raise RuntimeError("Connection closed by peer [127.0.0.1]:1")'
    )
    assert cli.run('ended', []) == 1
    ended = json.loads(record.read_text())
    assert (
        ended['message'].startswith('another process')
        and ended['timestamp'] - first['timestamp'] > 30
    )


def test_a_module_of_nobody_is_a_bug(monkeypatch, tmp_path):
    (tmp_path / 'buggy.py').write_text('import nowhere_to_be_found')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError):
        cli.run('buggy', [])
