"""Whole rings on device arrays: the kernels on the emulator and a device that does its work late, or a GPU (``RINGMPI_GPU=1``); real MPI.

The device fails the test if MPI is handed a buffer, or a piece of its copy in host memory, whose last work was not waited for; if work
is started on what MPI still has; or if work runs before what it needs. Work that nobody waits for never runs, so a forgotten
wait also gives wrong numbers.
"""
import os
import re

import numpy as np
import pytest
from emulator.device import Device, at_hand, pretend
from emulator.foreign import ByDlpack, ByInterface
from mpi4py import MPI

import ringmpi
from ringmpi import gpu
from ringmpi.comm import memory_kinds
from ringmpi.tiles import cuda, registry, staging

AWARE = getattr(gpu.decide(gpu.evidence(memory_kinds(MPI.COMM_WORLD))), "aware", False)
# Pieces that divide nothing, and one that is longer than any message.
PIECES, WHOLE = 1000, 1 << 22
KINDS = ("forward", "backward_dq", "backward_dkdv")
DTYPES = ("bfloat16", "float16", "float32", "float64")
NAMES = [(row.file, row.name) for dtype in DTYPES for row in (registry.find(kind, dtype, 40, 24) for kind in KINDS)]
NAMES += [("rows.cu", "clip")]
NAMES += [("rows.cu", f"{name}<{registry.TYPES[dtype]}>") for dtype in DTYPES for name in ("delta", "finish")]
# Of the largest number. Half types have 11 and 8 bits: an ulp of the result, and p and ds rounded on the way.
BOUNDS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2e-6, "float64": 5e-15}
LSE = {"float64": 5e-15}


def ways(*staged):
    """Direct, and staged in pieces of so many bytes. A real device's memory is given only to an MPI that takes it."""
    found = [] if os.environ.get("RINGMPI_GPU") == "1" and not AWARE else [(True, WHOLE)]
    found += [(False, piece) for piece in staged]
    return pytest.mark.parametrize("way", found, ids=lambda way: "direct" if way[0] else f"staged-{way[1]}")


@pytest.fixture
def device(monkeypatch):
    """The module cupy."""
    return at_hand(monkeypatch)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("file", "name"), NAMES)
def test_kernels_are_compiled_once(comm, device, file, name):
    """Not in the time of the tests that use them, nor by every rank."""
    if comm.rank == 0:
        cuda._compiled(0, file, name, 0)
    comm.Barrier()


class Watched:
    """The seats of a ring, telling the device what MPI has."""

    def __init__(self, seats, device):
        self.seats, self.device, self.loans = seats, device, {}

    def __getattr__(self, name):
        return getattr(self.seats, name)

    def _lend(self, request, buffer, written):
        self.loans[id(request)] = self.device.lend(buffer, written), request
        return request

    def send(self, buffer, seat, tag):
        return self._lend(self.seats.send(buffer, seat, tag), buffer, False)

    def receive(self, buffer, seat, tag):
        return self._lend(self.seats.receive(buffer, seat, tag), buffer, True)

    def completed(self, requests):
        kept = [id(request) for request in requests]
        done = self.seats.completed(requests)
        for i in done:
            self.device.give_back(self.loans.pop(kept[i])[0])
        return done


def given(comm, dtype, length, heads, dims, seed=3):
    """The same whole q, k, v, dout on all ranks."""
    import ml_dtypes

    random, kind = np.random.default_rng(seed), np.dtype(getattr(ml_dtypes, dtype, dtype))
    rows = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1])]
    return [random.standard_normal((1, length, *row)).astype(kind) for row in rows]


def on_ring(comm, device, way, arrays, sinks=None, **rules):
    """out, lse, dq, dk, dv of the whole sequence, and dsinks, by a ring of device arrays."""
    with ringmpi.Ring(comm) as ring:
        ring._spaces["ringmpi.tiles.cuda"] = cuda.Space(*way)
        if isinstance(device, Device):
            ring._seats = Watched(ring._seats, device)
        attn = ringmpi.RingAttention(ring, arrays[0].shape[1], **rules)
        q, k, v, dout = (device.asarray(attn.shard(x)) for x in arrays)
        sinks = None if sinks is None else device.asarray(sinks)
        out, lse = attn.forward(q, k, v, sinks)
        gradients = attn.backward(dout, q, k, v, out, lse, sinks)
        assert all(isinstance(x, device.ndarray) for x in (out, lse, *gradients[:3]))
        whole = [attn.unshard(x.get()) for x in (out, *gradients[:3])]
        return [whole[0], attn.unshard(lse.get(), axis=2), *whole[1:], *(x.get() for x in gradients[3:])]


def reference(arrays, **rules):
    q, k, v, dout = (x.astype(float) for x in arrays)
    out, lse = ringmpi.attention_reference(q, k, v, **rules)
    return [out, lse, *ringmpi.attention_reference_backward(dout, q, k, v, out, lse, **rules)]


def check(arrays, got, **rules):
    dtype = arrays[0].dtype.name
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), got, reference(arrays, **rules)):
        bound = LSE.get(dtype, 2e-6) if name == "lse" else BOUNDS[dtype]
        error = np.abs(x.astype(float) - y).max() / max(1, np.abs(y).max())
        assert error < bound, (dtype, name, error)


@pytest.mark.mpi(min_size=1)
@ways(PIECES)
@pytest.mark.parametrize("rules", [
    {"mask": "causal", "layout": "zigzag"},
    {"mask": ringmpi.Mask(causal=True, window=(19, 0)), "layout": "striped", "schedule": "bidirectional"},
    {},
], ids=["zigzag", "window", "full"])  # fmt: skip
def test_ring_of_devices(comm, device, way, rules):
    arrays = given(comm, "bfloat16", 67, (4, 2), (40, 24))
    check(arrays, on_ring(comm, device, way, arrays, **rules), mask=rules.get("mask", "full"))


@pytest.mark.mpi(min_size=1)
@ways(PIECES)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_ring_of_every_dtype(comm, device, way, dtype):
    if comm.size > 4:
        pytest.skip("the bounds are the same for 1 to 4 ranks")
    arrays = given(comm, dtype, 45, (2, 1), (40, 24))
    check(arrays, on_ring(comm, device, way, arrays, mask="causal", layout="zigzag"), mask="causal")


@pytest.mark.mpi(min_size=1)
def test_blocks_shorter_than_a_piece(comm, device):
    arrays = given(comm, "float32", 23, (2, 1), (40, 24))
    check(arrays, on_ring(comm, device, (False, WHOLE), arrays))


@pytest.mark.mpi(min_size=1)
def test_sinks_of_devices(comm, device):
    arrays, sinks = given(comm, "float32", 23, (2, 1), (40, 24)), np.array([0.5, -1], np.float32)
    check(arrays, on_ring(comm, device, (False, PIECES), arrays, sinks), sinks=sinks)


@pytest.mark.mpi(min_size=2)
def test_what_ranks_hold_may_be_nothing(comm, device):
    arrays = given(comm, "bfloat16", 33, (2, 1), (16, 16))
    counts = [0] * (comm.size - 1) + [33]
    check(arrays, on_ring(comm, device, (False, PIECES), arrays, layout=ringmpi.Custom(counts), mask="causal"), mask="causal")


@pytest.mark.mpi(min_size=1)
def test_decode_from_devices(comm, device):
    arrays = [x[:, :9] for x in given(comm, "bfloat16", 9 + comm.rank, (4, 2), (40, 24), seed=5 + comm.rank)]
    with ringmpi.Ring(comm) as ring:
        ring._spaces["ringmpi.tiles.cuda"] = cuda.Space(False)
        for step in range(3):
            q = given(comm, "bfloat16", 1, (4, 2), (40, 24), seed=step)[0]
            want, want_lse = ringmpi.decode(q, *arrays[1:3], ring)
            out, lse = ringmpi.decode(*map(device.asarray, (q, *arrays[1:3])), ring)
            assert np.abs(lse.get() - want_lse).max() < 1e-5
            assert np.abs(out.get().astype(float) - want.astype(float)).max() < 2.0**-7 * np.abs(want.astype(float)).max()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [ByInterface, ByDlpack])
def test_arrays_of_other_libraries(comm, monkeypatch, kind):
    """Those of Numba, PyTorch and JAX, whose own work on them is still to run, through every pass of a ring."""
    device = pretend(monkeypatch)
    arrays = given(comm, "float32", 45, (2, 1), (40, 24))
    with ringmpi.Ring(comm) as ring, ringmpi.RingAttention(ring, 45, mask="causal", layout="zigzag") as attn:
        ring._spaces["ringmpi.tiles.cuda"] = cuda.Space(True)
        ring._seats = Watched(ring._seats, device)
        q, k, v, dout = (kind(device, attn.shard(x)) for x in arrays)
        out, lse = attn.forward(q, k, v)
        gradients = attn.backward(dout, q, k, v, kind(device, out.get()), kind(device, lse.get()))
        whole = [attn.unshard(x.get()) for x in (out, *gradients)]
        check(arrays, [whole[0], attn.unshard(lse.get(), axis=2), *whole[1:]], mask="causal")
        token = arrays[0][:, :1]
        out, _ = ringmpi.decode(kind(device, token), k, v, ring, positions=attn.kv_positions)
        want, _ = ringmpi.attention_reference(*(x.astype(float) for x in (token, *arrays[1:3])))
        assert np.abs(out.get() - want).max() < 1e-5


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("forgotten", ["ready", "busy"])
def test_a_forgotten_wait_is_found(comm, monkeypatch, forgotten):
    device = pretend(monkeypatch)
    monkeypatch.setattr(cuda.Space, "ready", lambda self, buffer: None)
    if forgotten == "busy":
        monkeypatch.setattr(cuda.Space, "busy", lambda self, buffer: False)
    arrays = given(comm, "bfloat16", 67, (2, 1), (16, 16))
    with ringmpi.Ring(comm) as ring, pytest.raises(AssertionError, match="MPI is given a buffer"):
        attn = ringmpi.RingAttention(ring, 67)
        ring._spaces["ringmpi.tiles.cuda"] = cuda.Space(True)
        attn.forward(*(device.asarray(attn.shard(x)) for x in arrays[:3]))


def without_events(monkeypatch):
    started = staging.Pinned._started
    monkeypatch.setattr(staging.Pinned, "_started", lambda *piece: started(*piece) and None)


def one_piece_for_all(monkeypatch):
    pieces = staging.Pinned.pieces
    first = np.empty(PIECES, np.uint8)
    monkeypatch.setattr(staging.Pinned, "pieces", lambda *a: ((device, first[: len(host)]) for device, host in pieces(*a)))


def nobody_waits_for_copies_up(monkeypatch):
    monkeypatch.setattr(cuda.Space, "touched_on", lambda self, stream, buffer: None)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("bug", "found"), [
    (without_events, "MPI is given a buffer on which work"),
    (one_piece_for_all, "MPI is given a buffer|a buffer that MPI still has"),
    (nobody_waits_for_copies_up, "work has run before"),
], ids=lambda x: getattr(x, "__name__", ""))  # fmt: skip
def test_a_bug_of_staging_is_found(comm, monkeypatch, bug, found):
    device = pretend(monkeypatch)
    bug(monkeypatch)
    # A rank may see that another has failed before it does itself.
    with pytest.raises((AssertionError, ringmpi.RingTimeout)) as error:
        on_ring(comm, device, (False, PIECES), given(comm, "bfloat16", 67, (4, 2), (40, 24)))
    told = comm.allgather(str(error.value))
    assert any(re.search(found, text) for text in told), told
