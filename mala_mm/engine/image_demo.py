"""Predict with a trained detector, segmentor or classifier, and draw what it finds.

    python tools/image_demo.py CONFIG CHECKPOINT photo.jpg
    python tools/image_demo.py CONFIG CHECKPOINT photos/ --out-dir found --threshold 0.5
    python tools/image_demo.py CONFIG CHECKPOINT film.mp4 --classes car person
    python tools/image_demo.py CONFIG CHECKPOINT webcam:0 --frames 100

Writes a picture for each image (a video for a video) and predictions.json: boxes x1, y1, x2, y2 in
pixels with masks as COCO's run lengths, shares of classes, or scores. The label maps of a segmentor
go to label_maps/ as PNG.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
from rich.console import Console
from rich.progress import Progress

from mala_mm.checkpoint import enforce_safe_loading
from mala_mm.data.folders import IMAGE_SUFFIXES
from mala_mm.data.images import inspect_image
from mala_mm.errors import UserError
from mala_mm.files import write_bytes

from . import arguments
from .config import load_config
from .predictor import Prediction, Predictor

VIDEO_SUFFIXES = ('.mp4', '.avi', '.mov', '.mkv', '.webm', '.m4v')


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = arguments.make_parser(__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument(
        'inputs', nargs='+', metavar='INPUT', help='images, folders of images, videos, or webcam:N'
    )
    parser.add_argument('--out-dir', default='predictions', help='default: predictions')
    parser.add_argument(
        '--threshold', type=float, default=0.3, help='lowest score of a detection (default: 0.3)'
    )
    parser.add_argument('--classes', nargs='+', metavar='NAME', help='show these classes alone')
    parser.add_argument('--device', help='such as cpu or cuda:0 (default: the best there is)')
    parser.add_argument('--frames', type=int, help='stop a video or webcam after so many frames')
    arguments.add_config_options(parser, data_root=False)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Predict from the command line.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If an input, the config or the checkpoint is wrong.
    """
    args = parse_args(argv)
    enforce_safe_loading()
    arguments.check_checkpoint(args.checkpoint)
    images, videos = find_inputs(args.inputs)
    cfg = load_config(args.config, args.cfg_options)
    predictor = Predictor(cfg, args.checkpoint, args.device, args.threshold, args.classes)
    out = Path(args.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict] = {}
    unreadable = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for path, name in progress.track(images, description='images') if images else ():
            image = read_image(path)
            if isinstance(image, str):
                unreadable.append(f'{path} ({image})')
                continue
            prediction = predictor(image)
            found[str(path)] = prediction.content
            write_image(out / name.with_suffix('.jpg'), prediction.picture)
            _write_label_map(out / 'label_maps' / name.with_suffix('.png'), prediction)
        for source in videos:
            frames = follow(source, predictor, out, args.frames, progress)
            found[str(source)] = dict(frames=frames)
    write_bytes(out / 'predictions.json', json.dumps(found, indent=1).encode() + b'\n')
    print(f'{out}: {len(found)} inputs, pictures and predictions.json')
    if unreadable:
        raise UserError(
            f'{len(unreadable)} of {len(images)} images cannot be read, the first is '
            f'{unreadable[0]}; replace them or take them out'
        )


def find_inputs(inputs: Sequence[str]) -> tuple[list[tuple[Path, Path]], list[Path | int]]:
    """Return images with the names of their pictures, and videos.

    Args:
        inputs (Sequence[str]): Files, folders and ``webcam:N``.

    Raises:
        UserError: If one is not there or holds nothing.
    """
    images: list[tuple[Path, Path]] = []
    videos: list[Path | int] = []
    for text in inputs:
        path = Path(text).expanduser()
        if text.startswith('webcam:') and text[7:].isdigit():
            videos.append(int(text[7:]))
        elif path.is_dir():
            listed = [p for p in sorted(path.rglob('*')) if p.suffix.lower() in IMAGE_SUFFIXES]
            if not listed:
                raise UserError(f'The folder {path} holds no image; name one that does')
            images += [(p, p.relative_to(path)) for p in listed]
        elif not path.is_file():
            raise UserError(f'The input {path} does not exist; name an image, a folder or a video')
        elif path.suffix.lower() in VIDEO_SUFFIXES:
            videos.append(path)
        else:
            images.append((path, Path(path.name)))
    taken: set[Path] = set()
    for i, (path, name) in enumerate(images):  # a.jpg beside a.png
        if name.with_suffix('') in taken:
            images[i] = path, name.with_name(f'{name.stem}_{name.suffix[1:]}_{i}{name.suffix}')
        taken.add(name.with_suffix(''))
    return images, videos


def read_image(path: Path) -> np.ndarray | str:
    """Return an image as uint8 RGB, turned by its EXIF orientation, or why it cannot be read.

    Args:
        path (Path): The file.
    """
    size, remarks = inspect_image(path)
    if size is None:
        return remarks[0][1]
    image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
    return image[..., ::-1]


def write_image(path: Path, image: np.ndarray) -> None:
    """Write uint8 RGB as a JPEG.

    Args:
        path (Path): The file; its folder is made.
        image (ndarray): (H, W, 3).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = cv2.imencode('.jpg', image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 92])[1]
    write_bytes(path, data.tobytes())


def _write_label_map(path: Path, prediction: Prediction) -> None:
    if prediction.label_map is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, cv2.imencode('.png', prediction.label_map)[1].tobytes())


def _frames(source: Path | int, most: int | None) -> Iterator[np.ndarray]:
    capture = cv2.VideoCapture(source if isinstance(source, int) else str(source))
    try:
        count = 0
        while most is None or count < most:
            read, frame = capture.read()
            if not read:
                break
            count += 1
            yield frame[..., ::-1]
    finally:
        capture.release()


def follow(
    source: Path | int,
    predictor: Predictor,
    out: Path,
    most: int | None,
    progress: Progress,
) -> list[dict]:
    """Predict on the frames of a video or webcam, and write a video of them.

    Args:
        source (Path | int): The file, or the number of the webcam.
        predictor (Predictor): The model.
        out (Path): Where the video goes.
        most (int, optional): Number of frames to stop after; Ctrl-C stops too.
        progress (Progress): Where to show how far it is.

    Returns:
        list[dict]: What was found in each frame.

    Raises:
        UserError: If there is no frame.
    """
    camera = isinstance(source, int)
    capture = cv2.VideoCapture(source if camera else str(source))
    rate = capture.get(cv2.CAP_PROP_FPS) or 25
    total = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)) or None
    capture.release()
    name = f'webcam_{source}.mp4' if camera else f'{source.stem}.mp4'
    task = progress.add_task(name, total=most or (None if camera else total))
    found: list[dict] = []
    writer = None
    try:
        for frame in _frames(source, most):
            prediction = predictor(np.ascontiguousarray(frame))
            found.append(prediction.content)
            picture = prediction.picture
            # Video coders want even sides.
            picture = picture[: picture.shape[0] // 2 * 2, : picture.shape[1] // 2 * 2]
            if writer is None:
                code = cv2.VideoWriter_fourcc(*'mp4v')
                writer = cv2.VideoWriter(str(out / name), code, rate, picture.shape[1::-1])
            writer.write(np.ascontiguousarray(picture[..., ::-1]))
            progress.advance(task)
    except KeyboardInterrupt:
        pass  # the usual end of a webcam
    finally:
        if writer is not None:
            writer.release()
    if not found:
        what = f'The webcam {source}' if camera else f'The video {source}'
        raise UserError(f'{what} yields no frame; check that it can be played')
    return found
