_base_ = [
    '../../_base_/import_mala_mm.py',
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    'mmdet::_base_/schedules/schedule_1x.py',
    'mmdet::_base_/default_runtime.py',
    'ms-crop-3x.py',
]
# A leaf adds its own backbone, and its channels for the neck.
model = dict(backbone=dict(_delete_=True, norm_cfg=dict(type='SyncBN')))

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
