"""How many threads a rank uses: as many as it is told, within its affinity mask, or its share of the cores of its node."""
from __future__ import annotations

import os
from functools import cache
from pathlib import Path

# What launchers say of the ranks on this node: Open MPI, MPICH and Intel MPI, MVAPICH, Slurm.
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")


@cache
def threads() -> tuple[int, str]:
    """OMP_NUM_THREADS within this rank's affinity mask, else its fair share of the cores; and why so many, in words."""
    mine = _cpus(0)
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked.isdigit() and int(asked) > 0:
        return min(int(asked), len(mine)), f"OMP_NUM_THREADS={asked}, {counted(len(mine), 'processor')} in the affinity mask"
    ranks = _ranks_here()
    cores, shared = _cores(mine), _cores(_cpus(os.getppid()) | mine)
    allotted = os.environ.get("SLURM_CPUS_ON_NODE", "")
    shared = min(shared, int(allotted)) if allotted.isdigit() else shared
    return max(1, min(cores, shared // ranks)), f"{counted(cores, 'core')} in the affinity mask, {counted(ranks, 'rank')} on this node"


def counted(number: int, what: str) -> str:
    """Such as "2 cores"."""
    return f"{number} {what}{'s' * (number != 1)}"


def _cpus(pid: int) -> set[int]:
    """The affinity mask of a process (0: this one); empty where it cannot be asked for."""
    try:
        return os.sched_getaffinity(pid)
    except (AttributeError, OSError):
        return set() if pid else set(range(os.cpu_count() or 1))


def _cores(cpus: set[int]) -> int:
    """How many cores these processors are: hardware threads of a core count once."""
    siblings = set()
    for cpu in cpus:
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)


def _ranks_here() -> int:
    """How many ranks the launcher started on this node, by its environment."""
    for name in LOCAL_RANKS:
        number = os.environ.get(name, "").split("(")[0].split(",")[0]
        if number.isdigit() and int(number) > 0:
            return int(number)
    return 1
