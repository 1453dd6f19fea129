"""One link made slow or late, one rank made slow, or nothing: and whom the profile names. What tests and bench share."""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from launch import QUIET, ROOT, launchers

from network.lab import ring_of_hosts

HOSTS, RATE, QUARTER, LATE, SLOW = 4, "400mbit", "100mbit", 5.0, 20.0
KINDS = ("clean", "late link", "slow link", "slow rank")


def run(lab, ranks, program, *words, timeout=120):
    """A program of this folder under MPICH, a rank on each of the first hosts."""
    mpi = next(mpi for mpi in launchers() if mpi.name == "mpich")
    hosts = [f"n{i + 1}" for i in range(ranks)]
    return lab.mpiexec(mpi, hosts, Path(__file__).with_name(program), *words, timeout=timeout, env={**QUIET, "PYTHONPATH": str(ROOT)})


def trial(kind, where, seconds=3.0):
    """Runs a profile in a ring of hosts where link (or rank) ``where`` is at fault: (right, what it said)."""
    fault = {"late link": {"late": (where, LATE)}, "slow link": {"slow": (where, QUARTER)}}.get(kind, {})
    words = ("slow", where, SLOW) if kind == "slow rank" else ()
    with ring_of_hosts(range(1, HOSTS + 1), RATE, **fault) as lab:
        done = run(lab, HOSTS, "measured.py", seconds, *words)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return False, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(lines[-1])
    named = {(verdict["what"], tuple(verdict["ranks"])) for verdict in found["verdicts"]}
    meant = {"clean": set(), "slow rank": {("rank", (where,))}}.get(kind, {("link", (where, (where + 1) % HOSTS))})
    return named == meant and not found["wrong"], [verdict["sentence"] for verdict in found["verdicts"]]
