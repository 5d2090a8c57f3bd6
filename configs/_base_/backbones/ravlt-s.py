# The recipes start from the ImageNet-1K classifier of this size. Its file, ours or the published one:
# --cfg-options model.backbone.init_cfg.type=Pretrained model.backbone.init_cfg.checkpoint=FILE
backbone = dict(type='mala_mm.RAVLT', arch='small')
stage_channels = [64, 128, 320, 512]
