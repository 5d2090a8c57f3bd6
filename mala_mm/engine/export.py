"""Export a model to ONNX, or to a program of PyTorch's own operators.

    python tools/export.py CONFIG CHECKPOINT --dynamic --out model.onnx
    python tools/export.py CONFIG CHECKPOINT --size 512 512 --to torch --out model.pt2

What is written takes RGB images (B, 3, H, W) as float32 from 0 to 255 and normalises them itself.
It runs without this package, and it is written only if it gives what the model gives: at three
sizes, or the fixed one, for one image and for four.

`--part` says how much is exported:

model     classifiers: the logits; segmentors: the logits at the size of the image; one-stage
          detectors: the outputs of the head at every level, scores before boxes. Boxes are
          decoded and filtered outside (mmdet's `predict_by_feat`); two-stage detectors gather
          regions within the model and have no such form.
neck      the pyramid of a detector
backbone  the maps of the four stages

`--dynamic` exports have any batch and any height and width; multiples of 32 for necks and
detectors, which mmdet pads to; segmentors' heads resize to sizes that exporters take for constants
and need `--size`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from mala_mm.checkpoint import enforce_safe_loading, load_into
from mala_mm.errors import UserError
from mala_mm.files import replacing

from . import arguments
from .config import load_config

SUFFIXES = dict(onnx='.onnx', torch='.pt2')
PACKAGES = ('onnx', 'onnxruntime', 'onnxscript')
TOLERANCE = 1e-4  # of the largest value of an output; float32 sums in another order lose 1e-6
DYNAMIC_SIZES = ((64, 96), (128, 64), (160, 224))
SMALLEST, LARGEST = 33, 4096  # pixels; below 33 the last stage has one token, another program


def main(argv: Sequence[str] | None = None) -> None:
    """Export from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If the config, the checkpoint or an option is wrong, a package is missing, or
            what was exported does not compute what the model does.
    """
    parser = arguments.make_parser(__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('--out', required=True, metavar='FILE', help='.onnx or .pt2')
    parser.add_argument('--to', choices=tuple(SUFFIXES), help='default: what FILE ends in')
    parser.add_argument('--part', choices=('model', 'neck', 'backbone'), default='model')
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument('--size', type=int, nargs=2, metavar=('H', 'W'), help='this size alone')
    sizes.add_argument('--dynamic', action='store_true', help='any size')
    arguments.add_config_options(parser, data_root=False)
    args = parser.parse_args(argv)
    form = choose_form(args.out, args.to)
    if args.size is not None and min(args.size) < SMALLEST:
        raise UserError(f'--size must be {SMALLEST} x {SMALLEST} at least, got {args.size}')
    enforce_safe_loading()
    cfg = load_config(args.config, args.cfg_options)
    arguments.check_checkpoint(args.checkpoint)
    module = Exportable(build(cfg, args.checkpoint), cfg.get('default_scope'), args.part)
    if args.dynamic and not module.dynamic:
        raise UserError(
            '--dynamic is not for segmentors, whose heads resize to sizes that exporters take for '
            'constants; give --size H W, or --part backbone'
        )
    size = tuple(args.size) if args.size else None
    program = export(module, size)
    checked = (
        [(b, *s) for b, s in zip((1, 4, 1), DYNAMIC_SIZES)]
        if size is None
        else [(1, *size), (4, *size)]
    )
    with replacing(args.out) as part:
        worst = write(program, part, form, module, checked)
    shapes = ', '.join('x'.join(map(str, shape)) for shape in checked)
    print(f'{args.out}: within {worst:.1e} of the model for images of {shapes}')


def choose_form(out: str, to: str | None) -> str:
    """Return the form of the file to write, which its name tells.

    Args:
        out (str): The file.
        to (str, optional): The form that was asked for.

    Raises:
        UserError: If the name has another suffix, its folder does not exist, or a package is
            missing.
    """
    found = {suffix: form for form, suffix in SUFFIXES.items()}.get(Path(out).suffix)
    if found is None or (to is not None and to != found):
        wanted = SUFFIXES.get(to, ' or '.join(SUFFIXES.values()))
        raise UserError(f'--out must end in {wanted}, got {out}')
    if not Path(out).absolute().parent.is_dir():
        raise UserError(f'the folder of --out {out} does not exist; make it first')
    if found == 'onnx':
        check_packages()
    return found


def check_packages() -> None:
    """Refuse to begin without the packages that ONNX takes.

    Raises:
        UserError: If one is missing.
    """
    from importlib.util import find_spec

    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(f"ONNX needs {', '.join(missing)}; run pip install 'mala_mm[export]'")


def build(cfg: Config, checkpoint: str) -> nn.Module:
    """Build a model for inference and load its weights.

    Args:
        cfg (Config): The config.
        checkpoint (str): The checkpoint file.

    Raises:
        UserError: If the file is damaged or does not fit the model.
    """
    from mmengine.registry import MODELS, init_default_scope

    init_default_scope(cfg.get('default_scope', 'mmengine'))
    model = revert_sync_batchnorm(MODELS.build(cfg.model))
    load_into(model, checkpoint)
    return model.eval()


class Exportable(nn.Module):
    """A model, or a part of one, from raw images to tensors.

    Args:
        model (nn.Module): A classifier, segmentor or detector in evaluation mode.
        scope (str): The library that it is of, ``'mmpretrain'``, ``'mmseg'`` or ``'mmdet'``.
        part (str): ``'model'``, ``'neck'`` or ``'backbone'``.

    Attributes:
        dynamic (bool): Whether it can be exported for any size.
        step (int): What height and width are a multiple of.

    Raises:
        UserError: If the model has no such part.
    """

    def __init__(self, model: nn.Module, scope: str, part: str) -> None:
        super().__init__()
        self.model, self.scope, self.part = model, scope, part
        if part == 'neck' and (scope != 'mmdet' or not model.with_neck):
            raise UserError(
                f'--part neck is for detectors with a neck, not for a {type(model).__name__}; give '
                '--part model or --part backbone'
            )
        if part == 'model' and scope == 'mmdet' and getattr(model, 'with_roi_head', False):
            raise UserError(
                f'a {type(model).__name__} gathers regions within the model and cannot be exported '
                'whole; give --part neck or --part backbone'
            )
        self.dynamic = part != 'model' or scope != 'mmseg'
        self.step = 32 if scope == 'mmdet' and part != 'backbone' else 1
        for name, neutral in (('mean', 0.0), ('std', 1.0)):
            value = getattr(model.data_preprocessor, name, torch.tensor(neutral))
            self.register_buffer(name, value.clone())

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the part.

        Args:
            images (Tensor): RGB images of shape (B, 3, H, W), from 0 to 255.
        """
        x = (images - self.mean) / self.std
        if self.part == 'backbone':
            return tuple(self.model.backbone(x))
        if self.part == 'neck':
            return tuple(self.model.extract_feat(x))
        outputs = self.model(x, mode='tensor')
        if self.scope == 'mmseg':
            outputs = nn.functional.interpolate(
                outputs, x.shape[2:], mode='bilinear', align_corners=self.model.align_corners
            )
        return tuple(torch.utils._pytree.tree_leaves(outputs))


def export(module: Exportable, size: tuple[int, int] | None) -> ExportedProgram:
    """Export a module for any batch, and one size or any.

    Args:
        module (Exportable): What to export.
        size (tuple[int, int], optional): Height and width; any by default.
    """
    shapes = {0: Dim('batch', min=1, max=LARGEST)}
    if size is None:
        step, first = module.step, -(-SMALLEST // module.step)
        for dim, name in ((2, 'height'), (3, 'width')):
            count = Dim(name, min=first, max=LARGEST // step)
            shapes[dim] = count if step == 1 else step * count
    # Sizes that no branch takes for special: neither one another's, nor a token or two.
    images = torch.rand(2, 3, *(size or (256, 192))) * 255
    with torch.no_grad():
        return torch.export.export(module, (images,), dynamic_shapes=(shapes,), strict=False)


def write(
    program: ExportedProgram,
    path: Path,
    form: str,
    module: Exportable,
    shapes: Sequence[tuple[int, int, int]],
) -> float:
    """Write a program, and hold the file against the module.

    Args:
        program (ExportedProgram): What :func:`export` returned.
        path (Path): The file.
        form (str): ``'onnx'`` or ``'torch'``.
        module (Exportable): What was exported.
        shapes (Sequence[tuple[int, int, int]]): Images and their height and width to compare at.

    Returns:
        float: The largest difference, of the largest value of an output.

    Raises:
        UserError: If it is larger than :data:`TOLERANCE`.
    """
    if form == 'onnx':
        with redirect_stdout(StringIO()):
            torch.onnx.export(program, dynamo=True, verbose=False).save(path, external_data=False)
        run = _run_onnx(path)
    else:
        with path.open('wb') as file:
            torch.export.save(program, file)
        run = torch.export.load(path.open('rb')).module()
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for batch, height, width in shapes:
        images = torch.rand(batch, 3, height, width, generator=generator) * 255
        with torch.no_grad():
            pairs = zip(module(images), run(images), strict=True)
        worst = max(worst, *(float((a - b).abs().max() / a.abs().max()) for a, b in pairs))
    if not worst <= TOLERANCE:
        raise UserError(
            f'what was exported must equal the model to {TOLERANCE:.0e} of the largest value, it '
            f'differs by {worst:.1e} and was not written'
        )
    return worst


def _run_onnx(path: Path) -> object:
    """Return a function from images to the outputs of ONNX Runtime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(os.fspath(path), providers=['CPUExecutionProvider'])
    (argument,) = session.get_inputs()
    return lambda images: map(torch.from_numpy, session.run(None, {argument.name: images.numpy()}))
