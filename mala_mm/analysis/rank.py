r"""Measures the rank of KV states and of output features, per layer and head.

python tools/rank.py CONFIG linear.pth rala.pth mala.pth softmax.pth --images photos/
python tools/rank.py CONFIG mala.pth --images photos/ --operators linear rala mala softmax

Three matrices of each head: "state", the d x d sum that the queries read (the papers' KV buffer,
which softmax attention has not); "output", the N x d output of the attention; "gated", the same
after local position and gate, as it reaches the projection (for each checkpoint's own operator).
Singular values s_1 >= s_2 ... of each matrix, in float64. "rank" counts s_i > s_1 max(N, d) 2^-23:
the rank in float32, as torch.linalg.matrix_rank has it. "rank 1 %" counts s_i > 0.01 s_1.
"effective" is exp(-sum p log p), p_i = s_i / sum s (Roy and Vetterli, 2007). Means over images.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mala_mm.engine.arguments import make_parser
from mala_mm.errors import UserError
from mala_mm.files import write_bytes
from mala_mm.ops import OPERATORS, Operator

from .arguments import (
    add_image_options,
    add_layer_options,
    add_model_options,
    check_out,
    load_models,
)
from .drawing import markdown_table, plot_lines
from .inside import AttentionLayer, find_images, read_image, record

MATRICES = ('state', 'output', 'gated')
FLOAT32 = 2.0**-23
FLOOR = 1e-9  # of a plot
HEAD = (
    'model',
    'operator',
    'matrix',
    'stage',
    'block',
    'head',
    'd',
    'rank',
    'rank 1 %',
    'effective',
)


@dataclass
class Spectrum:
    """Singular values of one matrix of one head, and its ranks, means over images.

    Attributes:
        model (str): Name of the checkpoint.
        operator (str): Name of the operator.
        matrix (str): One of :data:`MATRICES`.
        stage (int): From 1.
        block (int): From 1.
        head (int): From 1.
        rank (float): Numerical rank in float32.
        rank_percent (float): Singular values above 1 % of the largest.
        effective (float): Exponential of the entropy of the singular values.
        values (list[float]): Singular values, falling, divided by the largest.
    """

    model: str
    operator: str
    matrix: str
    stage: int
    block: int
    head: int
    rank: float
    rank_percent: float
    effective: float
    values: list[float]


def singular_values(matrices: Tensor) -> Tensor:
    """Return the singular values of matrices (..., n, d) in falling order, (..., min(n, d)).

    In float64. Tall matrices go through a QR decomposition first, which keeps their singular
    values to the last digits and costs O(n d^2).
    """
    matrices = matrices.double()
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = torch.linalg.qr(matrices, mode='r').R
    return torch.linalg.svdvals(matrices)


def numerical_rank(values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Count the singular values (..., r) of matrices of a shape that float32 can tell from 0."""
    return (values > values[..., :1] * max(shape) * FLOAT32).sum(-1)


def effective_rank(values: Tensor) -> Tensor:
    """Return ``exp(-sum p log p)`` of ``p = s / sum s`` for singular values (..., r)."""
    values = values.double()
    p = values / values.sum(-1, keepdim=True).clamp_min(1e-300)
    return (-(p * p.clamp_min(1e-300).log()).sum(-1)).exp()


@torch.no_grad()
def matrices_of(layer: AttentionLayer, operator: Operator | None = None) -> dict[str, Tensor]:
    """Return the matrices of a layer, each (heads, rows, d), in float64.

    Args:
        layer (AttentionLayer): The layer.
        operator (Operator, optional): Another operator on the same queries, keys and values; it
            has no ``'gated'``.
    """
    other = operator or layer.operator
    q, k, v = (t.double() for t in (layer.q, layer.k, layer.v))
    found = {}
    if type(other).state is not Operator.state:
        found['state'] = other.state(q, k, v, layer.size)[0]
    extra = {'x': layer.x.double()} if other.needs_input else {}
    found['output'] = other.double().equations(q, k, v, layer.size, **extra)[0]
    other.float()
    if operator is None and layer.gated is not None:
        found['gated'] = layer.gated.double()[0]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If an image, the config, a checkpoint or an option is wrong.
    """
    parser = make_parser(__doc__)
    add_model_options(parser)
    add_image_options(parser)
    add_layer_options(parser)
    parser.add_argument('--out', default='rank.png', help='PNG or JPEG; a JSON lies beside it')
    args = parser.parse_args(argv)
    check_out(args.out)
    for name in args.operators or ():
        if name not in OPERATORS:
            raise UserError(f'the operator must be one of {tuple(OPERATORS)}, got {name!r}')
    images = find_images(args.images)[: args.limit]
    spectra: list[Spectrum] = []
    for name, model in load_models(args):
        found: dict[tuple, list[list]] = {}
        for path in images:
            seen = record(model, read_image(path, args.size)[0], predict=False)
            for layer in seen.choose(args.stage, args.block):
                for operator in args.operators or (None,):
                    _measure(layer, operator, found)
        for key, parts in found.items():
            ranks = [float(np.mean([p[i] for p in parts])) for i in range(3)]
            length = min(len(p[3]) for p in parts)  # images with few tokens have fewer values
            values = np.mean([p[3][:length] for p in parts], 0).tolist()
            spectra.append(Spectrum(name, *key, *ranks, values))
    print(f'{len(images)} images')
    print(markdown_table([HEAD, *_rows(spectra)], text_columns=3))
    plot(spectra, args.out)
    content = json.dumps([asdict(s) for s in spectra], indent=1)
    write_bytes(Path(args.out).with_suffix('.json'), content.encode())
    print(f'{args.out}: singular values; {Path(args.out).with_suffix(".json")}: every head')


def _measure(layer: AttentionLayer, operator: str | None, found: dict[tuple, list]) -> None:
    other = None if operator is None else layer.with_operator(operator)
    for name, matrices in matrices_of(layer, other).items():
        values = singular_values(matrices)
        ranks = numerical_rank(values, tuple(matrices.shape[-2:]))
        percent = (values > 0.01 * values[:, :1]).sum(-1)
        effective = effective_rank(values)
        relative = values / values[:, :1].clamp_min(1e-300)
        for head in range(layer.num_heads):
            key = (
                operator or layer.operator.name,
                name,
                layer.stage,
                layer.block,
                head + 1,
            )
            numbers = [ranks[head].item(), percent[head].item(), effective[head].item()]
            found.setdefault(key, []).append([*numbers, relative[head].tolist()])


def _rows(spectra: Sequence[Spectrum]) -> list[list[str]]:
    return [
        [
            *(s.model, s.operator, s.matrix, str(s.stage), str(s.block), str(s.head)),
            *(str(len(s.values)), f'{s.rank:.1f}', f'{s.rank_percent:.1f}', f'{s.effective:.1f}'),
        ]
        for s in spectra
    ]


def plot(spectra: Sequence[Spectrum], path: str) -> None:
    """Plot singular values, a panel per matrix and stage, a curve per operator and model."""
    panels = []
    several = len({s.model for s in spectra}) > 1
    for matrix in MATRICES:
        for stage in sorted({s.stage for s in spectra}):
            curves: dict[str, list] = {}
            for s in spectra:
                if (s.matrix, s.stage) == (matrix, stage):
                    different = several and s.model != s.operator
                    label = f'{s.operator} ({s.model})' if different else s.operator
                    curves.setdefault(label, []).append(s)
            if curves:
                panels.append(
                    (f'{matrix}, stage {stage}', {k: _mean(v) for k, v in curves.items()})
                )
    columns = len({s.stage for s in spectra})
    plot_lines(panels, path, 'index', 'singular value / largest', columns, log_y=True)


def _mean(spectra: Sequence[Spectrum]) -> tuple[list[int], np.ndarray]:
    """Return the geometric mean over blocks and heads."""
    length = min(len(s.values) for s in spectra)
    logs = [np.log(np.maximum(s.values[:length], FLOOR)) for s in spectra]
    return list(range(1, length + 1)), np.exp(np.mean(logs, 0))
