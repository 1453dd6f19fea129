"""Living in somebody else's MPI program, and what happens when a rank is odd, late, dead or gone."""
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from mpi4py import MPI
from oracle import problem

import ringmpi
import ringmpi.tiles.numpy
from ringmpi import RingAttention, RingTimeout, tiles

pytestmark = pytest.mark.mpi(min_size=1)


def everyone_raises(comm, body, error, words, within=5.0):
    began = time.monotonic()
    with pytest.raises(error, match=words) as caught:
        body()
    assert time.monotonic() - began < within
    assert len(set(comm.allgather(str(caught.value)))) == 1


@pytest.mark.parametrize(
    ("odd", "error", "words"),
    [
        ({"dim": 16}, ValueError, "was given head_dim"),
        ({"dtype": "float32"}, TypeError, "was given dtype"),
        ({"dtype": "int32"}, TypeError, "rank 0: q is <i4"),
    ],
)
@pytest.mark.mpi(min_size=2)
def test_one_odd_call_raises_on_all(comm, ring, odd, error, words):
    given = problem(31, **(odd if comm.rank == 0 else {}))
    attn = RingAttention(ring, 31)
    everyone_raises(comm, lambda: attn.forward(*(attn.shard(x) for x in given[:3])), error, words)
    attn.forward(*(attn.shard(x) for x in problem(31)[:3]))


@pytest.mark.mpi(min_size=2)
def test_one_odd_plan_raises_on_all(comm, ring):
    last = comm.rank == comm.size - 1
    words = rf"rank {comm.size - 1} was given|rank 0 was given" if comm.size == 2 else f"rank {comm.size - 1} was given mask"
    everyone_raises(comm, lambda: RingAttention(ring, 31, mask="causal" if last else "full"), ValueError, words)
    layout = "zagzig" if last else "zigzag"
    everyone_raises(comm, lambda: RingAttention(ring, 31, layout=layout), ValueError, f"rank {comm.size - 1}: no layout")


@pytest.mark.mpi(min_size=2)
def test_a_communicator_that_a_rank_is_not_in(comm):
    """Split gives those left out a null communicator: they are told so, and the others make their ring."""
    part = comm.Split(MPI.UNDEFINED if comm.rank == 0 else 1)
    if comm.rank == 0:
        with pytest.raises(TypeError, match="comm is COMM_NULL: this rank is not among those"):
            ringmpi.Ring(part)
    else:
        with ringmpi.Ring(part, timeout=10) as ring:
            assert ring.size == comm.size - 1
        part.Free()


@pytest.mark.mpi(min_size=2)
def test_a_wrong_order_is_refused_on_all(comm):
    order = [0] * comm.size if comm.rank == 0 else list(range(comm.size))
    everyone_raises(comm, lambda: ringmpi.Ring(comm, order=order), ValueError, f"rank 0: an order of {comm.size} ranks holds each once")


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_never_calls_is_named(comm):
    ring = ringmpi.Ring(comm, timeout=1.0)
    attn = RingAttention(ring, 31)
    if comm.rank != comm.size - 1:
        began = time.monotonic()
        with pytest.raises(RingTimeout, match=rf"step 0.*neighbour.*silent in the roll call: rank {comm.size - 1}") as caught:
            attn.forward(*(attn.shard(x) for x in problem(31)[:3]))
        assert caught.value.silent == (comm.size - 1,) and time.monotonic() - began < 5
        with pytest.raises(RuntimeError, match="make a new one"):
            attn.forward(*(attn.shard(x) for x in problem(31)[:3]))
    comm.Barrier()
    ring.close()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_stops_in_the_middle_is_named(comm):
    """Step, block and neighbour are said; the ranks that wait learn of the failure long before the time-out."""
    ring = ringmpi.Ring(comm, timeout=15.0)
    attn = RingAttention(ring, 4001)
    arrays = [attn.shard(x) for x in problem(4001, dim=32, v_dim=32, batch=1)[:3]]
    began = time.monotonic()
    if comm.rank == 0:
        attn.strips = [None]
        with pytest.raises(AttributeError):
            attn.forward(*arrays)
    else:
        try:
            attn.forward(*arrays)
        except RingTimeout as error:
            words = str(error)
            assert "step" in words and "block of rank" in words and "neighbour rank" in words
            assert "stopped by an error of its own: rank 0" in words
    assert time.monotonic() - began < 12
    comm.Barrier()
    ring.close()


@pytest.mark.mpi(min_size=2)
def test_a_rank_in_another_call_raises_on_all(comm, ring):
    attn = RingAttention(ring, 31)
    q, k, v, dout = (attn.shard(x) for x in problem(31)[:4])
    out, lse = attn.forward(q, k, v)
    other = (lambda: attn.unshard(out)) if comm.rank == 0 else lambda: attn.backward(dout, q, k, v, out, lse)
    everyone_raises(comm, other, ValueError, "called .* unshard|called unshard")
    attn.forward(q, k, v)


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_memory_is_named(comm):
    ring = ringmpi.Ring(comm, timeout=20.0)
    attn = RingAttention(ring, 31, tile="numpy")
    arrays = [attn.shard(x) for x in problem(31)[:3]]
    if comm.rank == 0:
        ring.space(tiles.numpy).empty = lambda nbytes: np.empty(10**18)
    began = time.monotonic()
    with pytest.raises(MemoryError if comm.rank == 0 else RingTimeout, match=None if comm.rank == 0 else "error of its own: rank 0"):
        attn.forward(*arrays)
    assert time.monotonic() - began < 10
    comm.Barrier()
    ring.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("timeout", [0, -3, "soon", None, float("nan")])
def test_a_time_out_that_is_none_is_refused_on_all(comm, timeout):
    given = timeout if comm.rank == 0 else 10
    everyone_raises(comm, lambda: ringmpi.Ring(comm, timeout=given), ValueError, "rank 0: timeout is .*; it must be a number of sec")


def test_lengths_that_change_do_not_add_up(comm, ring, monkeypatch):
    """A datatype is made for every length of a message, and few are kept."""
    monkeypatch.setattr(ringmpi.comm, "TYPES", 8)
    x = np.zeros((1, 40, 1, 1), np.float16)
    for length in range(40):
        rows = [length] * (comm.rank == 0) or [1]
        out, _ = ringmpi.ring_attention(*[x[:, : rows[0]]] * 3, ring)
    assert not out.any() and len(ring._seats._types) <= 8


def test_a_rank_that_holds_nothing_unshards(comm, ring):
    x = np.arange(31.0).reshape(31, 1)
    attn = RingAttention(ring, 31, layout=ringmpi.Custom([31 * (rank == comm.size - 1) for rank in range(comm.size)]))
    assert (attn.unshard(attn.shard(x, 0), 0) == x).all()


@pytest.mark.mpi(min_size=2)
def test_a_ring_that_not_all_come_to_make(comm):
    half = comm.Dup()
    if comm.rank:
        with pytest.raises(RingTimeout, match=f"not all of {comm.size} ranks came"):
            ringmpi.Ring(half, timeout=1.0)
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_the_callers_messages_and_wildcards_stay_its_own(comm, ring):
    """A host code's wildcard receive on its own communicator sees none of the ring's messages, and the ring none of its."""
    attn = RingAttention(ring, 31)
    inbox, right = np.empty(1), (comm.rank + 1) % comm.size
    request = comm.Irecv(inbox, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    attn.forward(*(attn.shard(x) for x in problem(31)[:3]))
    assert not request.Test()
    comm.Barrier()
    comm.Send(np.full(1, 7.0 + comm.rank), right, tag=0)
    request.Wait()
    assert inbox[0] == 7.0 + (comm.rank - 1) % comm.size


def test_subcommunicators(comm):
    """Two rings at once on the two halves of a communicator that was split by the host code."""
    half = comm.Split(comm.rank % 2, -comm.rank)
    given = problem(23)
    with ringmpi.Ring(half, timeout=10) as ring:
        attn = RingAttention(ring, 23, mask="causal")
        out, _ = attn.forward(*(attn.shard(x) for x in given[:3]))
        assert abs(attn.unshard(out) - given.solve("causal")[0]).max() < 1e-13
    half.Free()


def test_the_callers_communicator_sees_one_ibarrier_and_one_split(comm):
    called = []

    class Watched:
        def __getattr__(self, name):
            thing = getattr(comm, name)
            return (lambda *given: called.append(name) or thing(*given)) if callable(thing) else thing

    with ringmpi.Ring(Watched(), timeout=10) as ring:
        RingAttention(ring, 31).forward(*np.ones((3, 1, len(RingAttention(ring, 31).positions), 1, 2)))
    assert called == ["Ibarrier", "Split"]


def test_a_fatal_communicator_becomes_one_that_raises(comm):
    comm.Set_errhandler(MPI.ERRORS_ARE_FATAL)
    with ringmpi.Ring(comm, timeout=10) as ring:
        assert ring._seats._comm.Get_errhandler() == MPI.ERRORS_RETURN
    assert comm.Get_errhandler() == MPI.ERRORS_ARE_FATAL
    comm.Set_errhandler(MPI.ERRORS_RETURN)


def test_rings_are_freed(comm):
    """MPICH has 2,046 communicators: making more rings than that must work."""
    many = comm.size == 2 and "MPICH" in MPI.Get_library_version()
    for _ in range(2100 if many else 50):
        ringmpi.Ring(comm, timeout=10).close()


def test_nothing_is_left_of_a_ring_that_is_closed_twice(comm):
    ring = ringmpi.Ring(comm, timeout=10)
    ring.close()
    ring.close()
    with pytest.raises(RuntimeError, match="closed"):
        RingAttention(ring, 5)


PROGRAM = """
import mpi4py
mpi4py.rc.initialize = False
import ringmpi
from mpi4py import MPI
assert not MPI.Is_initialized()
MPI.Init()
ring = ringmpi.Ring(MPI.COMM_SELF)
out, lse = ringmpi.RingAttention(ring, 3).forward(*__import__("numpy").ones((3, 1, 3, 1, 2)))
MPI.Finalize()
ring.close()
ring.close()
print("well")
"""


@pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="a program of its own: started once")
def test_import_initialises_nothing_and_close_after_finalize_is_nothing(comm):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "OMPI_COMM", "PMIX", "PRTE", "HYDRA"))}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=20, env=env, check=False)
    assert done.stdout == "well\n", done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_messages_over_two_gibibytes(comm):
    """One element of a contiguous type: no count overflows, in either MPI."""
    if comm.size > 2:
        return
    rows = (1 << 31) // (64 * 2 * 4) + 3
    x = np.zeros((1, rows, 1, 64), np.float32)
    x[0, -1] = 1 + comm.rank
    with ringmpi.Ring(comm, timeout=120) as ring:
        attn = RingAttention(ring, 2 * rows, mask=ringmpi.Mask(window=(rows, rows), kv_range=[(2 * rows - 1, 2 * rows)]))
        out, _ = attn.forward(x, x, x)
    assert (out[0, -1] == 2).all()
