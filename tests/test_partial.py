"""Partials: the merge is exact to rounding in any order and grouping, and empty is neutral."""
import itertools

import numpy as np
import pytest

from ringmpi import Partial, attention_reference, merge
from ringmpi.partial import sink_partial


def partial_of(scores, values, dtype=np.float64):
    """By definition, one query and one head: scores (keys,), values (keys, dim)."""
    scores, values = np.asarray(scores, np.longdouble), np.asarray(values, np.longdouble)
    m = scores.max(initial=-np.inf)
    p = np.exp(scores - (m if np.isfinite(m) else 0))
    o, dim = p @ values if len(p) else np.zeros(values.shape[1]), values.shape[1]
    return Partial(o.astype(dtype).reshape(1, 1, 1, dim), np.full((1, 1, 1), m, dtype), np.full((1, 1, 1), p.sum(), dtype))


def test_the_worked_example():
    both = merge(partial_of([1, 2], [[1], [2]]), partial_of([3, 0], [[3], [4]]))
    assert [round(float(x.item()), 3) for x in (both.m, both.l, both.o, both.finish()[0])] == [3.0, 1.553, 4.07, 2.621]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_order_and_grouping_gives_the_same(dtype):
    rng = np.random.default_rng(0)
    pieces = [(rng.standard_normal(n) * 30, rng.standard_normal((n, 3))) for n in (1, 4, 0, 7)]
    want = partial_of(np.concatenate([s for s, _ in pieces]), np.concatenate([v for _, v in pieces]), np.longdouble).finish()
    for order in itertools.permutations(range(4)):
        a, b, c, d = (partial_of(*pieces[i], dtype) for i in order)
        for got in (merge(merge(merge(a, b), c), d), merge(merge(a, b), merge(c, d)), merge(a, merge(b, merge(c, d)))):
            for x, y in zip(got.finish(), want):
                assert abs(x - y).max() <= 8 * np.finfo(dtype).eps * abs(y).max()


def test_empty_is_neutral_to_the_bit():
    some, empty = partial_of([-700.0, 3.25], [[1.5], [2]]), partial_of([], np.empty((0, 1)))
    for got in (merge(some, empty), merge(empty, some)):
        assert all((x == y).all() for x, y in zip((got.o, got.m, got.l), (some.o, some.m, some.l)))
    nothing = merge(empty, empty)
    assert nothing.m == -np.inf and nothing.l == 0 and nothing.o == 0
    out, lse = nothing.finish()
    assert out == 0 and lse == -np.inf


@pytest.mark.parametrize(("a", "b"), [(0, 89), (800, 0), (-800, 800), (20000, -20000), (-60000, -60001)])
def test_far_scores_do_not_overflow(a, b):
    for dtype in (np.float32, np.float64):
        out, lse = merge(partial_of([a], [[1]], dtype), partial_of([b], [[3]], dtype)).finish()
        want = np.logaddexp(np.longdouble(a), b)
        assert abs(lse.item() - want) <= np.finfo(dtype).eps * abs(want)
        assert abs(out.item() - (1 + 2 * np.exp(b - want))) < 1e-6


def test_normalised_results_are_partials():
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 2, 11, 4, 5))
    want = attention_reference(q, k, v)
    halves = [attention_reference(q, k[:, half], v[:, half]) for half in (slice(0, 4), slice(4, None))]
    for make in (Partial.from_lse, lambda out, lse: Partial(out, lse, np.ones_like(lse)), lambda out, lse: Partial(out, lse, 1)):
        got = merge(*(make(*half) for half in halves)).finish()
        assert all(abs(x - y).max() < 1e-14 for x, y in zip(got, want))
        assert all((x == y).all() for x, y in zip(make(*want).finish(), want))


@pytest.mark.parametrize("sign", [-1, 1])
def test_an_empty_row_may_say_minus_or_plus_infinity(sign):
    empty = Partial.from_lse(np.full((1, 1, 1, 2), np.nan), np.full((1, 1, 1), sign * np.inf))
    out, lse = merge(empty, partial_of([2.0], [[5.0, 6.0]])).finish()
    assert out.ravel().tolist() == [5, 6] and lse == 2


def test_half_results_are_merged_in_float32():
    half = Partial.from_lse(np.ones((1, 3, 1, 2), np.float16), np.zeros((1, 1, 3), np.float32))
    assert half.o.dtype == np.float32
    assert merge(half, half).finish(np.float16)[0].dtype == np.float16


def test_a_sink_counts_as_a_key_of_value_zero():
    got = merge(partial_of([1.0, 2.0], [[3.0], [4.0]]), partial_of([0.5], [[0.0]]))
    total = partial_of([1.0, 2.0], [[3.0], [4.0]])
    total.absorb(sink_partial(np.array([0.5]), total.o))
    assert all(abs(x - y).max() < 1e-15 for x, y in zip(total.finish(), got.finish()))


def test_nan_is_not_hidden():
    out, lse = merge(partial_of([1.0], [[1.0]]), Partial(*(np.full(s, np.nan) for s in ((1, 1, 1, 1), (1, 1, 1), (1, 1, 1))))).finish()
    assert np.isnan(out).all() and np.isnan(lse).all()
