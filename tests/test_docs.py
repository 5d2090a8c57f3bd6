"""What the documents name has to be there."""

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
