"""The hook that stops at a loss which is not a number."""

from types import SimpleNamespace

import pytest
import torch
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS
from mmengine.runner.priority import get_priority
from mmengine.structures import BaseDataElement

from mala_mm.engine.hooks import CheckInvalidLossHook
from mala_mm.errors import UserError

BATCH = dict(
    inputs=[],
    data_samples=[BaseDataElement(metainfo=dict(img_path=f'images/{name}')) for name in 'ab'],
)


def after_iteration(iteration, losses, batch=BATCH, **kwargs):
    hook = HOOKS.build(dict(type='mala_mm.CheckInvalidLossHook', **kwargs))
    hook.after_train_iter(SimpleNamespace(iter=iteration), 0, batch, losses)


@pytest.mark.parametrize('value', ['nan', 'inf', '-inf'])
def test_names_iteration_losses_and_images(value):
    losses = dict(loss=torch.tensor(float(value)), loss_cls=torch.tensor(float(value)), acc=50.0)
    with pytest.raises(UserError) as caught:
        after_iteration(6, losses)
    message = str(caught.value)
    assert f'iteration 7: loss = {value}, loss_cls = {value}, images: ' in message
    assert 'images/a, images/b' in message


@pytest.mark.parametrize('name', ['decode.loss_ce', 'aux_0.loss_ce', 's2.loss_bbox'])
def test_sees_the_losses_of_every_head(name):
    """mmseg and mmdet put the head before ``loss``."""
    with pytest.raises(UserError, match=f'{name} = nan'):
        after_iteration(0, {'loss': torch.tensor(1.0), name: torch.tensor(float('nan'))})


def test_lets_the_rest_pass():
    after_iteration(0, dict(loss=torch.tensor(1e30), acc=float('nan')))
    after_iteration(1, None)
    after_iteration(1, dict(loss=float('nan')), interval=3)
    with pytest.raises(UserError, match='images: unknown'):
        after_iteration(2, dict(loss=float('nan')), batch=[1, 2], interval=3)
    with pytest.raises(ValueError, match='got 0'):
        after_iteration(0, {}, interval=0)


def test_runs_before_the_checkpoint_is_written():
    assert get_priority(CheckInvalidLossHook.priority) < get_priority(CheckpointHook.priority)
