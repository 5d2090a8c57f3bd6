# DeiT-T with MALA with local position and gate, 6,221,992 parameters.
# Not in the MALA paper, table 9; not measured here.
# Total batch 1024 (8 GPUs x 128), lr 1e-3 and 20 epochs of warm-up, as DeiT and Swin are trained.
# bash tools/dist_train.sh configs/cls/linear_attention/deit-t_mala-lepe-gate_8xb128_in1k.py 8
_base_ = '../_base_/deit-t_8xb128_in1k.py'
model = dict(
    backbone=dict(
        type='mala_mm.ReplaceAttention',
        host='VisionTransformer',
        attn_types='mala',
        lepe=True,
        gate=True,
    )
)
