_base_ = [
    '../../_base_/import_mala_mm.py',
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    'mmdet::_base_/datasets/coco_detection.py',
    'mmdet::_base_/schedules/schedule_1x.py',
    'mmdet::_base_/default_runtime.py',
]
# A leaf adds its own backbone, and its channels for the neck. Stages 2 to 4 only: the output of
# stage 1 would never be used, and its norm would get no gradient.
model = dict(
    backbone=dict(_delete_=True, out_indices=(1, 2, 3), norm_cfg=dict(type='SyncBN')),
    neck=dict(start_level=0),
)

# Everything decays, norms included.
optim_wrapper = dict(
    type='AmpOptimWrapper',
    loss_scale=512.0,
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-4),
)
# Checkpoints appear whole, and the old ones go last; runs go on from them exactly.
default_hooks = dict(checkpoint=dict(type='mala_mm.CheckpointHook'))
