"""A resumed run equals an uninterrupted one, bit for bit."""

import pytest
import torch

from mala_mm.checkpoint import load_checkpoint

# Random numbers everywhere: order, crops, flips, colours, drop path, the heads' samplers, dropout.
# Batches of the detector are formed by aspect ratio. No seed: the run's own is in the checkpoint.
CONFIGS = dict(
    det="""
_base_ = 'det.py'
model = dict(backbone=dict(drop_path_rate=0.5))
train_dataloader = dict(
    dataset=dict(
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
            dict(type='RandomChoiceResize', scales=[(64, 64), (80, 80)], keep_ratio=True),
            dict(type='RandomFlip', prob=0.5),
            dict(type='PhotoMetricDistortion'),
            dict(type='PackDetInputs'),
        ]
    )
)
""",
    seg="""
_base_ = 'seg.py'
model = dict(backbone=dict(drop_path_rate=0.5))
train_dataloader = dict(
    dataset=dict(
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', reduce_zero_label=True),
            dict(type='RandomResize', scale=(80, 64), ratio_range=(0.8, 1.5), keep_ratio=True),
            dict(type='RandomCrop', crop_size=(64, 64), cat_max_ratio=0.75),
            dict(type='RandomFlip', prob=0.5),
            dict(type='PhotoMetricDistortion'),
            dict(type='PackSegInputs'),
        ]
    )
)
randomness = dict(seed=3)
""",
)
# Four images in batches of two. That of segmentation validates in between.
LOOPS = dict(
    epoch="""
train_cfg = dict(_delete_=True, type='EpochBasedTrainLoop', max_epochs=2)
train_dataloader['sampler'] = dict(_delete_=True, type='DefaultSampler', shuffle=True)
""",
    iter="""
train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=4, val_interval=2)
train_dataloader['sampler'] = dict(_delete_=True, type='InfiniteSampler', shuffle=True)
""",
)
CHECKPOINTS = """
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=1))
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=9)]
"""
NO_VALIDATION = 'val_cfg = val_dataloader = val_evaluator = None\n'
# Each run, and the iteration from which another one goes on: in an epoch or at its end.
RUNS = dict(det_epoch_0=1, det_epoch_2=1, det_iter_2=2, seg_iter_0=1, seg_iter_2=2, seg_epoch_0=2)


def options(workplace, task, workers):
    return [
        *('--data-root', str(workplace.data / dict(det='coco', seg='ade')[task])),
        *('--cfg-options', f'train_dataloader.num_workers={workers}'),
        f'train_dataloader.persistent_workers={workers > 0}',
    ]


@pytest.fixture(scope='module')
def runs(workplace):
    """Runs without an interruption, and others that go on from the checkpoints of these."""
    whole, resumed = {}, {}
    for name in RUNS:
        task, loop, workers = name.split('_')
        text = CONFIGS[task] + LOOPS[loop] + CHECKPOINTS
        text += '' if name.startswith('seg_iter') else NO_VALIDATION
        (workplace.folder / f'resume_{task}_{loop}.py').write_text(text)
        whole[name] = ['train', f'resume_{task}_{loop}.py', *options(workplace, task, int(workers))]
        resumed[f'{name}_resumed'] = [*whole[name], 'resume=True']
    resumed['without_states'] = [*whole['seg_iter_0'], 'resume=True']
    for name, outcome in workplace.in_forks(whole).items():
        assert outcome['code'] == 0, (name, outcome['err'])
    for name, at in RUNS.items():
        (workplace.folder / f'{name}_resumed').mkdir()
        content = (workplace.folder / name / f'iter_{at}.pth').read_bytes()
        (workplace.folder / f'{name}_resumed' / f'iter_{at}.pth').write_bytes(content)
    (workplace.folder / 'without_states').mkdir()
    checkpoint = load(workplace.folder / 'seg_iter_0', 1)
    del checkpoint['training_state']
    torch.save(checkpoint, workplace.folder / 'without_states' / 'iter_1.pth')
    outcomes = workplace.in_forks(resumed)
    for name, outcome in outcomes.items():
        assert outcome['code'] == 0, (name, outcome['err'])
    return workplace.folder, outcomes


def load(folder, iteration):
    return load_checkpoint(folder / f'iter_{iteration}.pth')


def differing(a, b, path=''):
    """The places where two checkpoints differ."""
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [path]
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return [d for key in a for d in differing(a[key], b[key], f'{path}.{key}')]
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        return [d for i, (x, y) in enumerate(zip(a, b)) for d in differing(x, y, f'{path}.{i}')]
    return [] if a == b else [path]


@pytest.mark.slow
@pytest.mark.parametrize('name', RUNS)
def test_resumed_equals_uninterrupted(runs, name):
    folder, outcomes = runs
    a, b = load(folder / name, 4), load(folder / f'{name}_resumed', 4)
    for part in ('state_dict', 'optimizer', 'param_schedulers', 'training_state'):
        assert differing(a[part], b[part], part) == []
    assert f'iter: {RUNS[name]}' in outcomes[f'{name}_resumed']['out']


@pytest.mark.slow
def test_workers_do_not_change_a_bit(runs):
    folder, _ = runs
    a, b = (load(folder / f'seg_iter_{workers}', 4) for workers in (0, 2))
    assert differing(a['state_dict'], b['state_dict']) == []


@pytest.mark.slow
def test_without_random_states_a_resumed_run_differs_and_says_so(runs):
    """The tests above could fail: randomness does matter in these runs."""
    folder, outcomes = runs
    a, b = load(folder / 'seg_iter_0', 4), load(folder / 'without_states', 4)
    assert differing(a['state_dict'], b['state_dict'])
    assert 'holds no random states' in outcomes['without_states']['out']
