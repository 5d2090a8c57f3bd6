# DeiT's recipe: 300 epochs, cosine with 5 epochs of warm-up, AdamW 1e-3 for a total batch of 1024,
# weight decay 0.05 except on norms and biases, no EMA. To test on a folder of ImageNet-V2:
# tools/test.py CONFIG CHECKPOINT --cfg-options test_dataloader.dataset.type=mala_mm.ImageNetV2
# test_dataloader.dataset.data_root=FOLDER test_dataloader.dataset.split=
_base_ = [
    '../../_base_/import_mala_mm.py',
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py',
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_conformer.py',
    'mmpretrain::_base_/default_runtime.py',
]
# A leaf adds its own backbone, and the channels of the tail.
model = dict(
    type='ImageClassifier',
    backbone=dict(out_indices=(3,), output_norm=False),
    neck=dict(type='mala_mm.ProjectionNeck'),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02, bias=0.0),
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    ),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)
train_dataloader = dict(batch_size=128)
val_dataloader = dict(batch_size=128)
test_dataloader = val_dataloader
# Checkpoints appear whole, and the old ones go last; runs go on from them exactly.
default_hooks = dict(checkpoint=dict(type='mala_mm.CheckpointHook'))
