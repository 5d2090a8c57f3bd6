"""The CPU backend: both of its engines against float64, in numbers, layouts and memory."""

import itertools

import pytest
import torch
from torch.profiler import profile

from benchmarks import accuracy
from mala_mm import ops
from mala_mm.ops.fused import cpu, library
from mala_mm.ops.fused.cpu import build, compiled, tiles
from mala_mm.ops.fused.dispatch import eager

VARIANTS = [
    ('mala', 'published'),
    ('mala', 'paper'),
    ('rala', 'published'),
    ('linear', 'published'),
]
NAMES = ('out', 'dq', 'dk', 'dv')
_REASON = compiled.why_not(torch.zeros(1, 1, 1, 64))
ENGINES = [
    pytest.param(tiles, id='tiles'),
    pytest.param(
        compiled,
        id='compiled',
        marks=pytest.mark.skipif(_REASON is not None, reason=f'the C code {_REASON}'),
    ),
]


def inputs(shape, size, dtype=torch.float32, seed=0):
    """q, k, v, with a mean of 1 where MALA cancels, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, head_dim = shape
    q, k, v, grad = torch.randn(4, batch, heads, size[0] * size[1], head_dim, generator=generator)
    return [x.to(dtype) for x in (q, k, v + 1, grad)]


def evaluate(engine, variant, size, q, k, v, grad=None, rotary=True):
    """Output and gradients by a backend, into memory that held NaN."""
    kind, form = variant
    problem = library.make_problem(kind, q.shape[-1], size, rotary=rotary, form=form)
    rows = library.state_rows(kind, q.shape[-1])
    dtype = torch.promote_types(q.dtype, torch.float32)
    states = torch.full((*q.shape[:2], rows, q.shape[-1]), torch.nan, dtype=dtype)
    results = [library.empty_tokens(x).fill_(torch.nan) for x in (q, q, k, v)]
    engine.forward(problem, q, k, v, results[0], states)
    if grad is not None:
        engine.backward(problem, grad, q, k, v, states, *results[1:])
    return results


def formula(variant, size, q, k, v, grad, rotary=True):
    """The same by autograd of the formula as it is written, in the type of its inputs."""
    kind, form = variant
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = eager(kind, q, k, v, size, rotary=rotary, form=form)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def assert_as_accurate_as_the_formula(ours, plain, exact, dtype, names=NAMES):
    for name, *tensors in zip(names, ours, plain, exact, strict=True):
        measured = accuracy.measure(*tensors, dtype)
        assert measured.passed, f'{name}: {measured}'


@pytest.mark.parametrize('rotary', [True, False])
@pytest.mark.parametrize('variant', VARIANTS, ids='-'.join)
def test_tiles_hold_every_gradient_in_float64(variant, rotary, monkeypatch):
    """Against autograd of the reference, with tiles of everything, of rows and of parts of rows."""
    for elements, shape, size in itertools.product(
        (1 << 17, 100, 24), ((2, 2, 8), (3, 1, 4)), ((5, 7), (1, 1))
    ):
        monkeypatch.setattr(tiles, 'TILE_ELEMENTS', elements)
        tensors = inputs(shape, size, torch.float64)
        ours = evaluate(tiles, variant, size, *tensors, rotary)
        exact = formula(variant, size, *tensors, rotary)
        for name, a, b in zip(NAMES, ours, exact, strict=True):
            # Some 100 roundings of 1.1e-16 each to either side, times a loss of up to 1000 where
            # the gradient of q is a difference of its terms.
            assert (a - b).norm() <= 2e-11 * b.norm() + 1e-14, (name, elements, shape, size)


@pytest.mark.parametrize('variant', VARIANTS, ids='-'.join)
def test_gradcheck(variant):
    size = (2, 3)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return evaluate(tiles, variant, size, q, k, v)[0]

        @staticmethod
        def backward(ctx, grad):
            return tuple(evaluate(tiles, variant, size, *ctx.saved_tensors, grad)[1:])

    tensors = [x.requires_grad_() for x in inputs((1, 2, 4), size, torch.float64)[:3]]
    assert torch.autograd.gradcheck(Attention.apply, tensors, fast_mode=True)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('variant', VARIANTS, ids='-'.join)
@pytest.mark.parametrize('engine', ENGINES)
def test_accuracy(engine, variant, dtype):
    cases = [((1, 2, 32), (31, 29)), ((2, 1, 64), (5, 13)), ((1, 1, 96), (1, 17))]
    for shape, size in cases[: 3 if dtype == torch.float32 else 1]:  # each width is compiled
        tensors = inputs(shape, size, dtype)
        exact = formula(variant, size, *(x.double() for x in tensors))
        plain = formula(variant, size, *tensors)
        ours = evaluate(engine, variant, size, *tensors)
        assert_as_accurate_as_the_formula(ours, plain, exact, dtype)


@pytest.mark.parametrize('token_major', [True, False])
@pytest.mark.parametrize('kind', library.KINDS)
@pytest.mark.parametrize('engine', ENGINES)
def test_gated_packed_mixer(engine, kind, token_major, monkeypatch):
    """One call from the packed projection; every gradient, the gate's and lepe's too."""
    monkeypatch.setattr(cpu, '_engine', lambda q: engine)
    size, heads, channels = (9, 11), 2, 64
    memory_format = torch.channels_last if token_major else torch.contiguous_format
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(2, factor * channels, *size, generator=generator).to(
            memory_format=memory_format
        )
        for factor in (4, 1, 1)
    ]

    def run(dtype, backend):
        qkvo, lepe, grad = (x.detach().to(dtype) for x in tensors)
        qkvo.requires_grad_(), lepe.requires_grad_()
        out = ops.gated_attention(qkvo, lepe, heads, kind=kind, backend=backend)
        out.backward(grad)
        return [out.detach(), *qkvo.grad.chunk(4, 1), lepe.grad]

    assert_as_accurate_as_the_formula(
        run(torch.float32, 'cpu'),
        run(torch.float32, 'reference'),
        run(torch.float64, 'reference'),
        torch.float32,
        ('out', 'dq', 'dk', 'dv', 'dgate', 'dlepe'),
    )


@pytest.mark.parametrize('variant', VARIANTS, ids='-'.join)
@pytest.mark.parametrize('engine', ENGINES)
def test_any_magnitude_stays_finite(engine, variant):
    size = (5, 7)
    q, k, v, grad = inputs((1, 2, 32), size)
    for factor in (1e-4, 1e4):
        assert all(
            x.isfinite().all() for x in evaluate(engine, variant, size, q * factor, k, v, grad)
        )
        results = evaluate(engine, variant, size, q * factor, k * factor, v, grad)
        assert all(x.isfinite().all() for x in results)
    for shift in (-20, -80, -200):  # phi underflows
        for a, b in ((q + shift, k), (q, k + shift), (q + shift, k + shift)):
            results = evaluate(engine, variant, size, a, b, v, grad)
            assert all(x.isfinite().all() for x in results), shift


@pytest.mark.parametrize('where', ['first', 'growing', 'last', 'falling'])
@pytest.mark.parametrize('engine', ENGINES)
def test_weights_follow_the_largest_key_wherever_it_is(engine, where, monkeypatch):
    """RALA: exponentials relative to any but the maximum over all tiles and chunks overflow."""
    monkeypatch.setattr(tiles, 'TILE_ELEMENTS', 1 << 12)  # three rows each
    size = (41, 37)  # 1517 tokens: three chunks of the compiled kernels, of eight blocks each
    q, k, v, grad = inputs((1, 1, 32), size)
    token = torch.arange(41 * 37)
    # A logit grows by about 32 * 32 ** -0.5 = 6 per unit: neighbouring blocks are e^120 apart.
    lift = {
        'first': 200.0 * (token < 20),
        'growing': 20.0 * (token // 64),
        'last': 200.0 * (token >= 1500),
        'falling': 20.0 * (23 - token // 64),
    }[where]
    k = k + lift[:, None]
    exact = formula(('rala', 'published'), size, *(x.double() for x in (q, k, v, grad)))
    # Where one key has all the weight, dq and the part of dk through the softmax are differences
    # that vanish: they are compared with the size of dv.
    allowed = {name: x.norm() for name, x in zip(NAMES, exact, strict=True)}
    allowed['dq'] = allowed['dk'] = torch.maximum(exact[2].norm(), exact[3].norm())
    ours = evaluate(engine, ('rala', 'published'), size, q, k, v, grad)
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        # A logit up to 3000, rounded by 6e-8 of it in each of some ten steps, is the exponent.
        assert (a - b).norm() <= 3000 * 10 * 6e-8 * allowed[name], (name, where)


@pytest.mark.parametrize('engine', ENGINES)
def test_small_features_keep_their_digits(engine):
    """phi(-25) is 1e-11, of which ``elu(x) + 1`` in float32 leaves nothing."""
    size, variant = (5, 7), ('linear', 'published')
    q, k, v, grad = inputs((1, 2, 32), size)
    for a, b in ((q - 25, k), (q, k - 25)):
        exact = formula(variant, size, *(x.double() for x in (a, b, v, grad)))
        ours = evaluate(engine, variant, size, a, b, v, grad)
        for name, x, y in zip(NAMES, ours, exact, strict=True):
            # elu(x) + 1 in float64 is off by 1.1e-16 itself, at x = -28 by 1e-4 of its value
            # and by less where the large values are that the norms consist of
            assert (x - y).norm() <= 1e-4 * y.norm(), name


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('engine', ENGINES)
def test_stores_round_as_pytorch_does(engine, dtype):
    """To the nearest number, ties to the even one: all products of 128 numbers in [1, 2)."""
    numbers = 1 + torch.arange(128) / 128
    pairs = torch.meshgrid(numbers, numbers, indexing='ij')
    lepe, gate = (x.reshape(1, 1, 512, 32).to(dtype) for x in pairs)
    q, k, v = torch.zeros(3, *lepe.shape, dtype=dtype)  # v = 0: the attention adds nothing
    problem = library.Problem('mala', 'published', 16, 32, 32**-0.5, 1e-6, True)
    out, states = torch.full_like(lepe, torch.nan), torch.empty(1, 1, 34, 32)
    engine.forward(problem, q, k, v, out, states, lepe, gate)
    product = lepe.float() * gate.float()  # exact
    assert torch.equal(out, product.to(dtype))
    if dtype == torch.bfloat16:  # ties below 2 were rounded up and down
        assert {-(2.0**-8), 2.0**-8} <= {*(out.float() - product)[product < 2].tolist()}


@pytest.mark.parametrize('engine', ENGINES)
def test_one_bad_key_is_not_hidden(engine):
    """A NaN spoils what depends on it and nothing else."""
    size = (4, 5)
    q, k, v, grad = inputs((1, 1, 32), size)
    q[0, 0, 3, 5] = torch.nan
    out = evaluate(engine, ('mala', 'published'), size, q, k, v, grad)[0]
    assert out[0, 0, 3].isnan().all()
    assert out[0, 0, :3].isfinite().all() and out[0, 0, 4:].isfinite().all()
    k[0, 0, 2, 1] = torch.nan
    assert evaluate(engine, ('mala', 'published'), size, q, k, v, grad)[0].isnan().all()


@pytest.mark.parametrize('variant', VARIANTS, ids='-'.join)
@pytest.mark.parametrize('engine', ENGINES)
def test_an_image_does_not_feel_its_batch(engine, variant):
    size = (6, 5)
    tensors = inputs((3, 2, 32), size)
    many = evaluate(engine, variant, size, *tensors)
    for image in range(3):
        one = evaluate(engine, variant, size, *(x[image : image + 1] for x in tensors))
        assert all(torch.equal(a[image : image + 1], b) for a, b in zip(many, one, strict=True))


@pytest.mark.parametrize('engine', ENGINES)
def test_any_strides(engine):
    """Packed token-major, channel-first, and every second token and channel of something larger."""
    size, shape = (7, 6), (2, 2, 42, 32)
    tensors = inputs((2, 2, 32), size)
    expected = evaluate(engine, ('rala', 'published'), size, *tensors)

    def like(x, layout):
        if layout == 'token-major':
            y = torch.empty(2, 42, 4, 2, 32)[:, :, 1].transpose(1, 2)
        elif layout == 'channel-first':
            y = torch.empty(2, 2, 32, 42).mT
        else:
            y = torch.empty(2, 2, 84, 64)[:, :, ::2, 1::2]
        assert y.shape == shape
        return y.copy_(x)

    for layouts in itertools.permutations(('token-major', 'channel-first', 'sparse', 'sparse'), 4):
        views = [like(x, layout) for x, layout in zip(tensors, layouts, strict=True)]
        for name, a, b in zip(
            NAMES, evaluate(engine, ('rala', 'published'), size, *views), expected, strict=True
        ):
            # Products of matrices may sum in another order: 42 terms, each 6e-8 off, at worst.
            torch.testing.assert_close(
                a, b, rtol=0, atol=42 * 6e-8 * b.abs().max().item(), msg=name
            )


@pytest.mark.parametrize('engine', ENGINES)
def test_repeats_bit_for_bit(engine):
    size = (41, 37)
    tensors = inputs((1, 2, 32), size)
    for variant in VARIANTS:
        first, second = (evaluate(engine, variant, size, *tensors) for _ in range(2))
        assert all(map(torch.equal, first, second))


@pytest.mark.parametrize('engine', ENGINES[1:])
def test_threads_do_not_change_a_bit(engine):
    size = (41, 37)
    tensors = inputs((1, 1, 32), size)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = evaluate(engine, ('rala', 'published'), size, *tensors)
        torch.set_num_threads(3)
        assert all(
            map(torch.equal, evaluate(engine, ('rala', 'published'), size, *tensors), expected)
        )
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize('engine', ENGINES)
def test_memory_beside_the_results_is_small(engine, monkeypatch):
    """Forward: below a tenth of what the formula takes."""
    monkeypatch.setattr(
        tiles, 'TILE_ELEMENTS', 1 << 15
    )  # 16 tiles, as at N = 66800 and two threads
    size = (128, 128)
    q, k, v, _ = inputs((1, 1, 32), size)
    problem = library.Problem('mala', 'published', *size, 32**-0.5, 1e-6, True)
    out, states = torch.empty_like(q), torch.empty(1, 1, 34, 32)

    def extra(function):
        with profile(profile_memory=True) as profiler:
            function()
        now = most = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == '[memory]':
                now += event.nbytes()
                most = max(most, now)
        return most

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # the buffers of tiles grow with them
        ours = extra(lambda: engine.forward(problem, q, k, v, out, states))
    finally:
        torch.set_num_threads(threads)
    assert 0 < ours < 0.1 * extra(lambda: eager('mala', q, k, v, size))


def test_engine_follows_type_and_width():
    wide, narrow = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 8)
    assert cpu._engine(narrow) is tiles
    assert cpu._engine(wide.double()) is tiles
    assert cpu._engine(wide) is (compiled if _REASON is None else tiles)
    assert compiled.why_not(narrow) == 'needs a head width among (32, 64, 96, 128), got d = 8'
    assert 'got torch.float64' in compiled.why_not(wide.double())


@pytest.mark.parametrize(
    ('variable', 'value', 'reason'),
    [
        ('MALA_MM_CPU_KERNELS', '0', 'is switched off by MALA_MM_CPU_KERNELS=0'),
        ('CC', 'no-such-compiler', 'needs a C compiler, found none'),
        ('CC', 'false', 'cannot be compiled: '),
        ('XDG_CACHE_HOME', '/dev/null', 'cannot be compiled: '),
    ],
)
def test_without_compiled_code_there_are_tiles(variable, value, reason, monkeypatch, tmp_path):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(compiled, '_library', compiled._library.__wrapped__)
    q = torch.zeros(1, 1, 6, 32)
    assert compiled.why_not(q).startswith(reason)
    assert cpu._engine(q) is tiles
    assert not [file for file in tmp_path.rglob('*') if file.is_file()]  # nothing half-made


@pytest.mark.skipif(_REASON is not None, reason=f'the C code {_REASON}')
def test_another_source_or_machine_is_compiled_for_anew(monkeypatch, tmp_path):
    source = tmp_path / 'kernels.c'
    code = compiled._SOURCE.read_bytes()
    source.write_bytes(code)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setattr(compiled, '_SOURCE', source)
    monkeypatch.setattr(compiled, '_library', compiled._library.__wrapped__)  # as a new process
    q = torch.zeros(1, 1, 6, 32)
    assert compiled.why_not(q) is None
    source.write_text('#error edited')
    assert 'edited' in compiled.why_not(q)
    source.write_bytes(code)
    monkeypatch.setattr(build, '_processor', lambda: 'another that shares the home folder')
    assert compiled.why_not(q) is None
    assert len([*(tmp_path / 'cache').rglob('*.so')]) == 2


def test_first_use_in_inference_mode_does_not_spoil_training():
    size = (11, 3)  # of this test alone, so that its tables are made here
    for head_dim in (32, 8):
        q, k, v, _ = inputs((1, 1, head_dim), size)
        with torch.inference_mode():
            expected = ops.mala_attention(q, k, v, size=size, backend='cpu').clone()
        out = ops.mala_attention(q.requires_grad_(), k, v, size=size, backend='cpu')
        out.sum().backward()
        assert torch.equal(out, expected)
        assert q.grad.isfinite().all()
