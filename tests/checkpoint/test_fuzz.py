"""Whatever the bytes: a checkpoint loads or is refused in one sentence."""

import io
import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st
from mmengine.logging import HistoryBuffer
from safetensors.torch import save

from mala_mm.checkpoint import load_checkpoint, load_into
from mala_mm.models import MAViT
from tests.fuzzing import damaged_bytes, damaged_content, outcome

ARCH = dict(embed_dims=(8, 8), depths=(1, 1), num_heads=(1, 1))


def model():
    return MAViT(ARCH, out_indices=(1,))


def saved(content, **options):
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


def state():
    return dict(
        meta=dict(epoch=1, mala_mm=dict(family='MAViT', target='backbone')),
        state_dict=dict(list(model().state_dict().items())[:4]),
        message_hub=dict(log_scalars=dict(loss=HistoryBuffer([1.0], [1]))),
        optimizer=dict(state={}, param_groups=[dict(lr=1e-4, params=[0])]),
    )


FILES = [
    ('zip.pth', saved(state())),
    ('legacy.pth', saved(state(), _use_new_zipfile_serialization=False)),
    ('pickle.pth', pickle.dumps(dict(state_dict={}))),
    ('a.safetensors', save(state()['state_dict'], metadata=dict(meta='{"mala_mm": {}}'))),
]
damaged_files = st.sampled_from(FILES).flatmap(
    lambda file: st.tuples(st.just(file[0]), damaged_bytes(file[1]))
)


@given(file=damaged_files)
def test_fuzz_files(tmp_path_factory, file):
    name, data = file
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data)
    content = outcome(load_checkpoint, path)
    assert content is None or isinstance(content, dict)


@given(content=damaged_content(state()))
def test_fuzz_content(tmp_path_factory, content):
    """Weights of any names, types and shapes load or are refused."""
    path = tmp_path_factory.getbasetemp() / 'content.pth'
    torch.save(content, path)
    outcome(load_into, model(), path)
