# MALA paper, table 2: top-1 84.7 % on ImageNet-1K val, 27 M parameters, 4.6 GFLOPs; not measured here.
# Total batch 1024 (8 GPUs x 128) and lr 1e-3, as in the paper; the 5 epochs of warm-up are RAVLT's, assumed.
# bash tools/dist_train.sh configs/cls/mavit/mavit-s_8xb128_in1k.py 8
_base_ = ['../_base_/8xb128_in1k.py', '../../_base_/backbones/mavit-s.py']
model = dict(
    backbone=_base_.backbone,
    neck=dict(in_channels=_base_.stage_channels[-1], out_channels=2048),
    head=dict(in_channels=2048),
)
