_base_ = [
    '../../_base_/import_mala_mm.py',
    'mmseg::_base_/models/fpn_r50.py',
    'mmseg::_base_/datasets/ade20k.py',
    'mmseg::_base_/schedules/schedule_80k.py',
    'mmseg::_base_/default_runtime.py',
]
data_preprocessor = dict(size=(512, 512))
# A leaf adds its own backbone, and its channels for the neck.
model = dict(
    data_preprocessor=data_preprocessor,
    pretrained=None,
    backbone=dict(_delete_=True, norm_cfg=dict(type='SyncBN')),
    decode_head=dict(num_classes=150),
)
train_dataloader = dict(batch_size=2)

# Everything decays, norms included.
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-4)
)
param_scheduler = [dict(type='PolyLR', eta_min=1e-6, power=0.9, begin=0, end=80000, by_epoch=False)]
auto_scale_lr = dict(enable=False, base_batch_size=16)
# Checkpoints appear whole, and the old ones go last; runs go on from them exactly.
default_hooks = dict(checkpoint=dict(type='mala_mm.CheckpointHook'))
