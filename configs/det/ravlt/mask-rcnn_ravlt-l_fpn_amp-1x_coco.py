# RALA paper, table 6: box AP 52.3, mask AP 46.4 on COCO val2017, 114 M parameters, 501 GFLOPs; not measured here.
# Total batch 16 (8 GPUs x 2), assumed; lr 1e-4 from the RALA paper.
# bash tools/dist_train.sh configs/det/ravlt/mask-rcnn_ravlt-l_fpn_amp-1x_coco.py 8 --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=CLASSIFIER
_base_ = ['../_base_/mask-rcnn_fpn_amp-1x_coco.py', '../../_base_/backbones/ravlt-l.py']
model = dict(backbone=_base_.backbone, neck=dict(in_channels=_base_.stage_channels))
