_base_ = [
    '../../_base_/import_mala_mm.py',
    'mmdet::_base_/models/cascade-mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    'mmdet::_base_/schedules/schedule_1x.py',
    'mmdet::_base_/default_runtime.py',
    'ms-crop-3x.py',
]
# A leaf adds its own backbone, and its channels for the neck. Each box head has 4 convolutions and
# 1 fully connected layer, and regresses decoded boxes per class.
model = dict(
    backbone=dict(_delete_=True, norm_cfg=dict(type='SyncBN')),
    roi_head=dict(
        bbox_head=[
            dict(
                type='Shared4Conv1FCBBoxHead',
                in_channels=256,
                conv_out_channels=256,
                fc_out_channels=1024,
                roi_feat_size=7,
                num_classes=80,
                norm_cfg=dict(type='SyncBN'),
                bbox_coder=dict(
                    type='DeltaXYWHBBoxCoder',
                    target_means=[0.0, 0.0, 0.0, 0.0],
                    target_stds=target_stds,
                ),
                reg_class_agnostic=False,
                reg_decoded_bbox=True,
                loss_cls=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
                loss_bbox=dict(type='GIoULoss', loss_weight=10.0),
            )
            for target_stds in (
                [0.1, 0.1, 0.2, 0.2],
                [0.05, 0.05, 0.1, 0.1],
                [0.033, 0.033, 0.067, 0.067],
            )
        ]
    ),
)

train_pipeline = _base_.ms_crop_pipeline
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
train_cfg = dict(max_epochs=36)
param_scheduler = _base_.schedule_3x

# The loss scale is dynamic, the default of AmpOptimWrapper. Only norms are spared weight decay:
# biases and layer scales are not.
optim_wrapper = dict(
    type='AmpOptimWrapper',
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0),
)
# Checkpoints appear whole, and the old ones go last; runs go on from them exactly.
default_hooks = dict(checkpoint=dict(type='mala_mm.CheckpointHook'))
