"""A trained model of any task that takes an image and returns plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.device import get_device
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope

from mala_mm.checkpoint import load_checkpoint
from mala_mm.checkpoint.load import match
from mala_mm.data.datasets import Dataset, leaves
from mala_mm.errors import UserError

from .drawing import draw_instances, draw_label_map, draw_lines, palette


@dataclass
class Prediction:
    """What a model says about an image.

    Attributes:
        content (dict[str, Any]): Plain values, for JSON.
        picture (ndarray): uint8 RGB: the image with what was found.
        label_map (ndarray, optional): uint8 or uint16 class indices (H, W), of a segmentor.
    """

    content: dict[str, Any]
    picture: np.ndarray
    label_map: np.ndarray | None = None


class Predictor:
    """A detector, segmentor or classifier.

    Args:
        cfg (Config): As read by :func:`mala_mm.engine.config.load_config`.
        checkpoint (str): The file of the weights; it is read safely.
        device (str, optional): The best there is by default.
        threshold (float): Detections with lower scores are left out.
        classes (Sequence[str], optional): Names of the classes to show; all by default.

    Raises:
        UserError: If the checkpoint does not fit, or a class is unknown.
    """

    def __init__(
        self,
        cfg: Config,
        checkpoint: str,
        device: str | None = None,
        threshold: float = 0.3,
        classes: Sequence[str] | None = None,
    ) -> None:
        scope = cfg.get('default_scope') or 'mmengine'
        init_default_scope(scope)
        self.device = device or get_device()
        content = load_checkpoint(checkpoint)
        model = MODELS.build({**cfg.model, 'init_cfg': None})
        if self.device == 'cpu':
            model = revert_sync_batchnorm(model)
        weights, _ = match(model, content, checkpoint)
        model.load_state_dict(weights, strict=False)
        self.model = model.to(self.device).eval()
        dataset = next(leaves(cfg.test_dataloader.dataset))
        # The image comes as an array, and without annotations.
        steps = [
            s for s in dataset['pipeline'] if not str(s['type']).rsplit('.')[-1].startswith('Load')
        ]
        self.pipeline = Compose(deepcopy(steps))
        meta = (
            content['meta'].get('dataset_meta') if isinstance(content.get('meta'), dict) else None
        )
        meta = meta if isinstance(meta, Mapping) else {}
        names = meta.get('classes') or Dataset(dataset, scope).classes
        if not names:
            raise UserError(
                f'Neither {checkpoint} nor the config says what the classes are called; set '
                'metainfo=dict(classes=...) in its test data set'
            )
        self.names = tuple(names)
        colours = meta.get('palette')
        usable = isinstance(colours, (list, tuple)) and len(colours) == len(self.names)
        self.colours = [tuple(map(int, c)) for c in (colours if usable else palette(len(names)))]
        unknown = [name for name in classes or () if name not in self.names]
        if unknown:
            raise UserError(
                f'The model knows no class {unknown[0]!r}; its classes are {", ".join(self.names)}'
            )
        self.shown = {i for i, name in enumerate(self.names) if not classes or name in classes}
        self.threshold = threshold

    @torch.inference_mode()
    def __call__(self, image: np.ndarray) -> Prediction:
        """Predict.

        Args:
            image (ndarray): uint8 RGB of shape (H, W, 3).
        """
        shape = image.shape[:2]
        sample = dict(
            # Pipelines work on BGR, as OpenCV reads.
            img=np.ascontiguousarray(image[..., ::-1]),
            **dict(img_shape=shape, ori_shape=shape, img_path='', img_id=0, height=shape[0]),
            **dict(width=shape[1], scale_factor=(1.0, 1.0), sample_idx=0),
        )
        found = self.model.test_step(pseudo_collate([self.pipeline(sample)]))[0]
        if 'pred_instances' in found:
            return self._instances(image, found.pred_instances.cpu().numpy())
        if 'pred_sem_seg' in found:
            return self._label_map(image, found.pred_sem_seg.data[0].cpu().numpy())
        return self._classes(image, found.pred_score.cpu().numpy())

    def _instances(self, image: np.ndarray, found: Any) -> Prediction:
        keep = [
            i
            for i in np.argsort(found.scores)  # the surest are drawn last
            if found.scores[i] >= self.threshold and int(found.labels[i]) in self.shown
        ]
        masks = found.masks[keep] if 'masks' in found else None
        labels = [int(i) for i in found.labels[keep]]
        texts = [f'{self.names[k]} {found.scores[i]:.2f}' for i, k in zip(keep, labels)]
        colours = [self.colours[k] for k in labels]
        instances = [
            dict(
                label=self.names[k],
                score=round(float(found.scores[i]), 4),
                bbox=[round(float(v), 2) for v in found.bboxes[i]],
            )
            for i, k in zip(keep, labels)
        ]
        if masks is not None:
            from pycocotools import mask as mask_utils

            for instance, mask in zip(instances, masks):
                code = mask_utils.encode(np.asfortranarray(mask, np.uint8))
                instance['segmentation'] = dict(size=code['size'], counts=code['counts'].decode())
        picture = draw_instances(image, found.bboxes[keep], texts, colours, masks)
        return Prediction(dict(instances=instances[::-1]), picture)

    def _label_map(self, image: np.ndarray, labels: np.ndarray) -> Prediction:
        indices, counts = np.unique(labels, return_counts=True)
        order = np.argsort(-counts)
        shares = {
            self.names[indices[i]]: round(float(counts[i] / labels.size), 4)
            for i in order
            if indices[i] in self.shown
        }
        visible = np.where(np.isin(labels, list(self.shown)), labels, 2**16 - 1)
        picture = draw_label_map(image, visible, self.names, self.colours)
        kind = np.uint8 if len(self.names) < 256 else np.uint16
        return Prediction(dict(share_of_pixels=shares), picture, labels.astype(kind))

    def _classes(self, image: np.ndarray, scores: np.ndarray) -> Prediction:
        best = [i for i in np.argsort(-scores) if i in self.shown][:5]
        found = [dict(label=self.names[i], score=round(float(scores[i]), 4)) for i in best]
        lines = [f'{entry["label"]} {entry["score"]:.2f}' for entry in found[:3]]
        return Prediction(dict(classes=found), draw_lines(image, lines))
