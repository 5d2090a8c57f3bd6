# Variables for the 3x recipes: 36 epochs of multi-scale training, as in DETR, Sparse R-CNN and Swin.
scales = [(side, 1333) for side in range(480, 801, 32)]
resize = dict(type='RandomChoiceResize', scales=scales, keep_ratio=True)
ms_crop_pipeline = [
    dict(type='LoadImageFromFile', backend_args=None),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomFlip', prob=0.5),
    dict(
        type='RandomChoice',
        transforms=[
            [resize],
            [
                dict(
                    type='RandomChoiceResize',
                    scales=[(400, 1333), (500, 1333), (600, 1333)],
                    keep_ratio=True,
                ),
                dict(
                    type='RandomCrop',
                    crop_type='absolute_range',
                    crop_size=(384, 600),
                    allow_negative_crop=True,
                ),
                resize,
            ],
        ],
    ),
    dict(type='PackDetInputs'),
]
schedule_3x = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(type='MultiStepLR', begin=0, end=36, by_epoch=True, milestones=[27, 33], gamma=0.1),
]
del scales, resize
