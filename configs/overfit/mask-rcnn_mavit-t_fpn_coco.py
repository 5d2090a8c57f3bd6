# Mask R-CNN with MAViT-tiny on eight COCO images, until they are overfitted: tools/overfit_check.py det.
# Model and losses are those of the 1x recipe; image size, sampling and schedule are small enough for
# two CPU cores, and nothing augments. The tool names the images, and evaluates on the same.
_base_ = '../det/mavit/mask-rcnn_mavit-t_fpn_amp-1x_coco.py'

max_iters = 300

model = dict(
    backbone=dict(drop_path_rate=0.0),
    # Objects of 20 to 320 pixels on maps of stride 4 to 64.
    rpn_head=dict(anchor_generator=dict(scales=[4])),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=500, max_per_img=250),
        rcnn=dict(sampler=dict(num=128)),
    ),
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=(320, 320), keep_ratio=True),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(320, 320), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
dataset = dict(
    _delete_=True,
    type='CocoDataset',
    data_root='data/coco/',
    ann_file='annotations/instances_train2017.json',
    data_prefix=dict(img='train2017/'),
)
train_dataloader = dict(
    batch_size=2,
    num_workers=0,
    sampler=dict(_delete_=True, type='InfiniteSampler', shuffle=True),
    batch_sampler=None,
    dataset=dict(**dataset, pipeline=train_pipeline),
)
test_dataloader = dict(
    num_workers=0, dataset=dict(**dataset, test_mode=True, pipeline=test_pipeline)
)
del dataset
test_evaluator = dict(ann_file='data/coco/annotations/instances_train2017.json')
val_cfg = val_dataloader = val_evaluator = None

train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=max_iters)
optim_wrapper = dict(
    _delete_=True,
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=2e-4, weight_decay=0.0),
    clip_grad=dict(max_norm=10),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=20),
    dict(type='MultiStepLR', by_epoch=False, milestones=[max_iters * 17 // 20]),
]
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(by_epoch=False, interval=max_iters))
log_processor = dict(by_epoch=False)
randomness = dict(seed=0)
