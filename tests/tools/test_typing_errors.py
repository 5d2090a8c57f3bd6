"""A typing error in a config ends in one sentence that names it, and leaves nothing behind."""

import copy
import functools
import re
import sys

import pytest
from mmengine.config import Config
from mmengine.utils import ManagerMixin

from mala_mm.engine import arguments, cli

BACKBONE = 'model.backbone.'
NECK = 'model.neck.'
ROI = 'model.roi_head.'
LOADER = 'train_dataloader.'
DATASET = 'train_dataloader.dataset.'
OPTIM = 'optim_wrapper.'
HOOKS = 'default_hooks.'

# Options of the command line, and what the sentence says of them.
DET = [
    (BACKBONE + 'arch=tinny', 'arch must be one of .*tiny'),
    (BACKBONE + 'arch=3', 'arch must be a name or a dict, got int'),
    (BACKBONE + 'arch.depths=[1,-1,1,1]', r"arch\['depths'\] must be a sequence of positive"),
    (BACKBONE + 'arch.depths=[1,0,1,1]', r"arch\['depths'\] must be"),
    (BACKBONE + 'arch.depths=[1,1.5,1,1]', r"arch\['depths'\] must be"),
    (BACKBONE + 'arch.depths=4', r"arch\['depths'\] must be"),
    (BACKBONE + 'arch.embed_dims=[8,8,x,16]', r"arch\['embed_dims'\] must be"),
    (BACKBONE + 'arch.embed_dims=[8,8,16]', r"arch\['embed_dims'\] must have 4 entries"),
    (BACKBONE + 'arch.num_heads=[0,1,2,2]', r"arch\['num_heads'\] must be"),
    (BACKBONE + 'arch.num_heads=[3,1,2,2]', 'embed_dims / num_heads must be an integer'),
    (BACKBONE + 'arch.mlp_ratio=-1', r"arch\['mlp_ratio'\] must be a positive number, got -1"),
    (BACKBONE + 'arch.mlp_ratio=big', r"arch\['mlp_ratio'\] must be"),
    (BACKBONE + 'arch.layer_scale_init_values=1', r"arch\['layer_scale_init_values'\] must be"),
    (BACKBONE + 'arch.depth=[1,1,1,1]', 'an arch dict needs .*depths'),
    (BACKBONE + 'attn_types=[mala,mala,soft,softmax]', 'attn_types must name 4 operators.*softmax'),
    (BACKBONE + 'attn_types=[mala,mala]', 'attn_types must name 4 operators'),
    (BACKBONE + 'attn_types=3', 'attn_types must name 4 operators'),
    (BACKBONE + 'attn_cfg.epsilon=1e-6', "the option 'epsilon', .*did you mean eps?"),
    (BACKBONE + 'attn_cfg.form=papers', r"form must be one of \('published', 'paper'\)"),
    (BACKBONE + 'attn_cfg.backend=tritn', 'backend must be one of .*triton'),
    (BACKBONE + 'attn_cfg.eps=-1', 'eps must be a number from 0 on, got -1'),
    (BACKBONE + 'attn_cfg.eps=small', 'eps must be a number'),
    (BACKBONE + 'attn_cfg.scale=nan', 'scale must be a positive number'),
    (BACKBONE + 'attn_cfg.rotary=yes', "rotary must be True or False, got 'yes'"),
    (BACKBONE + 'attn_cfg=[1]', 'attn_cfg must be a dict'),
    (BACKBONE + 'out_indices=[0,1,2,4]', 'out_indices must be .* from 0 to 3'),
    (BACKBONE + 'out_indices=[0,1,1,2]', 'out_indices must be .* each once'),
    (BACKBONE + 'out_indices=3', 'out_indices must be'),
    (BACKBONE + 'out_indices=[0,1,2]', r'neck.in_channels is \[8, 8, 16, 16\], but model.backbone'),
    (BACKBONE + 'frozen_stages=5', 'frozen_stages must be an int from -1 to 4, got 5'),
    (BACKBONE + 'frozen_stages=all', 'frozen_stages must be an int'),
    (BACKBONE + 'drop_path_rate=1.5', 'drop_path_rate must be a number from 0 to below 1, got 1.5'),
    (BACKBONE + 'drop_path_rate=-0.1', 'drop_path_rate must be'),
    (BACKBONE + 'drop_path_rate=high', 'drop_path_rate must be'),
    (BACKBONE + 'norm_cfg.type=BatchNom', 'norm_cfg.type is .BatchNom.; did you mean .BN'),
    (BACKBONE + 'norm_cfg=BN', 'norm_cfg must be a dict'),
    (BACKBONE + 'norm_cfg=None', 'norm_cfg must be a dict'),
    (BACKBONE + 'norm_cfg.epsilon=1', "has no 'epsilon'; did you mean eps"),
    (BACKBONE + 'in_channels=0', 'in_channels must be a positive integer, got 0'),
    (BACKBONE + 'in_channels=4', 'in_channels is 4, but .* 3 channels'),
    (BACKBONE + 'in_channels=rgb', 'in_channels must be'),
    (BACKBONE + 'with_cp=maybe', 'with_cp must be True or False'),
    (BACKBONE + 'norm_eval=maybe', 'norm_eval must be True or False'),
    (BACKBONE + 'type=MaViT', "model.backbone.type is 'MaViT'.*did you mean MAViT"),
    (BACKBONE + 'type=3', 'model.backbone must be a dict with a type'),
    (NECK + 'in_channels=[8,8,16,32]', r'set model.neck.in_channels=\[8, 8, 16, 16\]'),
    (NECK + 'in_channels=[8,8,16]', r'set model.neck.in_channels=\[8, 8, 16, 16\]'),
    (NECK + 'in_channels=8', 'model.neck.in_channels is 8'),
    (NECK + 'out_channels=32', 'model.rpn_head.in_channels is 16, but model.neck returns 32'),
    (NECK + 'out_channels=many', 'out_channels must be a positive integer'),
    (NECK + 'num_outs=3', 'model.neck.num_outs is 3, fewer than the 4 maps'),
    (NECK + 'type=FNP', "model.neck.type is 'FNP'.*did you mean .*FPN"),
    ('model.rpn_head.in_channels=32', 'set model.rpn_head.in_channels=16'),
    ('model.rpn_head.anchor_generator.strides=[4,8,16,32]', 'strides has 4 entries.*5 maps'),
    ('model.rpn_head.loss_cls.type=CrossEntropyLos', 'did you mean CrossEntropyLoss'),
    ('model.rpn_head.loss_cls.loss_weight=heavy', "loss_weight must be a number, got 'heavy'"),
    (ROI + 'bbox_roi_extractor.out_channels=32', 'bbox_roi_extractor.out_channels is 32'),
    (ROI + 'bbox_roi_extractor.featmap_strides=[4]', r'featmap_strides is \[4\].*4, 8, 16, 32'),
    (ROI + 'mask_roi_extractor.featmap_strides=[4,8,16,64]', 'featmap_strides is'),
    (ROI + 'bbox_head.in_channels=32', 'set model.roi_head.bbox_head.in_channels=16'),
    (ROI + 'mask_head.in_channels=32', 'set model.roi_head.mask_head.in_channels=16'),
    (ROI + 'bbox_head.num_classes=-1', 'num_classes must be a positive integer, got -1'),
    (ROI + 'bbox_head.num_classes=eight', 'num_classes must be a positive integer'),
    (ROI + 'type=StandardRoiHead', 'did you mean StandardRoIHead'),
    ('model.type=MaskRCN', 'did you mean MaskRCNN'),
    ('model=3', 'model must be a dict with a type'),
    ('model.data_preprocessor.type=DetPreprocessor', 'did you mean DetDataPreprocessor'),
    ('model.data_preprocessor.mean=[1,2]', 'mean must be a list of 1 or 3 numbers'),
    ('model.data_preprocessor.mean=[a,b,c]', 'mean must be a list'),
    ('model.data_preprocessor.std=[0,1,1]', 'std must be a list of positive numbers'),
    ('model.data_preprocessor.pad_size_divisor=0', 'pad_size_divisor must be a positive integer'),
    (OPTIM + 'optimizer.type=AdmW', 'did you mean AdamW'),
    (OPTIM + 'optimizer.lr=fast', "lr must be a number from 0 on, got 'fast'"),
    (OPTIM + 'optimizer.lr=-1', 'lr must be a number from 0 on, got -1'),
    (OPTIM + 'optimizer.lr=nan', 'lr must be'),
    (OPTIM + 'optimizer.weight_decay=-1', 'weight_decay must be'),
    (OPTIM + 'optimizer.betas=[0.9,2]', 'betas must be two numbers'),
    (OPTIM + 'optimizer.betas=high', 'betas must be'),
    (OPTIM + 'type=AmpOptimWraper', 'did you mean AmpOptimWrapper'),
    (OPTIM + 'accumulative_counts=0', 'accumulative_counts must be a positive integer'),
    (OPTIM + 'clip_grad.max_norm=x', 'max_norm must be a positive number'),
    (OPTIM + 'clip_grad.max_norm=-1', 'max_norm must be a positive number'),
    (OPTIM + 'clip_grad=1', 'clip_grad must be a dict'),
    (OPTIM + 'constructor=LayerDecayConstructor', 'optim_wrapper.constructor is'),
    (OPTIM + 'paramwise_cfg=3', 'paramwise_cfg must be a dict'),
    ('model.test_cfg.rcnn.nms.type=nmss', "nms.type must be one of nms, .*got 'nmss'"),
    (ROI + 'bbox_head.roi_feat_size=5', r'first batch fails in model.roi_head.bbox_head \(Shared2'),
    (ROI + 'bbox_roi_extractor.roi_layer.output_size=5', 'first batch fails in model.roi_head'),
    (ROI + 'mask_roi_extractor.roi_layer.output_size=7', 'first batch fails in model.roi_head'),
    ('model.rpn_head.bbox_coder.target_means=[0,0]', 'first batch fails in model.rpn_head'),
    (LOADER + 'batch_size=0', 'batch_size must be a positive integer, got 0'),
    (LOADER + 'batch_size=-2', 'batch_size must be'),
    (LOADER + 'batch_size=two', 'batch_size must be'),
    (LOADER + 'batch_size=1.5', 'batch_size must be'),
    ('val_dataloader.batch_size=0', 'val_dataloader.batch_size must be'),
    (LOADER + 'num_workers=-1', 'num_workers must be an integer from 0 on, got -1'),
    (LOADER + 'num_workers=many', 'num_workers must be'),
    (f'{LOADER}num_workers=1 {LOADER}prefetch_factor=0', 'prefetch_factor must be'),
    (LOADER + 'sampler.type=DefaultSamplr', 'did you mean DefaultSampler'),
    (LOADER + 'batch_sampler.type=AspectRatioSampler', 'did you mean AspectRatioBatchSampler'),
    (LOADER + 'collate_fn.type=pseudo_colate', 'did you mean pseudo_collate'),
    ('train_dataloader=None', 'train_dataloader must not be None where train_cfg and'),
    ('train_dataloader=3', 'train_dataloader must be a dict'),
    (DATASET + 'type=CocoDatset', 'did you mean .*CocoDataset'),
    (DATASET + 'pipeline.2.type=Resiz', 'pipeline.2.type is .*did you mean .*Resize'),
    (DATASET + 'pipeline.2.scle=3', "has no 'scle'; did you mean scale"),
    (
        DATASET + 'pipeline.2.scale=big',
        'The transform Resize fails on the image .*jpg .TypeError: Scale must be',
    ),
    (DATASET + 'pipeline=3', 'pipeline must be a list of dicts'),
    (DATASET + 'pipeline=[Resize]', 'pipeline must be a list of dicts'),
    (DATASET + 'pipeline.0.type=PackDetInputs', 'The transform LoadAnnotations fails'),
    (DATASET + 'ann_file=3', 'ann_file must be a text'),
    (DATASET + 'data_prefix=3', 'data_prefix must be'),
    (DATASET + 'metainfo=3', 'metainfo must be a dict'),
    (DATASET + 'metainfo.classes=3', 'classes must be a tuple of names'),
    (DATASET + 'filter_cfg=3', 'filter_cfg must be a dict'),
    (DATASET + 'filter_cfg.min_size=4000', 'No image of .* is left'),
    (DATASET + 'indices=-1', 'indices must be a positive integer'),
    ('train_cfg.max_epochs=0', 'max_epochs must be a positive integer, got 0'),
    ('train_cfg.max_epochs=-3', 'max_epochs must be'),
    ('train_cfg.max_epochs=ten', 'max_epochs must be'),
    ('train_cfg.max_epochs=1.5', 'max_epochs must be'),
    ('train_cfg.val_interval=0', 'val_interval must be'),
    ('train_cfg.type=EpochTrainLoop', 'did you mean .*TrainLoop'),
    ('train_cfg=3', 'train_cfg must be a dict'),
    ('val_cfg.type=ValLop', 'did you mean ValLoop'),
    (HOOKS + 'checkpoint.type=ChekpointHook', 'did you mean CheckpointHook'),
    (HOOKS + 'checkpoint.interval=0', 'checkpoint.interval must be a positive integer, or -1'),
    (HOOKS + 'checkpoint.interval=-5', 'checkpoint.interval must be'),
    (HOOKS + 'checkpoint.interval=often', 'checkpoint.interval must be'),
    (HOOKS + 'checkpoint.max_keep_ckpts=0', 'max_keep_ckpts must be'),
    (HOOKS + 'checkpoint.max_keep_ckpts=x', 'max_keep_ckpts must be'),
    (HOOKS + 'checkpoint.max_keep_ckpt=1', "no 'max_keep_ckpt'; did you mean max_keep_ckpts"),
    (HOOKS + 'checkpoint.save_best=bbox_mAP', 'save_best is .*did you mean coco/bbox_mAP?'),
    (HOOKS + 'checkpoint.save_best=[auto,coco/bbox_mAp]', 'did you mean coco/bbox_mAP?'),
    (HOOKS + 'checkpoint.save_best=3', 'save_best must be a name'),
    (HOOKS + 'checkpoint.save_best=loss_total', 'loss_total.*metrics are .*choose one of'),
    (
        f'val_evaluator=None val_cfg=None val_dataloader=None {HOOKS}checkpoint.save_best=auto',
        'there is no val_evaluator',
    ),
    (HOOKS + 'logger.interval=0', 'logger.interval must be'),
    (HOOKS + 'logger=3', 'default_hooks.logger must be'),
    (HOOKS + 'logger.priority=TOP', 'priority must be .*VERY_HIGH'),
    ('custom_hooks=[3]', 'custom_hooks must be a list of dicts'),
    ('param_scheduler.0.type=LinerLR', 'did you mean LinearLR'),
    ('param_scheduler.0.start_factor=2', 'does not fit LinearLR: .*[Ss]tart'),
    ('param_scheduler.0.end=-1', 'end must be a positive integer'),
    ('param_scheduler.0.end=soon', 'end must be'),
    ('param_scheduler=3', 'param_scheduler must be'),
    ('param_scheduler.1.milestones=8', 'milestones must be a list'),
    ('val_evaluator.metric=bboxes', 'metric should be one of .*bbox'),
    ('val_evaluator.type=CocoMetrc', 'did you mean CocoMetric'),
    ('val_evaluator=None', 'val_evaluator must not be None'),
    ('val_evaluator.ann_file=none.json', 'none.json does not exist'),
    ('randomness.seed=x', 'seed must be'),
    ('randomness.seed=-1', 'seed must be'),
    ('load_from=3', 'load_from must be a text'),
    ('load_from=none.pth', 'none.pth does not exist'),
    ('default_scope=mmdett', 'needs mmdett, which cannot be imported'),
    ('default_scope=3', 'default_scope must be a text'),
    ('log_level=LOUD', 'log_level must be one of DEBUG'),
    ('visualizer.type=DetVisualizer', 'did you mean .*DetLocalVisualizer'),
    ('visualizer.vis_backends=[3]', 'vis_backends must be a list'),
    ('custom_imports.imports=[no_such_module]', 'no_such_module'),
    ('env_cfg=3', 'env_cfg must be a dict'),
    ('env_cfg.mp_cfg.mp_start_method=frok', 'mp_start_method must be one of fork'),
    ('auto_scale_lr.base_batch_size=x', 'base_batch_size must be a positive integer'),
]
SEG = [
    ('model.decode_head.in_channels=[8,8,16,32]', r'set model.decode_head.in_channels=\[8, 8, 16'),
    ('model.decode_head.in_channels=[8,8,16]', 'model.decode_head.in_channels is'),
    ('model.decode_head.in_index=[0,1,2,7]', 'in_index has 7, but model.backbone returns 4 maps'),
    ('model.auxiliary_head.in_channels=99', 'set model.auxiliary_head.in_channels=16'),
    ('model.auxiliary_head.in_index=9', 'model.auxiliary_head.in_index has 9'),
    ('model.decode_head.num_classes=3', 'decode_head.num_classes is 3, but the data set'),
    ('model.decode_head.channels=0', 'channels must be a positive integer'),
    ('model.decode_head.norm_cfg.type=BNN', 'decode_head.norm_cfg.type is .BNN.; did you mean .BN'),
    ('model.decode_head.dropout_ratio=2', 'dropout_ratio must be a number from 0 to 1'),
    ('model.decode_head.loss_decode.class_weight=[1,2]', 'first batch fails in model.decode_head'),
    ('model.decode_head.in_index=0 model.decode_head.in_channels=8', 'does not fit .*UPerHead'),
    (HOOKS + 'checkpoint.save_best=miou', 'did you mean mIoU?'),
    ('model.test_cfg.mode=slid', "model.test_cfg.mode must be 'slide' or 'whole'"),
    (DATASET + 'pipeline.2.crop_size=[0,0]', 'crop_size must be'),
    (DATASET + 'pipeline.2.crop_size=big', 'crop_size must be'),
    ('train_cfg.max_iters=0', 'max_iters must be a positive integer'),
    ('train_cfg.max_iters=x', 'max_iters must be'),
    ('val_evaluator.iou_metrics=[mIOU]', 'iou_metrics must be .*mIoU'),
]
CLS = [
    ('model.neck.in_channels=17', 'set model.neck.in_channels=16'),
    ('model.head.in_channels=17', 'set model.head.in_channels=16'),
    ('model.head.num_classes=2', 'model.head.num_classes is 2'),
    ('model.head.topk=x', 'topk must be'),
    ('val_evaluator.topk=[9]', 'val_evaluator.topk has 9, but model.head.num_classes is 4'),
    (HOOKS + 'checkpoint.save_best=accuracy/top5', 'did you mean accuracy/top1?'),
    ('model.head.loss.type=LabelSmooth', 'did you mean LabelSmoothLoss'),
    (BACKBONE + 'out_indices=[0]', 'model.neck.in_channels is 16, but model.backbone returns 8'),
    (DATASET + 'split=trian', 'trian does not exist'),
]
CASES = [
    pytest.param(config, *case, id=f'{config}-{case[0].replace(" ", "-")}')
    for config, cases in (('det', DET), ('seg', SEG), ('cls', CLS))
    for case in cases
]


@pytest.fixture(scope='module')
def read_once():
    """``Config.fromfile`` that parses each file once."""
    read = functools.lru_cache(Config.fromfile)
    return lambda path, *args, **kwargs: copy.deepcopy(read(path))


def subclasses(cls):
    """A class and all that derive from it."""
    return [cls, *(found for child in cls.__subclasses__() for found in subclasses(child))]


@pytest.fixture
def refuse(workplace, read_once, monkeypatch, capfd):
    """Trains with options of the command line, in this process, and returns the sentence."""
    monkeypatch.chdir(workplace.folder)
    monkeypatch.setattr(Config, 'fromfile', read_once)
    monkeypatch.setattr(sys, 'argv', ['train.py'])
    monkeypatch.setattr(
        arguments, 'enforce_safe_loading', lambda: None
    )  # for the rest of the process
    monkeypatch.setenv('LOCAL_RANK', '0')

    def run(config, *argv):
        root = workplace.data / dict(det='coco', seg='ade', cls='imagenet')[config]
        for cls in subclasses(ManagerMixin):  # loggers and visualizers of the run before
            cls._instance_dict.clear()
        before = sorted(workplace.folder.rglob('*'))
        code = cli.run('mala_mm.engine.train', [f'{config}.py', '--data-root', str(root), *argv])
        written = capfd.readouterr().err.strip().splitlines()
        sentences = [line for line in written if line.startswith('train.py: error: ')]
        assert code == 1 and len(sentences) == 1 and written[-1] == sentences[0], written
        assert 'Traceback' not in '\n'.join(written)
        assert sorted(workplace.folder.rglob('*')) == before  # nothing is left behind
        return sentences[0]

    return run


@pytest.mark.parametrize(('config', 'options', 'sentence'), CASES)
def test_typing_error(refuse, config, options, sentence):
    found = refuse(config, '--work-dir', 'typing/error', '--cfg-options', *options.split())
    assert re.search(sentence, found), found


@pytest.mark.parametrize('work_dir', ['det.py', 'det.py/sub'])
def test_work_dir_that_is_a_file(refuse, work_dir):
    assert re.search('det.py is a file; name another', refuse('det', '--work-dir', work_dir))


def test_work_dir_that_is_no_text(refuse):
    assert 'work_dir must be a text' in refuse('det', '--cfg-options', 'work_dir=3')
