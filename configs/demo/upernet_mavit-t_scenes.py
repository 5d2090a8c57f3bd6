# UperNet with MAViT-tiny on generated scenes, on two CPU cores: `make demo`.
# The model is that of the 160K recipe with narrow heads; image size and schedule are small.
_base_ = '../seg/mavit/upernet_mavit-t_8xb2-amp-160k_ade20k-512x512.py'

data_root = 'data/demo/ade/'
max_iters = 280
size = (128, 128)
classes = (
    *('grass', 'mountain', 'road', 'sand', 'sky', 'wall', 'water'),
    *('ball', 'car', 'house', 'star', 'tree'),
)
palette = [
    *([130, 200, 90], [120, 110, 130], [90, 90, 95], [235, 215, 160], [165, 215, 245]),
    *([165, 85, 65], [60, 130, 190]),
    *([230, 60, 60], [30, 90, 230], [240, 120, 190], [250, 210, 40], [20, 110, 50]),
]
# Objects cover an eighth of the pixels.
class_weight = [1.0] * 7 + [3.0] * 5

model = dict(
    data_preprocessor=dict(size=size),
    backbone=dict(drop_path_rate=0.0, norm_cfg=dict(type='BN')),
    decode_head=dict(
        channels=128, num_classes=len(classes), loss_decode=dict(class_weight=class_weight)
    ),
    auxiliary_head=dict(
        channels=32, num_classes=len(classes), loss_decode=dict(class_weight=class_weight)
    ),
)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='Resize', scale=size, keep_ratio=False),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=size, keep_ratio=False),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs'),
]
dataset = dict(
    type='BaseSegDataset',
    data_root=data_root,
    metainfo=dict(classes=classes, palette=palette),
    reduce_zero_label=True,
)
train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(**dataset, pipeline=train_pipeline),
)
val_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(**dataset, pipeline=test_pipeline),
)
test_dataloader = val_dataloader
del dataset

train_cfg = dict(max_iters=max_iters, val_interval=70)
optim_wrapper = dict(
    _delete_=True,
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.01),
    paramwise_cfg=dict(norm_decay_mult=0.0),
    clip_grad=dict(max_norm=10),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=25),
    dict(type='PolyLR', eta_min=0.0, power=1.0, begin=25, end=max_iters, by_epoch=False),
]
default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(interval=max_iters),
)
randomness = dict(seed=0)
