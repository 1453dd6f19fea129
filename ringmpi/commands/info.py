"""info: what is installed, what MPI it runs on, where the ranks are, and which tiles can be had."""
from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import Any

from .. import __version__, comm, tiles
from ..tiles import cuda

PACKAGES = ("numpy", "mpi4py", "ml_dtypes", "h5py", "cupy")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The words of the command: none."""


def run(args: argparse.Namespace) -> int:
    """Prints a line for everything known. Collective, but it makes no ring: what is wrong with the MPI is said, not refused."""
    try:
        world, trouble = comm.world(), ""
    except RuntimeError as found:
        world, trouble = None, str(found)
    lines = [*_versions(), *_mpi(world, trouble), *_ranks(world), *_device_memory(world), *_tiles()]
    if (comm.launched()[1] if world is None else world.rank) == 0:
        for name, text in lines:
            print(f"{name:14} {text}")
    return 2 if trouble else 0


def _versions() -> Iterator[tuple[str, str]]:
    yield "ringmpi", f"{__version__}, {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}"
    yield "Python", f"{platform.python_version()}, {platform.machine()}"
    distributions = metadata.packages_distributions()
    for package in PACKAGES:
        found = sorted(set(distributions.get(package, ())))
        yield package, ", ".join(f"{metadata.version(name)} ({name})" for name in found) or "not installed"


def _mpi(world: Any, trouble: str) -> Iterator[tuple[str, str]]:
    if world is None:
        yield "MPI", trouble or "none: one rank, without MPI"
        return
    yield from comm.about().items()


def _ranks(world: Any) -> Iterator[tuple[str, str]]:
    """The ranks of every node, and how many cores each of them may use. Collective."""
    mine = platform.node(), len(os.sched_getaffinity(0))
    ranks = [mine] if world is None else world.allgather(mine)
    yield "ranks", str(len(ranks))
    for node in dict.fromkeys(name for name, _ in ranks):
        held = [f"{rank} ({cores})" for rank, (name, cores) in enumerate(ranks) if name == node]
        yield "node", f"{node}: ranks (cores) {', '.join(held)}"


def _device_memory(world: Any) -> Iterator[tuple[str, str]]:
    """Whether MPI takes device memory, and all that tells. Collective."""
    aware, known = comm.device_memory(world, cuda.device())
    yield "device memory", f"MPI {aware}"
    for evidence in known:
        yield "  evidence", str(evidence)


def _tiles() -> Iterator[tuple[str, str]]:
    for name in (*tiles.TILES, *tiles.ON_DEVICES):
        try:
            yield f"tile {name}", import_module(f"ringmpi.tiles.{name}").status()
        except ImportError as missing:
            yield f"tile {name}", f"not here: {missing}"
