# MALA paper, table 5: mIoU 53.6 on ADE20K val, single scale, 125 M parameters, 1182 GFLOPs; not measured here.
# Total batch 16 (8 GPUs x 2), as in the paper; lr 6e-5 of Swin's recipe.
# bash tools/dist_train.sh configs/seg/mavit/upernet_mavit-l_8xb2-amp-160k_ade20k-512x512.py 8 --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=CLASSIFIER
_base_ = ['../_base_/upernet_8xb2-amp-160k_ade20k-512x512.py', '../../_base_/backbones/mavit-l.py']
model = dict(
    backbone=_base_.backbone,
    decode_head=dict(in_channels=_base_.stage_channels),
    auxiliary_head=dict(in_channels=_base_.stage_channels[2]),
)
