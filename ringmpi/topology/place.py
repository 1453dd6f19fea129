"""Where a process stands in the machine, as far as it can tell by itself: host, NUMA domain, GPU, network address.

Slurm tells every task where its node hangs in the network: ``SLURM_TOPOLOGY_ADDR`` and what its fields mean in
``SLURM_TOPOLOGY_ADDR_PATTERN``:

    tree       switch.switch.node   spine.leaf0.n1        switches from the top down; a level may be empty
    block      block.node           b3.n1
    ring       ring:position.node   r8:2.n1
    torus      torus:x:y:z.node     pod1:1:0:2.n1
    flat       node                 n1

Host names may contain dots, so fields are counted from the left. No address says how large a ring or a torus is:
``RINGMPI_TORUS`` does (``torus.py``).
"""
from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("ringmpi")
UNKNOWN = -1
# The environment variable that says how large the torus is in which Slurm tells coordinates.
SIZE = "RINGMPI_TORUS"


class Place(NamedTuple):
    """Where one rank stands. ``node`` is the lowest rank that shares memory with it.

    ``switches`` are the names on the way down to it, ``grid`` its coordinates in a network that has any, ``torus`` what is
    said of that network's size, ``name`` what Slurm calls the node. NUMA domain and GPU are -1 where they are not known.
    """

    node: int
    host: str = ""
    numa: int = UNKNOWN
    gpu: int = UNKNOWN
    switches: tuple[str, ...] = ()
    grid: tuple[int, ...] = ()
    torus: str = ""
    name: str = ""

    @property
    def path(self) -> tuple[object, ...]:
        """The way down to it: switches, node, NUMA domain. Two ranks are as far apart as their ways part early."""
        return (*self.switches, self.node, self.numa)


def here(node: int, environ: Mapping[str, str] = os.environ) -> Place:
    """The place of this process, whose node is known by the number ``node``."""
    switches, grid, name = address(environ.get("SLURM_TOPOLOGY_ADDR", ""), environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""))
    return Place(node, os.uname().nodename, numa_domain(), gpu_number(environ), switches, grid, environ.get(SIZE, ""), name)


def believed(places: Sequence[Place], rank: int = 0) -> list[Place]:
    """The places of all ranks; without addresses, and with a word in rank 0's log, if nodes that share no memory have one name.

    Slurm tells every task its own node's, but a launcher that hands on its environment gives all ranks that of one node.

    >>> believed([Place(rank, switches=("leaf0",), name=f"n{rank}") for rank in range(2)])[1].switches
    ('leaf0',)
    """
    nodes: dict[str, set[int]] = {}
    for place in places:
        nodes.setdefault(place.name, set()).add(place.node)
    many = sorted(name for name, its in nodes.items() if name and len(its) > 1)
    if not many:
        return list(places)
    say = log.debug if rank else log.warning
    say("SLURM_TOPOLOGY_ADDR is not believed: it says %s on %s nodes, as if handed on from one", many[0], len(nodes[many[0]]))
    return [place._replace(switches=(), grid=(), torus="", name="") for place in places]


def address(text: str, pattern: str) -> tuple[tuple[str, ...], tuple[int, ...], str]:
    """The switches, the coordinates and the node that a Slurm topology address names; nothing where it does not fit its pattern.

    >>> address("spine.leaf0.n1.cluster.org", "switch.switch.node")
    (('spine', 'leaf0'), (), 'n1.cluster.org')
    >>> address("pod1:1:0:2.n7", "torus:x:y:z.node")
    (('pod1',), (1, 0, 2), 'n7')
    """
    kinds = pattern.split(".")
    fields = text.split(".", len(kinds) - 1)
    if len(fields) != len(kinds) or kinds[-1] != "node":
        return (), (), ""
    switches: list[str] = []
    grid: tuple[int, ...] = ()
    for kind, value in zip(kinds[:-1], fields):
        name, *numbers = value.split(":")
        if len(numbers) != kind.count(":") or not all(number.isdecimal() for number in numbers):
            return (), (), ""
        switches.append(name)
        grid += tuple(map(int, numbers))
    return tuple(switches), grid, fields[-1]


def numa_domain(root: str = "/sys/devices/system/node") -> int:
    """The NUMA domain that holds every core this process may run on, else -1."""
    try:
        mine = os.sched_getaffinity(0)
        domains = {int(path.name[4:]): cpu_list((path / "cpulist").read_text()) for path in Path(root).glob("node[0-9]*")}
    except (OSError, ValueError, AttributeError):
        return UNKNOWN
    return next((number for number, cpus in domains.items() if mine <= cpus), UNKNOWN)


def cpu_list(text: str) -> set[int]:
    """The numbers of a list as Linux writes it.

    >>> sorted(cpu_list("0-2,8"))
    [0, 1, 2, 8]
    """
    ends = (part.split("-") for part in text.strip().split(",") if part)
    return {cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1)}


def gpu_number(environ: Mapping[str, str]) -> int:
    """The number of this process's GPU where it may see exactly one, else -1."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return UNKNOWN
