"""Class names and colours of the generated scenes, for ``metainfo`` in configs."""

# Alphabetical, so that detection labels, scene labels and the folder order of the
# ImageNet layout agree.
THING_CLASSES = ('ball', 'boat', 'box', 'car', 'house', 'ring', 'star', 'tree')
THING_PALETTE = (
    (230, 60, 60),
    (150, 80, 220),
    (200, 130, 50),
    (30, 90, 230),
    (240, 120, 190),
    (0, 200, 190),
    (250, 210, 40),
    (20, 110, 50),
)

STUFF_CLASSES = ('grass', 'mountain', 'road', 'sand', 'sky', 'wall', 'water')
STUFF_PALETTE = (
    (130, 200, 90),
    (120, 110, 130),
    (90, 90, 95),
    (235, 215, 160),
    (165, 215, 245),
    (165, 85, 65),
    (60, 130, 190),
)

# The label map stores the index in this tuple plus one; 0 means "other" (ADE20K's convention).
SCENE_CLASSES = STUFF_CLASSES + THING_CLASSES
SCENE_PALETTE = STUFF_PALETTE + THING_PALETTE
