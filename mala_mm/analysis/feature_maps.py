r"""Draws the feature maps of a model over an image, and where a class is seen (Grad-CAM).

python tools/feature_maps.py photo.jpg CONFIG checkpoint.pth
python tools/feature_maps.py photo.jpg CONFIG checkpoint.pth --cam GradCAM --target 3 --stage 3 4

The feature maps need no package more. "norm" is the length of each token's features, "components"
their three main directions as red, green and blue. Class activation maps come from the package
grad-cam (pip install grad-cam), of a classifier's logit, of a detector's scores of all objects of
the class, or of a segmentor's logit where it sees the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from mala_mm.engine.arguments import make_parser
from mala_mm.errors import UserError

from .arguments import add_model_options, check_out
from .drawing import Panel, colour, overlay, save_panels
from .inside import load_model, preprocess, read_image

METHODS = ('GradCAM', 'GradCAMPlusPlus', 'LayerCAM', 'HiResCAM', 'EigenGradCAM')


def stage_modules(model: nn.Module) -> list[nn.Module]:
    """Return the stages of a model's backbone.

    Raises:
        UserError: If the backbone has none.
    """
    backbone = getattr(model, 'backbone', model)
    stages = getattr(backbone, 'stages', None)
    if stages is None:
        raise UserError(
            f'{type(backbone).__name__} has no stages; name a config with a MAViT, RAVLT or Swin '
            'backbone'
        )
    return list(stages)


@torch.no_grad()
def feature_maps(model: nn.Module, image: np.ndarray) -> list[Tensor]:
    """Return the maps (C, H, W) that the stages of a model's backbone hand on.

    Args:
        model (nn.Module): A model in evaluation mode.
        image (ndarray): uint8 RGB of shape (h, w, 3).
    """
    maps: list[Tensor] = []
    hooks = [
        stage.register_forward_hook(lambda *args: maps.append(args[-1][0].float()))
        for stage in stage_modules(model)
    ]
    try:
        getattr(model, 'backbone', model)(preprocess(model, image)['inputs'])
    finally:
        for hook in hooks:
            hook.remove()
    return maps


def main_components(features: Tensor) -> np.ndarray:
    """Turn a map (C, H, W) into colours (H, W, 3) by its three main directions over the tokens."""
    tokens = features.flatten(1).T.double()
    tokens = tokens - tokens.mean(0)
    values, vectors = torch.linalg.eigh(tokens.T @ tokens)
    projected = tokens @ vectors[:, -3:].flip(1)  # the largest come last
    low, high = torch.quantile(projected, torch.tensor([0.02, 0.98]).double(), dim=0)
    scaled = ((projected - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
    return (255 * scaled).round().byte().reshape(*features.shape[1:], 3).numpy()


class Evidence(nn.Module):
    """A classifier, detector or segmentor as a function from its input to one number per class.

    Args:
        model (nn.Module): The model.
        samples (list): The data samples of the image.
    """

    def __init__(self, model: nn.Module, samples: list) -> None:
        super().__init__()
        self.model = model
        self.samples = samples

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the evidence for each class, (1, classes).

        Raises:
            UserError: If the model is of another kind.
        """
        if hasattr(self.model, 'decode_head'):
            logits = self.model.encode_decode(inputs, [s.metainfo for s in self.samples])
            best = logits.detach().argmax(1, keepdim=True)
            seen = torch.zeros_like(logits).scatter_(1, best, 1)
            # a class that is seen nowhere: its logit everywhere
            seen = torch.where(seen.sum((2, 3), keepdim=True) > 0, seen, torch.ones_like(seen))
            return (logits * seen).sum((2, 3)) / seen.sum((2, 3))
        if hasattr(self.model, 'roi_head') or hasattr(self.model, 'bbox_head'):
            (found,) = self.model.predict(inputs, self.samples, rescale=False)
            found = found.pred_instances
            evidence = found.scores.new_zeros(_num_classes(self.model))
            return evidence.index_add(0, found.labels, found.scores)[None]
        if hasattr(self.model, 'head'):
            return self.model(inputs, mode='tensor')
        raise UserError(
            f'{type(self.model).__name__} predicts no classes; name the config of a classifier, a '
            'detector or a segmentor'
        )


def _num_classes(model: nn.Module) -> int:
    head = model.roi_head.bbox_head if hasattr(model, 'roi_head') else model.bbox_head
    head = head[-1] if isinstance(head, nn.ModuleList) else head
    return head.num_classes


def class_activation(
    model: nn.Module,
    image: np.ndarray,
    layers: Sequence[nn.Module],
    target: int | None = None,
    method: str = 'GradCAM',
) -> tuple[list[np.ndarray], int]:
    """Compute where in an image a model sees a class.

    Args:
        model (nn.Module): A classifier, detector or segmentor in evaluation mode.
        image (ndarray): uint8 RGB of shape (h, w, 3).
        layers (Sequence[nn.Module]): Modules whose output is a map (1, C, H, W).
        target (int, optional): The class; the one with most evidence by default.
        method (str): One of :data:`METHODS`.

    Returns:
        tuple[list[ndarray], int]: For each layer a map (h, w) from 0 to 1, and the class.

    Raises:
        UserError: If the package grad-cam is missing, or there is no such class or method.
    """
    if method not in METHODS:
        raise UserError(f'the method must be one of {METHODS}, got {method!r}')
    try:
        import pytorch_grad_cam
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
    except ModuleNotFoundError as error:
        raise UserError(
            f'class activation maps need the package grad-cam ({error}); run pip install grad-cam'
        ) from error
    data = preprocess(model, image)
    evidence = Evidence(model, data.get('data_samples'))
    inputs = data['inputs']
    with torch.no_grad():
        classes = evidence(inputs)[0]
    if target is None:
        target = int(classes.argmax())
    if not 0 <= target < len(classes):
        raise UserError(f'the class must be from 0 to {len(classes) - 1}, got {target}')
    maps = []
    for layer in layers:
        with getattr(pytorch_grad_cam, method)(evidence, [layer]) as cam:
            found = cam(inputs, targets=[ClassifierOutputTarget(target)])[0]
        maps.append(found[: image.shape[0], : image.shape[1]])
    return maps, target


def class_name(model: nn.Module, target: int) -> str:
    """Return the name of a class, or its number where the model knows no names."""
    meta: dict[str, Any] = getattr(model, 'dataset_meta', None) or {}
    names = meta.get('classes')
    return names[target] if names and target < len(names) else f'class {target}'


def main(argv: Sequence[str] | None = None) -> None:
    """Draw from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If the image, the config, the checkpoint or an option is wrong.
    """
    parser = make_parser(__doc__)
    parser.add_argument('image', help='an image file')
    add_model_options(parser, many=False)
    parser.add_argument('--stage', type=int, nargs='+', help='stages, from 1 (default: all)')
    parser.add_argument('--cam', choices=METHODS, help='class activation maps by this method too')
    parser.add_argument(
        '--target', type=int, help='class, from 0 (default: that with most evidence)'
    )
    parser.add_argument('--out', default='feature_maps.png', help='PNG or JPEG file to write')
    args = parser.parse_args(argv)
    check_out(args.out)
    image, _ = read_image(args.image, args.size)
    model = load_model(args.config, args.checkpoint, args.cfg_options)
    modules = stage_modules(model)
    stages = args.stage or range(1, len(modules) + 1)
    for stage in stages:
        if not 1 <= stage <= len(modules):
            raise UserError(f'stage must be one of 1 to {len(modules)}, got {stage}')
    maps = feature_maps(model, image)
    size = image.shape[1::-1]
    rows = [[Panel(image, 'image')], [Panel(image, 'image')]]
    for stage in stages:
        features = maps[stage - 1]
        norm = cv2.resize(features.norm(dim=0).numpy(), size, interpolation=cv2.INTER_NEAREST)
        norm -= norm.min()
        components = cv2.resize(main_components(features), size, interpolation=cv2.INTER_NEAREST)
        note = f'{features.shape[0]} x {features.shape[1]} x {features.shape[2]}'
        rows[0].append(Panel(overlay(image, colour(norm)), f'stage {stage}', note))
        rows[1].append(Panel(components, f'stage {stage}', note))
    labels = ['norm', 'components']
    if args.cam:
        chosen = [modules[stage - 1] for stage in stages]
        found, target = class_activation(model, image, chosen, args.target, args.cam)
        rows.append([Panel(image, 'image')])
        for stage, values in zip(stages, found):
            panel = Panel(overlay(image, colour(values)), f'stage {stage}')
            rows[-1].append(panel)
        labels.append(f'{args.cam}: {class_name(model, target)}')
    save_panels(rows, labels, args.out)
    print(f'{args.out}: {", ".join(labels)} of stages {", ".join(map(str, stages))}')
