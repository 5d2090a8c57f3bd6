# Mask R-CNN with MAViT-tiny on generated scenes, on two CPU cores: `make demo`.
# The model is that of the 1x recipe; image size, sampling and schedule are small.
_base_ = '../det/mavit/mask-rcnn_mavit-t_fpn_amp-1x_coco.py'

data_root = 'data/demo/coco/'
classes = ('ball', 'car', 'house', 'star', 'tree')
metainfo = dict(classes=classes)
max_iters = 240

model = dict(
    backbone=dict(drop_path_rate=0.0),
    # Objects are 20 to 90 pixels wide, on maps of stride 4 to 64.
    rpn_head=dict(anchor_generator=dict(scales=[4])),
    roi_head=dict(
        # One sample per bin: the adaptive number takes longer.
        bbox_roi_extractor=dict(roi_layer=dict(sampling_ratio=1)),
        mask_roi_extractor=dict(roi_layer=dict(sampling_ratio=1)),
        bbox_head=dict(num_classes=len(classes)),
        mask_head=dict(num_classes=len(classes)),
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=300, max_per_img=100),
        rcnn=dict(sampler=dict(num=32)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=100), rcnn=dict(max_per_img=20)),
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=(128, 128), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(128, 128), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(_delete_=True, type='InfiniteSampler', shuffle=True),
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=train_pipeline),
)
val_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator

train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=max_iters, val_interval=120)
optim_wrapper = dict(
    _delete_=True,
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=2e-4, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0),
    clip_grad=dict(max_norm=10),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=50, T_max=max_iters - 50, eta_min=2e-6),
]
default_hooks = dict(
    logger=dict(interval=10, log_metric_by_epoch=False),
    checkpoint=dict(by_epoch=False, interval=max_iters),
)
log_processor = dict(by_epoch=False, window_size=10)
randomness = dict(seed=0)
