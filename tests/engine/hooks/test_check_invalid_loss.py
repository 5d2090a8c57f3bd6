"""The hook that stops at a loss or a gradient which is not a number."""

from types import SimpleNamespace

import pytest
import torch
from mmengine.hooks import CheckpointHook
from mmengine.optim import AmpOptimWrapper
from mmengine.optim.optimizer import amp_optimizer_wrapper
from mmengine.registry import HOOKS
from mmengine.runner.priority import get_priority
from mmengine.structures import BaseDataElement
from torch import nn

from mala_mm.engine.hooks import CheckInvalidLossHook
from mala_mm.errors import UserError

from ..toy import Toy, files, make_runner

BATCH = dict(
    inputs=[],
    data_samples=[BaseDataElement(metainfo=dict(img_path=f'images/{name}')) for name in 'ab'],
)


def after_iteration(iteration, losses, batch=BATCH, **kwargs):
    hook = HOOKS.build(dict(type='mala_mm.CheckInvalidLossHook', **kwargs))
    hook.after_train_iter(SimpleNamespace(iter=iteration, world_size=2), 0, batch, losses)


@pytest.mark.parametrize('value', ['nan', 'inf', '-inf'])
def test_names_iteration_losses_and_images(value):
    losses = dict(loss=torch.tensor(float(value)), loss_cls=torch.tensor(float(value)), acc=50.0)
    with pytest.raises(UserError) as caught:
        after_iteration(6, losses)
    message = str(caught.value)
    assert f'iteration 7: loss = {value}, loss_cls = {value}, ' in message
    assert 'images: images/a, images/b' in message


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


class BadGradient(torch.autograd.Function):
    """The identity, whose gradient is ``value``."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, ctx.value), None


class Faulty(Toy):
    """A head behind the backbone; from iteration 3 on, something is wrong."""

    def __init__(self, gradient=None, output=None, times=99):
        super().__init__()
        self.head = nn.Linear(1, 1)
        self.gradient, self.output, self.calls, self.times = gradient, output, 0, times

    def forward(self, x, mode='tensor'):
        self.calls += 1
        wrong = 3 <= self.calls < 3 + self.times
        y = self.backbone(x)
        if wrong and self.output is not None:
            y = y * self.output
        y = self.head(y)
        if wrong and self.gradient is not None:
            y = BadGradient.apply(y, self.gradient)
        return dict(loss=y.square().mean())


def watched(folder, model, **kwargs):
    """A run of eight iterations, with a checkpoint after each."""
    return make_runner(
        folder,
        dict(by_epoch=False, interval=1),
        model=model,
        train_cfg=dict(by_epoch=False, max_iters=8),
        **kwargs,
    )


@pytest.mark.parametrize('clip', [{}, dict(clip_grad=dict(max_norm=1.0))])
@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_a_bad_gradient_is_seen_before_the_step(tmp_path, value, clip):
    """Clipping spreads NaN to all gradients; the place of origin is named nevertheless."""
    optim_wrapper = dict(optimizer=dict(type='AdamW', lr=0.1), **clip)
    runner = watched(tmp_path, Faulty(gradient=value), optim_wrapper=optim_wrapper)
    with pytest.raises(UserError) as caught:
        runner.train()
    message = str(caught.value)
    assert message.startswith(
        'Training stopped at iteration 3: the gradient is not finite, though the losses are, '
        'first in head, images: '
    )
    assert all(p.isfinite().all() for p in runner.model.parameters())
    assert {'iter_1.pth', 'iter_2.pth'} == {n for n in files(tmp_path) if n.endswith('.pth')}


def test_the_first_bad_module_of_a_bad_loss_is_named(tmp_path):
    runner = watched(tmp_path, Faulty(output=float('nan')))
    with pytest.raises(UserError, match='iteration 3: loss = nan, first in head, images'):
        runner.train()


def test_gradients_that_only_look_infinite_are_left_alone(tmp_path):
    """The square of 1e25 overflows, the number does not."""
    watched(tmp_path, Faulty(gradient=1e25)).train()


@pytest.fixture
def amp(monkeypatch):
    """A config of mixed precision, which mmengine allows on GPUs only."""
    monkeypatch.setattr(amp_optimizer_wrapper, 'is_cuda_available', lambda: True)
    monkeypatch.setattr(
        amp_optimizer_wrapper,
        'GradScaler',
        lambda **kwargs: torch.amp.GradScaler('cpu', **kwargs),
    )
    return dict(type=AmpOptimWrapper, dtype='bfloat16', optimizer=dict(type='AdamW', lr=0.1))


def test_steps_that_mixed_precision_skips_are_no_error(tmp_path, amp):
    runner = watched(tmp_path, Faulty(gradient=float('inf'), times=3), optim_wrapper=amp)
    runner.train()
    assert runner.optim_wrapper.loss_scaler.get_scale() == 2**16 / 2**3
    steps = {int(s['step']) for s in runner.optim_wrapper.optimizer.state.values()}
    assert steps == {8 - 3}


class FaultyNowAndThen(Faulty):
    def forward(self, x, mode='tensor'):
        self.gradient = float('inf') if self.calls % 2 else None
        return super().forward(x, mode)


def test_skipped_steps_count_only_in_a_row(tmp_path, amp):
    hook = dict(type='mala_mm.CheckInvalidLossHook', max_skipped=2)
    optim_wrapper = dict(amp, loss_scale=8.0)
    runner = watched(tmp_path, FaultyNowAndThen(), optim_wrapper=optim_wrapper, custom_hooks=[hook])
    runner.train()
    steps = {int(s['step']) for s in runner.optim_wrapper.optimizer.state.values()}
    assert steps == {8 - 3}  # iterations 4, 6 and 8 took none


@pytest.mark.parametrize(
    'scale, iteration', [(dict(init_scale=4.0), 5), (8.0, 6)], ids=['dynamic', 'static']
)
def test_under_mixed_precision_a_real_nan_stops(tmp_path, amp, scale, iteration):
    """At scale 1, after two halvings, or after four steps in a row at the same scale."""
    runner = watched(
        tmp_path,
        Faulty(gradient=float('nan')),
        optim_wrapper=dict(amp, loss_scale=scale),
        custom_hooks=[dict(type='mala_mm.CheckInvalidLossHook', max_skipped=4)],
    )
    with pytest.raises(UserError, match=f'iteration {iteration}: the gradient is not finite'):
        runner.train()
