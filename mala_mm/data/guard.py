"""Transforms whose failures name the file, the transform and the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mala_mm.errors import UserError

from .images import incomplete

# Transforms of these packages end in a sentence; those of a user in their own traceback.
PACKAGES = ('mmcv', 'mmengine', 'mmdet', 'mmseg', 'mmpretrain', 'mala_mm')


class GuardedTransform:
    """A transform whose failures name it and the image.

    Args:
        transform (Callable): The transform.
    """

    def __init__(self, transform: Callable) -> None:
        self.transform = transform

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') or name == 'transform':
            raise AttributeError(name)
        return getattr(self.transform, name)

    def __call__(self, results: dict) -> dict | None:
        """Transform; what goes wrong ends in a sentence that names the image."""
        try:
            return self.transform(results)
        except UserError:
            raise
        except Exception as error:
            image = results.get('img_path') if isinstance(results, dict) else None
            raise UserError(
                f'The transform {type(self.transform).__name__} fails on the image {image} '
                f'({_reason(error)}); correct the pipeline in the config, or the annotations of '
                'this image'
            ) from error


class GuardedLoad(GuardedTransform):
    """A loading transform that names files which cannot be read whole.

    An image whose size is not what its annotations say is refused too: its boxes would lie
    elsewhere.

    Args:
        transform (Callable): mmcv's ``LoadImageFromFile`` or ``LoadAnnotations`` or one derived
            from them.
        key (str): Where the path stands in a sample: ``img_path`` or ``seg_map_path``.
    """

    def __init__(self, transform: Callable, key: str) -> None:
        super().__init__(transform)
        self.key = key
        backend = (getattr(transform, 'backend_args', None) or {}).get('backend', 'local')
        self.local = backend == 'local' and not getattr(transform, 'file_client_args', None)

    def __call__(self, results: dict) -> dict | None:
        """Load; a local file is looked at first."""
        path = results.get(self.key)
        if path is None or not self.local or '://' in str(path):
            return super().__call__(results)
        loaded = None
        try:
            reason = incomplete(Path(path).read_bytes())
            if reason is None:
                loaded = self.transform(results)
        except (KeyError, TypeError):  # of the annotations
            return super().__call__(results)
        except Exception as error:  # the readers of images raise anything
            reason = _reason(error)
        if reason is not None:
            kind = 'label map' if self.key == 'seg_map_path' else 'image'
            raise UserError(
                f'The {kind} {path} cannot be read ({reason}); replace it, or take it out of the '
                'data'
            )
        stated = results.get('height'), results.get('width')
        if self.key == 'img_path' and loaded is not None and None not in stated:
            found = tuple(loaded['img_shape'][:2])
            if found != stated:
                raise UserError(
                    f'The image {path} has {found[1]}x{found[0]} pixels (turned by its EXIF '
                    f'orientation, if any), but its annotations say {stated[1]}x{stated[0]}; '
                    'correct width, height and boxes'
                )
        return loaded


def _reason(error: Exception) -> str:
    if 'failed to load image' in str(error):  # mmcv's words, with the path again
        return 'it cannot be decoded'
    return f'{type(error).__name__}: {" ".join(str(error).split())}'.removesuffix(': ')


def guard_pipeline(dataset: Any) -> None:
    """Guards the transforms of a built data set, wrapped or not.

    Args:
        dataset: changed in place.
    """
    from mmcv.transforms import LoadAnnotations, LoadImageFromFile

    for inner in (*getattr(dataset, 'datasets', ()), getattr(dataset, 'dataset', None)):
        if inner is not None:
            guard_pipeline(inner)
    transforms = getattr(getattr(dataset, 'pipeline', None), 'transforms', None)
    for i, transform in enumerate(transforms if isinstance(transforms, list) else ()):
        if isinstance(transform, LoadImageFromFile):
            transforms[i] = GuardedLoad(transform, 'img_path')
        elif isinstance(transform, LoadAnnotations):
            transforms[i] = GuardedLoad(transform, 'seg_map_path')
        elif type(transform).__module__.split('.')[0] in PACKAGES:
            transforms[i] = GuardedTransform(transform)
