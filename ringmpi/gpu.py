"""Whether MPI takes device memory: decided once, from evidence, for there is no portable way to ask. And which GPU is a rank's.

The first source that says anything decides, in this order:

    1. the user             RINGMPI_GPU_AWARE=1 or 0
    2. the memory kinds     a communicator's info key mpi_memory_alloc_kinds (MPI 4.1) names cuda, or cuda:device. That it does
                            not says nothing: an MPI need only name what it was asked for
    3. the library          MPIX_Query_cuda_support() and MPIX_GPU_query_support() say what it can do, at run time
    4. the environment      switches by which an MPI takes device memory, or does not
    5. a probe              device bytes sent to itself by a process of its own, and compared: an MPI that knows nothing of
                            GPUs may fault, or deliver zeros

A switch that turns it off, or a UCX that is told to do without CUDA, counts before what the library can do. Device memory
is handed to MPI only if all ranks find that it may be. Without any evidence blocks go through pinned host memory, which is
always right. Nothing here touches a GPU or starts MPI; the probe is a process that does both.
"""
from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

OVERRIDE = "RINGMPI_GPU_AWARE"
# Of Cray MPICH, MPICH, MVAPICH2 and Open MPI 4. MPICH's own is on unless it is turned off.
SWITCHES = ("MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU", "MV2_USE_CUDA", "OMPI_MCA_opal_cuda_support")
ONLY_OFF = ("MPIR_CVAR_ENABLE_GPU",)
# What launchers tell a process of its number on its node, and what says that there are others.
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID",
               "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID")  # fmt: skip
RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
# By these a launcher binds a process to its job. The probe must not join it.
OF_LAUNCHERS = ("PMI_", "PMIX_", "PMI2_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIEXEC_", "OMPI_COMM_", "OMPI_WORLD_", "OMPI_UNIVERSE_",
                "OMPI_NUM_APP", "OMPI_FILE_", "OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_num_procs", "PRTE_", "SLURM_", "PALS_", "FLUX_",
                "MV2_COMM_")  # fmt: skip
PROBE = (sys.executable, "-m", "ringmpi.commands.probe")
ARRIVED, MANGLED = "the bytes arrived", "other bytes arrived"


class Evidence(NamedTuple):
    """What one source says: that MPI takes device memory, that it does not, or nothing (None); and its words."""

    source: str
    aware: bool | None
    words: str

    def __str__(self) -> str:
        answer = {True: "yes", False: "no", None: "says nothing"}[self.aware]
        return f"{self.source}: {answer}, {self.words}"


class Awareness(NamedTuple):
    """Whether MPI takes device memory, and what says so."""

    aware: bool
    why: str

    def __str__(self) -> str:
        return f"{'takes device memory' if self.aware else 'gets copies in pinned host memory'}, {self.why}"


def told(environ: Mapping[str, str] = os.environ) -> str | None:
    """The user's word: "1", "0" or None.

    Raises ValueError for one that is neither.
    """
    word = environ.get(OVERRIDE)
    if word not in ("0", "1", None):
        raise ValueError(f"{OVERRIDE}={word}: it is 0 or 1")
    return word


def evidence(kinds: Sequence[str] = (), environ: Mapping[str, str] = os.environ, maps: str | None = None) -> list[Evidence]:
    """What is known before a probe, in the order in which it counts.

    ``kinds`` are the values of mpi_memory_alloc_kinds, of every communicator that has any; ``maps`` is what this process has
    loaded, as /proc/self/maps.
    """
    if maps is None:
        with open("/proc/self/maps") as loaded:
            maps = loaded.read()
    word, switches = told(environ), _switches(environ)
    off = [found for found in (*switches, _transports(environ, maps)) if found.aware is False]
    on = [found for found in switches if found.aware]
    nothing = [] if off or on else [Evidence("environment", None, "no switch is set")]
    by_user = Evidence("user", None if word is None else word == "1", f"{OVERRIDE} is {word or 'not set'}")
    return [by_user, *off, _kinds(kinds), _library(maps), *on, *nothing]


def decide(found: Sequence[Evidence]) -> Awareness | None:
    """The decision of the first source that says anything; None if none does.

    >>> decide([Evidence("user", None, "RINGMPI_GPU_AWARE is not set"), Evidence("library", False, "MPIX_Query_cuda_support() is 0")])
    Awareness(aware=False, why='for MPIX_Query_cuda_support() is 0')
    """
    return next((Awareness(one.aware, f"for {one.words}") for one in found if one.aware is not None), None)


def together(everyone: Sequence[Awareness | None]) -> Awareness | None:
    """The decision for all ranks: yes only if it is for each of them, no if it is for one, and None where a probe must tell.

    >>> together([Awareness(True, "for a"), Awareness(False, "for b"), None])
    Awareness(aware=False, why='for b (rank 1)')
    """
    for rank, one in enumerate(everyone):
        if one is not None and not one.aware:
            return one if everyone == [one] * len(everyone) else Awareness(False, f"{one.why} (rank {rank})")
    return None if None in everyone else everyone[0]


def agreed(gather: Callable[[Any], list[Any]], mine: Sequence[Evidence],
           probing: Callable[[], Evidence | None]) -> tuple[Awareness, list[Evidence]]:  # fmt: skip
    """The same decision on all ranks, and what this one knows. Collective by ``gather``, which gives the values of all.

    Where the evidence of some rank says nothing, ``probing`` tells, on the ranks on which it returns anything.
    """
    mine = list(mine)
    both = together(gather(decide(mine)))
    if both is None:
        probe = probing()
        mine += [probe] if probe else []
        found = [one for one in gather(decide(mine)) if one is not None]
        both = together(found) if found else None
    return both or Awareness(False, f"for nothing says otherwise; {OVERRIDE}=1 does"), mine


def probe(device: int = 0, command: Sequence[str] = PROBE, limit: float = 60.0) -> Evidence:
    """Has a process of its own send device bytes to itself by MPI and compare them. It may crash, hang or be refused."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    process = subprocess.Popen([*command, str(device)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, errors="replace", env=kept, start_new_session=True)  # fmt: skip
    try:
        said = process.communicate(timeout=limit)[0].strip().split("\n")[-1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Evidence("probe", False, f"it did not end in {limit:g} s")
    code = process.returncode
    if code < 0:
        return Evidence("probe", False, f"it died of {signal.Signals(-code).name}")
    if code or said not in (ARRIVED, MANGLED):
        return Evidence("probe", False, f"it failed: {said:.200}")
    return Evidence("probe", said == ARRIVED, f"{said} in a process of its own")


@cache
def probed(device: int) -> Evidence:
    """What the probe of a device said, the first time."""
    return probe(device)


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """The number of this process among those of its node, by its launcher; 0 for one that was not launched.

    Raises RuntimeError where a launcher says that there are others, but not which one of its node this is.

    >>> local_rank({"SLURM_PROCID": "5", "SLURM_LOCALID": "1"}), local_rank({})
    (1, 0)
    """
    found = next((int(environ[name]) for name in LOCAL_RANKS if environ.get(name, "").isdecimal()), None)
    if found is None and any(name in environ for name in RANKS):
        raise RuntimeError(f"the launcher tells no rank's number on its node: none of {', '.join(LOCAL_RANKS)} is set; choose the GPU "
                           "yourself, by cupy.cuda.Device(number).use()")  # fmt: skip
    return found or 0


# ------------------------------------------------------------------------------------------------------------- sources


def _kinds(values: Sequence[str]) -> Evidence:
    """By MPI 4.1 and its side document on memory allocation kinds: "cuda" is all of CUDA's memory, "cuda:device" a device's own."""
    kinds = [kind.strip().split(":") for value in values for kind in value.split(",")]
    takes = any(kind[0] == "cuda" and (len(kind) == 1 or "device" in kind[1:]) for kind in kinds)
    names = ",".join(dict.fromkeys(":".join(kind) for kind in kinds))
    return Evidence("memory kinds", True if takes else None, f"mpi_memory_alloc_kinds is {names or 'not there'}")


def _library(maps: str) -> Evidence:
    """What the loaded MPI says of itself. It is loaded for Python alone, so that its symbols are found by its path only."""
    found = re.search(r"/\S*/libmpi(?:_\w+)?\.so\S*", maps)
    return library_says(found.group(0)) if found else Evidence("library", None, "no MPI is loaded")


def library_says(path: str) -> Evidence:
    """What an MPI library at a path says of itself."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return Evidence("library", None, f"it cannot be asked: {error}")
    answers = {}
    if hasattr(library, "MPIX_Query_cuda_support"):
        answers["MPIX_Query_cuda_support()"] = bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        flag = ctypes.c_int(0)
        # MPIX_GPU_SUPPORT_CUDA is 0.
        refused = library.MPIX_GPU_query_support(ctypes.c_int(0), ctypes.byref(flag))
        answers["MPIX_GPU_query_support(CUDA)"] = bool(flag.value) and not refused
    if not answers:
        return Evidence("library", None, "it has neither MPIX_Query_cuda_support nor MPIX_GPU_query_support")
    return Evidence("library", any(answers.values()), " and ".join(f"{name} is {int(answer)}" for name, answer in answers.items()))


def _switches(environ: Mapping[str, str]) -> list[Evidence]:
    """What the switches in the environment say."""
    found = []
    for name in SWITCHES:
        word = environ.get(name, "").lower()
        if word in ("0", "false"):
            found.append(Evidence("environment", False, f"{name} is {word}"))
        elif word and name not in ONLY_OFF:
            found.append(Evidence("environment", True, f"{name} is {word}"))
    return found


def _transports(environ: Mapping[str, str], maps: str) -> Evidence:
    """UCX faults on device memory if its list of transports leaves CUDA's out."""
    listed = environ.get("UCX_TLS", "")
    names = listed.lower().split(",")
    lacks = bool(listed) and "/libucp" in maps and not listed.startswith("^") and not any(n == "all" or "cuda" in n for n in names)
    return Evidence("environment", False if lacks else None, f"UCX_TLS is {listed}, without cuda")
