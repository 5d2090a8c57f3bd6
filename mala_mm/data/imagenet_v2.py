"""ImageNet-V2. Needs mmpretrain, and is imported when a config names it."""

from __future__ import annotations

from mmpretrain.datasets import ImageNet

from mala_mm.registry import DATASETS


@DATASETS.register_module()
class ImageNetV2(ImageNet):
    """A folder of ImageNet-V2: one folder per class, named by its number.

    `Do ImageNet Classifiers Generalize to ImageNet? <https://arxiv.org/abs/1902.10811>`_.
    mmpretrain's own data sets number the folders in alphabetical order, in which ``10`` comes
    before ``2``. The arguments are those of :class:`mmpretrain.datasets.ImageNet`.

    Raises:
        ValueError: If a folder's name is not the number of a class.
    """

    def _find_samples(self) -> list[tuple[str, int]]:
        samples = super()._find_samples()
        numbers = {str(number): number for number in range(len(self.CLASSES))}
        names = {index: name for name, index in self.folder_to_idx.items()}
        unknown = sorted(set(names.values()) - set(numbers))
        if unknown:
            raise ValueError(
                f'the folders in {self.img_prefix} must be named 0 to {len(numbers) - 1}, '
                f'got {unknown[0]!r}'
            )
        self.folder_to_idx = numbers
        return [(path, numbers[names[index]]) for path, index in samples]
