"""Times the checks of an annotation file of COCO's size, which run before training starts.

    python -m benchmarks.annotations            # 118,287 images, 860,001 annotations, as train2017
    python -m benchmarks.annotations --images 5000 --annotations 36781     # as val2017

Writes a file with polygons of random length beside boxes, as long as COCO's are (about 21 points),
some 440 MB for train2017, into a temporary folder, and reports: the time to parse it, which
mmdet spends again when it builds the data set; the time of the checks without the parsing; and the
time for a second loader or evaluator that names the same file.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from mala_mm.data import coco


def write(path, num_images, num_annotations):
    """Write an annotation file without faults."""
    draw = random.Random(0)
    images = [
        dict(id=i, file_name=f'{i:012d}.jpg', height=480, width=640) for i in range(num_images)
    ]
    with path.open('w') as file:
        head = dict(images=images, categories=[dict(id=i, name=f'class {i}') for i in range(1, 81)])
        file.write(json.dumps(head)[:-1] + ', "annotations": [')
        for i in range(num_annotations):
            x, y = draw.uniform(0, 500), draw.uniform(0, 400)
            w, h = draw.uniform(5, 139), draw.uniform(5, 79)
            points = []
            for _ in range(max(3, int(draw.expovariate(1 / 21)))):
                points += [round(x + draw.random() * w, 2), round(y + draw.random() * h, 2)]
            annotation = dict(
                segmentation=[points],
                area=round(w * h / 2, 4),
                iscrowd=0,
                image_id=draw.randrange(num_images),
                bbox=[round(v, 2) for v in (x, y, w, h)],
                category_id=draw.randrange(1, 81),
                id=i,
            )
            file.write((', ' if i else '') + json.dumps(annotation))
        file.write(']}')


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--images', type=int, default=118_287)
    parser.add_argument('--annotations', type=int, default=860_001)
    parser.add_argument('--file', type=Path, help='measure with this file instead')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder, 'instances.json')
        if args.file is None:
            write(path, args.images, args.annotations)
        start = time.perf_counter()
        json.loads(path.read_bytes())
        parsed = time.perf_counter()
        summary = coco.summarize_coco(path)
        checked = time.perf_counter()
        coco.summarize_coco(path)
        again = time.perf_counter()
    print(f'{path.name}: {summary.num_annotations} annotations, {len(summary.findings)} findings')
    print(f'parse {parsed - start:.2f} s, parse and check {checked - parsed:.2f} s, '
          f'again {again - checked:.4f} s')  # fmt: skip


if __name__ == '__main__':
    main()
