"""Orders and schedules on real rings, against the dense oracle."""
from __future__ import annotations

import time

import numpy as np
import pytest

import ringmpi
from ringmpi import topology
from ringmpi.topology import measure


def arrays(tokens: int, heads: int = 2, kv_heads: int = 1, dim: int = 8):
    rng = np.random.default_rng(tokens)
    return [rng.standard_normal((1, tokens, h, dim)) for h in (heads, kv_heads, kv_heads, heads)]


def worst_error(ring, tokens: int, mask, layout: str, schedule) -> float:
    """The worst error of this rank's rows of out, lse, dq, dk, dv against dense float64."""
    q, k, v, dout = arrays(tokens)
    out, lse = ringmpi.attention_reference(q, k, v, mask=mask)
    expected = (out, lse, *ringmpi.attention_reference_backward(dout, q, k, v, out, lse, mask=mask))
    attn = ringmpi.RingAttention(ring, tokens, mask=mask, layout=layout, schedule=schedule)
    mine = [attn.shard(x) for x in (q, k, v, dout)]
    found = attn.forward(*mine[:3])
    found = (*found, *attn.backward(mine[3], *mine[:3], *found))
    rows = [2 if name == "lse" else 1 for name in ("out", "lse", "dq", "dk", "dv")]
    return max(float(np.abs(x - attn.shard(e, axis)).max(initial=0)) for x, e, axis in zip(found, expected, rows))


WINDOW = ringmpi.Mask(causal=True, window=(9, 0))
DOCUMENTS = ringmpi.Mask(causal=True, documents=[0, 13, 14, 70, 103])


@pytest.mark.mpi
@pytest.mark.parametrize("schedule", ["multi", "broadcast", "gather"])
def test_schedules_against_the_oracle(ring, schedule):
    for mask, layout in (("full", "contiguous"), ("causal", "zigzag"), (WINDOW, "striped"), (DOCUMENTS, "contiguous")):
        assert worst_error(ring, 103, mask, layout, schedule) < 1e-13


@pytest.mark.mpi
@pytest.mark.parametrize("schedule", ["multi", "broadcast", "gather"])
def test_bits_do_not_depend_on_who_is_late(comm, schedule, monkeypatch):
    """Every rank sleeps at random between its tiles; float32, so that another order of sums shows."""
    from ringmpi.tiles import numpy as tile

    plain, chance = tile.backward, np.random.default_rng(comm.rank)

    def late(*given):
        time.sleep(chance.random() * 0.01)
        yield from plain(*given)

    tokens = 4096
    q, k, v, dout = [x.astype(np.float32) for x in arrays(tokens, dim=4)]
    found = set()
    with ringmpi.Ring(comm) as ring:
        attn = ringmpi.RingAttention(ring, tokens, mask=ringmpi.Mask(causal=True, window=(300, 0)), layout="striped",
                                     schedule=schedule, tile="numpy")  # fmt: skip
        mine = [attn.shard(x) for x in (q, k, v, dout)]
        forward = attn.forward(*mine[:3])
        for sleepy in (False, True, True):
            monkeypatch.setattr(tile, "backward", late if sleepy else plain)
            found.add(b"".join(x.tobytes() for x in attn.backward(mine[3], *mine[:3], *forward)))
    assert len(found) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("schedule", ["broadcast", "gather"])
def test_collectives_are_recorded_and_given_up(comm, schedule, monkeypatch):
    from ringmpi.tiles import numpy as tile

    q, k, v, dout = arrays(103)
    with ringmpi.Ring(comm, timeout=20) as ring:
        attn = ringmpi.RingAttention(ring, 103, schedule=schedule)
        mine = [attn.shard(x) for x in (q, k, v, dout)]
        with attn.record() as trace:
            forward = attn.forward(*mine[:3])
        assert [hop.kind for hop in trace.hops] == ["block"] * (comm.size if schedule == "broadcast" else 1)
        with attn.record() as trace:
            attn.backward(mine[3], *mine[:3], *forward)
        assert sorted(hop.owner for hop in trace.hops if hop.kind == "home") == list(range(comm.size))
    with ringmpi.Ring(comm, timeout=20) as ring:
        attn = ringmpi.RingAttention(ring, 103, schedule=schedule, tile="numpy")
        if comm.rank == 1:
            monkeypatch.setattr(tile, "forward", broken)
        with pytest.raises(ZeroDivisionError if comm.rank == 1 else ringmpi.RingTimeout, match="" if comm.rank == 1 else "rank 1"):
            attn.forward(*mine[:3])
            attn.backward(mine[3], *mine[:3], *forward)


def broken(*given):
    raise ZeroDivisionError


@pytest.mark.mpi
def test_measured_order(comm):
    how = topology.Measured(nbytes=1 << 16, seconds=5, repeats=2)
    with ringmpi.Ring(comm, order=how, timeout=10) as ring:
        assert sorted(ring.order) == list(range(comm.size))
        assert ring.route.source.startswith("measured") and dict(ring.route.notes)["pairs_measured"] == (comm.size > 1)
        assert len(set(comm.allgather(repr(ring.route)))) == 1
        assert worst_error(ring, 103, "causal", "zigzag", "ring") < 1e-13


class Short:
    """NumPy on a machine without memory."""

    zeros = staticmethod(lambda *given: np.empty(1 << 62, np.uint8))

    def __getattr__(self, name):
        return getattr(np, name)


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_memory_to_measure_with_is_heard_of_on_all(comm, monkeypatch):
    if comm.rank == 1:
        monkeypatch.setattr(measure, "np", Short())
    with pytest.raises(Exception, match="rank 1"):
        ringmpi.Ring(comm, order="measured", timeout=10)


@pytest.mark.mpi(min_size=2)
def test_a_wrong_order_is_refused_on_all_ranks(comm):
    more = comm.size + 1
    for order, words in (([0, *range(comm.size - 1)], "twice"), (ringmpi.Torus((more,)), f"multiply to {more}; there are {comm.size}")):
        with pytest.raises(ValueError, match=words):
            ringmpi.Ring(comm, order=order)
    with pytest.raises(ValueError, match="was given order"):
        ringmpi.Ring(comm, order=topology.Measured(seconds=1 + (comm.rank == 1)))


@pytest.mark.mpi(min_size=2)
def test_an_order_is_saved_and_loaded(comm, tmp_path):
    path = comm.bcast(str(tmp_path / "order.json"))
    backwards = list(range(comm.size))[::-1]
    with ringmpi.Ring(comm, order=backwards) as ring:
        ring.save_order(path)
    with ringmpi.Ring(comm, order=path) as ring:
        assert list(ring.order) == backwards and ring.route.source == f"saved in {path}"
