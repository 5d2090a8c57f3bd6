"""What the fuzzing tests share: damaged JSON and bytes, and the contract.

Every test runs 40 fixed cases; ``pytest -k fuzz --fuzz 2000`` runs 2000 new ones per test.
"""

import copy
import json

from hypothesis import strategies as st

from mala_mm.errors import UserError

numbers = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.sampled_from([2**31, 2**63, 10**30, 10**400, -(10**400)]),
    st.floats(),
    st.booleans(),
)
texts = st.one_of(st.text(max_size=8), st.sampled_from(['', '130', 'nan', '\0', '\ud800', '../x']))
leaves = st.one_of(st.none(), numbers, texts)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.dictionaries(st.one_of(texts, st.just('counts')), inner, max_size=3),
    ),
    max_leaves=8,
)


def places(node, path=()):
    """The paths to everything inside of JSON content."""
    yield path
    if isinstance(node, (dict, list)):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from places(child, (*path, key))


@st.composite
def damaged_content(draw, content, value=values):
    """Content with one to four entries replaced, removed or repeated."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 4))):
        *parents, key = draw(st.sampled_from([path for path in places(content) if path]))
        node = content
        for parent in parents:
            node = node[parent]
        action = draw(st.sampled_from(['replace', 'replace', 'replace', 'remove', 'repeat']))
        if action == 'replace':
            node[key] = draw(value)
        elif action == 'remove':
            del node[key]
        elif isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        if not content:
            break
    return content


@st.composite
def damaged_bytes(draw, data):
    """Bytes cut short, with some changed, inserted or removed; or others altogether."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=64))
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(len(data) - 1, 0)))
        action = draw(st.sampled_from(['flip', 'flip', 'cut', 'insert', 'remove']))
        if action == 'flip' and data:
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif action == 'cut':
            del data[start:]
        elif action == 'insert':
            data[start:start] = draw(st.binary(min_size=1, max_size=8))
        else:
            del data[start : start + draw(st.integers(1, 64))]
    return bytes(data)


def dumps(content) -> bytes:
    """JSON as files hold it, NaN and lone surrogates included."""
    return json.dumps(content).encode()


def outcome(function, *args):
    """What a function returns, or None if it refuses its input in one sentence."""
    try:
        return function(*args)
    except UserError as error:
        sentence = str(error)
        assert sentence and '\n' not in sentence and len(sentence) < 2000, sentence
        sentence.encode()
        return None
