# MALA paper, table 2: top-1 86.0 % on ImageNet-1K val, 98 M parameters, 16.1 GFLOPs; not measured here.
# Total batch 1024 (8 GPUs x 128) and lr 1e-3, as in the paper; the 5 epochs of warm-up are RAVLT's, assumed.
# bash tools/dist_train.sh configs/cls/mavit/mavit-l_8xb128_in1k.py 8
_base_ = ['../_base_/8xb128_in1k.py', '../../_base_/backbones/mavit-l.py']
model = dict(
    backbone=_base_.backbone,
    neck=dict(in_channels=_base_.stage_channels[-1], out_channels=2560),
    head=dict(in_channels=2560),
)
