"""The tile contract, held by every tile that computes on NumPy arrays: against dense float64, in any strides."""
import numpy as np
import pytest
from oracle import EPS, MASKS, SCORES, close, problem

from ringmpi import Custom, Mask, Run, Score, attention_reference_backward, tiles
from ringmpi.mask import mask
from ringmpi.pairs import Pair, Work
from ringmpi.partial import Partial, accumulator
from ringmpi.tiles import host

SCORE = Score(scale=0.35)


@pytest.fixture(params=tiles.TILES)
def tile(request):
    return tiles.tile(request.param, np.zeros(1))


def run_forward(tile, problem, pairs):
    """The pairs of one rank that holds everything, merged and finished."""
    q, k, v = problem.q, problem.k, problem.v
    total = Partial.empty((*q.shape[:3], v.shape[3]), accumulator(q.dtype))
    for pair in pairs:
        mine = total.at(slice(None), pair.rows, slice(None))
        for where, partial in tile.forward(q[:, pair.rows], k[:, pair.keys], v[:, pair.keys], pair):
            tile.merge(mine, where, partial)
    return total.finish(q.dtype)


def run_backward(tile, problem, pairs, out, lse, fill=0.0):
    """dq, dk, dv of the pairs, added to ``fill``."""
    q, k, v, dout = problem[:4]
    sums = accumulator(q.dtype)
    dq, dk, dv = (np.full(x.shape, fill, sums) for x in (q, k, v))
    delta, lse = tile.delta(dout, out), lse.astype(sums)
    for pair in pairs:
        r, c = pair.rows, pair.keys
        for _ in tile.backward(q[:, r], k[:, c], v[:, c], dout[:, r], lse[..., r], delta[..., r], pair, dq[:, r], dk[:, c], dv[:, c]):
            pass
    return dq, dk, dv


def pairs_of(problem, rules, score=SCORE, runs=None):
    """The pairs of a problem on one rank, whose rows may be cut into runs."""
    queries = runs or ((Run(0, problem.q.shape[1]),),)
    keys = runs or ((Run(0, problem.k.shape[1]),),)
    work = Work(queries, keys, mask(rules), score)
    return list(work.pairs(work.strips(0), score.resolve(problem.q.shape[3]), 0))


def rounded_weights(tile, given, rules, score):
    """What out may err by where weights are rounded to bfloat16 before they meet v: half an ulp of each."""
    if tile is not host or not host.rounds_weights(given.q.dtype):
        return 0.0
    return 0.5 * EPS["bfloat16"] * given._replace(v=np.abs(given.v)).solve(rules, score)[0]


def check(tile, given, rules, score=SCORE, floor=0.0):
    want = given.solve(rules, score)
    pairs = pairs_of(given, rules, score)
    out, lse = run_forward(tile, given, pairs)
    close(out, want[0], "out", also=rounded_weights(tile, given, rules, score))
    close(lse, want[1], "lse")
    sums = accumulator(given.q.dtype)
    given_out, dense_lse = want[0].astype(given.q.dtype), want[1]
    want = attention_reference_backward(given.dout, given.q, given.k, given.v, given_out, dense_lse, mask=rules, score=score)
    for name, got, reference in zip(("dq", "dk", "dv"), run_backward(tile, given, pairs, given_out, dense_lse), want):
        assert got.dtype == sums
        close(got, reference, name, floor=floor)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rules", MASKS.values(), ids=MASKS)
def test_masks(tile, rules, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    check(tile, problem(101, dtype=getattr(ml_dtypes, dtype, dtype)), rules)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_no_columns(tile, dtype):
    """A value of no columns has an lse all the same, and gradients of 0."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    given = problem(20, 31, v_dim=0, dtype=getattr(ml_dtypes, dtype, dtype))
    pairs = pairs_of(given, "causal")
    out, lse = run_forward(tile, given, pairs)
    assert out.shape == (2, 20, 4, 0)
    close(lse, given._replace(v=given.k, dout=given.q).solve("causal", SCORE)[1], "lse")
    assert not any(x.any() for x in run_backward(tile, given, pairs, out, lse))


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_bfloat16_scores(tile, score):
    """Odd numbers of columns and keys, too."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for rules, sizes in (("full", dict(dim=1, v_dim=3)), ("causal", dict(dim=33, v_dim=65)), (Mask(window=(7, 3)), dict(dim=128, v_dim=2))):
        check(tile, problem(37, 251, dtype=ml_dtypes.bfloat16, **sizes), rules, score or Score())


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_scores(tile, score):
    for rules in ("full", "causal", Mask(window=(7, 3))):
        check(tile, problem(37, 53), rules, score or Score())


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 300), (300, 1), (257, 1030), (0, 5), (5, 0), (64, 64), (333, 77)])
def test_lengths(tile, queries, keys):
    for rules in ("full", "causal"):
        check(tile, problem(queries, keys, batch=1, heads=2, kv_heads=1), rules, floor=1.0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (6, 2), (9, 3), (5, 5)])
def test_grouped_heads(tile, heads, kv_heads):
    check(tile, problem(45, heads=heads, kv_heads=kv_heads, batch=1), "causal")


@pytest.mark.parametrize(("dim", "v_dim"), [(1, 1), (1, 7), (33, 130), (72, 72), (64, 128), (200, 16)])
def test_head_dims(tile, dim, v_dim):
    check(tile, problem(50, dim=dim, v_dim=v_dim, batch=1, heads=2, kv_heads=2), "causal", Score())


@pytest.mark.parametrize("score", [SCORE, Score(alibi=np.array([0.1, 0.02, 0.3, 0.0]))], ids=["plain", "alibi"])
def test_runs_of_any_step(tile, score):
    given, rules = problem(101), Mask(causal=True, window=(40, 0))
    parts = Custom([[(0, 20), (20, 27, 3), (21, 27, 3), (22, 27, 3)]]).partition(101, 1)
    order = np.concatenate([run.positions() for run in parts[0]])
    want = given.solve(rules, score)
    shuffled = type(given)(*(x[:, order] for x in given[:4]))
    pairs = pairs_of(shuffled, rules, score, runs=parts)
    out, lse = run_forward(tile, shuffled, pairs)
    close(out, want[0][:, order], "out")
    close(lse, want[1][..., order], "lse")
    for got, reference in zip(run_backward(tile, shuffled, pairs, out, lse), want[2:]):
        close(got, reference[:, order], "gradient")


def test_strides(tile):
    """Transposed, spread out, reversed and read-only arrays, and gradients in a strided home."""
    given = problem(61)
    wide = [np.zeros((x.shape[2], x.shape[3] * 2, 3, x.shape[1] + 4, x.shape[0])) for x in given[:4]]
    views = [w[:, ::2, 1, 2:-2].transpose(3, 2, 0, 1)[:, ::-1] for w in wide]
    for view, x in zip(views, given[:4]):
        view[...] = x
        view.flags.writeable = False
    check(tile, type(given)(*views), "causal")


def test_gradients_are_added_and_nothing_else_is_touched(tile):
    given, pairs = problem(61), None
    pairs = pairs_of(given, "causal")
    out, lse = run_forward(tile, given, pairs)
    once, twice = (run_backward(tile, given, pairs, out, lse, fill) for fill in (0.0, 3.0))
    for a, b in zip(once, twice):
        close(b, a + 3.0, "sum", base=1e-14)
    half = [pair for pair in pairs_of(given, Mask(causal=True, kv_range=30))]
    _, dk, dv = run_backward(tile, given, half, out, lse, fill=7.0)
    assert (dk[:, 30:] == 7).all() and (dv[:, 30:] == 7).all()


def test_what_nobody_sees_may_be_nan(tile):
    given, rules = problem(61), Mask(causal=True, window=(9, 0), kv_range=[(20, 50)])
    hidden = type(given)(*(x.copy() for x in given[:4]))
    for x in hidden[1:3]:
        x[:, :20] = x[:, 50:] = np.nan
    for x in (hidden.q, hidden.dout):
        x[:, :20] = x[:, 60:] = np.nan
    pairs = pairs_of(given, rules)
    want, got = run_forward(tile, given, pairs), run_forward(tile, hidden, pairs)
    assert all(np.array_equal(x, y) for x, y in zip(want, got))
    want, got = (run_backward(tile, g, pairs, *want) for g in (given, hidden))
    assert all(np.array_equal(x, y) for x, y in zip(want, got))


def test_what_is_seen_as_nan_stays_nan(tile):
    given = problem(61)
    given.k[:, 30] = np.nan
    out, lse = run_forward(tile, given, pairs_of(given, "causal"))
    assert np.isnan(out[:, 30:]).all() and np.isnan(lse[..., 30:]).all()


@pytest.mark.parametrize("value", [-60000.0, 800.0, 20000.0, -20000.0])
def test_one_visible_key_of_any_score(tile, value):
    for dtype in (np.float32, np.float64):
        q = np.full((1, 3, 1, 1), value, dtype)
        k, v = np.ones((1, 3, 1, 1), dtype), np.arange(3, dtype=dtype).reshape(1, 3, 1, 1)
        given = problem(3)._replace(q=q, k=k, v=v)
        out, lse = run_forward(tile, given, pairs_of(given, Mask(window=(0, 0)), Score(scale=1.0)))
        assert out.ravel().tolist() == [0, 1, 2] and (lse == value).all()


def test_calls_are_short(tile):
    """A pair of 4,096 x 4,096 is cut into calls between which the ring is polled, larger ones for more threads."""
    given = problem(4096, batch=1, heads=1, kv_heads=1, dim=64, v_dim=64, dtype=np.float32)
    pair, = pairs_of(given, "full")
    assert len(list(tile.forward(given.q, given.k, given.v, pair))) >= (32 / tile.threads() if tile is host else 16)


def test_empty_pairs_are_never_made():
    given = problem(101)
    assert not pairs_of(given, Mask(kv_range=0))
    assert all(isinstance(pair, Pair) for pair in pairs_of(given, "causal"))


def test_full_pairs_have_no_bounds():
    (pair,) = pairs_of(problem(30), "full")
    assert pair.bounds is None
    (pair,) = pairs_of(problem(30), "causal")
    assert pair.bounds is not None


def test_choice():
    with pytest.raises(ValueError, match="'abacus'"):
        tiles.tile("abacus", np.zeros(1))
    with pytest.raises(TypeError, match=r"builtins\.list"):
        tiles.tile("auto", [1.0])
