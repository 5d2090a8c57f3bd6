"""The inference functions of mmdet and mmseg, called as users call them."""

import json
import sys

CODE = """
import json, sys
import numpy as np
image, out = sys.argv[1:]
found = {}

from mmseg.apis import MMSegInferencer, inference_model, init_model
model = init_model('seg.py', 'seg/iter_2.pth', device='cpu')
result = inference_model(model, image)
found['segmentor'] = dict(
    classes=model.dataset_meta['classes'], palette=model.dataset_meta['palette'],
    labels=result.pred_sem_seg.data[0].numpy().tolist())
for name, config in dict(recipe='seg.py', written='seg/seg.py').items():
    inferencer = MMSegInferencer(config, 'seg/iter_2.pth', device='cpu')
    found[f'segmentor inferencer {name}'] = dict(
        labels=inferencer(image, out_dir=out)['predictions'].tolist(),
        classes=inferencer.visualizer.dataset_meta['classes'])

from mmdet.apis import DetInferencer, inference_detector, init_detector
model = init_detector('det.py', 'det/epoch_1.pth', device='cpu')
result = inference_detector(model, image).pred_instances
found['detector'] = dict(
    classes=model.dataset_meta['classes'], scores=result.scores.tolist(),
    masks=list(result.masks.shape))
for name, config in dict(recipe='det.py', written='det/det.py', none=None).items():
    inferencer = DetInferencer(config, 'det/epoch_1.pth', device='cpu')
    found[f'detector inferencer {name}'] = dict(
        classes=inferencer.model.dataset_meta['classes'],
        scores=inferencer(image, out_dir=out)['predictions'][0]['scores'])
print('RESULT', json.dumps(found))
"""


def test_inference_functions(workplace, trained_detector, trained_segmentor):
    image = next((workplace.data / 'coco' / 'val2017').iterdir())
    done = workplace.run(sys.executable, '-c', CODE, image, 'inferred')
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('RESULT '))
    found = json.loads(line.removeprefix('RESULT '))

    segmentor = found['segmentor']
    assert segmentor['classes'][:2] == ['wall', 'building'] and len(segmentor['classes']) == 150
    assert len(segmentor['palette']) == 150
    for name in ('recipe', 'written'):
        inferred = found[f'segmentor inferencer {name}']
        assert inferred['labels'] == segmentor['labels']
        assert inferred['classes'] == segmentor['classes']

    detector = found['detector']
    from mala_mm.demo.scenes import SceneConfig

    assert detector['classes'] == list(SceneConfig().thing_classes)
    height, width = len(segmentor['labels']), len(segmentor['labels'][0])
    assert detector['masks'] == [5, height, width]
    for name in ('recipe', 'written', 'none'):
        inferred = found[f'detector inferencer {name}']
        assert inferred['scores'] == detector['scores']
        assert inferred['classes'] == detector['classes']
    assert [*(workplace.folder / 'inferred' / 'vis').iterdir()]
