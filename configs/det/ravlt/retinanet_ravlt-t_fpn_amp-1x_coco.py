# RALA paper, table 6: box AP 45.9 on COCO val2017, 24 M parameters, 201 GFLOPs; not measured here.
# Total batch 16 (8 GPUs x 2), assumed; lr 1e-4 from the RALA paper.
# bash tools/dist_train.sh configs/det/ravlt/retinanet_ravlt-t_fpn_amp-1x_coco.py 8 --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=CLASSIFIER
_base_ = ['../_base_/retinanet_fpn_amp-1x_coco.py', '../../_base_/backbones/ravlt-t.py']
model = dict(backbone=_base_.backbone, neck=dict(in_channels=_base_.stage_channels[1:]))
