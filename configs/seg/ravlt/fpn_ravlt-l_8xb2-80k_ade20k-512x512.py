# RALA paper, table 7: mIoU 52.6 on ADE20K val, single scale, 98 M parameters, 424 GFLOPs; not measured here.
# Total batch 16 (8 GPUs x 2), assumed; lr 1e-4 of PVT's recipe.
# bash tools/dist_train.sh configs/seg/ravlt/fpn_ravlt-l_8xb2-80k_ade20k-512x512.py 8 --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=CLASSIFIER
_base_ = ['../_base_/fpn_8xb2-80k_ade20k-512x512.py', '../../_base_/backbones/ravlt-l.py']
model = dict(backbone=_base_.backbone, neck=dict(in_channels=_base_.stage_channels))
