"""How launches are kept and replayed, with kernels that only note what they are given."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip('triton', reason='the Triton backend is optional')

from mala_mm.ops.fused import library
from mala_mm.ops.fused.triton import kernels, launch, passes


class Kernel:
    """Stands for a Triton function: compiles at once, and notes every launch."""

    def __init__(self, original, notes, constants=True):
        self.__name__, self.arg_names = original.__name__, original.arg_names
        self.notes, self.constants = notes, constants

    def __getitem__(self, grid):
        def run(**arguments):
            options = [arguments.pop(name) for name in ('num_warps', 'num_stages')]
            assert list(arguments) == self.arg_names
            self.notes.append(('ordinary', self.__name__, grid, plain(arguments.values())))
            return Compiled(self, options)

        return run


class Compiled:
    """Stands for what Triton compiled."""

    function, packed_metadata = 'function', 'metadata'

    def __init__(self, kernel, options):
        self.kernel, self.options = kernel, options
        values = ['constexpr' if x.isupper() and kernel.constants else 'i32'
                  for x in kernel.arg_names]  # fmt: skip
        self.src = SimpleNamespace(signature=dict(zip(kernel.arg_names, values)))

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        assert (function, metadata, enter, leave) == ('function', 'metadata', None, None)
        name = self.kernel.__name__
        self.kernel.notes.append(('direct', name, (x, y, z), plain(arguments)))

    def __getitem__(self, grid):
        def run(*arguments, stream):
            self.kernel.notes.append(('watched', self.kernel.__name__, grid, plain(arguments)))

        return run


def plain(arguments):
    return [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]


@pytest.fixture
def notes(monkeypatch):
    """What the kernels are given; nothing is known of them at first."""
    notes = []
    for name in ('reduce_queries', 'reduce_keys', 'combine', 'apply_queries', 'backward_gate',
                 'backward_queries', 'backward_keys'):  # fmt: skip
        if hasattr(kernels, name):
            monkeypatch.setattr(kernels, name, Kernel(getattr(kernels, name), notes))
    monkeypatch.setattr(launch, '_plans', {})
    monkeypatch.setattr(launch, '_compiled', {})
    monkeypatch.setattr(launch, '_device', lambda index: ('none', 90, 132))
    monkeypatch.setattr(launch, '_stream', lambda device: 7)
    return notes


@pytest.fixture
def same_scratch(monkeypatch):
    """All scratch memory is one piece, so that its addresses can be compared."""
    memory, original = torch.empty(1 << 20), torch.Tensor.new_empty

    def new_empty(x, size, *rest, **kwargs):
        if isinstance(size, int) and kwargs.get('dtype') is torch.float32:
            return memory[:size]
        return original(x, size, *rest, **kwargs)

    monkeypatch.setattr(torch.Tensor, 'new_empty', new_empty)


def tensors(packed, direction, token_major=True, height=6, width=8, kind='mala'):
    """Arguments of one pass of the backend."""
    memory_format = torch.channels_last if token_major else torch.contiguous_format

    def map_of(channels):
        x = torch.randn(2, channels, height, width, dtype=torch.bfloat16)
        return x.to(memory_format=memory_format)

    if packed:
        inputs, outputs = (map_of(512), map_of(128)), (map_of(512), map_of(128))
        out = map_of(128)
    else:
        inputs, outputs = (
            tuple(library.split_heads(map_of(128), 2) for _ in range(3)) for _ in range(2)
        )
        out = library.split_heads(map_of(128), 2)
    problem = library.make_problem(kind, 64, (height, width))
    states = torch.empty(2, 2, library.state_rows(kind, 64), 64)
    if direction == 'forward':
        return problem, inputs, out, states
    return problem, out, inputs, states, outputs


@pytest.mark.parametrize('direction', ['forward', 'backward'])
@pytest.mark.parametrize('packed', [True, False], ids=['packed', 'separate'])
@pytest.mark.parametrize('kind', library.KINDS)
def test_a_replayed_launch_gets_what_an_ordinary_one_gets(
    kind, packed, direction, notes, same_scratch, monkeypatch
):
    run = getattr(launch, direction)
    run(*tensors(packed, direction, kind=kind))
    assert notes and {note[0] for note in notes if note[1] != 'combine'} == {'ordinary'}
    others = tensors(packed, direction, kind=kind)
    notes.clear()
    run(*others)
    assert {how for how, *_ in notes} == {'direct'}
    replayed = [note[1:] for note in notes]

    notes.clear()
    launch.forget_plans()
    launch._compiled.clear()
    run(*others)
    # a kernel that is launched twice in a pass is known the second time
    assert {how for how, *_ in notes} >= {'ordinary'}
    assert [note[1:] for note in notes] == replayed


def test_a_kernel_is_known_to_every_plan(notes):
    """Another size needs a description, but nothing of Triton's ordinary way."""
    launch.forward(*tensors(True, 'forward'))
    notes.clear()
    launch.forward(*tensors(True, 'forward', height=10))
    assert {how for how, *_ in notes} == {'direct'}
    assert len(launch._plans) == 2


def test_other_layouts_and_alignments_are_other_kernels(notes):
    problem, (q, k, v), out, states = tensors(False, 'forward')
    launch.forward(problem, (q, k, v), out, states)
    notes.clear()
    launch.forward(*tensors(False, 'forward', token_major=False))
    assert ('ordinary', 'reduce_keys') in [note[:2] for note in notes]
    notes.clear()
    memory = torch.empty(q.numel() + 1, dtype=q.dtype)
    shifted = memory[1:].as_strided(q.shape, q.stride())
    launch.forward(problem, (q, shifted, v), out, states)
    assert [note[:2] for note in notes if note[1] != 'combine'] == [
        ('ordinary', 'reduce_keys'),
        ('direct', 'apply_queries'),
    ]


def test_triton_3_2_takes_no_constants(notes, monkeypatch):
    for name in ('reduce_keys', 'combine', 'apply_queries'):
        monkeypatch.setattr(getattr(kernels, name), 'constants', False)
    launch.forward(*tensors(True, 'forward'))
    first = [note for note in notes if note[0] == 'ordinary']
    notes.clear()
    launch.forward(*tensors(True, 'forward'))
    for _, name, _, arguments in notes:
        names = getattr(kernels, name).arg_names
        assert len(arguments) == sum(not x.isupper() for x in names)
    assert len(first) == 3


def test_unknown_and_missing_arguments_are_refused(notes):
    kernel = kernels.combine
    arguments = dict.fromkeys(kernel.arg_names, 1)
    launch.Launch(kernel, (1,), arguments, 4, 3)
    with pytest.raises(TypeError, match='unknown arguments of combine: WEIHGTED; it takes part'):
        launch.Launch(kernel, (1,), arguments | {'WEIHGTED': True}, 4, 3)
    del arguments['chunks']
    with pytest.raises(TypeError, match='missing or unknown arguments of combine: chunks;'):
        launch.Launch(kernel, (1,), arguments, 4, 3)


def test_a_kind_without_kernels_is_refused_by_name(notes, monkeypatch):
    monkeypatch.delitem(passes.FLAGS, 'rala')
    with pytest.raises(ValueError, match="the kernels compute mala, linear, got kind 'rala'"):
        launch.forward(*tensors(False, 'forward', kind='rala'))
    assert not notes


def test_a_profiler_sees_the_launches(notes, monkeypatch):
    launch.forward(*tensors(True, 'forward'))
    notes.clear()
    monkeypatch.setattr(launch, '_HOOKS', SimpleNamespace(launch_enter_hook=print))
    launch.forward(*tensors(True, 'forward'))
    assert {how for how, *_ in notes} == {'watched'}


def test_launches_go_to_the_device_of_the_tensors(notes, monkeypatch):
    entered = []

    @contextlib.contextmanager
    def device(index):
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    monkeypatch.setattr(torch.cuda, 'device', device)
    with launch._on(1):
        pass
    assert entered == [1]
    with launch._on(0), launch._on(None):
        pass
    assert entered == [1]

    inside = []

    @contextlib.contextmanager
    def guard(index):
        inside.append(len(notes))
        yield
        inside.append(len(notes))

    monkeypatch.setattr(launch, '_on', guard)
    for _ in range(2):
        inside.clear()
        notes.clear()
        launch.forward(*tensors(True, 'forward'))
        assert inside == [0, len(notes)], 'a launch outside of the guard'


def test_plans_are_bounded(notes, monkeypatch):
    monkeypatch.setattr(launch, '_MOST_PLANS', 3)
    for height in range(1, 6):
        launch.forward(*tensors(True, 'forward', height=height))
    assert len(launch._plans) == 3


def test_a_crop_is_copied(notes, same_scratch):
    """Rows that do not follow each other have no single stride of tokens."""
    problem, (qkvo, lepe), out, states = tensors(True, 'forward')
    whole = torch.randn(2, 512, 7, 11, dtype=qkvo.dtype).to(memory_format=torch.channels_last)
    crop = whole[:, :, :6, :8]
    launch.forward(problem, (crop, lepe), out, states)
    addresses = {x for note in notes for x in note[3] if isinstance(x, int)}
    start, end = whole.data_ptr(), whole.data_ptr() + whole.nbytes
    assert not any(start <= x < end for x in addresses)


def test_recorded_launches_can_be_repeated(notes):
    launch.forward(*tensors(True, 'forward'))
    notes.clear()
    with launch.recorded() as runs:
        launch.forward(*tensors(True, 'forward'))
    launch.forward(*tensors(True, 'forward'))
    (run,) = runs
    first = notes[: len(run.plan.launches)]
    notes.clear()
    for one in run.plan.launches:
        run.repeat(one)
    assert notes == first
