"""A small generated data set, written once."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from mala_mm.demo.scenes import Scene, SceneConfig, make_scene
from mala_mm.demo.writers import write_demo_data


@dataclass
class Demo:
    """A written data set and what it was made from."""

    root: Path
    config: SceneConfig
    counts: dict
    seed: int

    def scene(self, split: str, index: int) -> Scene:
        return make_scene(self.config, self.seed, split, index)


@pytest.fixture(scope='session')
def demo(tmp_path_factory) -> Demo:
    """Coco, ade and imagenet; small, and with much of what is rare in the default set."""
    config = SceneConfig(
        sides=(96, 131), objects=(2, 6), crowd=0.4, empty=0.2, object_size=(0.12, 0.6)
    )
    counts, seed = dict(train=16, val=8), 3
    out = tmp_path_factory.mktemp('generated') / 'demo'
    write_demo_data(out, ('coco', 'ade', 'imagenet'), counts, config, seed)
    return Demo(out, config, counts, seed)
