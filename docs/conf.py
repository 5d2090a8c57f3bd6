"""The site: ``make docs``. Its sources are this folder and the pages that lie beside the code."""

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from mala_mm.version import __version__  # noqa: E402

project = 'mala_mm'
author = 'the mala_mm authors'
release = __version__

# Sphinx reads the repository, not this folder, so that links between pages are the same here and
# in a viewer of files.
root_doc = 'docs/index'
include_patterns = [
    'docs/**.md',
    'docs/**.ipynb',
    '*.md',
    'benchmarks/README.md',
    'benchmarks/results/*.md',
    'configs/**/README.md',
    'mala_mm/ops/README.md',
]
exclude_patterns = ['.*', 'build', 'site']

extensions = [
    'myst_nb',
    'sphinx.ext.autodoc',
    'sphinx.ext.mathjax',
    'sphinx.ext.napoleon',
    'sphinx_copybutton',
]
myst_enable_extensions = ['amsmath', 'dollarmath']
myst_heading_anchors = 3
nb_execution_mode = 'off'  # the tests run them

autodoc_member_order = 'bysource'
autodoc_default_options = {'members': True, 'show-inheritance': True}
autodoc_typehints = 'none'  # the docstrings have them, with shapes
napoleon_use_rtype = False
napoleon_preprocess_types = True

html_theme = 'furo'
html_title = f'mala_mm {release}'
html_show_sourcelink = False
html_theme_options = {'top_of_page_buttons': []}
