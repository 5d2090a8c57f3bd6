"""What the backbones say where mmengine is not installed."""

import subprocess
import sys

CODE = """
import sys
sys.modules['mmengine'] = None  # as if it were not installed
try:
    import mala_mm.models
except ModuleNotFoundError as error:
    print(error)
"""


def test_the_error_holds_the_command():
    done = subprocess.run([sys.executable, '-c', CODE], capture_output=True, text=True, check=True)
    assert 'need mmengine' in done.stdout
    assert 'run python -m pip install mmengine mmcv-lite' in done.stdout
