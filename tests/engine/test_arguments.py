"""What the options of the commands make of a config."""

import pytest

from mala_mm.engine.arguments import check_checkpoint, read_config, run_parser
from mala_mm.errors import UserError


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Take back what a run sets for its process."""
    monkeypatch.setenv('LOCAL_RANK', '0')
    monkeypatch.setattr('mala_mm.engine.arguments.enforce_safe_loading', lambda: None)


@pytest.fixture
def read(tmp_path):
    """A function that reads a config of the given text as a command line does."""

    def read(text, *options):
        path = tmp_path / 'my_config.py'
        path.write_text(f"default_scope = 'mmengine'\n{text}")
        return read_config(run_parser('').parse_args([str(path), *options]))

    return read


def test_the_work_dir_is_that_of_the_option_then_of_the_config_then_its_name(read):
    assert read('').work_dir == 'work_dirs/my_config'
    assert read("work_dir = 'own'").work_dir == 'own'
    assert read("work_dir = 'own'", '--work-dir', 'option').work_dir == 'option'


def test_the_imports_of_a_config_are_kept_beside_ours(read):
    """The written copy has no base files, and has to import what they did."""
    assert read('').custom_imports.imports == ['mala_mm']
    own = "custom_imports = dict(imports=['json'], allow_failed_imports=False)"
    assert read(own).custom_imports.imports == ['json', 'mala_mm']


def test_a_checkpoint_is_looked_for_where_it_may_lie(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'a.pth').touch()
    for path in (None, '~/a.pth', str(tmp_path / 'a.pth'), 'https://example.org/b.pth'):
        check_checkpoint(path)
    for path in ('~/b.pth', str(tmp_path)):
        with pytest.raises(UserError, match=f'Checkpoint {path} does not exist'):
            check_checkpoint(path)


def test_an_option_without_a_value_ends_in_a_sentence(capsys):
    with pytest.raises(SystemExit):
        run_parser('').parse_args(['c.py', '--cfg-options', 'a=1', 'b'])
    assert "--cfg-options takes key=value pairs, got 'b'" in capsys.readouterr().err
