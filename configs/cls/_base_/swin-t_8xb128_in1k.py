# mmpretrain's Swin-T as it trains it, drop path 0.2.
_base_ = [
    '../../_base_/import_mala_mm.py',
    'mmpretrain::swin_transformer/swin-tiny_16xb64_in1k.py',
]
train_dataloader = dict(batch_size=128)
val_dataloader = dict(batch_size=128)
test_dataloader = val_dataloader
# Checkpoints appear whole, and the old ones go last; runs go on from them exactly.
default_hooks = dict(checkpoint=dict(type='mala_mm.CheckpointHook'))
