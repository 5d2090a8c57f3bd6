"""The kernels' traffic, by the plan that is launched, beside the floor."""

import pytest
import torch

from benchmarks import traffic
from mala_mm.ops.fused.triton.tiling import PASSES, cut, tiling


@pytest.mark.parametrize('multiprocessors', [108, 132], ids=['A100', 'H200'])
@pytest.mark.parametrize('shape', traffic.SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize('direction', ['forward', 'backward'])
def test_within_15_percent_of_the_floor(shape, direction, multiprocessors):
    """At the shapes of the published models on dense prediction, in bf16."""
    launches = getattr(traffic, direction)(shape, torch.bfloat16, multiprocessors)
    moved = sum(launch.memory for launch in launches)
    assert moved <= 1.15 * traffic.floor(direction) * shape.unit(torch.bfloat16)


def test_a_backward_in_more_launches_reads_the_queries_side_once_more():
    """Two matrices of float32 do not fit at d = 96: q and g, 2t, are read a second time."""
    shape = traffic.SHAPES[1]
    moved = sum(part.memory for part in traffic.backward(shape, torch.float32, 132))
    least = (traffic.floor('backward') + 2) * shape.unit(torch.float32)
    assert least < moved <= 1.15 * least


@pytest.mark.parametrize('kind', ['mala', 'rala'])
def test_the_packed_mixer_too(kind):
    for shape in traffic.SHAPES:
        for direction in ('forward', 'backward'):
            launches = getattr(traffic, direction)(shape, torch.bfloat16, 132, kind, gated=True)
            moved = sum(launch.memory for launch in launches)
            least = traffic.floor(direction, kind, gated=True) * shape.unit(torch.bfloat16)
            assert least < moved <= 1.15 * least


def test_every_multiprocessor_has_work():
    """At detection's first stage: 2 heads in all, yet a program for nearly each multiprocessor."""
    for launches in (traffic.forward, traffic.backward):
        for launch in launches(traffic.SHAPES[0], torch.bfloat16, 132):
            if launch.name != 'combine':
                assert launch.programs >= 0.95 * 132, launch


def test_tokens_are_dealt_out_without_rest():
    """Every token has its program, no program is without tokens, whatever the size."""
    for name in PASSES:
        for head_dim in (32, 96):
            chosen = tiling(name, head_dim, torch.bfloat16, True)
            for height, width in (
                (1, 1),
                (3, 5),
                (1, 63),
                (64, 1),
                (100, 167),
                (200, 334),
                (999, 9),
            ):
                for heads in (1, 7, 512):
                    strips, pieces, tiles = cut(chosen, heads, (height, width), 132)
                    assert (strips - 1) * chosen.columns < width <= strips * chosen.columns
                    span = tiles * chosen.rows
                    assert (pieces - 1) * span < height <= pieces * span


@pytest.mark.parametrize('multiprocessors', [108, 132], ids=['A100', 'H200'])
@pytest.mark.parametrize('shape', traffic.SHAPES, ids=lambda shape: shape.name)
def test_programs_fill_the_device_once(shape, multiprocessors):
    """No program waits for another one's place; unless sums are written, few places idle."""
    for name in PASSES:
        chosen = tiling(name, shape.head_dim, torch.bfloat16, True)
        heads, size = shape.batch * shape.heads, (shape.height, shape.width)
        strips, pieces, tiles = cut(chosen, heads, size, multiprocessors)
        places = multiprocessors * chosen.residency
        assert heads * strips * pieces <= places, name
        if name in ('apply_queries', 'backward_gate', 'backward_keys'):
            work = heads * strips * -(-shape.height // chosen.rows)
            assert work >= 0.7 * places * tiles, name
