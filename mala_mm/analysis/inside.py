"""What the attention layers of a model hold while it looks at an image."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn

from mala_mm.checkpoint import load_checkpoint, load_into
from mala_mm.engine.config import load_config
from mala_mm.errors import UserError
from mala_mm.models.layers import AttentionMixer
from mala_mm.ops import Operator, build_operator, get_operator
from mala_mm.ops.registry import split_heads

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.webp')
MULTIPLE = 32  # of both sides: the stride of the last stage, so that no image is padded


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model and what went through it, for one image.

    Attributes:
        name (str): The path of its operator in the model.
        stage (int): From 1.
        block (int): Within the stage, from 1.
        operator (Operator): The operator.
        q (Tensor): Queries of shape (1, heads, N, d).
        k (Tensor): Keys, as ``q``.
        v (Tensor): Values, as ``q``.
        size (tuple[int, int]): Height and width (H, W); N is H * W and any class token.
        x (Tensor, optional): Input of the layer, for operators that need it.
        gated (Tensor, optional): Attention with local position and gate, (1, heads, N, d): what
            the output projection gets.
    """

    name: str
    stage: int
    block: int
    operator: Operator
    q: Tensor
    k: Tensor
    v: Tensor
    size: tuple[int, int]
    x: Tensor | None = None
    gated: Tensor | None = None

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self.operator.num_heads

    def with_operator(self, name: str, **options: Any) -> Operator:
        """Build another operator with those of this layer's options that it has, and ``options``.

        Args:
            name (str): Its registered name; that of this layer's for the same operator.
            **options: Options in place of this layer's.

        Raises:
            ValueError: If there is no such operator or option.
        """
        known = get_operator(name).option_names()
        same = name == self.operator.name
        shared = {
            key: getattr(self.operator, key)
            for key in self.operator.option_names()
            # A scale means another thing in each operator.
            if key in known and hasattr(self.operator, key) and (same or key != 'scale')
        }
        other = build_operator(
            name, self.num_heads, self.operator.head_dim, **{**shared, **options}
        )
        return other.expect_extra_tokens(self.operator.num_extra_tokens)

    def on_map(self, tokens: np.ndarray) -> np.ndarray:
        """Return numbers per token (N, ) as a map (H, W), without those of a class token."""
        return tokens[self.operator.num_extra_tokens :].reshape(self.size)

    def check_head(self, head: int | None) -> None:
        """Refuse a head that the layer lacks; heads count from 1, None means their mean.

        Raises:
            UserError: If there is no such head.
        """
        if head is not None and not 1 <= head <= self.num_heads:
            raise UserError(
                f'head must be one of 1 to {self.num_heads} in stage {self.stage}, got {head}'
            )


@dataclass(frozen=True)
class Recording:
    """An image, what the model made of it, and its attention layers.

    Attributes:
        image (ndarray): What the model saw, uint8 RGB of shape (h, w, 3).
        input_size (tuple[int, int]): Height and width of its input; the image may be padded.
        layers (tuple[AttentionLayer, ...]): The layers in the order in which they ran.
        prediction (Any): The data sample of the image; None for a bare backbone.
    """

    image: np.ndarray
    input_size: tuple[int, int]
    layers: tuple[AttentionLayer, ...]
    prediction: Any = None

    def choose(self, stage: int | None = None, block: int | None = None) -> list[AttentionLayer]:
        """Return the layers of a stage and block.

        Args:
            stage (int, optional): From 1; all stages by default.
            block (int, optional): From 1; -1 is the last of its stage. All blocks by default.

        Raises:
            UserError: If there is no such stage or block.
        """
        stages = sorted({layer.stage for layer in self.layers})
        if stage is not None and stage not in stages:
            raise UserError(f'stage must be one of {_listed(stages)}, got {stage}')
        found = [layer for layer in self.layers if stage in (None, layer.stage)]
        if block is None:
            return found
        last = {s: max(x.block for x in self.layers if x.stage == s) for s in stages}
        chosen = [x for x in found if x.block == (last[x.stage] if block == -1 else block)]
        if not chosen:
            where = f'in stage {stage}' if stage is not None else 'in these stages'
            count = max(x.block for x in found)
            raise UserError(
                f'block must be one of 1 to {count} {where}, or -1 for the last, got {block}'
            )
        return chosen

    def token_at(self, layer: AttentionLayer, point: Sequence[int]) -> int:
        """Return the token of a layer that lies under a pixel (x, y) of the image.

        Raises:
            UserError: If the pixel lies outside.
        """
        height, width = self.image.shape[:2]
        check_point(point, (height, width))
        row = int(point[1] * layer.size[0] / self.input_size[0])
        column = int(point[0] * layer.size[1] / self.input_size[1])
        return layer.operator.num_extra_tokens + row * layer.size[1] + column

    def spread(self, layer: AttentionLayer, tokens: np.ndarray) -> np.ndarray:
        """Enlarge numbers per token (N, ) to the image (h, w), without smoothing."""
        grid = layer.on_map(np.asarray(tokens, np.float32))
        height, width = self.input_size
        large = cv2.resize(grid, (width, height), interpolation=cv2.INTER_NEAREST)
        return large[: self.image.shape[0], : self.image.shape[1]]


def check_point(point: Sequence[int], size: tuple[int, int]) -> None:
    """Refuse a pixel (x, y) that lies outside of an image of size (h, w).

    Raises:
        UserError: If it does.
    """
    height, width = size
    if not (0 <= point[0] < width and 0 <= point[1] < height):
        raise UserError(
            f'the point must lie in the image, x from 0 to {width - 1} and y from 0 to '
            f'{height - 1}, got {tuple(point)}'
        )


def _listed(numbers: Sequence[int]) -> str:
    return ', '.join(str(n) for n in numbers)


def find_images(paths: Sequence[str | Path]) -> list[Path]:
    """Return the image files that paths name; a folder stands for those in it.

    Raises:
        UserError: If a path does not exist or a folder holds no image.
    """
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob('*') if p.suffix.lower() in SUFFIXES)
            if not inside:
                raise UserError(f'{path} holds no image; they end in {", ".join(SUFFIXES)}')
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f'image {path} does not exist; give a file or a folder')
    return found


def read_image(
    path: str | Path, longest: int | None = 512, point: Sequence[int] | None = None
) -> tuple[np.ndarray, tuple[int, int]]:
    """Read an image as training does, scaled so that the model need not pad it.

    Args:
        path (str | Path): The file.
        longest (int, optional): Pixels of the longer side. Both sides are rounded to multiples of
            32. Defaults to 512; None keeps the size up to that rounding.
        point (Sequence[int], optional): A pixel (x, y) of the file; its centre by default.

    Returns:
        tuple[ndarray, tuple[int, int]]: uint8 RGB of shape (h, w, 3), and the point in it.

    Raises:
        UserError: If the file cannot be read, the length is too small, or the point lies outside.
    """
    if longest is not None and longest < MULTIPLE:
        raise UserError(f'the size must be at least {MULTIPLE} pixels, got {longest}')
    data = np.fromfile(str(path), np.uint8) if Path(path).is_file() else np.empty(0, np.uint8)
    image = cv2.imdecode(data, cv2.IMREAD_COLOR) if data.size else None
    if image is None:
        raise UserError(f'{path} cannot be read as an image; give a JPEG or PNG file')
    height, width = image.shape[:2]
    if point is None:
        point = (width // 2, height // 2)
    check_point(point, (height, width))
    factor = 1 if longest is None else longest / max(height, width)
    new = [max(round(side * factor / MULTIPLE), 1) * MULTIPLE for side in (height, width)]
    image = cv2.resize(image, (new[1], new[0]), interpolation=cv2.INTER_AREA)
    point = (int((point[0] + 0.5) * new[1] / width), int((point[1] + 0.5) * new[0] / height))
    return np.ascontiguousarray(image[..., ::-1]), point


def load_model(
    config: str | Path,
    checkpoint: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Build the model of a config for looking inside, on the CPU, in evaluation mode.

    Args:
        config (str | Path): A config with a model, or a backbone fragment.
        checkpoint (str | Path, optional): Its weights; random ones by default. The operators that
            the file says it was trained with take the place of the config's.
        options (Mapping, optional): Values by dotted key, as ``--cfg-options`` yields them. If
            they name ``attn_types``, those are kept.
        seed (int): Of random weights.

    Raises:
        UserError: If the config, an option or the checkpoint is wrong, or the model has no
            attention layers of this package.
    """
    cfg = load_config(config, options)
    model_cfg, backbone_cfg = _model_of(cfg)
    if checkpoint is not None and not any('attn_types' in key for key in options or ()):
        trained = attn_types_of(checkpoint)
        if trained is not None:
            backbone_cfg.attn_types = trained
    backbone_cfg.pop('init_cfg', None)
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mala_mm')):
        try:
            model = MODELS.build(model_cfg)
        except ValueError as error:
            raise UserError(f'the model of {config} cannot be built: {error}') from error
    if checkpoint is None:
        torch.manual_seed(seed)
        with _quiet():  # mmengine lists every parameter
            model.init_weights()
    else:
        load_into(model, checkpoint)
    model.eval()  # which does not return the model in every package
    if not any(isinstance(module, Operator) for module in model.modules()):
        raise UserError(
            f'the model of {config} has no attention layer of this package; name a config with a '
            'MAViT or RAVLT backbone'
        )
    classes = _classes_of(cfg)
    if classes is not None:
        model.dataset_meta = dict(classes=classes)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _model_of(cfg: Config) -> tuple[Any, Any]:
    """Return the config of a model and that of its backbone within."""
    model = copy.deepcopy(cfg.get('model') or cfg.get('backbone'))
    if model is None:
        raise UserError(
            f'{cfg.filename} has neither model nor backbone, only {sorted(cfg)}; name a config '
            'that has one'
        )
    return model, model.get('backbone', model)


def _classes_of(cfg: Config) -> tuple[str, ...] | None:
    dataset = (cfg.get('test_dataloader') or {}).get('dataset') or {}
    return (dataset.get('metainfo') or {}).get('classes')


def attn_types_of(checkpoint: str | Path) -> list[str] | None:
    """Return the operators that a checkpoint of this package was trained with, if it says so."""
    weights = load_checkpoint(checkpoint).get('state_dict')
    for note in getattr(weights, '_metadata', {}).values():
        if 'attn_types' in note:
            return list(note['attn_types'])
    return None


@torch.no_grad()
def record(model: nn.Module, image: np.ndarray, predict: bool = True) -> Recording:
    """Let a model look at an image, and keep what its attention layers held.

    Args:
        model (nn.Module): A bare backbone, or a model of mmpretrain, mmdet or mmseg, in evaluation
            mode.
        image (ndarray): uint8 RGB of shape (h, w, 3).
        predict (bool): Whether the heads run too.

    Returns:
        Recording: What was seen, held and predicted.
    """
    data = preprocess(model, image)
    backbone = getattr(model, 'backbone', model)
    with _recorded(model) as layers:
        prediction = None
        if backbone is model or not predict:
            backbone(data['inputs'])
        else:
            prediction = model(**data, mode='predict')[0]
    return Recording(image, tuple(data['inputs'].shape[-2:]), tuple(layers), prediction)


def preprocess(model: nn.Module, image: np.ndarray) -> dict[str, Any]:
    """Return an image as the model's own preprocessing hands it on, with a data sample.

    Args:
        model (nn.Module): As in :func:`record`.
        image (ndarray): uint8 RGB of shape (h, w, 3).

    Returns:
        dict: ``inputs`` of shape (1, 3, H, W), and for a whole model ``data_samples``.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(image[..., ::-1])).permute(2, 0, 1)
    if not hasattr(model, 'data_preprocessor'):
        mean, std = torch.tensor([123.675, 116.28, 103.53]), torch.tensor([58.395, 57.12, 57.375])
        return dict(inputs=((tensor.flip(0) - mean[:, None, None]) / std[:, None, None])[None])
    size = image.shape[:2]
    sample = _sample_class(model)(
        metainfo=dict(
            img_shape=size, ori_shape=size, pad_shape=size, scale_factor=(1.0, 1.0), img_path=''
        )
    )
    data = pseudo_collate([dict(inputs=tensor, data_samples=sample)])
    return model.data_preprocessor(data, False)


def _sample_class(model: nn.Module) -> type:
    library = next(
        (c.__module__.split('.')[0] for c in type(model).__mro__ if c.__module__.startswith('mm')),
        '',
    )
    if library == 'mmdet':
        from mmdet.structures import DetDataSample as DataSample
    elif library == 'mmseg':
        from mmseg.structures import SegDataSample as DataSample
    else:
        from mmpretrain.structures import DataSample
    return DataSample


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[AttentionLayer]]:
    """Collect the attention layers that run inside."""
    layers: list[AttentionLayer] = []
    handles = []
    mixers = {n: m for n, m in model.named_modules() if isinstance(m, AttentionMixer)}
    try:
        for name, mixer in mixers.items():
            handles += _watch_mixer(name, mixer, layers)
        for name, module in model.named_modules():
            if isinstance(module, Operator) and name.rpartition('.')[0] not in mixers:
                handles.append(_watch_operator(name, module, layers))
        yield layers
    finally:
        for handle in handles:
            handle.remove()


def _watch_mixer(name: str, mixer: AttentionMixer, layers: list[AttentionLayer]) -> list:
    held: dict[str, Any] = {}

    def projected(_, args: tuple, qkvo: Tensor) -> None:
        held['x'], held['qkvo'] = args[0].float(), qkvo.float()

    def leaving(_, args: tuple) -> None:
        qkvo, heads = held['qkvo'], mixer.num_heads
        q, k, v, gated = (
            split_heads(part, heads) for part in (*qkvo.chunk(4, 1)[:3], args[0].float())
        )
        x = held['x'] if mixer.operator.needs_input else None
        place = _place(name)
        layers.append(
            AttentionLayer(name, *place, mixer.operator, q, k, v, tuple(qkvo.shape[2:]), x, gated)
        )

    return [
        mixer.qkvo.register_forward_hook(projected),
        mixer.proj.register_forward_pre_hook(leaving),
    ]


def _watch_operator(name: str, operator: Operator, layers: list[AttentionLayer]) -> Any:
    """Watch an operator that stands in another package's attention layer."""

    def entering(_, args: tuple, kwargs: dict) -> None:
        held = dict(zip(('q', 'k', 'v', 'size', 'x'), args), **kwargs)
        q, k, v = (held[key].float() for key in 'qkv')
        layers.append(
            AttentionLayer(
                name, *_place(name), operator, q, k, v, tuple(held['size']), held.get('x')
            )
        )

    return operator.register_forward_pre_hook(entering, with_kwargs=True)


def _place(name: str) -> tuple[int, int]:
    """Return stage and block, from 1, of a path such as ``backbone.stages.2.0.attn``."""
    numbers = [int(n) + 1 for n in re.findall(r'(?<=\.)\d+(?=\.)', f'.{name}.')]
    if len(numbers) >= 2:
        return numbers[0], numbers[1]
    return 1, numbers[0] if numbers else 1
