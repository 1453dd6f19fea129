"""Whether MPI takes device memory: the same on all ranks, whatever each of them finds."""
import sys

import numpy as np
import pytest
from emulator.device import pretend

import ringmpi
from ringmpi import comm as seats
from ringmpi import gpu
from ringmpi.gpu import Evidence
from ringmpi.tiles import cuda

# What the probe does, with host memory.
ECHO = """
import numpy as np
from ringmpi import comm, gpu
give, take = np.arange(3 << 18), np.zeros(3 << 18, int)
comm.echo(give, take)
print(gpu.ARRIVED if (give == take).all() else gpu.MANGLED)"""


def finds(monkeypatch, aware):
    monkeypatch.setattr(gpu, "evidence", lambda *a: [Evidence("library", aware, "it says so")])


@pytest.mark.mpi(min_size=1)
def test_real_libraries_say_what_they_are(comm, ring):
    """The wheels of MPICH and Open MPI take no device memory, and say so."""
    found = {one.source: one for one in gpu.evidence(seats.memory_kinds(comm, comm), {})}
    assert found["library"].aware is False and "MPIX_Query_cuda_support() is 0" in found["library"].words
    assert found["memory kinds"].aware is None
    assert found["memory kinds"].words == f"mpi_memory_alloc_kinds is {comm.Get_info().get('mpi_memory_alloc_kinds') or 'not there'}"
    assert not ring._seats.device_memory(0).aware
    decision, known = seats.device_memory(comm, None)
    assert not decision.aware and len(known) == 4


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("odd", [False, None])
def test_one_rank_that_cannot_is_enough(comm, ring, monkeypatch, odd):
    probes = []
    monkeypatch.setattr(gpu, "probed", lambda device: probes.append(device) or Evidence("probe", True, "the bytes arrived"))
    finds(monkeypatch, odd if comm.rank == comm.size - 1 else True)
    decisions = comm.allgather(ring._seats.device_memory(3))
    assert len(set(decisions)) == 1 and decisions[0].aware is (odd is None and comm.size > 1)
    # All ranks stand on one node, whose lowest probes, only if it must and there is somebody to send to.
    assert probes == ([3] if odd is None and comm.rank == 0 and comm.size > 1 else [])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("words", "text"), [(("1", "0"), "RINGMPI_GPU_AWARE"), (("1", "often"), "RINGMPI_GPU_AWARE=often: it is 0 or 1")])
def test_overrides_that_differ_are_refused_by_all(comm, ring, monkeypatch, words, text):
    monkeypatch.setenv(gpu.OVERRIDE, words[comm.rank == 1])
    with pytest.raises(ValueError, match=text):
        ring._seats.device_memory(0)
    assert ring.alive


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("aware", [True, False])
def test_the_first_call_of_a_ring_decides(comm, ring, monkeypatch, aware):
    device = pretend(monkeypatch)
    finds(monkeypatch, aware)
    cache = device.asarray(np.ones((1, 3, 1, 16), np.float32))
    ringmpi.decode(cache[:, :1], cache, cache, ring)
    assert ring._spaces["ringmpi.tiles.cuda"].aware is aware


@pytest.mark.mpi(min_size=2)
def test_arrays_of_host_and_device_do_not_mix(comm, ring, monkeypatch):
    device = pretend(monkeypatch)
    cache = np.ones((1, 3, 1, 16), np.float32)
    cache = device.asarray(cache) if comm.rank == 1 else cache
    with pytest.raises(ValueError, match="memory"):
        ringmpi.decode(cache[:, :1], cache, cache, ring)
    assert ring.alive


@pytest.mark.mpi(min_size=2)
def test_a_probe_starts_an_mpi_of_its_own(comm):
    if comm.size == 2:
        found = comm.allgather(gpu.probe(0, [sys.executable, "-c", ECHO], 20) if comm.rank == 0 else None)[0]
        assert found.aware, found


@pytest.mark.mpi(min_size=1)
def test_an_echo_of_device_memory(comm, monkeypatch):
    pretend(monkeypatch)
    assert cuda.arrives(seats.echo, 0)
