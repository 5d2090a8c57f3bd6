# MALA paper, table 5: mIoU 51.5 on ADE20K val, single scale, 51 M parameters, 292 GFLOPs; not measured here.
# Total batch 16 (8 GPUs x 2), as in the paper; lr 1e-4 of PVT's recipe.
# bash tools/dist_train.sh configs/seg/mavit/fpn_mavit-b_8xb2-80k_ade20k-512x512.py 8 --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=CLASSIFIER
_base_ = ['../_base_/fpn_8xb2-80k_ade20k-512x512.py', '../../_base_/backbones/mavit-b.py']
model = dict(backbone=_base_.backbone, neck=dict(in_channels=_base_.stage_channels))
