"""Lists the registered operators as the table of README.md: ``python -m mala_mm.ops``."""

from __future__ import annotations

import torch

from . import OPERATORS, build_operator
from .fused.library import KINDS

SHAPES = {'200 x 334, d = 64': (200 * 334, 64), '50 x 84, d = 64': (50 * 84, 64)}


def operator_table() -> str:
    """Return the operators in Markdown: options, kernels, parameters and cost of one head."""
    head = ['operator', 'options', 'fused', 'parameters', *(f'MMACs at {x}' for x in SHAPES)]
    rows = [head, ['---'] * len(head)]
    for name, cls in OPERATORS.items():
        paper, _, address = cls.paper.rpartition(', ')
        cells = [f'[`{name}`]({address} "{paper}")', ', '.join(cls.option_names())]
        cells.append('yes' if name in KINDS else 'no')
        with torch.device('meta'):
            operators = [build_operator(name, 1, width) for _, width in SHAPES.values()]
        cells.append(str(sum(p.numel() for p in operators[0].parameters())))
        for operator, (tokens, _) in zip(operators, SHAPES.values()):
            millions = operator.macs(tokens) / 1e6
            cells.append(f'{millions:,.0f}' if millions >= 10 else f'{millions:.1f}')
        rows.append(cells)
    return '\n'.join(f'| {" | ".join(row)} |' for row in rows)


if __name__ == '__main__':
    print(operator_table())
