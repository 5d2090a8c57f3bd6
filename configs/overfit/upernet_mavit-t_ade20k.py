# UperNet with MAViT-tiny on four ADE20K scenes, until they are overfitted: tools/overfit_check.py seg.
# Model and losses are those of the 160K recipe with narrow heads; image size and schedule are small
# enough for two CPU cores, and nothing augments. The tool names the images, and evaluates on the same.
_base_ = '../seg/mavit/upernet_mavit-t_8xb2-amp-160k_ade20k-512x512.py'

max_iters = 300
size = (256, 256)

model = dict(
    data_preprocessor=dict(size=size),
    backbone=dict(drop_path_rate=0.0, norm_cfg=dict(type='BN')),
    decode_head=dict(channels=128, dropout_ratio=0),
    auxiliary_head=dict(channels=64, dropout_ratio=0),
)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='Resize', scale=size, keep_ratio=False),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=size, keep_ratio=False),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs'),
]
data_prefix = dict(img_path='images/training', seg_map_path='annotations/training')
train_dataloader = dict(batch_size=4, num_workers=0, dataset=dict(pipeline=train_pipeline))
test_dataloader = dict(num_workers=0, dataset=dict(data_prefix=data_prefix, pipeline=test_pipeline))
del data_prefix
val_cfg = val_dataloader = val_evaluator = None

train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=max_iters)
optim_wrapper = dict(
    _delete_=True,
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=5e-4, weight_decay=0.0),
    clip_grad=dict(max_norm=10),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=20),
    dict(type='MultiStepLR', by_epoch=False, milestones=[max_iters * 17 // 20]),
]
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=max_iters))
randomness = dict(seed=0)
