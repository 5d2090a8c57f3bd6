"""Answers the questions of the page of ``tools/explore.py``."""

from __future__ import annotations

import base64
import math
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import nn

from mala_mm.errors import UserError
from mala_mm.ops import Operator

from .attention_maps import mean_row
from .drawing import colour
from .feature_maps import class_name
from .inside import AttentionLayer, Recording, read_image, record
from .rank import effective_rank, numerical_rank, singular_values
from .scores import check_operators

OPERATORS = ('mala', 'rala', 'linear', 'softmax')
KEPT = 8  # recordings of a model and an image


class Explorer:
    """Answers the page's questions.

    Args:
        models (Sequence[tuple[str, nn.Module]]): Models by name.
        images (Sequence[Path]): Image files to choose from.
        size (int): Longer side of an image that a model gets, in pixels.
        operators (Sequence[str]): Mechanisms to show beside a layer's own.
    """

    def __init__(
        self,
        models: Sequence[tuple[str, nn.Module]],
        images: Sequence[Path] = (),
        size: int = 512,
        operators: Sequence[str] = OPERATORS,
    ) -> None:
        check_operators(operators)
        self.models = list(models)
        self.size = size
        self.operators = tuple(operators)
        self.images = [(p.name, read_image(p, size)[0]) for p in images]
        self._seen: OrderedDict[tuple[int, int], tuple[Recording, dict]] = OrderedDict()
        self._lock = threading.Lock()  # one computation at a time: it uses all cores

    def setup(self) -> dict[str, Any]:
        """Return what there is to choose from."""
        return dict(
            models=[name or 'model' for name, _ in self.models],
            images=[name for name, _ in self.images],
        )

    def add_image(self, name: str, data: bytes) -> int:
        """Add an image from the bytes of its file, and return its number.

        Raises:
            UserError: If it cannot be read.
        """
        with tempfile.NamedTemporaryFile(suffix=Path(name).suffix[:8]) as file:
            file.write(data)
            file.flush()
            try:
                image = read_image(file.name, self.size)[0]
            except UserError as error:
                raise UserError(f'{name} cannot be read as an image; give a JPEG or PNG') from error
        self.images.append((name, image))
        return len(self.images) - 1

    def image(self, number: int) -> bytes:
        """Return an image as the models see it, as a JPEG file."""
        _, image = _pick(self.images, number, 'image')
        return cv2.imencode('.jpg', image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 92])[1].tobytes()

    def look(
        self,
        model: int,
        image: int,
        x: int | None = None,
        y: int | None = None,
        block: int = -1,
        head: int = 0,
    ) -> dict[str, Any]:
        """Return what the attention of a query sees in every stage.

        Args:
            model (int): Number of the model, from 0.
            image (int): Number of the image, from 0.
            x (int, optional): Column of the query's pixel; the middle by default.
            y (int, optional): Row, likewise.
            block (int): From 1; -1 is the last of each stage.
            head (int): From 1; 0 is the mean of all. Stages with fewer heads show their last.

        Raises:
            UserError: If there is no such model, image, pixel, block or head.
        """
        begin = time.perf_counter()
        with self._lock:
            seen, spectra = self._record(model, image)
            height, width = seen.image.shape[:2]
            point = (width // 2 if x is None else x, height // 2 if y is None else y)
            if head < 0 or head > max(layer.num_heads for layer in seen.layers):
                most = max(layer.num_heads for layer in seen.layers)
                raise UserError(f'the head must be from 1 to {most}, or 0 for all, got {head}')
            last = {layer.stage: layer.block for layer in seen.layers}
            if block != -1 and not 1 <= block <= max(last.values()):
                raise UserError(
                    f'the block must be from 1 to {max(last.values())}, or -1 for the last, '
                    f'got {block}'
                )
            stages = []
            for stage, depth in last.items():
                (layer,) = seen.choose(stage, depth if block == -1 else min(block, depth))
                stages.append(self._look(seen, layer, point, head, spectra))
            return dict(
                point=point,
                size=(width, height),
                stages=stages,
                blocks=max(last.values()),
                heads=max(layer.num_heads for layer in seen.layers),
                prediction=describe(self.models[model][1], seen.prediction),
                seconds=time.perf_counter() - begin,
            )

    def _record(self, model: int, image: int) -> tuple[Recording, dict]:
        _, network = _pick(self.models, model, 'model')
        _, pixels = _pick(self.images, image, 'image')
        key = (model, image)
        if key not in self._seen:
            self._seen[key] = record(network, pixels), {}
            if len(self._seen) > KEPT:
                self._seen.popitem(last=False)
        self._seen.move_to_end(key)
        return self._seen[key]

    def _look(
        self, seen: Recording, layer: AttentionLayer, point: tuple, head: int, spectra: dict
    ) -> dict[str, Any]:
        own = layer.operator.name
        token = seen.token_at(layer, point)
        chosen = min(head, layer.num_heads) or None
        maps = []
        for operator in dict.fromkeys((own, *self.operators)):
            if layer.operator.no_scores and operator == own:
                continue
            row = mean_row(layer, token, chosen, None if operator == own else operator)
            row = layer.on_map(row) * row.size
            signed = bool((row < 0).any())
            maps.append(
                dict(
                    operator=operator,
                    own=operator == own,
                    image=_png(self._cropped(seen, layer, colour(row, signed))),
                    low=float(row.min()),
                    high=float(row.max()),
                    negative=float((row < 0).mean()),
                )
            )
        if layer.name not in spectra:
            spectra[layer.name] = self._spectra(layer)
        return dict(
            stage=layer.stage,
            block=layer.block,
            head=chosen or 0,
            tokens=layer.size,
            maps=maps,
            spectra=spectra[layer.name],
        )

    @staticmethod
    def _cropped(seen: Recording, layer: AttentionLayer, colours: np.ndarray) -> np.ndarray:
        """Cut off the tokens that lie in the padding."""
        rows, columns = (
            math.ceil(tokens * shown / fed)
            for tokens, shown, fed in zip(layer.size, seen.image.shape, seen.input_size)
        )
        return colours[:rows, :columns]

    def _spectra(self, layer: AttentionLayer) -> list[dict[str, Any]]:
        """Return singular values and ranks of the states, means over the heads."""
        spectra = []
        for name in dict.fromkeys((layer.operator.name, *self.operators)):
            operator = layer.with_operator(name)
            if type(operator).state is Operator.state:
                continue
            state = operator.state(layer.q, layer.k, layer.v, layer.size)[0]
            values = singular_values(state)
            logs = (values / values[:, :1].clamp_min(1e-300)).clamp_min(1e-9).log()
            spectra.append(
                dict(
                    operator=name,
                    own=name == layer.operator.name,
                    rank=numerical_rank(values, tuple(state.shape[-2:])).double().mean().item(),
                    effective=effective_rank(values).mean().item(),
                    values=logs.mean(0).exp().tolist(),
                )
            )
        return spectra


def describe(model: nn.Module, sample: Any) -> dict[str, Any]:
    """Return a prediction in the words of the page: classes, boxes or shares of classes.

    Args:
        model (nn.Module): The model.
        sample (Any): The data sample that it predicted; None for a bare backbone.
    """
    boxes: list[list[float]] = []
    if sample is None:
        found = []
    elif 'pred_score' in sample:
        best = sample.pred_score.topk(min(5, len(sample.pred_score)))
        found = zip(best.indices.tolist(), best.values.tolist())
    elif 'pred_instances' in sample:
        instances = sample.pred_instances
        instances = instances[instances.scores > 0.3][:20]
        found = zip(instances.labels.tolist(), instances.scores.tolist())
        boxes = instances.bboxes.tolist()
    else:
        labels = sample.pred_sem_seg.data.flatten()
        best = torch.bincount(labels).double().div(len(labels)).sort(descending=True)
        found = zip(best.indices[:5].tolist(), best.values[:5].tolist())
    rows = [(class_name(model, label), score) for label, score in found if score > 0]
    return dict(rows=rows, boxes=boxes)


def _pick(things: Sequence[Any], number: int, kind: str) -> Any:
    if not things:
        raise UserError(f'there is no {kind} yet; choose a file')
    if not 0 <= number < len(things):
        raise UserError(f'the {kind} must be from 0 to {len(things) - 1}, got {number}')
    return things[number]


def _png(image: np.ndarray) -> str:
    data = cv2.imencode('.png', np.ascontiguousarray(image[..., ::-1]))[1].tobytes()
    return f'data:image/png;base64,{base64.b64encode(data).decode()}'
