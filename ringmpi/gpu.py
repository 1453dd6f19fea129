"""Whether this process's MPI takes device memory: decided from evidence, for there is no portable way to ask.

    1. the user: RINGMPI_GPU_AWARE=1 or 0
    2. the library: MPIX_Query_cuda_support (Open MPI, MPICH), what it says of itself at run time
    3. the environment in which it takes device memory only when told: MPICH_GPU_SUPPORT_ENABLED (Cray), MV2_USE_CUDA

Without any, no: blocks go through pinned host memory, which is always right. Nothing here touches a GPU or starts MPI.
"""
from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

OVERRIDE = "RINGMPI_GPU_AWARE"
SWITCHES = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA")


class Awareness(NamedTuple):
    """Whether MPI takes device memory, and what says so."""

    aware: bool
    why: str

    def __str__(self) -> str:
        return f"{'takes device memory' if self.aware else 'gets copies in pinned host memory'}, {self.why}"


def awareness() -> Awareness:
    """The decision for this process.

    Raises ValueError for an override that is neither 0 nor 1.
    """
    with open("/proc/self/maps") as maps:
        found = re.search(r"/\S*/libmpi(?:_\w+)?\.so\S*", maps.read())
    return decide(os.environ, library_says(found.group(0)) if found else None)


def decide(environ: Mapping[str, str], says: bool | None) -> Awareness:
    """The decision from the environment and from what the library says of itself (None: nothing).

    >>> decide({}, None).aware, decide({}, True).aware, decide({OVERRIDE: "0"}, True).aware
    (False, True, False)
    """
    told = environ.get(OVERRIDE)
    if told is not None:
        if told not in ("0", "1"):
            raise ValueError(f"{OVERRIDE}={told}: it is 0 or 1")
        return Awareness(told == "1", f"for {OVERRIDE} is {told}")
    for switch in SWITCHES:
        if environ.get(switch) == "1" and says is not False:
            return Awareness(True, f"for {switch} is 1")
    if says is None:
        return Awareness(False, f"for nothing says otherwise; {OVERRIDE}=1 does")
    return Awareness(says, f"for MPIX_Query_cuda_support() says {int(says)}")


def library_says(path: str) -> bool | None:
    """What a loaded MPI library says of itself; None if it cannot say.

    It is loaded for Python alone, so that its symbols are found by its path only.
    """
    try:
        query = ctypes.CDLL(path).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return None
    return bool(query())
