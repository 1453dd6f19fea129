"""Whether MPI takes device memory: every source of evidence, their order, the probe's process; and which GPU is a rank's."""
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from emulator.device import pretend

import ringmpi
from ringmpi import comm, gpu
from ringmpi.gpu import Awareness, Evidence
from ringmpi.tiles import cuda

KINDS = "system,mpi,cuda:device:managed"


def library(tmp_path, **functions):
    """The line of /proc/self/maps of a library that stands for an MPI: its functions and what they say."""
    bodies = {"MPIX_Query_cuda_support": "int {name}(void) {{ return {says}; }}",
              "MPIX_GPU_query_support": "int {name}(int type, int *flag) {{ *flag = type == 0 ? {says} : 1; return 0; }}"}  # fmt: skip
    source, built = tmp_path / "mpi.c", tmp_path / "libmpi.so.40"
    source.write_text("int MPI_Init(void) { return 0; }\n" + "\n".join(bodies[n].format(name=n, says=x) for n, x in functions.items()))
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", built, source], check=True)
    return f"7f00-7f01 r-xp 00000000 08:01 42    {built}\n"


def decided(kinds=(), environ=None, maps=""):
    return gpu.decide(gpu.evidence(kinds, environ or {}, maps))


@pytest.mark.parametrize(("word", "aware"), [("1", True), ("0", False)])
def test_the_user_decides(tmp_path, word, aware):
    against = {gpu.OVERRIDE: word, "MPICH_GPU_SUPPORT_ENABLED": "0" if aware else "1"}
    maps = library(tmp_path, MPIX_Query_cuda_support=int(not aware))
    assert decided([] if aware else [KINDS], against, maps) == Awareness(aware, f"for RINGMPI_GPU_AWARE is {word}")


def test_an_override_that_means_nothing_is_an_error():
    with pytest.raises(ValueError, match="RINGMPI_GPU_AWARE=yes: it is 0 or 1"):
        gpu.evidence((), {gpu.OVERRIDE: "yes"}, "")


@pytest.mark.parametrize(("kinds", "aware"), [
    ("cuda", True), ("mpi, system, cuda:device", True), (KINDS, True), ("cuda:managed:device", True),
    ("mpi,system", None), ("cuda:managed", None), ("cuda:host", None), ("rocm:device", None), ("barracuda", None),
])  # fmt: skip
def test_memory_kinds(tmp_path, kinds, aware):
    found = decided(["mpi,system", kinds])
    assert (found and found.aware) is aware
    if aware:
        assert decided([kinds], {}, library(tmp_path, MPIX_Query_cuda_support=0)).aware, "they come before the library's own word"
    else:
        assert not decided([kinds], {}, library(tmp_path, MPIX_Query_cuda_support=0)).aware


@pytest.mark.parametrize(("functions", "aware"), [
    ({}, None), ({"MPIX_Query_cuda_support": 1}, True), ({"MPIX_Query_cuda_support": 0}, False),
    ({"MPIX_GPU_query_support": 1}, True), ({"MPIX_GPU_query_support": 0}, False),
    ({"MPIX_Query_cuda_support": 0, "MPIX_GPU_query_support": 1}, True),
])  # fmt: skip
def test_what_the_library_says(tmp_path, functions, aware):
    maps = library(tmp_path, **functions)
    found = decided((), {}, maps)
    assert (found and found.aware) is aware
    # A switch that turns it on does not make a library able.
    assert decided((), {"MPICH_GPU_SUPPORT_ENABLED": "1"}, maps).aware is (aware is not False)


def test_a_library_that_cannot_be_asked_says_nothing():
    assert gpu.library_says("/nowhere/libmpi.so").aware is None
    assert gpu.evidence((), {}, "7f00-7f01 /usr/lib/libmpi_cxx_other.so.1\n7f /usr/lib/libc.so.6")[2].aware is None


@pytest.mark.parametrize(("environ", "aware"), [
    ({}, None), ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, True), ({"MPICH_GPU_SUPPORT_ENABLED": "0"}, False),
    ({"MV2_USE_CUDA": "1"}, True), ({"OMPI_MCA_opal_cuda_support": "true"}, True), ({"OMPI_MCA_opal_cuda_support": "False"}, False),
    ({"MPIR_CVAR_ENABLE_GPU": "1"}, None), ({"MPIR_CVAR_ENABLE_GPU": "0"}, False),
    ({"MV2_USE_CUDA": "1", "MPICH_GPU_SUPPORT_ENABLED": "0"}, False),
])  # fmt: skip
def test_switches_of_the_environment(tmp_path, environ, aware):
    found = decided((), environ)
    assert (found and found.aware) is aware
    if aware is False:
        assert not decided([KINDS], environ, library(tmp_path, MPIX_Query_cuda_support=1)).aware, "what is turned off is off"


@pytest.mark.parametrize(("transports", "aware"), [
    ("rc,sm", False), ("rc,cuda_copy", True), ("all", True), ("^tcp", True), ("", True),
])  # fmt: skip
def test_a_ucx_without_cuda_takes_no_device_memory(tmp_path, transports, aware):
    maps = library(tmp_path, MPIX_Query_cuda_support=1)
    assert decided((), {"UCX_TLS": transports}, maps + "7f00-7f01 /usr/lib/libucp.so.0\n").aware is aware
    assert decided((), {"UCX_TLS": transports}, maps).aware, "UCX is not there"


YES, NO = Awareness(True, "for a"), Awareness(False, "for b")


@pytest.mark.parametrize(("everyone", "all_of_them"), [
    ([YES], YES), ([NO], NO), ([None], None), ([YES, YES], YES), ([NO, NO], NO), ([YES, None], None),
    ([YES, NO], Awareness(False, "for b (rank 1)")), ([None, NO], Awareness(False, "for b (rank 1)")),
])  # fmt: skip
def test_all_ranks_or_none(everyone, all_of_them):
    assert gpu.together(everyone) == all_of_them


def no_probe():
    raise AssertionError("there is evidence")


@pytest.mark.parametrize(("mine", "others", "probe", "aware"), [
    (True, [True], no_probe, True), (True, [False], no_probe, False), (False, [True], no_probe, False),
    (None, [False], no_probe, False), (None, [None], True, True), (None, [None], False, False), (None, [None], None, False),
    (True, [None], None, True),
])  # fmt: skip
def test_a_probe_is_the_last_resort(mine, others, probe, aware):
    found, known = [Evidence("library", mine, "it")], []

    def gather(value):
        return [value, *(None if other is None else Awareness(other, "for them") for other in others)]

    probing = probe if callable(probe) else lambda: None if probe is None else Evidence("probe", probe, "it did")
    decision, known = gpu.agreed(gather, found, probing)
    assert decision.aware is aware and decision.why.startswith("for ")
    assert [one.source for one in known] == ["library"] + ["probe"] * (not callable(probe) and probe is not None)


CHILDREN = {
    "right": (f"print('warned of'); print({gpu.ARRIVED!r})", True, "the bytes arrived"),
    "wrong bytes": (f"print({gpu.MANGLED!r})", False, "other bytes arrived"),
    "crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", False, "it died of SIGSEGV"),
    "right, then a crash": (f"import os; print({gpu.ARRIVED!r}, flush=True); os.abort()", False, "it died of SIGABRT"),
    "error": ("raise RuntimeError('no context')", False, "it failed: RuntimeError: no context"),
    "silence": ("", False, "it failed: "),
    "other words": ("print('yes')", False, "it failed: yes"),
}


@pytest.mark.parametrize("child", CHILDREN)
def test_what_a_probe_may_do(child):
    code, aware, words = CHILDREN[child]
    found = gpu.probe(0, [sys.executable, "-c", code])
    assert found.aware is aware and words in found.words


def test_a_probe_that_hangs_is_ended_with_all_it_started(tmp_path):
    mark = tmp_path / "mark"
    code = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2); open({str(mark)!r}, 'w')"])
time.sleep(60)"""
    began = time.monotonic()
    found = gpu.probe(0, [sys.executable, "-c", code], limit=1)
    assert found == Evidence("probe", False, "it did not end in 1 s") and time.monotonic() - began < 10
    time.sleep(2)
    assert not mark.exists()


def test_a_probe_knows_its_device_and_not_its_launcher(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("OMPI_MCA_pml", "ob1")
    code = "import os, sys; print(sys.argv[1], 'PMI_RANK' in os.environ, 'OMPI_MCA_pml' in os.environ)"
    assert gpu.probe(3, [sys.executable, "-c", code]).words == "it failed: 3 False True"


def test_without_cupy_the_probe_itself_fails():
    if cuda.device() is None:
        assert gpu.probe(0).words.startswith("it failed: ")


@pytest.mark.parametrize(("spoil", "arrives"), [(lambda x: None, True), (lambda x: x.fill(0), False), (lambda x: x[100:].fill(1), False)])
def test_bytes_are_compared(monkeypatch, spoil, arrives):
    pretend(monkeypatch)

    def echo(give, take):
        take.memory[:] = give.memory
        spoil(take.memory)

    assert cuda.arrives(echo, 0) is arrives


@pytest.mark.parametrize(("environ", "number"), [
    ({}, 0), ({"MPI_LOCALRANKID": "1"}, 1), ({"OMPI_COMM_WORLD_LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, 2), ({"SLURM_LOCALID": "5"}, 1),
    ({"PALS_LOCAL_RANKID": "7"}, 3),
])  # fmt: skip
def test_the_gpu_of_a_rank(monkeypatch, environ, number):
    device = pretend(monkeypatch)
    device.devices = 4
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert ringmpi.choose_gpu(environ) == number == device.number == cuda.device()


def test_a_gpu_that_cannot_be_chosen(monkeypatch):
    device = pretend(monkeypatch)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(RuntimeError, match=r"none of MPI_LOCALRANKID, .* is set"):
        ringmpi.choose_gpu({"PMI_RANK": "0"})
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    with pytest.warns(RuntimeWarning, match="MPI was started before"):
        ringmpi.choose_gpu({})
    device.devices = 0
    with pytest.raises(RuntimeError, match="sees no GPU"):
        ringmpi.choose_gpu({})


@pytest.mark.parametrize(("memory", "kind", "aware", "text"), [
    ("PooledMemory", 2, True, None), ("MemoryAsync", 2, True, "asynchronous pool"), ("PooledMemory", 3, True, "managed memory"),
    ("MemoryAsync", 2, False, None), ("PooledMemory", 3, False, None),
])  # fmt: skip
def test_memory_that_mpi_has_trouble_with(monkeypatch, recwarn, memory, kind, aware, text):
    device = pretend(monkeypatch)
    device.allocator, device.memory_type = memory, kind
    space = cuda.Space(aware)
    for _ in range(3):
        space.empty(100)
    told = [str(warning.message) for warning in recwarn]
    assert len(told) == (text is not None) and (text is None or (text in told[0] and "RINGMPI_GPU_AWARE=0" in told[0]))


def test_one_rank_needs_none():
    assert not comm.Alone().device_memory(0).aware
    assert np.size(comm.device_memory(None, None)[1], 0) == 4
