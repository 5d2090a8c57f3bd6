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


def test_a_module_of_nobody_is_a_bug(monkeypatch, tmp_path):
    (tmp_path / 'buggy.py').write_text('import nowhere_to_be_found')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError):
        cli.run('buggy', [])
