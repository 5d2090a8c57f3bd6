"""Let a CUDA build of torchvision be imported next to a CPU build of torch.

PyPI's torchvision is a CUDA build. Next to a CPU build of torch its compiled
library cannot be loaded, and ``import torchvision`` ends with "operator
torchvision::nms does not exist", because it registers shape functions for
operators that nobody has declared. Declaring the schemas it asks for makes
the import succeed: transforms, models and everything else that is written in
Python then work. ``torchvision.ops.nms`` and ``torchvision.io.read_image``
still do not; use ``mmcv.ops.nms`` and ``mmcv.imread``.

``tools/setup_env`` installs this package only where importing torchvision
fails in that way. When a matching torchvision takes the place of the CUDA
build later, ``declare`` does nothing: a second declaration would be an error.
"""

import importlib.util
import re
from pathlib import Path

SCHEMAS = (
    'nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
    'qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor',
)

_library = None  # the declarations live as long as this object does


def torchvision_is_cuda_build() -> bool:
    """Whether the installed torchvision was built for CUDA.

    Its version is read from its file: importing it here would be too early.
    """
    spec = importlib.util.find_spec('torchvision')
    if spec is None or not spec.submodule_search_locations:
        return False
    version = Path(spec.submodule_search_locations[0], 'version.py')
    if not version.is_file():
        return False
    return re.search(r"__version__ = '[^']*\+cu\d", version.read_text()) is not None


def declare() -> None:
    """Declare torchvision's operators; torch calls this when it is imported."""
    global _library
    import torch

    if torch.version.cuda or torch.version.hip or not torchvision_is_cuda_build():
        return
    if torch._C._jit_get_schemas_for_operator('torchvision::nms'):
        return
    _library = torch.library.Library('torchvision', 'FRAGMENT')
    for schema in SCHEMAS:
        _library.define(schema)
