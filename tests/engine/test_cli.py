"""Commands: what is missing is named in one sentence."""

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


def test_one_process_speaks_for_all(monkeypatch, tmp_path, capsys):
    """On every machine of a run, also where only the scheduler numbers the processes."""
    (tmp_path / 'refusing.py').write_text(
        'from mala_mm.errors import UserError\ndef main(argv): raise UserError("no data")'
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ('RANK', 'SLURM_PROCID', 'LOCAL_RANK'):
        monkeypatch.delenv(name, raising=False)
    for variables, heard in (
        (dict(), True),
        (dict(RANK='0', LOCAL_RANK='0'), True),
        (dict(RANK='8', LOCAL_RANK='0'), False),  # the first of the second machine
        (dict(SLURM_PROCID='3'), False),
    ):
        with monkeypatch.context() as context:
            for name, value in variables.items():
                context.setenv(name, value)
            assert cli.run('refusing', []) == 1
        assert capsys.readouterr().err.endswith('error: no data\n') == heard


def test_the_image_at_fault_is_the_last_that_is_named():
    """mmcv's message comes with the traceback of a worker, in which others may stand."""
    message = 'failed to load image: a.jpg\nAssertionError: failed to load image: b.jpg'
    assert cli.explain(AssertionError(message)).startswith('The image b.jpg cannot be read')
    assert cli.explain(AssertionError('other')) is None


def test_a_module_of_nobody_is_a_bug(monkeypatch, tmp_path):
    (tmp_path / 'buggy.py').write_text('import nowhere_to_be_found')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError):
        cli.run('buggy', [])
