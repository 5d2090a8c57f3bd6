"""Generated parts of Markdown files."""

from __future__ import annotations

import re
from pathlib import Path

from mala_mm.errors import UserError


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Render a table with its first column left, all others right."""
    rule = ['---', *['---:'] * (len(header) - 1)]
    return '\n'.join(f'| {" | ".join(row)} |' for row in (header, rule, *rows))


def insert(root: Path, path: str, content: str) -> str:
    """Put generated content between the two markers of a file below a folder.

    Raises:
        UserError: If the file or its markers are missing.
    """
    begin, end = '<!-- written by tools/model_zoo.py -->\n', '\n<!-- end -->'
    text = (root / path).read_text() if (root / path).is_file() else ''
    if text.count(begin) != 1 or text.count(end) != 1:
        raise UserError(f'{path} must hold the lines {begin.strip()} and {end.strip()} once each')
    pattern = re.escape(begin) + '.*' + re.escape(end)
    return re.sub(pattern, lambda _: f'{begin}\n{content}\n{end}', text, flags=re.DOTALL)
