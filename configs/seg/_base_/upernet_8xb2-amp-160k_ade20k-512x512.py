_base_ = [
    '../../_base_/import_mala_mm.py',
    'mmseg::_base_/models/upernet_r50.py',
    'mmseg::_base_/datasets/ade20k.py',
    'mmseg::_base_/schedules/schedule_160k.py',
    'mmseg::_base_/default_runtime.py',
]
data_preprocessor = dict(size=(512, 512))
# A leaf adds its own backbone, and its channels for the heads.
model = dict(
    data_preprocessor=data_preprocessor,
    pretrained=None,
    backbone=dict(_delete_=True, norm_cfg=dict(type='SyncBN')),
    decode_head=dict(num_classes=150),
    auxiliary_head=dict(num_classes=150),
)
train_dataloader = dict(batch_size=2)

# The loss scale is dynamic, the default of AmpOptimWrapper. Only norms are spared weight decay:
# biases and layer scales are not, and position tables there are none.
optim_wrapper = dict(
    type='AmpOptimWrapper',
    optimizer=dict(_delete_=True, type='AdamW', lr=6e-5, betas=(0.9, 0.999), weight_decay=0.01),
    paramwise_cfg=dict(norm_decay_mult=0.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', eta_min=0.0, power=1.0, begin=1500, end=160000, by_epoch=False),
]
auto_scale_lr = dict(enable=False, base_batch_size=16)
# Checkpoints appear whole, and the old ones go last; runs go on from them exactly.
default_hooks = dict(checkpoint=dict(type='mala_mm.CheckpointHook'))
