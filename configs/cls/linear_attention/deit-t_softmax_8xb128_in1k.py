# DeiT-T with softmax attention, the host as it is, 5,717,416 parameters.
# MALA paper, table 9: top-1 72.2 % on ImageNet-1K val; not measured here.
# Total batch 1024 (8 GPUs x 128), lr 1e-3 and 20 epochs of warm-up, as DeiT and Swin are trained.
# bash tools/dist_train.sh configs/cls/linear_attention/deit-t_softmax_8xb128_in1k.py 8
_base_ = '../_base_/deit-t_8xb128_in1k.py'
