"""From folders of images to configs that train, and sentences for what is not right with them."""

import json
import shutil

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image

from mala_mm.engine.config import load_config, set_precision
from mala_mm.engine.image_demo import main as predict
from mala_mm.engine.new_dataset.command import main
from mala_mm.engine.predictor import Predictor
from mala_mm.engine.runner import Runner
from mala_mm.errors import UserError

COCO = 'annotations/instances_train2017.json'


@pytest.fixture(scope='module')
def folders(demo, tmp_path_factory):
    """The generated data as users have them: one file, outlines left out, no splits."""
    root = tmp_path_factory.mktemp('own')
    content = json.loads((demo.root / 'coco' / COCO).read_text())
    for annotation in content['annotations']:
        del annotation['segmentation']
        annotation['iscrowd'] = 0
    (root / 'boxes.json').write_text(json.dumps(content))
    for kind in ('images', 'annotations'):
        shutil.copytree(demo.root / 'ade' / kind / 'training', root / 'scenes' / kind)
    shutil.copy(demo.root / 'ade/objectInfo.txt', root / 'scenes')
    shutil.copytree(demo.root / 'imagenet/train', root / 'objects')
    return root


def arguments(data, demo, folders):
    coco = demo.root / 'coco'
    photos = ['--images', coco / 'train2017']
    return dict(
        outlines=['--coco', coco / COCO, *photos],
        two_files=[
            *('--coco', coco / COCO, *photos, '--val', coco / COCO.replace('train', 'val')),
            *('--val-images', coco / 'val2017'),
        ],
        boxes=['--coco', folders / 'boxes.json', *photos],
        scenes=['--ade', demo.root / 'ade'],
        one_folder=['--ade', folders / 'scenes'],
        objects=['--imagenet', demo.root / 'imagenet'],
        class_folders=['--imagenet', folders / 'objects'],
    )[data]


def write(out, *options):
    main([str(option) for option in (*options, '--out', out, '--size', 64, '--batch-size', 2)])
    return out / f'{out.name}.py'


def train_one_step(path, work_dir):
    cfg = load_config(path)
    cfg.work_dir = str(work_dir)
    set_precision(cfg)
    cfg.train_cfg.max_iters = 1
    for part in ('val_dataloader', 'val_cfg', 'val_evaluator'):
        cfg[part] = None
    cfg.train_cfg.pop('val_interval')
    cfg.train_dataloader.update(num_workers=0, persistent_workers=False)
    cfg.default_hooks.checkpoint.update(interval=-1, save_last=False)
    runner = Runner.from_cfg(cfg)
    before = {name: p.detach().clone() for name, p in runner.model.named_parameters()}
    runner.train()
    assert np.isfinite(runner.message_hub.get_scalar('train/loss').current())
    changed = [n for n, p in runner.model.named_parameters() if not torch.equal(p, before[n])]
    assert len(changed) > len(before) / 2
    return runner


@pytest.mark.parametrize(
    'data, recipe',
    [
        ('outlines', 'mask-rcnn_mavit-t'),
        ('one_folder', 'fpn_mavit-t'),
        ('class_folders', 'mavit-t'),
        pytest.param('two_files', 'retinanet_ravlt-t', marks=pytest.mark.slow),
        pytest.param('boxes', 'mask-rcnn_ravlt-t', marks=pytest.mark.slow),
        pytest.param('outlines', 'cascade-mask-rcnn_mavit-s', marks=pytest.mark.slow),
        pytest.param('scenes', 'upernet_ravlt-t', marks=pytest.mark.slow),
        pytest.param('objects', 'ravlt-t', marks=pytest.mark.slow),
    ],
)
def test_trains_and_predicts(data, recipe, demo, folders, tmp_path, capsys):
    out = tmp_path / 'mine'
    path = write(out, *arguments(data, demo, folders), '--recipe', recipe, '--val-split', 4)
    commands = capsys.readouterr().out
    for tool in ('tools/train.py', 'tools/test.py', 'tools/image_demo.py'):
        assert f'python {tool} {path}' in commands
    runner = train_one_step(path, tmp_path / 'run')

    checkpoint, pictures = tmp_path / 'trained.pth', tmp_path / 'found'
    torch.save(
        dict(
            state_dict=runner.model.state_dict(),
            meta=dict(dataset_meta=runner.train_dataloader.dataset.metainfo),
        ),
        checkpoint,
    )
    image = next((demo.root / 'ade/images/validation').iterdir())
    predict([str(path), str(checkpoint), str(image), '--out-dir', str(pictures)])
    (found,) = json.loads((pictures / 'predictions.json').read_text()).values()
    picture = Image.open(pictures / f'{image.stem}.jpg')
    assert max(picture.size) >= 480  # enlarged
    if 'share_of_pixels' in found:
        assert sum(found['share_of_pixels'].values()) == pytest.approx(1, abs=0.01)
        labels = Image.open(pictures / 'label_maps' / f'{image.stem}.png')
        assert labels.size == Image.open(image).size
    elif 'classes' in found:
        assert found['classes'][0]['label'] in demo.config.thing_classes
    else:
        assert found['instances'] == []  # of one step, nothing is sure


def test_the_split_is_whole_and_repeatable(demo, folders, tmp_path):
    sides = []
    for name in ('one', 'two'):
        write(
            tmp_path / name, *arguments('outlines', demo, folders), '--recipe', 'mask-rcnn_mavit-t'
        )
        sides.append(
            [json.loads((tmp_path / name / f).read_text()) for f in ('train.json', 'val.json')]
        )
    assert sides[0] == sides[1]
    train, val = ({image['id'] for image in side['images']} for side in sides[0])
    whole = json.loads((demo.root / 'coco' / COCO).read_text())
    assert not train & val and train | val == {image['id'] for image in whole['images']}
    assert sum(len(side['annotations']) for side in sides[0]) == len(whole['annotations'])


def test_the_config_is_short_and_can_be_moved(demo, folders, tmp_path):
    path = write(
        tmp_path / 'mine', *arguments('outlines', demo, folders), '--recipe', 'mask-rcnn_mavit-t'
    )
    text = path.read_text()
    lines = [line for line in text.splitlines() if '/' not in line]
    assert len(text.splitlines()) < 100 and max(map(len, lines)) <= 100
    moved = shutil.copytree(tmp_path / 'mine', tmp_path / 'elsewhere')
    cfg = Config.fromfile(moved / 'mine.py')
    assert cfg.train_dataloader.dataset.ann_file == str(moved / 'train.json')


def test_init_is_where_the_backbone_starts(demo, folders, tmp_path):
    from mala_mm.models import MAViT

    backbone = MAViT('tiny')
    torch.save(backbone.state_dict(), tmp_path / 'classifier.pth')
    options = ['--recipe', 'mavit-t', '--init', tmp_path / 'classifier.pth']
    path = write(tmp_path / 'mine', *arguments('class_folders', demo, folders), *options)
    cfg = load_config(path)
    assert cfg.model.backbone.init_cfg.checkpoint == str(tmp_path / 'classifier.pth')


@pytest.mark.parametrize(
    'change, sentence',
    [
        (dict(recipe='mask-rcn_mavit-t'), 'There is no recipe mask-rcn_mavit-t for detection; did'),
        (dict(recipe='fpn_mavit-t'), 'for detection'),
        (dict(val_split='99'), 'cannot be split'),
        (dict(init='absent.pth'), 'Checkpoint absent.pth does not exist'),
        (dict(images='absent'), 'image folder absent does not exist'),
        (dict(coco='absent.json'), 'annotation file absent.json does not exist'),
    ],
)
def test_mistakes_leave_nothing_behind(change, sentence, demo, tmp_path):
    coco = demo.root / 'coco'
    options = dict(coco=coco / COCO, images=coco / 'train2017', recipe='mask-rcnn_mavit-t')
    options = {**options, **change}
    flags = [part for k, v in options.items() for part in (f'--{k.replace("_", "-")}', v)]
    with pytest.raises(UserError, match=sentence):
        write(tmp_path / 'mine', *flags)
    assert list(tmp_path.iterdir()) == []


def test_faults_of_the_annotations_are_told(demo, tmp_path):
    content = json.loads((demo.root / 'coco' / COCO).read_text())
    content['annotations'][0]['bbox'] = [0, 0, 'wide', 3]
    (tmp_path / 'broken.json').write_text(json.dumps(content))
    with pytest.raises(UserError, match='1 fault that training would break on.*bbox'):
        write(
            *(tmp_path / 'mine', '--coco', tmp_path / 'broken.json'),
            *('--images', demo.root / 'coco/train2017', '--recipe', 'mask-rcnn_mavit-t'),
        )


def test_an_output_is_replaced_on_request_alone(demo, folders, tmp_path):
    options = [*arguments('class_folders', demo, folders), '--recipe', 'mavit-t']
    write(tmp_path / 'mine', *options)
    with pytest.raises(UserError, match='exists already; .* or replace it with --force'):
        write(tmp_path / 'mine', *options)
    write(tmp_path / 'mine', *options, '--force')
    (tmp_path / 'other').mkdir()
    with pytest.raises(UserError, match='exists already; name another folder with --out$'):
        write(tmp_path / 'other', *options, '--force')


def test_label_maps_and_classes_have_to_agree(demo, folders, tmp_path):
    with pytest.raises(UserError, match='go up to 15, but 3 classes'):
        write(
            *(tmp_path / 'mine', '--ade', folders / 'scenes', '--recipe', 'fpn_mavit-t'),
            *('--classes', 'a', 'b', 'c'),
        )


def test_unknown_class_for_predictions(demo, folders, tmp_path):
    path = write(
        tmp_path / 'mine', *arguments('class_folders', demo, folders), '--recipe', 'mavit-t'
    )
    cfg = load_config(path)
    from mmengine.registry import MODELS

    torch.save(dict(state_dict=MODELS.build(cfg.model).state_dict()), tmp_path / 'random.pth')
    with pytest.raises(UserError, match="knows no class 'bal'; its classes are ball"):
        Predictor(cfg, str(tmp_path / 'random.pth'), classes=['bal'])
