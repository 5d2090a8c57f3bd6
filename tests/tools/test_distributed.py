"""Several processes on CPUs."""

import json
import math
import pickle
import socket

HOOK = """
import hashlib, json, os
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

def digest(runner):
    weights = [p.detach().numpy().tobytes() for p in runner.model.parameters()]
    return hashlib.sha256(b''.join(weights)).hexdigest()

@HOOKS.register_module()
class WeightsOfEachRank(Hook):
    def before_train(self, runner):
        self.before = digest(runner)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        boxes = sum(len(s.gt_instances) for s in data_batch['data_samples'])
        self.boxes = [*getattr(self, 'boxes', []), boxes]

    def after_train(self, runner):
        found = dict(before=self.before, after=digest(runner), boxes=self.boxes)
        with open(f'rank{runner.rank}.json', 'w') as file:
            json.dump(found, file)
"""


def test_two_processes(workplace, free_port):
    """Both ranks end with equal weights, though one sees images without any object."""
    (workplace.folder / 'weights_of_each_rank.py').write_text(HOOK)
    annotations = workplace.data / 'coco' / 'annotations'
    content = json.loads((annotations / 'instances_train2017.json').read_text())
    only = content['images'][0]['id']
    content['annotations'] = [a for a in content['annotations'] if a['image_id'] == only]
    (annotations / 'sparse.json').write_text(json.dumps(content))
    config = workplace.folder / 'dist.py'
    config.write_text(
        "_base_ = 'det.py'\n"
        "custom_imports = dict(imports=['weights_of_each_rank'])\n"
        "custom_hooks = [dict(type='WeightsOfEachRank')]\n"
        "train_dataloader = dict(batch_size=1, dataset=dict(ann_file='annotations/sparse.json', "
        'filter_cfg=dict(filter_empty_gt=False)))\n'
    )
    common = ('--data-root', workplace.data / 'coco', '--work-dir', 'dist')
    tools = workplace.repo / 'tools'
    env = dict(PORT=str(free_port), PYTHONPATH=str(workplace.folder))
    done = workplace.run('bash', tools / 'dist_train.sh', config, 2, *common, **env)
    assert done.returncode == 0, done.stderr
    first, second = (
        json.loads((workplace.folder / f'rank{rank}.json').read_text()) for rank in (0, 1)
    )
    assert len(first['boxes']) == len(second['boxes']) == 2
    assert min(first['boxes'] + second['boxes']) == 0 < max(first['boxes'] + second['boxes'])
    assert first['before'] == second['before'] != first['after'] == second['after']

    done = workplace.run(
        *('bash', tools / 'dist_test.sh', config, 'dist/epoch_1.pth', 2, *common),
        *('--out', 'dist.pkl'),
        **env,
    )
    assert done.returncode == 0, done.stderr
    predictions = pickle.loads((workplace.folder / 'dist.pkl').read_bytes())
    names = {p['img_path'].rsplit('/', 1)[-1] for p in predictions}
    assert names == {p.name for p in (workplace.data / 'coco' / 'val2017').iterdir()}
    newest = max((workplace.folder / 'dist').glob('*/*.json'))
    assert math.isfinite(json.loads(newest.read_text())['coco/bbox_mAP'])


def test_an_error_is_told_once(workplace, free_port):
    """One sentence for both processes, without the launcher's own traceback."""
    done = workplace.run(
        *('bash', workplace.repo / 'tools' / 'dist_train.sh', 'det.py', 2, '--work-dir', 'once'),
        *('--data-root', workplace.data / 'coco'),
        *('--cfg-options', 'train_dataloader.batch_size=0'),
        PORT=str(free_port),
    )
    assert done.returncode == 1
    sentence = 'error: train_dataloader.batch_size must be a positive integer, got 0'
    assert done.stderr.strip() == sentence
    assert not (workplace.folder / 'once').exists()


def test_port_in_use(workplace):
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        script = workplace.repo / 'tools' / 'dist_train.sh'
        done = workplace.run('bash', script, 'det.py', 2, PORT=port)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        'error: the port for the processes to meet at is in use; choose another (PORT=29501)'
    )
