"""A tiny data set, tiny configs that inherit from the real ones, and a way to call the tools."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mala_mm.demo.scenes import SceneConfig
from mala_mm.demo.writers import write_demo_data

ARCH = 'dict(embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))'

CONFIGS = {
    'det': """
_base_ = '{repo}/configs/det/mavit/mask-rcnn_mavit-t_fpn_amp-1x_coco.py'
model = dict(
    backbone=dict(arch=dict(_delete_=True, **{arch})),
    neck=dict(in_channels=[8, 8, 16, 16], out_channels=16),
    rpn_head=dict(in_channels=16, feat_channels=16),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=16),
        bbox_head=dict(in_channels=16, fc_out_channels=16, num_classes={num_classes}),
        mask_roi_extractor=dict(out_channels=16),
        mask_head=dict(in_channels=16, conv_out_channels=16, num_classes={num_classes}),
    ),
    train_cfg=dict(rpn_proposal=dict(nms_pre=32, max_per_img=16), rcnn=dict(sampler=dict(num=8))),
    test_cfg=dict(
        rpn=dict(nms_pre=32, max_per_img=16), rcnn=dict(max_per_img=5, score_thr=0.0)
    ),
)
load = dict(type='LoadAnnotations', with_bbox=True, with_mask=True)
resize = dict(type='Resize', scale=(64, 64), keep_ratio=True)
pack = dict(
    type='PackDetInputs',
    meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
)
metainfo = dict(classes={classes})
train_dataloader = dict(
    batch_size=2,
    num_workers=0,
    dataset=dict(
        metainfo=metainfo,
        filter_cfg=dict(min_size=1),
        pipeline=[dict(type='LoadImageFromFile'), load, resize, pack],
    ),
)
val_dataloader = dict(
    num_workers=0,
    dataset=dict(
        metainfo=metainfo, pipeline=[dict(type='LoadImageFromFile'), resize, load, pack]
    ),
)
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=1)
default_hooks = dict(logger=dict(interval=1))
""",
    'seg': """
_base_ = '{repo}/configs/seg/mavit/upernet_mavit-t_8xb2-amp-160k_ade20k-512x512.py'
crop_size = (64, 64)
model = dict(
    data_preprocessor=dict(size=crop_size),
    backbone=dict(arch=dict(_delete_=True, **{arch})),
    decode_head=dict(in_channels=[8, 8, 16, 16], channels=8),
    auxiliary_head=dict(in_channels=16, channels=8),
)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='RandomCrop', crop_size=crop_size),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(80, 64), keep_ratio=True),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(num_workers=0, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(num_workers=0, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
train_cfg = dict(max_iters=2, val_interval=2)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=2))
""",
    'cls': """
_base_ = '{repo}/configs/cls/mavit/mavit-t_8xb128_in1k.py'
classes = {folders}
model = dict(
    backbone=dict(arch=dict(_delete_=True, **{arch})),
    neck=dict(in_channels=16, out_channels=16),
    head=dict(in_channels=16, num_classes=len(classes), topk=(1,)),
    train_cfg=None,
)
pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(32, 32)),
    dict(type='PackInputs'),
]
data_preprocessor = dict(num_classes=len(classes))
loader = dict(
    batch_size=2,
    num_workers=0,
    dataset=dict(metainfo=dict(classes=classes), pipeline=pipeline),
)
train_dataloader = loader
val_dataloader = loader
test_dataloader = loader
val_evaluator = dict(topk=(1,))
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=1)
default_hooks = dict(logger=dict(interval=1))
""",
}

# Importing takes seconds: the cases run one after another in forks of one process that has done so.
DRIVER = """
import json, os, sys, traceback
from pathlib import Path
import mmdet.utils
import mala_mm.engine.test, mala_mm.engine.train
from mala_mm.engine import cli

mmdet.utils.register_all_modules(init_default_scope=False)

def run(name, tool, *argv):
    for stream, end in ((1, 'out'), (2, 'err')):
        os.dup2(os.open(f'{name}.{end}', os.O_WRONLY | os.O_CREAT), stream)
    try:
        return cli.run(f'mala_mm.engine.{tool}', [*argv, '--work-dir', name])
    except SystemExit as end:  # argparse
        return end.code
    except Exception:
        traceback.print_exc()
        return 99

for name, command in json.loads(Path(sys.argv[1]).read_text()).items():
    child = os.fork()
    if child == 0:
        code = run(name, *command)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    Path(f'{name}.code').write_text(str(os.waitstatus_to_exitcode(status)))
"""


class Workplace:
    """A folder outside the checkout with data, configs and the tools' outputs."""

    def __init__(self, folder: Path, repo: Path):
        self.folder, self.repo = folder, repo
        scenes = SceneConfig(sides=(64, 80), objects=(2, 4), empty=0.0)
        self.data = write_demo_data(
            folder / 'data',
            layouts=('coco', 'ade', 'imagenet'),
            counts=dict(train=4, val=4),
            config=scenes,
        )
        folders = tuple(sorted(p.name for p in (self.data / 'imagenet' / 'train').iterdir()))
        for name, text in CONFIGS.items():
            text = text.format(
                repo=repo,
                arch=ARCH,
                classes=scenes.thing_classes,
                num_classes=len(scenes.thing_classes),
                folders=folders,
            )
            (folder / f'{name}.py').write_text(text)

    def run(self, *command, **environment) -> subprocess.CompletedProcess:
        """Run a command in the folder, without the checkout on the path."""
        env = {
            k: v
            for k, v in os.environ.items()
            if k not in ('PYTHONPATH', 'TORCH_FORCE_WEIGHTS_ONLY_LOAD')
        }
        env.update(OMP_NUM_THREADS='1', PYTHON=sys.executable, **environment)
        return subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
        )

    def tool(self, name, config, *options) -> subprocess.CompletedProcess:
        """Call ``tools/NAME config.py options`` with the data set that belongs to the config."""
        layout = dict(det='coco', seg='ade', cls='imagenet')[config]
        return self.run(
            *(sys.executable, self.repo / 'tools' / name, f'{config}.py', *options),
            *('--data-root', self.data / layout),
        )

    def in_forks(self, cases: dict[str, list[str]]) -> dict[str, dict]:
        """Run commands, ``['train' or 'test', config, *options]``, in work dirs named like them.

        Returns:
            dict[str, dict]: Exit code, outputs, and whether there is a work dir, of each.
        """
        folder = self.folder
        (folder / 'cases.json').write_text(json.dumps(cases))
        (folder / 'driver.py').write_text(DRIVER)
        done = self.run(sys.executable, 'driver.py', 'cases.json')
        assert done.returncode == 0, done.stderr
        return {
            name: dict(
                code=int((folder / f'{name}.code').read_text()),
                out=(folder / f'{name}.out').read_text(),
                err=(folder / f'{name}.err').read_text(),
                left=(folder / name).exists(),
            )
            for name in cases
        }


@pytest.fixture(scope='session')
def workplace(tmp_path_factory, repo) -> Workplace:
    return Workplace(tmp_path_factory.mktemp('workplace'), repo)


@pytest.fixture(scope='session')
def trained_detector(workplace) -> Path:
    """The work dir of a detector that was trained for two iterations."""
    done = workplace.tool('train.py', 'det', '--work-dir', 'det')
    assert done.returncode == 0, done.stderr
    return workplace.folder / 'det'


@pytest.fixture(scope='session')
def trained_segmentor(workplace) -> Path:
    """The work dir of a segmentor that was trained for two iterations in bfloat16."""
    done = workplace.tool('train.py', 'seg', '--work-dir', 'seg', '--amp')
    assert done.returncode == 0, done.stderr
    assert 'Mixed precision on the CPU' in done.stdout
    return workplace.folder / 'seg'
