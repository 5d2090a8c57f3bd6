"""Generated scenes (:mod:`.scenes`, :mod:`.writers`) and data set checks (:mod:`.checks`).

Importing this package costs nothing: only the class names are loaded.
"""

from .classes import (
    SCENE_CLASSES,
    SCENE_PALETTE,
    STUFF_CLASSES,
    STUFF_PALETTE,
    THING_CLASSES,
    THING_PALETTE,
)

__all__ = [
    'SCENE_CLASSES',
    'SCENE_PALETTE',
    'STUFF_CLASSES',
    'STUFF_PALETTE',
    'THING_CLASSES',
    'THING_PALETTE',
]
