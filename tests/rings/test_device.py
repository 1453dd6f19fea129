"""Whole rings on device arrays: the kernels on the emulator and a device that does its work late, or a GPU (``RINGMPI_GPU=1``); real MPI.

The device fails the test if MPI is handed a buffer whose last work was not waited for, or if work is started on a buffer
that MPI still has. Work that nobody waits for never runs, so a forgotten wait also gives wrong numbers.
"""
import os

import numpy as np
import pytest
from emulator.device import Device, at_hand, pretend

import ringmpi
from ringmpi import gpu
from ringmpi.tiles import cuda, registry

# A real device's memory is given only to an MPI that takes it.
WAYS = [True, False] if os.environ.get("RINGMPI_GPU") != "1" or gpu.awareness().aware else [False]
KINDS = ("forward", "backward_dq", "backward_dkdv")
NAMES = [(row.file, row.name) for row in (registry.find(kind, "bfloat16", 64, 64) for kind in KINDS)]
NAMES += [("rows.cu", name) for name in ("clip", "delta<__nv_bfloat16>", "finish<__nv_bfloat16>")]


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


def on_ring(comm, device, aware, arrays, sinks=None, **rules):
    """out, lse, dq, dk, dv of the whole sequence, by a ring of device arrays; and the ring's orders of launches."""
    with ringmpi.Ring(comm) as ring:
        ring._spaces["ringmpi.tiles.cuda"] = cuda.Space(aware)
        if isinstance(device, Device):
            ring._seats = Watched(ring._seats, device)
        attn = ringmpi.RingAttention(ring, arrays[0].shape[1], **rules)
        q, k, v, dout = (device.asarray(attn.shard(x)) for x in arrays)
        sinks = None if sinks is None else device.asarray(sinks)
        out, lse = attn.forward(q, k, v, sinks)
        gradients = attn.backward(dout, q, k, v, out, lse, sinks)
        assert all(isinstance(x, device.ndarray) for x in (out, lse, *gradients[:3]))
        whole = [attn.unshard(x.get()) for x in (out, *gradients[:3])]
        return [whole[0], attn.unshard(lse.get(), axis=2), *whole[1:]]


def reference(arrays, **rules):
    q, k, v, dout = (x.astype(float) for x in arrays)
    out, lse = ringmpi.attention_reference(q, k, v, **rules)
    return [out, lse, *ringmpi.attention_reference_backward(dout, q, k, v, out, lse, **rules)]


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("aware", WAYS, ids=lambda aware: "direct" if aware else "staged")
@pytest.mark.parametrize("rules", [
    {"mask": "causal", "layout": "zigzag"},
    {"mask": ringmpi.Mask(causal=True, window=(19, 0)), "layout": "striped", "schedule": "bidirectional"},
    {},
], ids=["zigzag", "window", "full"])  # fmt: skip
def test_ring_of_devices(comm, device, aware, rules):
    arrays = given(comm, "bfloat16", 67, (4, 2), (40, 24))
    got = on_ring(comm, device, aware, arrays, **rules)
    want = reference(arrays, mask=rules.get("mask", "full"))
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want):
        error = np.abs(x.astype(float) - y).max()
        # bfloat16 has 8 bits: an ulp of the result, and p and ds rounded on the way.
        assert error < (2e-6 * max(1, np.abs(y).max()) if name == "lse" else 2.0**-7 * np.abs(y).max()), (name, error)


@pytest.mark.mpi(min_size=2)
def test_what_ranks_hold_may_be_nothing(comm, device):
    arrays = given(comm, "bfloat16", 33, (2, 1), (16, 16))
    counts = [0] * (comm.size - 1) + [33]
    got = on_ring(comm, device, False, arrays, layout=ringmpi.Custom(counts), mask="causal")
    want = reference(arrays, mask="causal")
    assert np.abs(got[0].astype(float) - want[0]).max() < 2.0**-7 * np.abs(want[0]).max()
    assert np.abs(got[3].astype(float) - want[3]).max() < 2.0**-7 * np.abs(want[3]).max()


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
