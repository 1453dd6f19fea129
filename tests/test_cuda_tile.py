"""The CUDA tile against dense float64: the unchanged kernels, by the tile's own launcher, on the emulator or on a GPU (``RINGMPI_GPU=1``).

Half types may err twice what a dense computation errs that rounds p and ds where 16-bit hardware must; the others as on the host.
"""
import mmap

import numpy as np
import pytest
from emulator.cases import DTYPES, NOISE, Case, masks, worst
from emulator.device import Array, at_hand, pretend

from ringmpi.partial import EVERYTHING, Partial, accumulator, merge
from ringmpi.score import Score
from ringmpi.tiles import cuda, registry

BENT = Score(softcap=2.0, alibi=(0.1, 0.02, 0.0, 0.3))


@pytest.fixture
def device(monkeypatch):
    """The module cupy."""
    return at_hand(monkeypatch)


def put(device, x):
    """An array on the device with the strides it has, and what lies between its rows."""
    whole = device.asarray(x if x.base is None else x.base)
    return device.lib.stride_tricks.as_strided(whole, x.shape, x.strides)


def forward(device, case, start=None):
    """o, m, l of a pair, merged into an accumulator that holds ``start`` or nothing."""
    total = Partial.empty((case.batch, case.rows[0], case.heads[0], case.dims[1]), accumulator(case.q.dtype), device)
    for name in "oml" if start else "":
        getattr(total, name)[...] = device.asarray(getattr(start, name).astype(total.o.dtype))
    for where, partial in cuda.forward(*(put(device, x) for x in (case.q, case.k, case.v)), case.pair):
        cuda.merge(total, where, partial)
    return Partial(*(x.get() for x in (total.o, total.m, total.l)))


def backward(device, case):
    """dq, dk, dv of a pair, added to ones."""
    sums = accumulator(case.q.dtype)
    given = [put(device, x) for x in (case.q, case.k, case.v, case.dout)]
    stats = [device.asarray(x.astype(sums)) for x in (case.lse, case.delta)]
    gradients = [device.full(x.shape, 1, sums) for x in (case.q, case.k, case.v)]
    for _ in cuda.backward(*given, *stats, case.pair, *gradients):
        pass
    return [x.get() - 1 for x in gradients]


def check(device, case):
    """Holds both passes of a case against the truth, and returns what they gave."""
    rounded = case.q.dtype if case.q.dtype.itemsize == 2 else float
    noise, size = NOISE[case.dtype], max(1, case.rows[1] / 8)
    with np.errstate(all="ignore"):
        truth, allowed, got = case.forward(), case.forward(rounded), forward(device, case)
        some = truth.l > 0
        # m may differ where only its rounding does; o and l belong to it.
        turn = np.exp(np.where(some, got.m - truth.m, 0))
    assert np.array_equal(some, got.l > 0)
    assert worst(got.m, truth.m) <= noise * max(1, np.abs(truth.m, where=some, out=np.zeros_like(truth.m)).max(initial=0))
    assert worst(got.l * turn, truth.l) <= noise * size
    assert worst(got.o * turn.swapaxes(1, 2)[..., None], truth.o) <= 2 * worst(allowed.o, truth.o) + noise * size
    wanted, most, found = case.backward(), case.backward(rounded), backward(device, case)
    for name, g, w, a in zip(("dq", "dk", "dv"), found, wanted, most):
        scale = max(1, max(case.rows) / 16, np.abs(w).max(initial=0))
        assert worst(g, w) <= 2 * worst(a, w) + 2 * noise * scale, name
    return got, found


@pytest.mark.parametrize("mask", masks(1, 1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(device, dtype, mask):
    check(device, Case(dtype, (64, 64), (100, 77), (4, 2), 1, masks(100, 77)[mask], seed=1))


@pytest.mark.parametrize("mask", ["full", "causal ahead", "random", "padding"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap_and_alibi_in_batches(device, dtype, mask):
    check(device, Case(dtype, (64, 64), (33, 130), (4, 4), 2, masks(33, 130, 2)[mask], BENT, seed=2))


# Every dim of the registry, and dims between, odd ones, and v's own.
DIMS = [(dtype, dims) for dtype in ("bfloat16", "float32", "float64") for dims in ((7, 5), (40, 72), (96, 96), (100, 128), (200, 256))]


@pytest.mark.parametrize(("dtype", "dims"), DIMS)
def test_dims(device, dtype, dims):
    check(device, Case(dtype, dims, (70, 50), (2, 1), 1, masks(70, 50)["random"], seed=3, pad=8 if dims[0] % 8 == 0 else 3))


@pytest.mark.parametrize("rows", [(0, 5), (5, 0), (1, 130), (200, 1), (129, 65)])
def test_lengths(device, rows):
    check(device, Case("bfloat16", (64, 64), rows, (2, 1), 1, None, seed=4))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 3.0])
def test_scales(device, scale):
    check(device, Case("float32", (16, 16), (40, 50), (2, 2), 1, masks(40, 50)["window"], Score(scale=scale), seed=5))


def test_more_query_tiles_than_one_vote(device):
    i = np.arange(1090)[None]
    check(device, Case("float32", (16, 16), (1090, 40), (2, 1), 1, (i - 1040, i - 1000), seed=6))


def test_offsets_beyond_32_bits(monkeypatch):
    device = pretend(monkeypatch)
    case = Case("bfloat16", (16, 16), (40, 40), (1, 1), 1, None, seed=7)
    stride = 1 << 26
    sparse = np.frombuffer(mmap.mmap(-1, 2 * 40 * stride, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint16).view(case.q.dtype)
    for name in "qkv":
        x = np.lib.stride_tricks.as_strided(sparse, (1, 40, 1, 16), (0, 2 * stride, 0, 2))
        x[...] = getattr(case, name)
        total = Partial.empty((1, 40, 1, 16), np.float32, device)
        given = [Array(device, x) if other == name else put(device, getattr(case, other)) for other in "qkv"]
        for where, partial in cuda.forward(*given, case.pair):
            cuda.merge(total, where, partial)
        assert np.array_equal(total.o.get(), forward(device, case).o), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_what_nobody_sees_may_be_nan(device, dtype):
    # Rows 0..39 see keys 0..9, the others 30..39: keys between lie inside the block's range. Rows 60.. see nothing.
    i = np.arange(80)[None]
    bounds = np.where(i < 40, 0, 30), np.where(i < 40, 10, np.where(i < 60, 40, 0))
    case = Case(dtype, (16, 16), (80, 60), (2, 1), 1, bounds, seed=8)
    clean = forward(device, case), backward(device, case)
    for x in (case.k, case.v):
        x[:, 10:30], x[:, 40:] = np.nan, np.nan
    for x in (case.q, case.dout):
        x[:, 60:] = np.nan
    case.delta[..., 60:] = np.nan
    poisoned = forward(device, case), backward(device, case)
    assert np.array_equal(clean[0].o, poisoned[0].o) and np.array_equal(clean[0].l, poisoned[0].l)
    for a, b in zip(clean[1], poisoned[1]):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("first", [10, 16, 20])
@pytest.mark.parametrize(("dtype", "dim"), [("float64", 256), ("float64", 128), ("float32", 256), ("bfloat16", 256)])
def test_what_no_row_of_a_small_block_sees_may_be_nan(device, dtype, dim, first):
    """A span covers more rows than such a block has: keys before, between and after those of its own rows."""
    i = np.arange(37)[None]
    bounds = np.where(i < first, 0, 30), np.where(i < first, 10, np.where(i < 32, 39, 0))
    case = Case(dtype, (dim, dim), (37, 39), (2, 1), 1, bounds, seed=8)
    for x in (case.k, case.v):
        x[:, 10:30] = np.nan
    check(device, case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_nan_that_is_seen_stays(device, dtype):
    case = Case(dtype, (16, 16), (20, 20), (1, 1), 1, None, seed=9)
    case.k[:, 3] = np.nan
    got = forward(device, case)
    out, lse = cuda.finish(Partial(*map(device.asarray, (got.o, got.m, got.l))), np.float32)
    assert np.isnan(out.get()).all() and np.isnan(lse.get()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_resuming_is_merging(device, dtype):
    """Pair after pair into one accumulator, in many pieces: as good as one pair over all keys."""
    whole = Case(dtype, (64, 64), (50, 160), (2, 1), 1, None, seed=10)
    total = Partial.empty((1, 50, 2, 64), accumulator(whole.q.dtype), device)
    q, k, v = (put(device, x) for x in (whole.q, whole.k, whole.v))
    for first in range(0, 160, 10):
        piece = Case(dtype, (64, 64), (50, 10), (2, 1), 1, None, key=(first, 1)).pair
        for where, partial in cuda.forward(q, k[:, first : first + 10], v[:, first : first + 10], piece):
            cuda.merge(total, where, partial)
    out, lse = cuda.finish(total, np.float64 if dtype == "float64" else np.float32)
    with np.errstate(all="ignore"):
        want, rough = whole.forward().finish(), whole.forward(whole.q.dtype if whole.q.dtype.itemsize == 2 else float).finish()
    assert worst(lse.get(), want[1]) <= NOISE[dtype]
    assert worst(out.get(), want[0]) <= 2 * worst(rough[0], want[0]) + NOISE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_merge_finish_and_delta(device, dtype):
    random = np.random.default_rng(11)
    parts = []
    for empty in (3, 5):
        m, l = random.standard_normal((2, 3, 17)), random.random((2, 3, 17)) + 1
        m[..., empty], l[..., empty] = -np.inf, 0
        m[..., 9], l[..., 9] = -np.inf, 0
        o = random.standard_normal((2, 17, 3, 20))
        o[:, [empty, 9]] = 0
        parts.append(Partial(*(x.astype(dtype) for x in (o, m, l))))
    a, b = (Partial(*(device.asarray(x) for x in (part.o, part.m, part.l))) for part in parts)
    cuda.merge(a, EVERYTHING, b)
    want = merge(*parts)
    for name in "oml":
        assert worst(getattr(a, name).get(), getattr(want, name)) <= NOISE[dtype], name
    out, lse = cuda.finish(a, dtype)
    with np.errstate(all="ignore"):
        wanted = want.finish()
    assert worst(out.get(), wanted[0]) <= NOISE[dtype] and worst(lse.get(), wanted[1]) <= NOISE[dtype]
    got = cuda.delta(a.o, out).get()
    assert worst(got, np.einsum("bqhd,bqhd->bhq", want.o, wanted[0])) <= 20 * NOISE[dtype]


def test_a_partial_can_be_looked_at(device):
    case = Case("bfloat16", (16, 16), (20, 30), (2, 1), 1, masks(20, 30)["causal ahead"], seed=12)
    [(_, partial)] = cuda.forward(*(put(device, x) for x in (case.q, case.k, case.v)), case.pair)
    merged = forward(device, case)
    for name in "oml":
        assert np.array_equal(getattr(partial, name).get(), getattr(merged, name)), name


def test_the_same_bits_whatever_the_timing(device):
    case = Case("bfloat16", (64, 64), (150, 200), (2, 1), 1, masks(150, 200)["random"], seed=13)
    once = forward(device, case), backward(device, case)
    again = forward(device, case), backward(device, case)
    assert np.array_equal(once[0].o, again[0].o) and all(np.array_equal(a, b) for a, b in zip(once[1], again[1]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_no_fault_in_checked_mode(monkeypatch, dtype):
    device = pretend(monkeypatch, checked=True)
    for dims, mask, score in (((64, 64), "random", BENT), ((36, 60), "window", Score())):
        check(device, Case(dtype, dims, (70, 90), (4, 2), 1, masks(70, 90)[mask], score, seed=14, pad=4))


def test_what_cannot_be_launched_is_refused(device):
    case = Case("bfloat16", (300, 16), (4, 4))
    with pytest.raises(ValueError, match=r"head_dim 300 and v's 16 with bfloat16: the CUDA kernels take up to 256"):
        forward(device, case)


def test_bounds_are_uploaded_once_and_forgotten(monkeypatch):
    device = pretend(monkeypatch)
    case = Case("bfloat16", (16, 16), (20, 30), (2, 1), 1, masks(20, 30)["window"], seed=15)
    for _ in range(3):
        forward(device, case)
    assert len(cuda._uploaded) == 2
    del case
    assert not cuda._uploaded


def test_every_kind_has_a_row_for_every_dtype():
    for dtype in registry.TYPES:
        for kind in ("forward", "backward_dq", "backward_dkdv"):
            dims = [row.dim for row in registry.KERNELS if (row.kind, row.dtype) == (kind, dtype)]
            assert dims == sorted(dims) and dims[-1] == 256
