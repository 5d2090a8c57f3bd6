# Swin-S with focused linear attention, 50,510,288 parameters.
# MALA paper, table 9: top-1 83.5 % on ImageNet-1K val; not measured here.
# Total batch 1024 (8 GPUs x 128), lr 1e-3 and 20 epochs of warm-up, as DeiT and Swin are trained.
# bash tools/dist_train.sh configs/cls/linear_attention/swin-s_focused_8xb128_in1k.py 8
_base_ = '../_base_/swin-s_8xb128_in1k.py'
model = dict(
    backbone=dict(
        type='mala_mm.ReplaceAttention',
        host='SwinTransformer',
        attn_types=('focused', 'focused', None, None),
    )
)
