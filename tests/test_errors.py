"""Every error of the package is one sentence of one form: what is wrong, its value, the remedy."""

import ast

import pytest

from mala_mm.paths import ROOT

KINDS = ('UserError', 'InvalidLossError', 'ValueError', 'TypeError')
# What ends a sentence with a remedy: a nearest name, an advice, the sentence of another error.
ADVICE = ('advice', 'remedy', 'not_computed', 'similar_', 'first_problem', 'error')


def parts(node):
    """The texts and the code of which a sentence is made."""
    if isinstance(node, ast.BinOp):
        return parts(node.left) + parts(node.right)
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in parts(value)]
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    code = node.value if isinstance(node, ast.FormattedValue) else node
    return [f'{{{ast.unparse(code)}}}']


def sentences():
    for path in sorted((ROOT / 'mala_mm').rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in KINDS and node.args:
                where = f'{path.relative_to(ROOT)}:{node.lineno}'
                yield pytest.param(node.func.id, parts(node.args[0]), id=where)


@pytest.mark.parametrize(('kind', 'found'), sentences())
def test_one_form(kind, found):
    text = ''.join(found)
    assert not text.endswith('.') and '. ' not in text.replace('...', ''), text
    if kind in ('UserError', 'InvalidLossError'):
        advice = found[-1].startswith('{') and any(word in found[-1] for word in ADVICE)
        assert ' must ' in text or '; ' in text or advice, text
