"""Each tool is the command of a module of the package, and says how to use it."""

import ast
import importlib

import pytest

from mala_mm.paths import ROOT

TOOLS = sorted((ROOT / 'tools').glob('*.py'))


@pytest.mark.parametrize('path', TOOLS, ids=lambda path: path.stem)
def test_tool_runs_a_module_of_the_package(path, capsys):
    tree = ast.parse(path.read_text())
    (call,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == 'cli.run'
    )
    module = importlib.import_module(ast.literal_eval(call.args[0]))
    with pytest.raises(SystemExit) as stop:
        module.main(['--help'])
    assert stop.value.code == 0
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out
    # Whoever opens the file finds how to call it.
    assert f'tools/{path.name}' in ast.get_docstring(tree)
    assert len(tree.body) <= 5
