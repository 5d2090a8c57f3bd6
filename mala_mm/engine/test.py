"""Evaluates a detector, segmentor or classifier."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy

from mmengine.config import Config, ConfigDict
from mmengine.evaluator import DumpResults

from mala_mm.errors import UserError

from . import arguments
from .explain import explain
from .runner import Runner


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If the config, an option, the data or the checkpoint is wrong.
    """
    parser = arguments.run_parser(__doc__)
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument(
        '--out',
        help='where to save predictions: a .pkl file, or for segmentation a folder of label maps',
    )
    parser.add_argument('--show-dir', metavar='DIR', help='folder for images of the predictions')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation')
    args = parser.parse_args(argv)
    cfg = arguments.read_config(args)
    arguments.check_checkpoint(args.checkpoint)
    cfg.resume, cfg.load_from = False, args.checkpoint
    segmentation = cfg.get('default_scope') == 'mmseg'
    if args.show_dir:
        draw_predictions(cfg, args.show_dir)
    if args.out and segmentation:
        save_label_maps(cfg, args.out)
    elif args.out and not args.out.endswith(('.pkl', '.pickle')):
        raise UserError(f'--out must end in .pkl, got {args.out}')
    arguments.check_data(cfg, 'test')
    if args.tta:
        augment(cfg)
    runner = Runner.from_cfg(cfg)
    if args.out and not segmentation:
        runner.test_evaluator.metrics.append(_dump(cfg, args.out))
    try:
        runner.test()
    except Exception as error:
        if explain(error) is not None:
            runner.discard_outputs()
        raise


def draw_predictions(cfg: Config, folder: str) -> None:
    """Let the visualization hook draw every test image.

    Args:
        cfg (Config): Changed in place.
        folder (str): Where the images go.

    Raises:
        UserError: If the config has no visualization hook.
    """
    hook = cfg.get('default_hooks', {}).get('visualization')
    if not hook:
        raise UserError(
            f'--show-dir needs default_hooks.visualization in {cfg.filename}; add one, for example '
            "dict(type='DetVisualizationHook')"
        )
    folder = os.path.abspath(folder)
    hook.interval = 1
    scope = cfg.get('default_scope')
    if scope == 'mmdet':
        hook.update(draw=True, test_out_dir=folder)
    elif scope == 'mmpretrain':
        hook.update(enable=True, out_dir=folder)
    else:
        hook.draw = True
        cfg.visualizer.save_dir = folder


def save_label_maps(cfg: Config, folder: str) -> None:
    """Let the metrics of a segmentor save the predicted label maps.

    Args:
        cfg (Config): Changed in place.
        folder (str): Where the maps go, as PNG.
    """
    metrics = cfg.test_evaluator if isinstance(cfg.test_evaluator, list) else [cfg.test_evaluator]
    for metric in metrics:
        metric.output_dir = folder


def augment(cfg: Config) -> None:
    """Replace the model and the test pipeline by those of test-time augmentation.

    A config without ``tta_model`` and ``tta_pipeline`` gets horizontal flips, as in mmdet and
    mmpretrain.

    Args:
        cfg (Config): Changed in place.

    Raises:
        UserError: If there is no default for the config's library, or the model predicts masks,
            which mmdet's augmentation does not merge.
    """
    scope = cfg.get('default_scope')
    if scope == 'mmdet' and (cfg.model.get('roi_head') or cfg.model).get('mask_head'):
        raise UserError('--tta merges boxes alone, but the model has a mask_head; leave --tta out')
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    if 'tta_model' not in cfg:
        if scope == 'mmdet':
            nms = dict(type='nms', iou_threshold=0.5)
            cfg.tta_model = dict(type='DetTTAModel', tta_cfg=dict(nms=nms, max_per_img=100))
        elif scope == 'mmpretrain':
            cfg.tta_model = dict(type='AverageClsScoreTTA')
        else:
            raise UserError(f'--tta needs tta_model and tta_pipeline in {cfg.filename}; add both')
    if 'tta_pipeline' not in cfg:
        cfg.tta_pipeline = _flip_pipeline(dataset.pipeline)
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    dataset.pipeline = cfg.tta_pipeline


def _flip_pipeline(pipeline: Sequence[dict]) -> list[dict]:
    *steps, pack = deepcopy(list(pipeline))
    if 'meta_keys' in pack:
        pack['meta_keys'] = (*pack['meta_keys'], 'flip', 'flip_direction')
    flips = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
    return [*steps, dict(type='TestTimeAug', transforms=[flips, [pack]])]


def _dump(cfg: Config, path: str) -> DumpResults:
    if cfg.get('default_scope') == 'mmdet':
        from mmdet.evaluation import DumpDetResults  # masks as run-length codes

        return DumpDetResults(out_file_path=path)
    return DumpResults(out_file_path=path)
