# MAViT-tiny as a classifier of generated single objects, from random weights, on two CPU cores:
# the pretraining of `make demo`, in place of ImageNet.
_base_ = '../cls/mavit/mavit-t_8xb128_in1k.py'

data_root = 'data/demo/imagenet/'
size = 64
classes = ('ball', 'car', 'house', 'star', 'tree')
max_iters = 300

model = dict(
    backbone=dict(drop_path_rate=0.0),
    head=dict(num_classes=len(classes), topk=(1,), loss=dict(num_classes=len(classes))),
    train_cfg=None,
)
data_preprocessor = dict(num_classes=len(classes))
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=size, crop_ratio_range=(0.5, 1.0)),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(size, size)),
    dict(type='PackInputs'),
]
dataset = dict(
    _delete_=True,
    type='CustomDataset',
    data_root=data_root,
    metainfo=dict(classes=classes),
)
train_dataloader = dict(
    batch_size=32,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(_delete_=True, type='InfiniteSampler', shuffle=True),
    dataset=dict(**dataset, data_prefix='train', pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=50,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(**dataset, data_prefix='val', pipeline=test_pipeline),
)
test_dataloader = val_dataloader
del dataset
val_evaluator = dict(topk=(1,))
test_evaluator = val_evaluator

train_cfg = dict(
    _delete_=True, type='IterBasedTrainLoop', max_iters=max_iters, val_interval=max_iters
)
optim_wrapper = dict(optimizer=dict(lr=1e-3), clip_grad=dict(max_norm=5))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=30),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=30, T_max=max_iters - 30, eta_min=1e-5),
]
default_hooks = dict(
    logger=dict(interval=10, log_metric_by_epoch=False),
    checkpoint=dict(by_epoch=False, interval=max_iters),
)
log_processor = dict(by_epoch=False)
randomness = dict(seed=0)
