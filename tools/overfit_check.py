#!/usr/bin/env python
"""Train on a handful of real images until they are known by heart.

A model that cannot learn eight images has a bug. ``det`` trains Mask R-CNN with MAViT-tiny on
eight COCO images (box AP50 > 0.9 on these eight), ``seg`` trains UperNet with MAViT-tiny on four
ADE20K scenes (pixel accuracy > 0.95 and mIoU over the classes present > 0.6). Everything starts
from random weights; the model and the losses are those of the 1x and 160K recipes, while image
size, head width, sampling and schedule are small enough for two CPU cores.

    python tools/overfit_check.py det --data-root data/coco
    python tools/overfit_check.py seg --data-root data/ade/ADEChallengeData2016
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

CONFIGS = Path(__file__).resolve().parents[1] / 'configs'
DET_CONFIG = 'det/mavit/mask-rcnn_mavit-t_fpn_amp-1x_coco.py'
SEG_CONFIG = 'seg/mavit/upernet_mavit-t_8xb2-amp-160k_ade20k-512x512.py'
NUM_DET_IMAGES, DET_SIZE, MIN_OBJECT_SIDE = 8, 320, 20
NUM_SEG_IMAGES, SEG_SIZE = 4, 256


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('task', choices=('det', 'seg'))
    parser.add_argument('--data-root', required=True, help='COCO or ADE20K in its official layout')
    parser.add_argument('--work-dir', help='default: work_dirs/overfit_{det,seg}')
    parser.add_argument('--iters', type=int, default=300, help='default: 300')
    parser.add_argument('--lr', type=float, help='default: 2e-4 for det, 5e-4 for seg')
    args = parser.parse_args()
    if args.work_dir is None:
        args.work_dir = f'work_dirs/overfit_{args.task}'
    args.lr = args.lr or dict(det=2e-4, seg=5e-4)[args.task]
    return args


def select_coco(data_root, work_dir):
    """The first eight training images whose objects are all large enough to be seen.

    At least two objects each, no crowds, every object 20 pixels wide (root of its area) once the
    image is resized. Returns the path of their annotation file.
    """
    coco = json.loads((data_root / 'annotations/instances_train2017.json').read_text())
    chosen = []
    for image in coco['images']:
        objects = [a for a in coco['annotations'] if a['image_id'] == image['id']]
        scale = DET_SIZE / max(image['width'], image['height'])
        visible = [
            not a['iscrowd'] and a['area'] ** 0.5 * scale >= MIN_OBJECT_SIDE for a in objects
        ]
        if len(objects) >= 2 and all(visible):
            chosen.append(image)
    if len(chosen) < NUM_DET_IMAGES:
        sys.exit(f'{data_root} has only {len(chosen)} suitable images, {NUM_DET_IMAGES} are needed')
    coco['images'] = chosen[:NUM_DET_IMAGES]
    ids = {image['id'] for image in coco['images']}
    coco['annotations'] = [a for a in coco['annotations'] if a['image_id'] in ids]
    ann_file = (work_dir / 'instances.json').resolve()
    ann_file.write_text(json.dumps(coco))
    return str(ann_file)


def select_ade(data_root, work_dir):
    """The four training scenes with the fewest classes. Returns the path of their list."""
    import cv2

    labels = sorted((data_root / 'annotations/training').glob('*.png'))
    if len(labels) < NUM_SEG_IMAGES:
        sys.exit(f'{data_root} has only {len(labels)} label maps, {NUM_SEG_IMAGES} are needed')
    count = {p: len(np.setdiff1d(cv2.imread(str(p), cv2.IMREAD_UNCHANGED), [0])) for p in labels}
    chosen = sorted(labels, key=lambda p: (count[p], p.name))[:NUM_SEG_IMAGES]
    ann_file = (work_dir / 'scenes.txt').resolve()
    ann_file.write_text(''.join(f'{p.stem}\n' for p in chosen))
    return str(ann_file)


def det_config(args, data_root, ann_file):
    """Mask R-CNN 1x, smaller and without augmentation."""
    from mmengine.config import Config

    cfg = Config.fromfile(CONFIGS / DET_CONFIG)
    resize = dict(type='Resize', scale=(DET_SIZE, DET_SIZE), keep_ratio=True)
    dataset = dict(
        type='CocoDataset',
        data_root=str(data_root),
        ann_file=ann_file,
        data_prefix=dict(img='train2017/'),
    )
    cfg.train_dataloader = dict(
        batch_size=2,
        num_workers=0,
        sampler=dict(type='InfiniteSampler', shuffle=True),
        dataset=dict(
            **dataset,
            pipeline=[
                dict(type='LoadImageFromFile'),
                dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
                resize,
                dict(type='PackDetInputs'),
            ],
        ),
    )
    cfg.test_dataloader = dict(
        batch_size=1,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=False),
        dataset=dict(
            **dataset,
            test_mode=True,
            pipeline=[
                dict(type='LoadImageFromFile'),
                resize,
                dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
                dict(
                    type='PackDetInputs',
                    meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
                ),
            ],
        ),
    )
    cfg.test_evaluator = dict(type='CocoMetric', ann_file=ann_file, metric=['bbox', 'segm'])
    # Objects of 20 to 320 pixels on maps of stride 4 to 64.
    cfg.model.rpn_head.anchor_generator.scales = [4]
    cfg.model.train_cfg.rpn_proposal.update(nms_pre=500, max_per_img=250)
    cfg.model.train_cfg.rcnn.sampler.num = 128
    return cfg


def seg_config(args, data_root, ann_file):
    """UperNet 160K with narrow heads, smaller and without augmentation."""
    from mmengine.config import Config

    cfg = Config.fromfile(CONFIGS / SEG_CONFIG)
    resize = dict(type='Resize', scale=(SEG_SIZE, SEG_SIZE), keep_ratio=False)
    load = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', reduce_zero_label=True)]
    dataset = dict(
        type='ADE20KDataset',
        data_root=str(data_root),
        ann_file=ann_file,
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
    )
    cfg.train_dataloader = dict(
        batch_size=4,
        num_workers=0,
        sampler=dict(type='InfiniteSampler', shuffle=True),
        dataset=dict(**dataset, pipeline=[*load, resize, dict(type='PackSegInputs')]),
    )
    cfg.test_dataloader = dict(
        batch_size=1,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=False),
        dataset=dict(**dataset, pipeline=[load[0], resize, load[1], dict(type='PackSegInputs')]),
    )
    cfg.test_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
    cfg.model.data_preprocessor.size = (SEG_SIZE, SEG_SIZE)
    cfg.model.decode_head.update(channels=128, dropout_ratio=0)
    cfg.model.auxiliary_head.update(channels=64, dropout_ratio=0)
    return cfg


def common_config(cfg, args, work_dir):
    """A short AdamW schedule without anything that makes learning by heart harder."""
    cfg.work_dir = str(work_dir)
    cfg.model.backbone.update(drop_path_rate=0.0, norm_cfg=dict(type='BN'))
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=args.iters)
    cfg.optim_wrapper = dict(
        type='OptimWrapper',
        optimizer=dict(type='AdamW', lr=args.lr, weight_decay=0.0),
        clip_grad=dict(max_norm=10),
    )
    cfg.param_scheduler = [
        dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=20),
        dict(type='MultiStepLR', by_epoch=False, milestones=[int(0.85 * args.iters)]),
    ]
    cfg.default_hooks.logger = dict(type='LoggerHook', interval=10)
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', by_epoch=False, interval=args.iters)
    cfg.log_processor = dict(by_epoch=False)
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    cfg.randomness = dict(seed=0)
    cfg.log_level = 'INFO'
    return cfg


def judge(task, metrics):
    """Pairs of a figure's name, its value and the bar it has to pass."""
    if task == 'det':
        return [('box AP50', metrics['coco/bbox_mAP_50'], 0.9)]
    # mmseg's mean leaves out classes that are neither labelled nor predicted.
    return [
        ('pixel accuracy', metrics['aAcc'] / 100, 0.95),
        ('mIoU over the classes present', metrics['mIoU'] / 100, 0.6),
    ]


def main():
    args = parse_args()
    data_root = Path(args.data_root).resolve()
    if not data_root.is_dir():
        sys.exit(f'no data at {data_root}: name the folder with --data-root')
    work_dir = Path(args.work_dir)
    work_dir.mkdir(parents=True, exist_ok=True)
    select, build = (select_coco, det_config) if args.task == 'det' else (select_ade, seg_config)
    cfg = common_config(build(args, data_root, select(data_root, work_dir)), args, work_dir)

    from mmengine.runner import Runner

    runner = Runner.from_cfg(cfg)
    begin = time.time()
    runner.train()
    metrics = runner.test()
    minutes = (time.time() - begin) / 60
    passed = True
    print(f'\n{args.iters} iterations and their evaluation took {minutes:.1f} minutes')
    for name, value, bar in judge(args.task, metrics):
        passed &= value > bar
        print(f'{name}: {value:.3f} ({"passes" if value > bar else "FAILS"}: more than {bar})')
    return 0 if passed else 1


if __name__ == '__main__':
    sys.exit(main())
