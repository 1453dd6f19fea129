"""What is measured on which network, and how much faster what must be: for the tests and for bench/topology.py."""
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from network.lab import pair, ring_of_hosts, two_switches

ROOT = Path(__file__).resolve().parents[2]
LAPS = Path(__file__).with_name("laps.py")
MIB = 1 << 20
PHYSICAL = (1, 3, 5, 2, 4, 6)


class Scene(NamedTuple):
    """A network, the host of every rank, the cases to time on it, and the least ratios of their seconds."""

    lab: Callable[..., Any]
    hosts: tuple[str, ...]
    cases: dict[str, dict[str, Any]]
    ratios: dict[tuple[str, str], float]
    nbytes: int = MIB


def hosts(n, ranks=1):
    return tuple(f"n{i}" for i in range(1, n + 1) for _ in range(ranks))


ORDERS = {"natural": {"order": "natural"}, "addresses": {"order": "auto"}, "measured": {"order": f"measured:{MIB}:10"}}
TORUS = {"order": {"dims": [6], "coords": [[PHYSICAL.index(i)] for i in range(1, 7)]}}
BOTH = {f"{name}{', backward' * backward}": {"schedule": name, "backward": backward}
        for backward in (False, True) for name in ("ring", "bidirectional", "multi", "broadcast", "gather")}  # fmt: skip

SCENES = {
    "four hosts on two switches": Scene(
        partial(two_switches, 4, "200mbit"), hosts(4), ORDERS, {("natural", "addresses"): 1.8, ("natural", "measured"): 1.8}),
    "six hosts on two switches": Scene(
        partial(two_switches, 6, "200mbit"), hosts(6), ORDERS, {("natural", "addresses"): 2.7, ("natural", "measured"): 2.7}),
    "a physical ring of six hosts": Scene(
        partial(ring_of_hosts, PHYSICAL, "100mbit"), hosts(6),
        {"natural": {"order": "natural"}, "torus": TORUS, "bidirectional": {**TORUS, "schedule": "bidirectional"},
         "torus, backward": {**TORUS, "backward": True},
         "bidirectional, backward": {**TORUS, "schedule": "bidirectional", "backward": True},
         "measured": {"order": f"measured:{MIB}:10"}},
        {("natural", "torus"): 2.7, ("natural", "measured"): 2.7, ("torus", "bidirectional"): 1.8,
         ("torus, backward", "bidirectional, backward"): 1.8}),
    "four switched hosts with one link each": Scene(
        partial(two_switches, 4, "10gbit", "50mbit"), hosts(4), BOTH,
        {("ring", "bidirectional"): 0.95, ("ring, backward", "bidirectional, backward"): 0.95}),
    "two hosts of two ranks sharing one uplink": Scene(
        partial(pair, "100mbit"), hosts(2, 2), {name: {"schedule": name} for name in ("ring", "double")}, {("ring", "double"): 1.35}),
}  # fmt: skip


def play(scene, mpi, lab, repeats=2):
    """The timings of a scene's cases, by name, on a lab that stands."""
    job = {"nbytes": scene.nbytes, "repeats": repeats, "cases": scene.cases}
    done = lab.mpiexec(mpi, scene.hosts, LAPS, json.dumps(job), timeout=120, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def speedup(found, slow, fast):
    """How many times faster one case is than another, by the least of their repeats: noise only ever adds."""
    return found[slow]["least"] / found[fast]["least"]
