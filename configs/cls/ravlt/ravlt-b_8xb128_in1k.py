# RALA paper, table 3: top-1 85.5 % on ImageNet-1K val, 48 M parameters, 9.9 GFLOPs; not measured here.
# Total batch 1024 (8 GPUs x 128) and lr 1e-3, as in the paper.
# bash tools/dist_train.sh configs/cls/ravlt/ravlt-b_8xb128_in1k.py 8
_base_ = ['../_base_/8xb128_in1k.py', '../../_base_/backbones/ravlt-b.py']
model = dict(
    backbone=_base_.backbone,
    neck=dict(in_channels=_base_.stage_channels[-1], out_channels=1024),
    head=dict(in_channels=1024),
)
