"""Which checkpoint training goes on from, and that it goes on as if it had never stopped."""

import os

import pytest
import torch

from mala_mm.checkpoint import load_checkpoint
from mala_mm.engine import random_states
from mala_mm.engine.resume import latest_checkpoint
from mala_mm.errors import UserError

from .toy import Toy, make_runner

LOOPS = dict(epoch=dict(by_epoch=True, max_epochs=3), iter=dict(by_epoch=False, max_iters=10))
EACH = dict(by_epoch=False, interval=1)


def save(path, weight=1.0, **parts):
    training = dict(meta={}, message_hub={}, optimizer={})
    torch.save({**training, 'state_dict': dict(weight=torch.tensor(weight)), **parts}, path)
    return str(path)


def test_no_checkpoint_ever(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / 'none') is None


def test_the_named_one_comes_first_whatever_its_name(tmp_path):
    (tmp_path / 'elsewhere').mkdir()
    named = save(tmp_path / 'elsewhere' / 'my_name.pth')
    save(tmp_path / 'iter_9.pth')
    (tmp_path / 'last_checkpoint').write_text(f'{named}\n')
    assert latest_checkpoint(tmp_path) == named


def test_what_was_written_after_the_mark_is_ahead_of_it(tmp_path):
    """A kill came between a checkpoint and its entry; whoever edits the entry is obeyed."""
    named = save(tmp_path / 'iter_9.pth')
    mark = tmp_path / 'last_checkpoint'
    mark.write_text(named)
    newer = save(tmp_path / 'iter_10.pth')
    save(tmp_path / 'iter_8.pth')  # as copying a folder may order them
    save(tmp_path / 'epoch_11.pth')
    for path, second in ((mark, 5), (tmp_path / 'iter_10.pth', 6)):
        os.utime(path, (second, second))
    assert latest_checkpoint(tmp_path) == newer
    os.utime(mark, (7, 7))
    assert latest_checkpoint(tmp_path) == named


def test_a_moved_folder_is_no_obstacle(tmp_path):
    named = save(tmp_path / 'step7.pth')
    (tmp_path / 'last_checkpoint').write_text('/was/here/before/step7.pth')
    assert latest_checkpoint(tmp_path) == named


def test_the_numbered_ones_follow(tmp_path):
    for name in ('iter_9.pth', 'iter_10.pth', 'best_coco_bbox_mAP_epoch_12.pth'):
        save(tmp_path / name)
    (tmp_path / 'iter_11.pth').write_bytes((tmp_path / 'iter_10.pth').read_bytes()[:100])
    save(tmp_path / 'iter_12.pth', weight=float('nan'))
    torch.save(dict(state_dict={}), tmp_path / 'iter_13.pth')  # weights only, as somebody put them
    (tmp_path / 'last_checkpoint').write_text('')  # as a kill may leave it
    assert latest_checkpoint(tmp_path) == str(tmp_path / 'iter_10.pth')


@pytest.mark.parametrize(
    'remains, problem',
    [
        (dict(last_checkpoint=b'iter_9.pth'), 'iter_9.pth does not exist'),
        (dict(last_checkpoint=b''), 'last_checkpoint is empty'),
        ({'iter_9.pth': b''}, 'iter_9.pth is damaged'),
    ],
)
def test_a_run_that_had_checkpoints_does_not_start_anew_by_itself(tmp_path, remains, problem):
    for name, content in remains.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f'has had checkpoints, .*{problem}.*--resume FILE'):
        latest_checkpoint(tmp_path)
    runner = make_runner(tmp_path, resume=True)
    with pytest.raises(UserError, match='has had checkpoints'):
        runner.train()


def test_resume_without_a_checkpoint_starts_anew(tmp_path):
    runner = make_runner(tmp_path, resume=True)
    runner.train()
    assert runner.iter == 4


def test_states_of_all_generators_are_plain_and_complete(tmp_path):
    torch.save(random_states.get_states(), tmp_path / 'states')
    before = draw()
    random_states.set_states(torch.load(tmp_path / 'states', weights_only=True))
    assert draw() == before != draw()
    with random_states.seeded(1, 2):
        first = draw()
    state = random_states.get_states()
    with random_states.seeded(1, 2):
        assert draw() == first
    with random_states.seeded(1, 3):
        assert not set(draw()) & set(first)
    assert str(random_states.get_states()) == str(state)


def draw():
    import random

    import numpy as np

    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()] + [
        torch.rand(()).item()
    ]


def finish(runner):
    runner.train()
    return {k: v.clone() for k, v in runner.model.state_dict().items()}


@pytest.fixture(scope='module', params=[(loop, w) for loop in LOOPS for w in (0, 2)], ids=str)
def whole(request, tmp_path_factory):
    """A run without interruption: its settings, folder and final weights."""
    loop, workers = request.param
    settings = dict(checkpoint=EACH, workers=workers, train_cfg=LOOPS[loop])
    folder = tmp_path_factory.mktemp('whole') / f'{loop}{workers}'
    return settings, folder, finish(make_runner(folder, **settings))


@pytest.mark.parametrize('at', [2, 4])
def test_resumed_equals_uninterrupted(whole, tmp_path, at):
    """In the middle of an epoch of four batches, and at its end; the run has no seed of its own."""
    settings, folder, weights = whole
    start = str(folder / f'iter_{at}.pth')
    resumed = finish(make_runner(tmp_path / 'run', resume=True, load_from=start, **settings))
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    loaded = load_checkpoint(start)
    assert {'random', 'position'} == set(loaded['training_state'])


def test_each_part_of_the_state_is_needed(tmp_path):
    """The test above could fail."""
    settings = dict(checkpoint=EACH, train_cfg=LOOPS['epoch'])
    weights = finish(make_runner(tmp_path / 'whole', **settings))
    for part in ('random', 'position'):
        content = load_checkpoint(tmp_path / 'whole' / 'iter_2.pth')
        if part == 'random':
            content['training_state']['random'] = [random_states.get_states()]
        else:
            content['training_state']['position']['batch'] = 0
        torch.save(content, tmp_path / 'start.pth')
        resumed = finish(
            make_runner(
                tmp_path / part, resume=True, load_from=str(tmp_path / 'start.pth'), **settings
            )
        )
        assert not torch.equal(weights['backbone.weight'], resumed['backbone.weight'])


def test_gradients_that_are_being_accumulated_are_not_lost(tmp_path):
    settings = dict(
        checkpoint=EACH,
        train_cfg=LOOPS['iter'],
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.1), accumulative_counts=3),
    )
    weights = finish(make_runner(tmp_path / 'whole', **settings))
    start = str(tmp_path / 'whole' / 'iter_5.pth')
    resumed = finish(make_runner(tmp_path / 'run', resume=True, load_from=start, **settings))
    assert torch.equal(weights['backbone.weight'], resumed['backbone.weight'])


def test_nothing_is_loaded_in_vain(tmp_path):
    settings = dict(checkpoint=EACH, train_cfg=LOOPS['iter'])
    make_runner(tmp_path / 'whole', **settings).train()
    start = str(tmp_path / 'whole' / 'iter_8.pth')
    runner = make_runner(
        tmp_path / 'run', resume=True, load_from=start, model=Counting(), **settings
    )
    runner.train()
    assert runner.model.batches == 2


class Counting(Toy):
    batches = 0

    def forward(self, x, mode='tensor'):
        self.batches += 1
        return super().forward(x, mode)
