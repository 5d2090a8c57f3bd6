"""mmengine's runner, made to run without a GPU and to look at checkpoints before it trusts them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.dist import is_distributed, is_main_process
from mmengine.model import revert_sync_batchnorm
from mmengine.runner import Runner as MMEngineRunner
from torch import nn

from mala_mm.errors import UserError
from mala_mm.files import replacing

from .hooks import CheckInvalidLossHook, CheckpointGuard


class Runner(MMEngineRunner):
    """A runner for one machine or many, with GPUs or without.

    Built from a config as mmengine's. In addition:

    - Several processes run on CPUs, over gloo, where mmengine wants a GPU per process. SyncBN,
      which torch has for GPUs only, becomes BN there (mmengine does so for a single process).
    - A checkpoint has to fit the model: what is missing or unexpected is listed, and one that
      matches nothing of the backbone is refused.
    - Training stops at a loss that is NaN or infinite (:class:`CheckInvalidLossHook`).
    - What a run wrote can be removed again, if it failed before it did any work.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        work_dir = Path(kwargs['work_dir']).absolute()
        self._made_folders = [p for p in (work_dir, *work_dir.parents) if not p.exists()]
        self._config_was_there = (work_dir / Path(kwargs['cfg'].filename).name).exists()
        try:
            super().__init__(*args, **kwargs)
        except Exception:
            self.discard_outputs()
            raise
        if not any(isinstance(hook, CheckInvalidLossHook) for hook in self._hooks):
            self.register_hook(CheckInvalidLossHook())
        # Other classes than the checkpoint's are wanted in fine-tuning, and a mistake elsewhere.
        fine_tuning = self._train_dataloader is not None and not self._resume
        self.register_hook(CheckpointGuard(other_heads=fine_tuning))

    def discard_outputs(self) -> None:
        """Remove what this run wrote. For runs that failed before they did any work."""
        if not is_main_process():
            return
        shutil.rmtree(getattr(self, '_log_dir', ''), ignore_errors=True)
        if not self._config_was_there:
            (Path(self.work_dir) / Path(self.cfg.filename).name).unlink(missing_ok=True)
        for folder in self._made_folders:
            if any(folder.glob('*')):
                break
            folder.rmdir()

    def setup_env(self, env_cfg: dict) -> None:
        """Start the process group and set resource limits.

        Args:
            env_cfg (dict): The config's ``env_cfg``; ``dist_cfg.backend`` counts on GPUs only.
        """
        if self._launcher == 'pytorch' and get_device() == 'cpu' and not is_distributed():
            torch.distributed.init_process_group('gloo')
        super().setup_env(env_cfg)

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Move the model to its device and wrap it for distributed training.

        Args:
            model_wrapper_cfg (dict, optional): The config's ``model_wrapper_cfg``.
            model (nn.Module): The model.
        """
        if self.distributed and get_device() == 'cpu':
            self.logger.info('No GPU: SyncBN layers, if any, become BN layers.')
            model = revert_sync_batchnorm(model)
            defaults = dict(
                type='MMDistributedDataParallel',
                broadcast_buffers=False,
                find_unused_parameters=self.cfg.get('find_unused_parameters', False),
            )
            model_wrapper_cfg = {**defaults, **(model_wrapper_cfg or {}), 'device_ids': None}
        return super().wrap_model(model_wrapper_cfg, model)

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint under its name only once it is complete.

        A run that is killed meanwhile leaves earlier checkpoints as they were.

        Args:
            out_dir (str): The folder, or a remote place that mmengine knows.
            filename (str): The name of the file in it.
            *args: As in mmengine.
            **kwargs: As in mmengine.

        Raises:
            UserError: If the file cannot be written.
        """
        if '://' in str(out_dir):
            super().save_checkpoint(out_dir, filename, *args, **kwargs)
        elif is_main_process():
            path = Path(out_dir) / filename
            try:
                with replacing(path) as part:
                    super().save_checkpoint(out_dir, part.name, *args, **kwargs)
            except OSError as error:
                raise UserError(
                    f'{path} could not be written ({error}); earlier checkpoints are intact: '
                    'make room and continue with --resume'
                ) from error
