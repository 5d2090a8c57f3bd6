"""What pyproject.toml cannot say: the wheel carries configs and tools as ``mala_mm/.mim``.

``mim`` and ``mmengine.hub`` look for ``.mim/configs``, ``.mim/tools`` and ``.mim/model-index.yml``
inside an installed package. An editable installation gets links instead of copies.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SHARED = ('configs', 'tools', 'model-index.yml')


class BuildPyWithMim(build_py):
    """Add the ``.mim`` folder to the built package."""

    def run(self) -> None:
        """Build the package, then copy or link what lies beside it."""
        super().run()
        package = ROOT if self.editable_mode else Path(self.build_lib)
        target = package / 'mala_mm' / '.mim'
        # Leftovers of an earlier build must not get into this one.
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for source in (ROOT / name for name in SHARED if (ROOT / name).exists()):
            copy = target / source.name
            if self.editable_mode:
                copy.symlink_to(Path('..', '..', source.name))
            elif source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns('__pycache__'))
            else:
                shutil.copy2(source, copy)


setup(cmdclass={'build_py': BuildPyWithMim})
