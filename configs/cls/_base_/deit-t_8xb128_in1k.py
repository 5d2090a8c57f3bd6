# mmpretrain's DeiT-T as the comparisons of linear attention train it: drop path 0.1, the rest as there.
_base_ = ['../../_base_/import_mala_mm.py', 'mmpretrain::deit/deit-tiny_4xb256_in1k.py']
model = dict(backbone=dict(drop_path_rate=0.1))
train_dataloader = dict(batch_size=128)
val_dataloader = dict(batch_size=128)
test_dataloader = val_dataloader
# Checkpoints appear whole, and the old ones go last; runs go on from them exactly.
default_hooks = dict(checkpoint=dict(type='mala_mm.CheckpointHook'))
