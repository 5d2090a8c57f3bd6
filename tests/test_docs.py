"""What the documents name has to be there."""

import pkgutil
import re

import pytest

from .conftest import REPO

PAGES = [
    path.relative_to(REPO)
    for pattern in (
        '*.md',
        'docs/*.md',
        'configs/**/README.md',
        'benchmarks/*.md',
        'mala_mm/ops/*.md',
    )
    for path in sorted(REPO.glob(pattern))
]
# CONTRIBUTING tells to make these two, and its own test makes one of them.
TO_BE_MADE = {
    'configs/_base_/backbones/mavit-x.py',
    'configs/det/mavit/mask-rcnn_mavit-t_fpn_amp-2x_coco.py',
}


@pytest.mark.parametrize('page', PAGES, ids=str)
def test_links_and_files_exist(page):
    text = (REPO / page).read_text()
    links = [link.split('#')[0] for link in re.findall(r'\]\(([^) ]+)', text)]
    missing = [
        link
        for link in links
        if link and '://' not in link and not (REPO / page).parent.joinpath(link).exists()
    ]
    assert not missing
    files = re.findall(r'\b(?:tests|mala_mm|benchmarks|tools|configs)/[\w./-]+\.\w+', text)
    missing = {name for name in files if not (REPO / name).exists()} - TO_BE_MADE
    assert not missing


@pytest.mark.parametrize('page', PAGES, ids=str)
def test_named_tests_exist(page):
    """``tests/a/test_b.py::test_c``, and after one with a folder ``test_d.py`` beside it."""
    text = (REPO / page).read_text()
    for file, name in re.findall(r'`(tests/[\w/]+\.py)::(\w+)', text):
        assert f'def {name}(' in (REPO / file).read_text(), f'{file}::{name}'


@pytest.mark.parametrize('page', PAGES, ids=str)
def test_headings_that_are_linked_exist(page):
    """``page.md#a-heading``, as GitHub and the site name it."""
    for link in re.findall(r'\]\(([^) :]*\.md)?#([^) ]+)\)', (REPO / page).read_text()):
        file, name = (REPO / page).parent / link[0] if link[0] else REPO / page, link[1]
        headings = re.findall(r'^#+ +(.+)$', file.read_text(), flags=re.M)
        slugs = {re.sub(r'[^\w\- ]', '', h.lower()).replace(' ', '-') for h in headings}
        assert name in slugs, f'{file.name}#{name}'


@pytest.mark.parametrize('page', ['docs/papers.md', 'docs/gallery.md'])
def test_named_code_exists(page):
    """``mala_mm.module.Class.method`` in backticks is an attribute of a module."""
    text = (REPO / page).read_text()
    names = set(re.findall(r'`(mala_mm(?:\.\w+)+)`', text))
    assert names or page != 'docs/papers.md'
    for name in names:
        pkgutil.resolve_name(name)


def test_every_equation_figure_and_table_of_the_papers_has_a_row():
    """Numbers as the papers have them; a row may be of several: ``1, 5-6``."""
    text = (REPO / 'docs/papers.md').read_text()
    last = dict(zip(('MALA', 'RALA'), ((22, 7, 11), (15, 9, 10))))
    for paper, numbers in last.items():
        for kind, number in zip(('equations', 'figures', 'tables'), numbers):
            section = text.split(f'## {paper}: {kind}\n')[1].split('\n## ')[0]
            found = set()
            for cell in re.findall(r'^\| ([\d, -]+) \|', section, flags=re.M):
                for part in cell.split(', '):
                    first, _, end = part.partition('-')
                    found |= set(range(int(first), int(end or first) + 1))
            assert found == set(range(1, number + 1)), (paper, kind)
