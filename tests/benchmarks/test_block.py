"""``python -m benchmarks.block``: what counts as moved, and the whole of a block."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks import block


def moved(function, *tensors):
    with block.Traffic() as traffic:
        function(*tensors)
    return traffic.counts


def test_every_tensor_counts_once_and_views_do_not():
    x = torch.empty(2, 8, 4, 4, dtype=torch.bfloat16, device='meta')
    size = 2 * x.numel()
    assert moved(lambda x: x.permute(0, 2, 3, 1)[:, 1:], x) == {}
    assert moved(lambda x: x + x, x) == {'add': 2 * size}  # read once, written once
    assert moved(lambda x: F.gelu(x.float()), x) == {'_to_copy': 3 * size, 'gelu': 4 * size}
    assert moved(lambda x: x.add_(1), x) == {'add_': 2 * size}  # read and written


def test_the_bias_of_a_convolution_is_a_pass():
    x = torch.empty(1, 4, 8, 8, device='meta')
    weight, bias = torch.empty(6, 4, 1, 1, device='meta'), torch.empty(6, device='meta')
    counts = moved(F.conv2d, x, weight, bias)
    assert counts['convolution, bias'] == 2 * 4 * 6 * 64
    assert counts['convolution'] == 4 * (4 * 64 + 6 * 64 + 24 + 6)


@pytest.mark.parametrize('attn_type', ['mala', 'rala'])
def test_totals(attn_type, capsys):
    assert block.main(['--attn-type', attn_type, '--size', '20x30', '--channels', '64']) == 0
    lines = [line.split('|')[1:-1] for line in capsys.readouterr().out.splitlines()[6:]]
    totals = {(form.strip(), part.strip()): float(t) for form, part, _, t in lines}
    for part in ('forward', 'backward'):
        assert block.FLOOR < totals['ours', part] < totals['published', part]
    # with the kernels: what the plan of the block adds up to, and weights on this small map
    assert totals['ours', 'forward'] < 60 and totals['ours', 'backward'] < 100
