# MALA paper, table 4: box AP 50.6 on COCO val2017, 104 M parameters, 482 GFLOPs; not measured here.
# Total batch 16 (8 GPUs x 2), assumed; lr 4e-4 from the released MAViT configs, which do not name the number of GPUs.
# bash tools/dist_train.sh configs/det/mavit/retinanet_mavit-l_fpn_amp-1x_coco.py 8 --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=CLASSIFIER
_base_ = ['../_base_/retinanet_fpn_amp-1x_coco.py', '../../_base_/backbones/mavit-l.py']
model = dict(backbone=_base_.backbone, neck=dict(in_channels=_base_.stage_channels[1:]))
optim_wrapper = dict(optimizer=dict(lr=4e-4))
