import pytest
import torch
from mmengine.runner import CheckpointLoader


@pytest.fixture
def restore_loading(monkeypatch):
    """Take back what ``enforce_safe_loading`` does to the process."""
    monkeypatch.setenv('TORCH_FORCE_WEIGHTS_ONLY_LOAD', '0')
    monkeypatch.setattr(CheckpointLoader, '_schemes', dict(CheckpointLoader._schemes))
    allowed = torch.serialization.get_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(allowed)
