"""Decoding with a cache that is spread over the ranks, against dense attention over all of it."""
import numpy as np
import pytest
from oracle import MASKS, SCORES, close, problem

import ringmpi
from ringmpi import Custom, Mask, Ring, RingAttention, Score, Striped, Zigzag, attention_reference, decode
from ringmpi.layout import positions

RULES = {
    "full": {},
    "causal": {"mask": "causal"},
    "a window smaller than a block": {"mask": Mask(causal=True, window=(3, 0), keep_first=2)},
    "lengths": {"mask": Mask(causal=True, kv_range=[60, 0])},
    "score": {"score": SCORES["all"]},
    "documents and score": {"mask": Mask(causal=True, documents=([0, 2, 4], [0, 40, 101])), "score": SCORES["all"]},
}


def uneven(size):
    """Counts over 101 keys, the second rank's zero."""
    counts = np.diff((101 * np.linspace(0, 1, size + 1) ** 2).astype(int))
    if size > 1:
        counts[0] += counts[1]
        counts[1] = 0
    return Custom(counts.tolist())


def held(layout, comm):
    return positions(layout.partition(101, comm.size)[comm.rank])


def check(got, p, what, **rules):
    want = attention_reference(p.q, p.k, p.v, sinks=p.sinks, **rules)
    for name, x, y in zip(("out", "lse"), got, want):
        close(x, y, f"{what}: {name}")


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("queries", [1, 4])
def test_dense_attention(ring, comm, rules, queries):
    given = RULES[rules]
    if "documents" in rules and queries == 1:
        given = {**given, "mask": Mask(causal=True, documents=([0, 0, 1], [0, 40, 101]))}
    p = problem(queries, 101, sinks=True)
    for layout in (uneven(comm.size), Zigzag(), Striped()):
        mine = held(layout, comm)
        got = decode(p.q, p.k[:, mine], p.v[:, mine], ring, positions=mine, sinks=p.sinks, **given)
        check(got, p, layout, **given)
    mine = held(uneven(comm.size), comm)
    check(decode(p.q, p.k[:, mine], p.v[:, mine], ring, sinks=p.sinks, **given), p, "in order of rank", **given)


@pytest.mark.mpi(min_size=1)
def test_a_communicator_or_a_ring_in_any_order(comm):
    p, mine = problem(1, 101), held(uneven(comm.size), comm)
    want = decode(p.q, p.k[:, mine], p.v[:, mine], comm, mask="causal")
    check(want, p, "communicator", mask="causal")
    with Ring(comm, order=list(range(comm.size))[::-1]) as ring:
        got = decode(p.q, p.k[:, mine], p.v[:, mine], ring, mask=MASKS["narrow window"])
        check(got, p, "order", mask=MASKS["narrow window"])


@pytest.mark.mpi(min_size=1)
def test_bit_for_bit_the_same_again_and_on_all_ranks(ring, comm):
    p, mine = problem(3, 101, dtype=np.float32), held(Striped(), comm)
    results = [decode(p.q, p.k[:, mine], p.v[:, mine], ring, positions=mine, mask="causal") for _ in range(5)]
    assert len({out.tobytes() + lse.tobytes() for out, lse in results}) == 1
    assert len(set(comm.allgather(results[0][0].tobytes()))) == 1


@pytest.mark.mpi(min_size=1)
def test_nothing_is_held_anywhere(ring):
    p = problem(2, 0)
    out, lse = decode(p.q, p.k, p.v, ring)
    assert (out == 0).all() and np.isneginf(lse).all()


@pytest.mark.mpi(min_size=2)
def test_scores_so_far_apart_that_a_rank_adds_nothing(ring, comm):
    p, mine = problem(1, 101, dtype=np.float32, scale=30), held(Zigzag(), comm)
    out, lse = decode(p.q, p.k[:, mine], p.v[:, mine], ring)
    want = attention_reference(p.q, p.k, p.v)
    close(out, want[0], "out", base=5e-5)
    assert np.isfinite(lse).all()


@pytest.mark.mpi(min_size=1)
def test_a_cache_that_a_prefill_left_and_that_grows(ring, comm):
    length, more, window = 61, 7, Mask(causal=True, window=(9, 0))
    p = problem(length + more)
    attn = RingAttention(ring, length, mask="causal", layout="zigzag")
    mine = attn.positions
    before = attn.unshard(attn.forward(*(x[:, mine] for x in p[:3]))[0])
    want = {mask: attention_reference(*p[:3], mask=mask) for mask in ("causal", window)}
    close(before, want["causal"][0][:, :length], "prefill")
    for now in range(length, length + more):
        if now % comm.size == comm.rank:
            mine = np.append(mine, now)
        for mask, (out, lse) in want.items():
            got = decode(p.q[:, [now]], p.k[:, mine], p.v[:, mine], ring, positions=mine, mask=mask)
            close(got[0], out[:, [now]], f"token {now}, {mask}: out")
            close(got[1], lse[:, :, [now]], f"token {now}, {mask}: lse")


def wrong(rank, mine):
    """What one rank is given wrongly, and the words all ranks then say."""
    return {
        "dtype": ({"q": mine["q"].astype(np.float32)}, TypeError, f"decode, rank {rank}: k is float64, q float32"),
        "batch": ({name: x[:1] for name, x in mine.items()}, ValueError, f"rank {rank} was given batch 1|rank 0 was given batch 2"),
        "queries": ({"q": mine["q"][:, :1]}, ValueError, "was given queries"),
        "mask": ({"mask": "causal"}, ValueError, "was given mask"),
        "unknown mask": ({"mask": "cozy"}, ValueError, f"decode, rank {rank}: no mask is called 'cozy'"),
        "score": ({"score": Score(scale=2.0)}, ValueError, "was given score"),
        "positions": ({"positions": np.arange(mine["k_cache"].shape[1])}, ValueError, "was given positions"),
        "shape": ({"v_cache": mine["v_cache"][..., :0, :]}, ValueError, f"decode, rank {rank}: v has shape"),
        "nothing": ({"k_cache": None}, TypeError, f"decode, rank {rank}: a builtins.NoneType"),
    }


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", wrong(0, {"q": np.ones((2, 2, 1, 1)), **dict.fromkeys(("k_cache", "v_cache"), np.ones((2, 1, 1, 1)))}))
def test_what_one_rank_does_wrong_all_raise_and_go_on(ring, comm, what):
    p, rows = problem(3, 101), held(uneven(comm.size), comm)
    mine = {"q": p.q, "k_cache": p.k[:, rows], "v_cache": p.v[:, rows]}
    change, error, words = wrong(comm.size - 1, mine)[what]
    with pytest.raises(error, match=words):
        decode(**{**mine, **(change if comm.rank == comm.size - 1 else {})}, comm=ring)
    check(decode(**mine, comm=ring), p, "the same ring again")


@pytest.mark.mpi(min_size=2)
def test_a_position_that_two_ranks_hold(ring, comm):
    cache = np.ones((1, 1, 1, 4))
    with pytest.raises(ValueError, match=r"position 0 .* held more than once"):
        decode(cache, cache, cache, ring, positions=[0])
    assert ringmpi.decode(cache, cache, cache, ring)[0].shape == cache.shape


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come(comm):
    x = np.ones((1, 1, 1, 4))
    ring = Ring(comm, timeout=1)
    if comm.rank == comm.size - 1:
        comm.Barrier()
    else:
        with pytest.raises(ringmpi.RingTimeout) as caught:
            decode(x, x, x, ring)
        assert comm.size - 1 in caught.value.silent
        with pytest.raises(RuntimeError, match="dead since a time-out"):
            decode(x, x, x, ring)
        comm.Barrier()
    ring.close()
