"""Examine the installation: ``python -m mala_mm.doctor``.

Prints the versions found and what works, and for each defect the one command that fixes it. The
exit code is 1 if training could not work.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from . import registration_error
from .paths import ROOT
from .version import __version__

PIP = 'python -m pip'
TOOLS = f"{PIP} install 'mala_mm[tools]'"
LINES = ('onedl', 'upstream')


@dataclass(frozen=True)
class Package:
    """A package that is looked for.

    Attributes:
        module (str): Name by which it is imported.
        names (tuple[str, ...]): Name by which it is installed; two if the lines differ.
        needs (tuple[str, ...]): Modules without which it cannot be imported.
        serves (str): What needs it, if training as a whole works without it.
    """

    module: str
    names: tuple[str, ...]
    needs: tuple[str, ...] = ()
    serves: str = ''

    def name(self, line: str) -> str:
        """Name by which it is installed on a line."""
        return self.names[-1 if line == 'upstream' else 0]


PACKAGES = (
    Package('numpy', ('numpy',)),
    Package('cv2', ('opencv-python',), ('numpy',)),
    Package('pycocotools', ('pycocotools',), ('numpy',)),
    Package('torch', ('torch',)),
    Package('torchvision', ('torchvision',), ('torch',), 'classification'),
    Package('triton', ('triton',), serves='the fused kernels on a GPU'),
    Package('mmengine', ('onedl-mmengine', 'mmengine'), ('torch', 'cv2')),
    Package('mmcv', ('onedl-mmcv', 'mmcv'), ('mmengine',)),
    Package('mmdet', ('onedl-mmdetection', 'mmdet'), ('mmcv', 'pycocotools')),
    Package('mmseg', ('onedl-mmsegmentation', 'mmsegmentation'), ('mmcv',)),
    Package('mmpretrain', ('onedl-mmpretrain', 'mmpretrain'), ('mmcv',), 'classification'),
    Package('PIL', ('pillow',), serves='the tools'),
    Package('contourpy', ('contourpy',), ('numpy',), 'the tools'),
    Package('matplotlib', ('matplotlib',), ('numpy',), 'the tools'),
    Package('rich', ('rich',), serves='the tools'),
    Package('yaml', ('pyyaml',), serves='the tools'),
)


@dataclass(frozen=True)
class Defect:
    """What is wrong, the command that fixes it, and whether training cannot work."""

    text: str
    fix: str
    fatal: bool = True


@dataclass
class Report:
    """The table (name, version, state) and the defects, in the order in which to fix them."""

    line: str | None = None
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    defects: list[Defect] = field(default_factory=list)

    @property
    def fatal(self) -> bool:
        """Whether training cannot work."""
        return any(defect.fatal for defect in self.defects)

    def __str__(self) -> str:
        line = f'{self.line} line' if self.line else 'no OpenMMLab packages'
        name, version = (max(len(row[i]) for row in self.rows) for i in (0, 1))
        text = [f'mala_mm {__version__}, {line}', '']
        text += [f'{a:{name}}  {b:{version}}  {c}'.rstrip() for a, b, c in self.rows]
        for number, defect in enumerate(self.defects, 1):
            text += ['', f'{number}. {defect.text}', f'   {defect.fix}']
        verdict = 'Training cannot work here.' if self.fatal else 'Training works here.'
        return '\n'.join([*text, '', verdict])


def how_to_install(module: str) -> str | None:
    """Name the command that installs a module which a command misses.

    Args:
        module (str): The module, or one inside of it.

    Returns:
        str | None: The command, or None for a module that none of our commands needs.
    """
    found = [package for package in PACKAGES if package.module == module.split('.')[0]]
    if not found:
        return None
    return TOOLS if found[0].serves == 'the tools' else 'python -m mala_mm.doctor'


def examine() -> Report:
    """Import every package and try what training needs.

    Returns:
        Report: What was found. Nothing is raised for a missing or broken package.
    """
    report = Report()
    report.rows.append(('python', platform.python_version(), sys.executable))
    line = _find_line(report)
    usable: set[str] = set()
    for package in PACKAGES:
        _try_package(package, line, usable, report)
    if 'torch' in usable:
        _try_gpu(usable, report)
    if 'mmcv' in usable:
        _try_operators(line, report)
    if {'mmengine', 'mmcv'} <= usable:
        _try_models(report)
    return report


def _find_line(report: Report) -> str:
    """Return the line whose packages are installed; the default line if none are."""
    installed = {
        line: [p.name(line) for p in PACKAGES if len(p.names) == 2 and _version(p.name(line))]
        for line in LINES
    }
    if all(installed.values()):
        report.defects.append(
            Defect(
                'The packages of both dependency lines are installed, and each has overwritten '
                'files of the other. Remove them, then install one line.',
                f'{PIP} uninstall -y {" ".join(installed["onedl"] + installed["upstream"])}',
            )
        )
    report.line = next((line for line in LINES if installed[line]), None)
    return report.line or LINES[0]


def _try_package(package: Package, line: str, usable: set[str], report: Report) -> None:
    module, name = package.module, package.name(line)
    without = [need for need in package.needs if need not in usable]
    missing = importlib.util.find_spec(module) is None
    error = None
    if missing:
        state, fault = 'missing', f'{module} is not installed'
    elif without:
        report.rows.append((module, _version(name), f'not tried without {without[0]}'))
        return
    else:
        error = _failure(lambda: importlib.import_module(module))
        state, fault = 'broken', f'{module} cannot be imported ({error})'
    if not missing and error is None:
        usable.add(module)
        version = _version(name) or getattr(sys.modules[module], '__version__', '')
        report.rows.append((module, version, 'ok'))
        return
    report.rows.append((module, _version(name), state))
    if module == 'mmcv':
        fix = _build_mmcv(line)
    elif error and 'torchvision::nms does not exist' in error:
        fix = f'{PIP} install --no-deps {_torchvision_cpu()}'
    elif missing:
        fix = f'{PIP} install {_pinned(name)}' if package.serves != 'the tools' else TOOLS
    else:
        # torch may lack a library that one of its dependencies brings.
        alone = '' if module == 'torch' else '--no-deps '
        fix = f'{PIP} install --force-reinstall {alone}{_pinned(name)}'
    # mmengine imports torchvision where there is one, so a broken one is worse than none.
    fatal = not package.serves or (module == 'torchvision' and not missing)
    purpose = f'; it is needed for {package.serves}' if package.serves else ''
    report.defects.append(Defect(f'{fault}{purpose}.', fix, fatal))


def _try_gpu(usable: set[str], report: Report) -> None:
    import torch

    built_for = torch.version.cuda or torch.version.hip
    if torch.cuda.is_available():
        error = _failure(lambda: torch.ones(8, 8, device='cuda').mm(torch.ones(8, 8).cuda()).cpu())
        state = error or torch.cuda.get_device_name()
        fix = 'nvidia-smi  # is the GPU in order, and is its driver new enough for this torch?'
        if error:
            report.defects.append(Defect(f'Computing on the GPU fails ({error}).', fix))
    elif Path('/dev/nvidia0').exists():
        state = 'a GPU that torch cannot use'
        if built_for:
            text = f'torch, built for CUDA {built_for}, cannot use the GPU of this machine.'
            fix = 'nvidia-smi  # install a torch built for the CUDA version that it shows'
        else:
            text = 'This machine has a GPU, but torch is a CPU build.'
            fix = f'{PIP} install --force-reinstall {_pinned("torch")} {_pinned("torchvision")}'
        report.defects.append(Defect(text, fix, fatal=False))
    else:
        state = 'no GPU' if built_for else 'no GPU, torch is a CPU build'
    report.rows.append(('CUDA', built_for or '', state))
    if 'triton' not in usable:
        return
    state = "no GPU, usable through Triton's interpreter (TRITON_INTERPRET=1)"
    if torch.cuda.is_available():
        error = _failure(_run_kernel)
        state = 'ok' if error is None else 'broken'
        if error is not None:
            fix = f'{PIP} install --force-reinstall --no-deps {_pinned("triton", "torch")}'
            report.defects.append(Defect(f'The Triton kernels do not run ({error}).', fix))
    report.rows.append(('kernels', '', state))


def _try_operators(line: str, report: Report) -> None:
    """Run mmcv's compiled operators wherever a model would."""
    import torch

    for device in ['cpu', 'cuda'] if torch.cuda.is_available() else ['cpu']:
        error = _failure(_run_nms, device)
        state = 'ok' if error is None else 'broken'
        report.rows.append((f'mmcv ops on {device}', '', state))
        if error is not None:
            fix = _build_mmcv(line, 'FORCE_CUDA=1 ' if device == 'cuda' else '')
            text = f'The compiled operators of mmcv do not work on {device} ({error}).'
            report.defects.append(Defect(text, fix))
            return


def _try_models(report: Report) -> None:
    """Whether mmengine knows our models, and whether they load."""
    error = registration_error and f'{type(registration_error).__name__}: {registration_error}'
    error = error or _failure(importlib.import_module, 'mala_mm.models')
    report.rows.append(('mala_mm models', __version__, 'broken' if error else 'ok'))
    if error:
        text = f'mmengine cannot build the models of mala_mm ({error}).'
        report.defects.append(Defect(text, f'{PIP} install --force-reinstall --no-deps mala_mm'))


def _run_nms(device: str) -> None:
    import torch
    from mmcv.ops import nms

    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30]], device=device)
    kept = nms(boxes, torch.tensor([0.9, 0.8, 0.7], device=device), iou_threshold=0.5)[1]
    if kept.tolist() != [0, 2]:
        raise RuntimeError(f'nms kept the boxes {kept.tolist()} and not [0, 2]')


def _run_kernel() -> None:
    import torch

    from .ops import mala_attention

    q, k, v = torch.randn(3, 1, 1, 16, 32, device='cuda')
    out, expected = (
        mala_attention(q, k, v, size=(4, 4), backend=name) for name in ('triton', 'reference')
    )
    error = (out - expected).abs().max().item()
    if not error < 0.01 * expected.abs().max().item():
        raise RuntimeError(f'the result of mala_attention is off by {error}')


def _failure(action: Callable, *args) -> str | None:
    """Return the first line of the error that an action ends with, if it does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            action(*args)
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        return text.splitlines()[0].rstrip('.')
    return None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ''


def _release(name: str) -> str:
    """Version without the part that names the build, as in ``2.13.0+cpu``."""
    return _version(name).split('+')[0]


def _pinned(name: str, dependent: str = 'mala_mm') -> str:
    """``name==version`` as a dependent package pins it, or as it is installed, or the name."""
    try:
        requirements = metadata.requires(dependent) or []
    except metadata.PackageNotFoundError:
        requirements = []
    pins = (re.match(rf'{re.escape(name)}\s*==\s*[\w.+]+', text) for text in requirements)
    installed = f'{name}=={_release(name)}' if _release(name) else name
    return next((pin.group().replace(' ', '') for pin in pins if pin), installed)


def _build_mmcv(line: str, variables: str = '') -> str:
    """Build mmcv with its operators; without any of the options it comes without them."""
    name = next(p for p in PACKAGES if p.module == 'mmcv').name(line)
    return (
        f'{variables}MMCV_WITH_OPS=1 {PIP} install --no-build-isolation --no-cache-dir --no-deps '
        f'--force-reinstall --no-binary {name} {_pinned(name)}'
    )


def _torchvision_cpu() -> Path:
    """Return the package that declares torchvision's operators, in the checkout or in the wheel."""
    return ROOT / 'tools' / 'setup_env' / 'torchvision_cpu'


def main() -> int:
    """Print the diagnosis; 1 if training cannot work."""
    report = examine()
    print(report)
    return int(report.fatal)


if __name__ == '__main__':
    sys.exit(main())
