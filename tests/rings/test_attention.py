"""Whole rings on real MPI: exact forward and backward, whatever the mask, layout, schedule and dtype."""
import random
import time

import numpy as np
import pytest
from oracle import MASKS, SCORES, close, problem, real

import ringmpi
from ringmpi import Custom, Mask, RingAttention, Score, tiles
from ringmpi.schedule import double

LAYOUTS = ("contiguous", "zigzag", "striped")
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
pytestmark = pytest.mark.mpi(min_size=1)


def schedules(size):
    return ["ring", "bidirectional", *(double(size // local, local) for local in range(1, size + 1) if size % local == 0)]


def solve(ring, given, mask="full", score=None, layout="contiguous", schedule="ring"):
    """out, lse, dq, dk, dv (, dsinks) of this rank's rows, and which rows those are of the whole results."""
    attn = RingAttention(ring, (given.q.shape[1], given.k.shape[1]), mask=mask, score=score, layout=layout, schedule=schedule)
    q, dout = attn.shard(given.q), attn.shard(given.dout)
    k, v = attn.shard(given.k, kv=True), attn.shard(given.v, kv=True)
    out, lse = attn.forward(q, k, v, given.sinks)
    mine, its = attn.positions, attn.kv_positions
    at = [np.s_[:, mine], np.s_[..., mine], np.s_[:, mine], np.s_[:, its], np.s_[:, its], np.s_[:]]
    return [out, lse, *attn.backward(dout, q, k, v, out, lse, given.sinks)], at


def right(ring, given, want, floor=0.0, **plan):
    """This rank's rows are within the bounds; the bound is of the whole result's largest value."""
    got, at = solve(ring, given, **plan)
    for name, mine, whole, rows in zip(NAMES, got, want, at):
        reference = np.asarray(whole)[rows]
        largest = np.abs(np.where(np.isfinite(whole), whole, 0)).max(initial=0)
        if reference.size:
            close(mine, reference, name, floor=max(floor, largest))


@pytest.mark.parametrize("rules", MASKS)
def test_exact(ring, rules):
    given = problem(101, sinks=True)
    want = given.solve(MASKS[rules])
    for i, plan in enumerate(schedules(ring.size), ring.size + list(MASKS).index(rules)):
        right(ring, given, want, mask=MASKS[rules], layout=LAYOUTS[i % 3], schedule=plan)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtypes(ring, dtype, layout):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    given = problem(131, dtype=getattr(ml_dtypes, dtype, dtype), dim=16)
    out, lse = ringmpi.attention_reference(*given[:3], mask="causal")
    rounded = out.astype(given.q.dtype)
    attn = RingAttention(ring, 131, mask="causal", layout=layout)
    q, k, v, dout = (attn.shard(x) for x in given[:4])
    mine, its = attn.forward(q, k, v)
    assert mine.dtype == given.q.dtype and its.dtype == (np.float64 if dtype == "float64" else np.float32)
    close(attn.unshard(mine), out, "out")
    close(attn.unshard(its, axis=2), lse, "lse")
    want = ringmpi.attention_reference_backward(given.dout, *given[:3], rounded, lse, mask="causal")
    for name, got, reference in zip(NAMES[2:], attn.backward(dout, q, k, v, attn.shard(rounded), attn.shard(lse, axis=2)), want):
        assert got.dtype == given.q.dtype
        close(attn.unshard(got), reference, name)


@pytest.mark.parametrize("score", SCORES)
def test_scores(ring, score):
    given, rules = problem(67, 89, sinks=True), Mask(causal=True, window=(30, 9))
    right(ring, given, given.solve(rules, SCORES[score]), mask=rules, score=SCORES[score], layout="zigzag", schedule="bidirectional")


@pytest.mark.parametrize(("queries", "keys"), [(50, 91), (91, 50), (3, 40), (1, 1), (0, 4), (4, 0)])
def test_lengths(ring, queries, keys):
    given = problem(queries, keys, batch=1)
    for layout in LAYOUTS:
        right(ring, given, given.solve("causal"), floor=1.0, mask="causal", layout=layout)


def test_a_rank_holds_nothing(ring):
    given, last = problem(31), ring.size - 1
    rows = Custom([31 * (rank == last) for rank in range(ring.size)])
    keys = Custom([31 * (rank == 0) for rank in range(ring.size)])
    for plan in schedules(ring.size):
        right(ring, given, given.solve("causal"), mask="causal", layout=(rows, keys), schedule=plan)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_extreme_scores(ring, dtype):
    """lse of 800, one visible key of score -60,000, logits near +-20,000, rows that see nothing: against longdouble."""
    given = problem(41, batch=1, dtype=dtype)
    q, k = given.q.copy(), given.k.copy()
    q[:, :, 0] *= 20000 / np.abs(q[:, :, 0]).max()
    q[:, 7, 1], k[:, 3, 0] = -60000 / 8, 1
    for rules, score in ((Mask(causal=True, kv_range=[(3, 30)]), Score(scale=1.0)), ("full", Score(scale=0.04))):
        hard = given._replace(q=q.astype(dtype), k=k.astype(dtype))
        want = hard.solve(rules, score, dtype=np.longdouble)
        dense = hard.solve(rules, score, dtype=dtype)
        got, at = solve(ring, hard, mask=rules, score=score, layout="zigzag")
        for name, mine, whole, plain, rows in zip(NAMES, got, want, dense, at):
            finite = np.isfinite(whole)
            error = np.abs((plain - whole)[finite]).max(initial=0)
            largest = np.abs(np.where(finite, whole, 0)).max(initial=0)
            base = {"float64": 1e-13, "float32": 5e-6}[dtype]
            reference = whole[rows]
            assert (np.isneginf(mine) == np.isneginf(reference)).all() and not np.isnan(mine).any(), name
            off = np.abs((mine - reference)[np.isfinite(reference)]).max(initial=0)
            assert off <= base * largest + 2 * error, f"{name}: {off} over {base * largest} + 2 x {error}"


def test_real_data(ring):
    given, lse_causal, every8 = real(2048)
    attn = RingAttention(ring, 2048, mask="causal", layout="zigzag")
    out, lse = attn.forward(*(attn.shard(x) for x in given))
    assert abs(attn.unshard(lse, axis=2) - lse_causal).max() < 1e-5
    close(attn.unshard(out)[:, ::8], every8.astype(np.float64), "out", roundings=2)


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_any_ring_order(comm, order):
    ranks = list(range(comm.size))[::-1] if order == "reversed" else random.Random(comm.size).sample(range(comm.size), comm.size)
    given = problem(61)
    with ringmpi.Ring(comm, order=ranks, timeout=10) as ring:
        assert ring.order == tuple(ranks) and ring.rank == comm.rank
        for plan in schedules(comm.size):
            right(ring, given, given.solve("causal"), mask="causal", layout="zigzag", schedule=plan)


def test_bits_do_not_depend_on_timing(ring):
    """Random delays on every rank, in every tile."""
    given = problem(101, dtype=np.float32)
    tile = tiles.tile("auto", given.q)
    plain = tile.forward

    def slow(*arguments):
        for piece in plain(*arguments):
            time.sleep(random.random() * 0.003)
            yield piece

    for plan in schedules(ring.size):
        first, _ = solve(ring, given, mask="causal", layout="zigzag", schedule=plan)
        tile.forward = slow
        try:
            again, _ = solve(ring, given, mask="causal", layout="zigzag", schedule=plan)
        finally:
            tile.forward = plain
        assert all(x.tobytes() == y.tobytes() for x, y in zip(first, again))


def test_large_blocks(ring):
    """Blocks of over 1 MiB go by rendezvous, where a buffer that is used too early shows."""
    given = problem(1501 * ring.size, dtype=np.float32, heads=2, kv_heads=2, dim=64, v_dim=64, batch=1)
    rules = Mask(causal=True, window=(200, 0), keep_first=3)
    attn = RingAttention(ring, given.q.shape[1], mask=rules, layout="striped", schedule="bidirectional")
    q, k, v, dout = (attn.shard(x) for x in given[:4])
    out, lse = attn.forward(q, k, v)
    gradients = attn.backward(dout, q, k, v, out, lse)
    rows = slice(0, 700)
    sub = type(given)(*(x[:, rows] for x in given[:4]))
    want = sub.solve(rules)
    close(attn.unshard(out)[:, rows], want[0], "out")
    dq, dk, _ = (attn.unshard(x) for x in gradients)
    close(dq[:, rows], want[2], "dq")
    assert np.isfinite(dk).all()


def test_one_call(comm):
    given, n = problem(17 * comm.size), comm.rank
    counts = [17 + 5 * (-1) ** rank if rank < comm.size - comm.size % 2 else 17 for rank in range(comm.size)]
    held = slice(sum(counts[:n]), sum(counts[: n + 1]))
    out, lse = ringmpi.ring_attention(*(x[:, held] for x in given[:3]), comm, mask="causal")
    want = given.solve("causal")
    close(out, want[0][:, held], "out", floor=np.abs(want[0]).max())
    gradients = ringmpi.ring_attention_backward(*(x[:, held] for x in (given.dout, *given[:3])), out, lse, comm, mask="causal")
    for got, whole in zip(gradients, want[2:]):
        close(got, whole[:, held], "gradient", floor=np.abs(whole).max())
