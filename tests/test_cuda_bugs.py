"""Well-known bugs of attention kernels, each planted where it was made before (``-DBUG=n``): every one must be found.

Each is a public issue of a project that had it. Some change numbers on the small inputs here; some only the checked mode
can see, for on an idle machine they give right numbers nearly always.
"""
import mmap

import numpy as np
import pytest
from emulator import EmulatorError
from emulator.cases import Case, masks
from emulator.device import Array, pretend
from test_cuda_tile import check, forward, put

from ringmpi.partial import EVERYTHING, Partial
from ringmpi.tiles import cuda


def masked(device, mask="random", **options):
    """Both passes of a case with more rows and keys than a tile."""
    check(device, Case("bfloat16", (64, 64), (140, 90), (4, 2), 1, masks(140, 90)[mask], seed=1, **options))


def huge_strides(device):
    case, stride = Case("bfloat16", (16, 16), (40, 40), (1, 1), 1, None, seed=7), 1 << 26
    # Memory before the array too: an offset that wraps round reads zeros there, rather than nothing at all.
    sparse = np.frombuffer(mmap.mmap(-1, (1 << 32) + 2 * 40 * stride, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint16)
    sparse = sparse[1 << 31 :].view(case.q.dtype)
    k = np.lib.stride_tricks.as_strided(sparse, (1, 40, 1, 16), (0, 2 * stride, 0, 2))
    k[...] = case.k
    total = Partial.empty((1, 40, 1, 16), np.float32, device)
    for where, partial in cuda.forward(put(device, case.q), Array(device, k), put(device, case.v), case.pair):
        cuda.merge(total, where, partial)
    assert np.array_equal(total.o.get(), forward(device, case).o)


def low_scores(device):
    """A row whose seen scores are below any finite stand-in for -inf."""
    case = Case("bfloat16", (16, 16), (1, 2), (1, 1), 1, (np.zeros((1, 1), int), np.ones((1, 1), int)))
    case.q[...], case.k[...] = 0, 0
    case.q[..., 0], case.k[:, 0, :, 0] = -20000, 10
    assert abs(forward(device, case).l - 1).max() < 1e-6


def unseen_nan(device):
    """Keys between those of some rows and those of others."""
    i = np.arange(80)[None]
    case = Case("bfloat16", (16, 16), (80, 60), (1, 1), 1, (np.where(i < 40, 0, 30), np.where(i < 40, 10, 40)))
    case.k[:, 10:30], case.v[:, 10:30] = np.nan, np.nan
    assert np.isfinite(forward(device, case).o).all()


def merged_with_nothing(device):
    """An empty partial may hold anything in o and l."""
    o, m, l = np.ones((1, 4, 1, 8), np.float32), np.zeros((1, 1, 4), np.float32), np.ones((1, 1, 4), np.float32)
    mine = Partial(*map(device.asarray, (o, m, l)))
    nothing = [device.full(x.shape, value, np.float32) for x, value in ((o, np.nan), (m, -np.inf), (l, np.inf))]
    cuda.merge(mine, EVERYTHING, Partial(*nothing))
    assert np.array_equal(mine.o.get(), o) and np.array_equal(mine.l.get(), l)


def two_merged(device):
    random, shapes = np.random.default_rng(0), ((1, 9, 2, 40), (1, 2, 9), (1, 2, 9))
    parts = [Partial(*(device.asarray(random.random(shape).astype(np.float32)) for shape in shapes)) for _ in "ab"]
    cuda.merge(parts[0], EVERYTHING, parts[1])
    parts[0].o.get()


# number: (what went wrong, where, how it is provoked, whether only the checked mode can be sure to see it)
BUGS = {
    1: ("int32 offsets", "flash-attention#1500, #2260, #2611", huge_strides, False),
    2: ("keys beyond the last are read", "SageAttention#376", masked, True),
    3: ("bounds not taken from the key run's start", "flash-attention#1778, flashinfer#348", masked, False),
    4: ("-inf less -inf in a row that sees nothing", "flashinfer#4401, TensorRT-LLM#17477", lambda d: masked(d, "mostly nothing"), False),
    5: ("an empty partial is merged", "flash-attention#978, FlashMLA#77", merged_with_nothing, False),
    6: ("a finite number for -inf", "ohdearquant/lattice#373", low_scores, False),
    7: ("no barrier between a copy and its use", "llama.cpp#13438, flash-attention#359", masked, True),
    8: ("a barrier that not all threads come to", "llama.cpp#27678", masked, False),
    9: ("sums not rescaled when one row's maximum moves", "flash-linear-attention#889", masked, False),
    10: ("rows taken for aligned", "vllm#45466, flash-attention#470", lambda d: masked(d, pad=4), False),
    11: ("p = 0 meets the NaN of a key that no row sees", "tilelang#2461", unseen_nan, False),
    12: ("m to base 2", "cudnn-frontend#931", masked, False),
    13: ("the K/V head of a query head", "flash-attention's tests of GQA", masked, False),
    14: ("m written while other lanes read it", "llama.cpp#13438", two_merged, True),
}  # fmt: skip


@pytest.mark.parametrize("number", BUGS, ids=lambda n: f"{n}-{BUGS[n][0].replace(' ', '_')}")
def test_a_planted_bug_is_found(monkeypatch, number):
    _, _, provoke, needs_checks = BUGS[number]
    with pytest.raises((AssertionError, EmulatorError)):
        provoke(pretend(monkeypatch, checked=needs_checks, options=[f"-DBUG={number}"]))


@pytest.mark.parametrize("provoke", {bug[2] for bug in BUGS.values() if bug[2].__name__ != "<lambda>"}, ids=lambda f: f.__name__)
def test_without_a_bug_nothing_is_found(monkeypatch, provoke):
    provoke(pretend(monkeypatch))
