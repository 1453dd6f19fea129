"""The compiled tile beside the contract that test_tile.py holds: threads, bits, calls, memory, and how libraries are made and found."""
import copy
import os
import pickle
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle import close, problem
from test_tile import SCORE, pairs_of, run_backward, run_forward

from ringmpi import Mask, Run, Score, tiles
from ringmpi.partial import EVERYTHING, Partial, accumulator, sink_partial
from ringmpi.tiles import cores, cut, host, native
from ringmpi.tiles import numpy as numpy_tile

ROOT = Path(tiles.__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(host.available(np.float32) is not None, reason=f"no library: {host.available(np.float32)}")
pytestmark = needs_compiler


@pytest.fixture
def team(monkeypatch):
    """Sets the number of threads."""
    return lambda number: monkeypatch.setattr(host, "threads", lambda: number)


def both(given, rules):
    pairs = pairs_of(given, rules, Score())
    out, lse = run_forward(host, given, pairs)
    return out, lse, *run_backward(host, given, pairs, out, lse)


CASES = {
    "many small heads": dict(queries=40, keys=56, heads=12, kv_heads=6, batch=3),
    "one large head": dict(queries=1500, keys=1100, heads=2, kv_heads=1, batch=1, dim=64, v_dim=48),
    "several large heads": dict(queries=500, keys=700, heads=7, kv_heads=7, batch=2, dim=64, v_dim=40),
    "large groups": dict(queries=300, keys=700, heads=12, kv_heads=4, batch=1, dim=64, v_dim=40),
    "odd": dict(queries=401, keys=333, heads=3, kv_heads=3, batch=1, dim=200, v_dim=17),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_bits_for_every_number_of_threads(case, team):
    given = problem(**case, dtype=np.float32)
    for rules in ("full", "causal", Mask(window=(100, 7))):
        results = []
        for number in (1, 2, 3, 1):
            team(number)
            results.append(both(given, rules))
        for other in results[1:]:
            assert all(np.array_equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("rows, keys, dim, rules", [
    (40, 400, 16, Mask(kv_range=[150])), (40, 400, 16, Mask(kv_range=[[50, 300]])), (24, 9000, 32, "causal"), (1, 20000, 64, "full"),
])  # fmt: skip
def test_same_bits_where_heads_are_fewer_than_threads(rows, keys, dim, rules, team):
    given = problem(rows, keys, heads=4, kv_heads=4, batch=1, dim=dim, v_dim=dim, dtype=np.float32)
    team(1)
    together = both(given, rules)
    one = type(given)(*(x[:, :, :1] for x in given[:4]))
    for number in (1, 2, 3):
        team(number)
        for of_all, alone in zip(together, both(one, rules)):
            axis = 1 if of_all.ndim == 3 else 2
            assert np.array_equal(of_all.take([0], axis), alone)


FEWER = """
import os
from test_tile_host import *
host.threads = lambda: 3
for case in ("one large head", "several large heads"):
    given = problem(**CASES[case])
    want = given.solve("full", Score())
    for name, got, right in zip(("out", "lse", "dq", "dk", "dv"), both(given, "full"), want):
        close(got, right, name)
print(len(os.listdir("/proc/self/task")))
"""


def test_openmp_may_give_fewer_threads_than_asked_for():
    done = python(FEWER, OMP_THREAD_LIMIT="2", OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 0 and int(done.stdout) <= 2, done.stdout + done.stderr


def test_a_head_is_the_same_alone_or_among_many(team):
    team(1)
    given = problem(50, heads=8, kv_heads=8, batch=2)
    together = both(given, "causal")
    for h in range(8):
        one = type(given)(*(x[:, :, h : h + 1] for x in given[:4]))
        alone = both(one, "causal")
        assert np.array_equal(alone[0], together[0][:, :, h : h + 1]) and np.array_equal(alone[2], together[2][:, :, h : h + 1])


@pytest.mark.parametrize("number", [1, 4])
def test_calls_are_of_two_milliseconds_by_shape(number, team):
    team(number)
    given = problem(2048, 4096, batch=1, heads=2, kv_heads=1, dim=64, v_dim=64, dtype=np.float32)
    pair, = pairs_of(given, "full")
    for which, flops in (("forward", 256), ("backward", 640)):
        job = host._Job(which, pair, given.q, given.k, given.v)
        rows = [job.plan.cut.starts[part.strip1] - job.plan.cut.starts[part.strip0] for part in job.plan.cut.parts()]
        work = [(p.group1 - p.group0) * n * (p.key1 - p.key0) * flops for n, p in zip(rows, job.plan.cut.parts())]
        assert sum(work) == 2 * 2048 * 4096 * flops
        assert max(work) < 1.6 * cut.FLOPS["float32"] * number and np.median(work) > 0.4 * cut.FLOPS["float32"] * number


def test_small_heads_share_calls():
    given = problem(64, heads=32, kv_heads=32, batch=1, dim=64, v_dim=64, dtype=np.float32)
    assert len(list(host.forward(given.q, given.k, given.v, pairs_of(given, "full")[0]))) <= 2


def test_numbers_of_two_sizes_in_one_process(monkeypatch):
    """The memory that a float32 call leaves, 140 bytes, also serves a float64 call."""
    monkeypatch.setattr(host._Workspace, "free", [])
    for rows, dtype in ((7, np.float32), (3, np.float64), (7, np.float32)):
        given = problem(rows, heads=1, kv_heads=1, batch=1, dim=3, v_dim=3, dtype=dtype)
        out, _ = run_forward(host, given, pairs_of(given, "causal"))
        close(out, given.solve("causal", SCORE)[0])


def test_a_narrow_window_computes_only_what_it_sees():
    given = problem(4096, batch=1, heads=1, kv_heads=1, dim=8, dtype=np.float32)
    given.k[:, :1000] = given.v[:, :1000] = 1e30
    rules = Mask(causal=True, window=(99, 0))
    job = host._Job("backward", pairs_of(given, rules)[0], given.q, given.k, given.v)
    assert sum(job.plan.cut.pairs(0, (0, 4096)).tolist()) == sum(min(i + 1, 100) for i in range(4096))
    rows = given.q.shape[1]
    for part in job.plan.cut.parts():
        low, high = part.key0, part.key1
        first, last = job.plan.cut.starts[part.strip0], min(job.plan.cut.starts[part.strip1], rows) - 1
        assert low >= max(0, first - 99) - 2 * job.library.gradient_keys and high <= last + 1


def guarded(shape, dtype=np.float32, value=7.0):
    """An array inside a larger one that is full of a value."""
    whole = np.full([n + 6 for n in shape], value, dtype)
    return whole, whole[tuple(slice(3, -3) for _ in shape)]


def test_nothing_beside_the_gradients_is_written():
    given = problem(61, 47, dim=9, v_dim=13, dtype=np.float32)
    (pair,) = pairs_of(given, "causal")
    out, lse = run_forward(host, given, [pair])
    homes = [guarded(x.shape) for x in given[:3]]
    for _ in host.backward(given.q, given.k, given.v, given.dout, lse, host.delta(given.dout, out), pair, *(g for _, g in homes)):
        pass
    for (whole, inner), want in zip(homes, run_backward(host, given, [pair], out, lse, fill=7.0)):
        assert np.array_equal(inner, want)
        inner[...] = 7
        assert (whole == 7).all()


def test_merging_writes_only_its_rows():
    rng, shape = np.random.default_rng(0), (2, 5, 3, 11)
    wholes, into = zip(*(guarded(s) for s in (shape, (2, 3, 5), (2, 3, 5))))
    other = host.Partial(*(rng.standard_normal(x.shape).astype(np.float32) for x in into))
    want = host.Partial(*(x.copy() for x in into))
    want.absorb(other)
    host.merge(host.Partial(*into), EVERYTHING, other)
    for got, x, whole in zip(into, (want.o, want.m, want.l), wholes):
        close(got, x, "merged")
        got[...] = 7
        assert (whole == 7).all()


@pytest.mark.parametrize("where", [
    (slice(None),) * 3, (slice(1, 2), slice(2, 5), slice(1, 3)), (slice(0, 2), slice(3, None), slice(None, 1)),
    (slice(None), slice(0, 5, 2), slice(None)), (slice(-1, None), slice(-3, -1), slice(-2, None)),
    (slice(0, 1), slice(4, 4), slice(0, 3)), (slice(0, 9), slice(1, 99), slice(0, 3)),
])  # fmt: skip
@pytest.mark.parametrize("inner", [None, (slice(None), slice(1, None), slice(0, 2))])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_merging_into_some_rows(where, inner, dtype):
    """Of a view, and of a view of a view: the others keep their bits. Twice, for the second time the library knows the whole."""
    rng, shape = np.random.default_rng(0), (2, 7, 4, 5)
    total = Partial(*(rng.standard_normal(s).astype(dtype) for s in (shape, (2, 4, 7), (2, 4, 7))))
    want, mine = copy.deepcopy(total), total.at(*inner) if inner else total
    for _ in range(2):
        its = want.at(*inner) if inner else want
        its = Partial(*(x.copy() for x in (its.at(*where).o, its.at(*where).m, its.at(*where).l)))
        other = Partial(*(rng.standard_normal(x.shape).astype(dtype) for x in (its.o, its.m, its.l)))
        its.absorb(other)
        place = (want.at(*inner) if inner else want).at(*where)
        place.o[...], place.m[...], place.l[...] = its.o, its.m, its.l
        host.merge(mine, where, other)
        for name in "oml":
            close(getattr(total, name), getattr(want, name), name)


def test_merging_what_the_library_cannot_add_to():
    """Of another dtype, or with columns apart, or broadcast: NumPy merges it, to the same numbers."""
    rng, shape = np.random.default_rng(0), (1, 3, 2, 4)
    base = Partial(*(rng.standard_normal(s).astype(np.float32) for s in (shape, (1, 2, 3), (1, 2, 3))))
    others = {"float64": Partial(*(rng.standard_normal(s) for s in (shape, (1, 2, 3), (1, 2, 3)))),
              "columns apart": Partial(np.asfortranarray(base.o), base.m, base.l),
              "one number": Partial(base.o, base.m, 1), "one m and l": Partial(base.o, base.m[:, :1, :1], base.l[:, :1, :1]),
              "one row": Partial(base.o[:, :1], base.m[..., :1], base.l[..., :1])}  # fmt: skip
    for name, other in others.items():
        got, want = copy.deepcopy(base), copy.deepcopy(base)
        host.merge(got, EVERYTHING, other)
        want.absorb(other)
        assert np.array_equal(got.o, want.o) and np.array_equal(got.m, want.m) and np.array_equal(got.l, want.l), name
    halves = [Partial(*(x.astype(np.float16) for x in (base.o, base.m, base.l))) for _ in range(3)]
    host.merge(halves[0], EVERYTHING, halves[2])
    halves[1].absorb(halves[2])
    assert np.array_equal(halves[0].o, halves[1].o) and np.array_equal(halves[0].m, halves[1].m)


def test_a_copy_of_a_partial_is_merged_into_by_itself():
    """What the library was told of the first does not go along."""
    rng, shape = np.random.default_rng(0), (1, 3, 2, 4)
    first, other = (Partial(*(rng.standard_normal(s) for s in (shape, (1, 2, 3), (1, 2, 3)))) for _ in range(2))
    host.merge(first, EVERYTHING, copy.deepcopy(other))
    before = first.o.copy()
    for its in (copy.deepcopy(first), pickle.loads(pickle.dumps(first)), copy.deepcopy(first.at(*[slice(None)] * 3))):
        host.merge(its, EVERYTHING, other)
        assert np.array_equal(first.o, before) and not np.array_equal(its.o, before)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(2, 7, 3, 5), (1, 301, 4, 64), (1, 1, 1, 1), (2, 0, 3, 8)])
def test_finish_and_delta(shape, dtype, team):
    """To the rounding of one division, one logarithm and a sum; a row over no keys, and NaN, as NumPy has them."""
    rng, per_row = np.random.default_rng(0), (shape[0], shape[2], shape[1])
    o, m, l = rng.standard_normal(shape), rng.standard_normal(per_row), rng.random(per_row) + 1
    total = Partial(*(x.astype(dtype) for x in (o, m, l)))
    if total.m.size > 6:
        total.o[0, 1], total.m[0, :, 1], total.l[0, :, 1] = 0, -np.inf, 0
        total.o[0, 2, 0], total.m[0, 0, 2], total.l[0, 0, 2] = np.nan, np.nan, np.nan
    eps = np.finfo(dtype).eps
    for threads in (1, 2):
        team(threads)
        (out, lse), (want, wanted) = host.finish(copy.deepcopy(total), np.dtype(dtype)), total.finish(dtype)
        assert np.array_equal(out, want, equal_nan=True) and out.dtype == lse.dtype == dtype
        np.testing.assert_allclose(lse, wanted, rtol=2 * eps, atol=2 * eps)
        dout = rng.standard_normal(shape).astype(dtype)
        exact = (dout.astype(np.longdouble) * total.o).sum(axis=3).swapaxes(1, 2)
        size = np.abs(dout * total.o).sum(axis=3).swapaxes(1, 2)
        got = host.delta(dout, total.o)
        assert got.dtype == dtype and (~(np.abs(got - exact) > 8 * eps * size) & (np.isnan(got) == np.isnan(exact))).all()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_what_an_empty_accumulator_holds_is_not_read(dtype, sinks):
    """Of rows that see nothing, all of them or some; before a sink, and before keys that come later."""
    for rules in (Mask(kv_range=[30, 0]), Mask(causal=True, kv_range=[60, 20]), Mask(window=(5, 0), kv_range=[[50, 80], [0, 3]])):
        given = problem(90, dtype=dtype, sinks=sinks)
        total = host.empty((*given.q.shape[:3], given.v.shape[3]), accumulator(dtype))
        total.o[...] = np.nan
        for pair in pairs_of(given, rules, runs=((Run(0, 41), Run(41, 49)),)):
            mine = total.at(slice(None), pair.rows, slice(None))
            for where, partial in host.forward(given.q[:, pair.rows], given.k[:, pair.keys], given.v[:, pair.keys], pair):
                host.merge(mine, where, partial)
        if sinks:
            host.merge(total, EVERYTHING, sink_partial(given.sinks, total.o))
        out, lse = host.finish(total, np.dtype(dtype))
        want = given.solve(rules, SCORE)
        assert out.dtype == dtype
        close(out, want[0], "out")
        close(lse, want[1], "lse")


def many_calls():
    """A problem of several calls, its pair, and an accumulator of nothing."""
    given = problem(700, heads=2, kv_heads=1, batch=1, dim=128, v_dim=128, dtype=np.float32)
    return given, *pairs_of(given, "full"), host.empty(given.q.shape, np.float32)


def test_a_partial_is_merged_before_the_next_is_asked_for():
    """Later it would be computed of other keys; nor twice."""
    given, pair, total = many_calls()
    calls = host.forward(given.q, given.k, given.v, pair)
    (_, first), (where, second) = next(calls), next(calls)
    host.merge(total, where, second)
    for late in (first, second):
        with pytest.raises(RuntimeError, match="before the next"):
            host.merge(total, where, late) if late is second else late.compute(total, where)


def test_partials_that_are_looked_at_or_left_out():
    """What was looked at is what is merged; calls after one that nobody wanted are right."""
    given, pair, total = many_calls()
    for _, partial in host.forward(given.q * 3, given.k[:, ::-1] * 5, given.v, pair):
        partial.finish()  # leaves other keys in the workspace
    seen = [(where, p, p.l) for where, p in host.forward(given.q, given.k, given.v, pair)]
    want = given.solve("full", SCORE)[0]
    for where, partial, l in seen:
        partial.l[...] = 2 * l
        host.merge(total, where, partial)
    close(2 * host.finish(total, np.float32)[0], want, "out")
    *_, total = many_calls()
    for number, (where, partial) in enumerate(host.forward(given.q, given.k, given.v, pair)):
        if number:
            host.merge(total, where, partial)
            close(host.finish(copy.deepcopy(total.at(*where)), np.float32)[0], want[where], "out")


@pytest.mark.parametrize("where", [slice(0, 180, 2), slice(-180, None)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_accumulators_that_the_library_cannot_add_to(where, dtype):
    """Of another dtype, or rows apart: NumPy merges, and reads nothing of rows over no keys either."""
    given, rules = problem(90, dtype=np.float32), Mask(kv_range=[60, 20])
    given.v[1, 20:] = given.k[1, 20:] = np.nan
    whole = Partial(*(np.full(s, x, dtype) for s, x in (((2, 180, 4, 6), np.nan), ((2, 4, 180), -np.inf), ((2, 4, 180), 0))))
    total = whole.at(slice(None), where, slice(None)) if where.step else whole.at(slice(None), slice(0, 90), slice(None))
    for place, partial in host.forward(given.q, given.k, given.v, pairs_of(given, rules)[0]):
        host.merge(total, place, partial)
    out, lse = host.finish(total, np.float32)
    want = given._replace(k=np.nan_to_num(given.k), v=np.nan_to_num(given.v)).solve(rules, SCORE)
    loose = 2e-2 if dtype == np.float16 else None
    close(out, want[0], "out", base=loose)
    close(lse.astype(np.float32), want[1], "lse", base=loose)
    assert host.finish(Partial.empty((1, 2, 1, 3), np.float32), None)[0].dtype == np.float32


def test_what_may_not_be_written_is_not():
    rng, shape = np.random.default_rng(0), (1, 5, 3, 4)
    fixed = Partial(*(rng.random(s).astype(np.float32) + 1 for s in (shape, (1, 3, 5), (1, 3, 5))))
    for x in (fixed.o, fixed.m, fixed.l):
        x.flags.writeable = False
    shared = Partial(np.broadcast_to(fixed.o[:, :, :1], shape), fixed.m, fixed.l)
    for its in (fixed, shared):
        before, want = its.o.copy(), its.finish(np.float32)[0]
        assert np.array_equal(host.finish(its, np.float32)[0], want) and np.array_equal(its.o, before)
        with pytest.raises(ValueError, match="read-only"):
            host.merge(its, EVERYTHING, fixed)
        total = host.empty(shape, np.float32)
        host.merge(total, EVERYTHING, its)
        assert np.array_equal(total.o, its.o)
    later = copy.deepcopy(fixed)
    host.merge(later, EVERYTHING, fixed)
    later.l.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        host.merge(later, EVERYTHING, fixed)


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_gradients_that_may_not_be_written_are_not(name):
    given = problem(7, dtype=np.float32)
    gradients = {f"d{x}": np.zeros_like(getattr(given, x)) for x in "qkv"}
    gradients[name].flags.writeable = False
    out, lse = run_forward(host, given, pairs_of(given, "full"))
    with pytest.raises(ValueError, match="read-only"):
        list(host.backward(*given[:4], lse, host.delta(given.dout, out), pairs_of(given, "full")[0], **gradients))
    assert not gradients[name].any()


def test_places_that_are_none_of_its_size():
    """Other widths, rows or heads: NumPy says what is wrong; every second row is a place, and the others are not written."""
    given = problem(40, batch=1, dtype=np.float32)
    for shape, rows in (((1, 40, 4, 5), slice(None)), ((1, 80, 4, 6), slice(0, 39, 2)), ((1, 40, 3, 6), slice(None))):
        total = host.empty(shape, np.float32)
        for (batch, _, heads), partial in host.forward(*given[:3], pairs_of(given, "full")[0]):
            with pytest.raises(ValueError, match="broadcast"):
                host.merge(total, (batch, rows, heads), partial)
        assert not total.l.any() and np.isneginf(total.m).all()
    twice = host.empty((1, 80, 4, 6), np.float32)
    twice.o[...] = 7
    for (batch, _, heads), partial in host.forward(*given[:3], pairs_of(given, "full")[0]):
        host.merge(twice, (batch, slice(0, 80, 2), heads), partial)
    close(twice.o[:, ::2] / twice.l.swapaxes(1, 2)[:, ::2, :, None], given.solve("full", SCORE)[0], "out")
    assert (twice.o[:, 1::2] == 7).all()


def test_a_plan_that_is_made_again_has_all_its_calls(team, monkeypatch):
    team(1)
    monkeypatch.setitem(cut.FLOPS, "float32", 1e4)
    host._even_plan.cache_clear()
    given = problem(500, heads=2, kv_heads=1, batch=1, dtype=np.float32)
    pair, = pairs_of(given, "full")
    first, again = ([where for where, _ in host.forward(*given[:3], pair)] for _ in range(2))
    host._even_plan.cache_clear()
    assert first == again and len(first) > cut.SLAB


@pytest.mark.parametrize(("dtype", "ulps"), [(np.float32, 1.5), (np.float64, 1.0)])
def test_weights_are_exponentials(dtype, ulps):
    """Two keys, of scores 0 and x <= 0, the second of value 1: o is exp(x)."""
    x = np.concatenate([-np.linspace(0, 0.34, 2001), -np.linspace(0.35, 20, 50)]).astype(dtype)
    given = problem(len(x), 2, dim=1, v_dim=1, batch=1, heads=1, kv_heads=1, dtype=dtype)
    given.q[0, :, 0, 0], given.k[0, :, 0, 0], given.v[0, :, 0, 0] = x, (0, 1), (0, 1)
    total = host.empty(given.q.shape, dtype)
    for where, partial in host.forward(*given[:3], pairs_of(given, "full", Score(scale=1.0))[0]):
        host.merge(total, where, partial)
    wanted = np.exp(x.astype(np.longdouble))
    error = np.abs(total.o[0, :, 0, 0] / wanted - 1) / np.finfo(dtype).eps
    assert (error < ulps + np.abs(x)).all(), error.max()


def test_finish_and_delta_of_other_arrays():
    """In other strides, or rounded to another dtype: the same numbers."""
    rng, shape = np.random.default_rng(0), (1, 9, 3, 20)
    total = Partial(*(rng.random(s).astype(np.float32) + 1 for s in (shape, (1, 3, 9), (1, 3, 9))))
    apart = Partial(np.asfortranarray(total.o), total.m, total.l)
    for its in (total.at(slice(None), slice(2, 7), slice(1, 3)), apart, Partial(total.o, total.m, 1)):
        for dtype in (np.float32, np.float16, np.float64):
            want, wanted = its.finish(dtype)
            out, lse = host.finish(copy.deepcopy(its), np.dtype(dtype))
            assert np.array_equal(out, want) and out.dtype == dtype
            np.testing.assert_allclose(lse, wanted, rtol=3e-7, atol=3e-7)
    dout = rng.random(shape).astype(np.float32)
    half = dout.astype(np.float16), total.o.astype(np.float16)
    for x, y in ((dout[:, ::-2], total.o[:, ::2]), (np.asfortranarray(dout), total.o), half):
        np.testing.assert_allclose(host.delta(x, y), numpy_tile.delta(x, y), rtol=3e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_merging_empty_and_nan(dtype):
    none = -np.inf
    make = lambda o, m, l: host.Partial(*(np.full(s, x, dtype) for s, x in zip(((1, 1, 1, 3), (1, 1, 1), (1, 1, 1)), (o, m, l))))  # noqa: E731
    for a, b in (((2, 1, 3), (0, none, 0)), ((0, none, 0), (2, 1, 3)), ((0, none, 0), (0, none, 0))):
        into = make(*a)
        host.merge(into, EVERYTHING, make(*b))
        want = max(a, b, key=lambda p: p[2])
        assert (into.o == want[0]).all() and into.m == want[1] and into.l == want[2]
    for a, b in (((2, np.nan, 3), (2, 1, 3)), ((2, 1, 3), (2, np.nan, 3))):
        into = make(*a)
        host.merge(into, EVERYTHING, make(*b))
        assert np.isnan(into.o).all() and np.isnan(into.m).all()


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_float64_to_1e_14(scale):
    given = problem(130, 257, dim=64, v_dim=40, scale=scale**0.5)
    want = given.solve("causal", dtype=np.longdouble)
    got = both(given, "causal")
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want):
        close(x, y, name, base=1e-14 if scale == 1 else 4e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softcap_is_a_tanh(dtype):
    """One key a row: lse is the capped score itself."""
    x = np.concatenate([np.linspace(-30, 30, 401), [0, 1e-30, 0.6249, 0.6251, 200, -200]]).astype(dtype)
    given = problem(len(x), 1, dim=1, v_dim=1, batch=1, heads=1, kv_heads=1, dtype=dtype)
    given.q[0, :, 0, 0], given.k[...] = x, 1
    _, lse = run_forward(host, given, pairs_of(given, "full", Score(scale=1.0, softcap=2.0)))
    want = 2 * np.tanh(x.astype(np.longdouble) / 2)
    assert np.abs(lse[0, 0] - want).max() < 6 * np.finfo(dtype).eps


def python(code, **environment):
    """Runs Python in a process of its own."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, timeout=300)


def test_the_process_stays_as_it_was():
    """No flush to zero, no signal handlers, no thread before the first call that asks for one."""
    done = python(
        "import os, numpy as np\n"
        "from ringmpi.tiles import host\n"
        "caught = lambda: [int(x.split()[1], 16) & 0x7fffffff for x in open('/proc/self/status') if x.startswith('SigCgt')]\n"
        "tiny = np.full(4, 1e-38, np.float32)\n"
        "before = caught(), len(os.listdir('/proc/self/task'))\n"
        "host.available(np.float32), host.available(np.float64)\n"
        "assert before == (caught(), len(os.listdir('/proc/self/task')))\n"
        "from test_tile_host import both, problem\n"
        "before = caught()\n"
        "both(problem(50, dtype=np.float32), 'causal')\n"
        "assert before == caught()\n"
        "assert (tiny * np.float32(0.01) > 0).all()\n",
        OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------------------ libraries


@pytest.fixture
def fake_compiler(tmp_path):
    """A compiler that takes a moment, gives the library there is, and notes that it ran."""
    script = tmp_path / "cc"
    script.write_text(
        f"#!/bin/sh\nfor last; do case $before in -o) out=$last;; esac; before=$last; done\n"
        f"echo run >> {tmp_path}/runs\nsleep 0.2\nhead -c -32 {native.library('float32')} > $out\n"
    )
    script.chmod(0o755)
    return {"CC": str(script), "RINGMPI_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}


LOAD = "from ringmpi.tiles import native; native.load('float32'); print(native.library('float32'))"


def test_many_may_compile_at_once(fake_compiler, tmp_path):
    variables = {**os.environ, **fake_compiler, "PYTHONPATH": str(ROOT)}
    several = [subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, text=True, env=variables) for _ in range(4)]
    paths = {process.communicate(timeout=100)[0] for process in several}
    assert [process.returncode for process in several] == [0] * 4 and len(paths) == 1
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [Path(paths.pop().strip()).name], "one library, nothing left over"
    runs = (tmp_path / "runs").read_text()
    assert python(LOAD, **fake_compiler).returncode == 0 and (tmp_path / "runs").read_text() == runs, "it is compiled once"


def test_a_damaged_library_is_compiled_again(fake_compiler, tmp_path):
    path = Path(python(LOAD, **fake_compiler).stdout.strip())
    path.write_bytes(path.read_bytes()[:5000])
    done = python(LOAD, **fake_compiler)
    assert done.returncode == 0, done.stderr
    assert path.stat().st_size > 5000


def test_a_cache_that_others_may_write_is_not_used(fake_compiler, tmp_path):
    open_to_all = tmp_path / "cache"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    path = Path(python(LOAD, **fake_compiler).stdout.strip())
    assert path.parent == tmp_path / f"ringmpi-{os.getuid()}"


def test_without_a_compiler_numpy_computes_and_one_warning_says_what_to_install(tmp_path):
    done = python(
        "import warnings, numpy as np\n"
        "from ringmpi import tiles\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    names = {tiles.tile('auto', np.zeros(1, np.float32)).__name__ for _ in range(3)}\n"
        "print(names, len(said), said[0].message)\n"
        "print(tiles.host.status())\n"
        "tiles.tile('host', np.zeros(1))\n",
        CC="", PATH="/nonexistent", RINGMPI_CACHE=str(tmp_path / "cache"), TMPDIR=str(tmp_path),
    )  # fmt: skip
    assert "{'ringmpi.tiles.numpy'} 1" in done.stdout and "install gcc" in done.stdout, done
    assert "the NumPy tile computes instead" in done.stdout, done
    assert "RuntimeError: the host tile cannot be had" in done.stderr


def test_what_does_not_compile_says_so(tmp_path):
    done = python("from ringmpi.tiles import host; print(host.status())", RINGMPI_CFLAGS="-DVECTOR_BYTES=nonsense",
                  RINGMPI_CACHE=str(tmp_path), TMPDIR=str(tmp_path))  # fmt: skip
    assert "the NumPy tile computes instead" in done.stdout and "nonsense" in done.stdout


def test_names_differ_by_what_libraries_are_made_of(monkeypatch):
    names = {native.name("float32"), native.name("float64")}
    monkeypatch.setenv("RINGMPI_CFLAGS", "-g")
    names.add(native.name("float32"))
    monkeypatch.setenv("RINGMPI_MARCH", "x86-64-v3")
    names.add(native.name("float32"))
    monkeypatch.setattr(native, "processor", lambda: "another")
    assert native.name("float32") in names, "a library for a named processor is one for all machines"
    monkeypatch.delenv("RINGMPI_MARCH")
    names.add(native.name("float32"))
    assert len(names) == 5


def test_status_tells_which_tile_runs():
    assert re.match(r"(AVX-512|AVX2|NEON|plain), \d+ threads? \(.*\), /.*host-float32-.*\.so$", host.status())


@pytest.mark.parametrize(
    ("mask", "parent", "environment", "want"),
    [
        ({0, 1, 2, 3}, {0, 1, 2, 3}, {"OMP_NUM_THREADS": "3"}, 3),
        ({0, 1}, {0, 1, 2, 3}, {"OMP_NUM_THREADS": "8"}, 2),
        ({0, 1, 2, 3}, {0, 1, 2, 3}, {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({2, 3}, {0, 1, 2, 3}, {"MPI_LOCALNRANKS": "2"}, 2),
        ({0, 1, 2, 3}, {0, 1, 2, 3}, {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 1),
        ({0, 1, 2, 3}, set(range(64)), {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_CPUS_ON_NODE": "4"}, 1),
        ({0, 1, 2, 3}, set(), {}, 4),
    ],
)
def test_threads_never_oversubscribe(mask, parent, environment, want, monkeypatch):
    for name in (*cores.LOCAL_RANKS, "OMP_NUM_THREADS", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cores, "_cpus", lambda pid: mask if pid == 0 else parent)
    monkeypatch.setattr(cores, "_cores", len)
    assert cores.threads.__wrapped__()[0] == want


BOUND = """
import os
import numpy as np
from ringmpi.tiles import host
many = len(os.sched_getaffinity(0))
assert host.available(np.float32) is None
print(host.threads() == min(2, many), many)
"""


def test_bound_threads_are_as_many_as_asked_for():
    """OpenMP binds the thread that loads the library to its first place: the affinity mask is then of that thread alone."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_PROC_BIND": "spread", "OMP_PLACES": "cores"}
    done = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split()[:1] == ["True"], done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------------- machine code

PRODUCTS = ("score", "add_values", "weights", "add_rows", "add_keys")
MULTIPLY_ADD = re.compile(r"v?fn?m(add|la)|fml[as]|v?mulp[sd]|vdpbf16ps|bfdot")
ON_STACK = re.compile(r"([xyz]mm\d|\bq\d).*(\(%r[sb]p\)|\[sp)|(\(%r[sb]p\)|\[sp).*([xyz]mm\d|\bq\d)")


def loops(listing):
    """(function, instructions) of every innermost loop in a disassembly."""
    for part in re.split(r"\n(?=[0-9a-f]+ <)", listing):
        head = re.match(r"[0-9a-f]+ <(.*)>:", part)
        lines = [(int(a, 16), text) for a, text in re.findall(r"^\s+([0-9a-f]+):\s+(.*)$", part, re.M)]
        where = {address: i for i, (address, _) in enumerate(lines)}
        found = []
        for i, (address, text) in enumerate(lines):
            jump = re.match(r"(?:j\w+|b\.\w+|cbn?z\s+\w+,)\s+(?:\w+, )?([0-9a-f]+) <", text)
            if head and jump and int(jump[1], 16) in where and int(jump[1], 16) <= address:
                found.append((where[int(jump[1], 16)], i))
        for a, b in found:
            if not any((c, d) != (a, b) and a <= c and d <= b for c, d in found):
                yield head[1], [text for _, text in lines[a : b + 1]]


def products(library):
    """The loops of products in a library: (function, instructions)."""
    listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True).stdout
    for function, body in loops(listing):
        if function.startswith(PRODUCTS) and sum(bool(MULTIPLY_ADD.match(line)) for line in body) >= 8:
            assert not [line for line in body if ON_STACK.search(line)], f"{function} spills"
            yield function, body


@pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump")
@pytest.mark.parametrize("real", native.REALS)
def test_product_loops_touch_no_stack(real):
    seen = {function for function, _ in products(native.library(real))}
    assert {"score_reals3", "add_values_reals3", "weights3", "add_rows2", "add_keys2"} <= seen


@pytest.mark.skipif(not shutil.which("objdump") or platform.machine() != "x86_64", reason="no objdump, or not for x86-64")
def test_products_of_bfloat16_are_dot_products(tmp_path):
    """24 of them a step, for AVX512-BF16: seen in its machine code, which this processor may not run."""
    line = [*native.compiler(), *native.FLAGS, "-march=x86-64-v4", "-mavx512bf16", "-DREAL=float", str(native.sources() / "tile.c")]
    done = subprocess.run([*line, "-o", str(tmp_path / "x.so"), "-lm"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the compiler does not know AVX512-BF16: {done.stderr[-200:]}")
    dots = [(function, sum(line.startswith("vdpbf16ps") for line in body)) for function, body in products(tmp_path / "x.so")]
    assert {("score_pairs3", 24), ("add_values_pairs3", 24)} <= set(dots)
    assert not any(number for function, number in dots if "pairs" not in function)
