"""Reading configs: where the data lie, options that nothing reads, kinds of machine."""

import pytest
import torch
from mmengine.config import Config

from mala_mm.engine import config
from mala_mm.errors import UserError

DET = 'configs/det/mavit/mask-rcnn_mavit-t_fpn_amp-1x_coco.py'
SEG = 'configs/seg/mavit/upernet_mavit-t_8xb2-amp-160k_ade20k-512x512.py'
CLS = 'configs/cls/mavit/mavit-t_8xb128_in1k.py'


def strings(node):
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, (list, tuple)):
        return [text for child in node for text in strings(child)]
    return [node] if isinstance(node, str) else []


@pytest.mark.parametrize(('name', 'old'), [(DET, 'data/coco'), (SEG, 'data/ade'), (CLS, 'data/')])
def test_data_root_moves_every_path(repo, name, old):
    cfg = config.load_config(repo / name)
    count = sum(text.startswith(old) for text in strings(cfg._cfg_dict))
    assert count >= 3
    config.set_data_root(cfg, '/elsewhere/data set')
    found = strings(cfg._cfg_dict)
    assert not [text for text in found if text.startswith(old)]
    assert sum(text.startswith('/elsewhere/data set') for text in found) == count
    for loader in config.DATALOADERS:
        assert cfg[loader].dataset.data_root == '/elsewhere/data set'
    if name == DET:
        ann_file = '/elsewhere/data set/annotations/instances_val2017.json'
        assert cfg.val_evaluator.ann_file == cfg.test_evaluator.ann_file == ann_file


def test_data_root_keeps_what_lies_elsewhere():
    dataset = dict(type='RepeatDataset', dataset=dict(data_root='a/b/', ann_file='a/bc/x'))
    cfg = Config(dict(train_dataloader=dict(dataset=dataset), other=['a/b/c', 'a/bc', ('a/b',)]))
    config.set_data_root(cfg, 'new')
    assert cfg.train_dataloader.dataset.dataset.ann_file == 'a/bc/x'
    assert cfg.other == ['new/c', 'a/bc', ('new',)]
    cfg.val_dataloader = dict(dataset=dict(data_root='third'))
    with pytest.raises(UserError, match=r"\['new', 'third'\]"):
        config.set_data_root(cfg, 'newer')


@pytest.mark.parametrize(
    'options',
    [
        {'model.backbone.with_cp': True},  # not in the config, an argument of MAViT
        {'model.backbone.init_cfg.type': 'Pretrained'},
        {'model.roi_head.bbox_head.num_classes': 3},
        {'train_dataloader.dataset.indices': 4},  # through **kwargs of two classes
        {'train_dataloader.pin_memory': True},
        {'optim_wrapper.clip_grad.max_norm': 1.0},
        {'optim_wrapper.accumulative_counts': 2},
        {'optim_wrapper.paramwise_cfg.custom_keys.backbone.lr_mult': 0.1},
        {'default_hooks.ema.type': 'EMAHook'},
        {'randomness.seed': 3},
        {'param_scheduler.0.end': 100},
        {'find_unused_parameters': True},
    ],
)
def test_options_that_are_read(repo, options):
    config.load_config(repo / DET, options)


@pytest.mark.parametrize(
    ('option', 'named'),
    [
        ('modle.backbone.with_cp', 'did you mean model'),
        ('model.backbne.with_cp', r"model \(MaskRCNN\) has no 'backbne'; did you mean backbone"),
        ('model.backbone.drop_path', 'did you mean drop_path_rate'),
        ('optim_wrapper.optimizer.learning_rate', r'optim_wrapper.optimizer \(AdamW\)'),
        ('train_dataloader.batchsize', 'did you mean batch_size'),
        ('train_dataloader.dataset.ann_fil', 'did you mean ann_file'),
        ('param_scheduler.7.end', 'a list of 2'),
        ('param_scheduler.2.end', 'a list of 2, so that a number below 2 must follow'),
        ('model.backbone.arch.depths', "model.backbone.arch is 'tiny'"),
        ('data_root', '--data-root DIR'),
    ],
)
def test_options_that_nothing_reads(repo, option, named):
    with pytest.raises(UserError, match=named):
        config.load_config(repo / DET, {option: 1})


def test_no_workers_means_no_workers(repo):
    """PyTorch refuses a loader without workers that keeps them or lets them work ahead."""
    options = {
        'train_dataloader.num_workers': 0,
        'train_dataloader.prefetch_factor': 4,
        'val_dataloader.prefetch_factor': 4,
    }
    cfg = config.load_config(repo / DET, options)
    names = ('num_workers', 'persistent_workers', 'prefetch_factor')
    train, val = (
        {name: loader[name] for name in names if name in loader}
        for loader in (cfg.train_dataloader, cfg.val_dataloader)
    )
    assert torch.utils.data.DataLoader([0, 1], **train).num_workers == 0
    assert val == dict(num_workers=2, persistent_workers=True, prefetch_factor=4)


def test_unreadable_configs(repo, tmp_path):
    with pytest.raises(UserError, match='did you mean .*/mavit-t.py'):
        config.load_config(repo / 'configs/_base_/backbones/mavitt.py')
    path = tmp_path / 'broken.py'
    for text, named in (
        ('model = dict(', 'SyntaxError'),
        ("_base_ = 'nothing.py'", 'nothing.py'),
        ("_base_ = 'mmnothing::x/y.py'", 'mmnothing'),
        ("default_scope = 'mmnothing'", 'needs mmnothing, which cannot be imported'),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=named):
            config.load_config(path)


def test_missing_package_is_named(repo, monkeypatch):
    find_spec = config.importlib.util.find_spec

    def without_mmseg(name, package=None):
        return None if name == 'mmseg' else find_spec(name, package)

    def refuse(command, *args, **kwargs):
        raise AssertionError(f'tried to run {command}')

    monkeypatch.setattr('importlib.util.find_spec', without_mmseg)
    monkeypatch.setattr('mmengine.utils.package_utils.call_command', refuse)
    with pytest.raises(UserError, match='mmseg is not installed.*mala_mm.doctor'):
        config.load_config(repo / SEG)


def test_precision_follows_the_machine(monkeypatch):
    def wrapper(device, amp, **optim_wrapper):
        monkeypatch.setattr(config, 'get_device', lambda: device)
        cfg = Config(dict(optim_wrapper=optim_wrapper))
        config.set_precision(cfg, amp)
        return dict(cfg.optim_wrapper)

    plain, half = dict(type='OptimWrapper'), dict(type='AmpOptimWrapper', loss_scale=512.0)
    assert wrapper('cpu', False, **plain) == plain
    assert wrapper('cpu', False, **half) == plain
    assert wrapper('cpu', True, **half) == dict(type='mala_mm.CPUAmpOptimWrapper')
    assert wrapper('cpu', True, **plain) == dict(type='mala_mm.CPUAmpOptimWrapper')
    fsdp = dict(half, dtype='bfloat16', use_fsdp=True)  # which the others do not take
    assert wrapper('cpu', False, **fsdp) == plain
    assert wrapper('cpu', True, **fsdp) == dict(type='mala_mm.CPUAmpOptimWrapper')
    assert wrapper('cuda', False, **fsdp) == fsdp
    assert wrapper('cuda', False, **half) == half
    assert wrapper('cuda', True, **half) == half
    assert wrapper('cuda', True, **plain) == dict(type='AmpOptimWrapper', loss_scale='dynamic')
