# Swin-T with Hydra attention, 28,285,312 parameters.
# MALA paper, table 9: top-1 80.7 % on ImageNet-1K val; not measured here.
# Total batch 1024 (8 GPUs x 128), lr 1e-3 and 20 epochs of warm-up, as DeiT and Swin are trained.
# bash tools/dist_train.sh configs/cls/linear_attention/swin-t_hydra_8xb128_in1k.py 8
_base_ = '../_base_/swin-t_8xb128_in1k.py'
model = dict(
    backbone=dict(
        type='mala_mm.ReplaceAttention',
        host='SwinTransformer',
        attn_types=('hydra', 'hydra', None, None),
    )
)
