"""Orders and schedules on a real network: hosts are namespaces, links are limited. Needs root.

A ratio is of one run, by the least of interleaved repeats. Where it misses, the scene is played once more: a busy machine is
no fault, a wrong order is wrong each time.
"""
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from launch import launchers
from network.lab import namespaces, pair, processes, sweep, why_not
from network.scenes import LAPS, ROOT, SCENES, play, speedup

NETWORK = LAPS.parent
MPIS = {mpi.name: mpi for mpi in launchers()}
needs_mpich = pytest.mark.skipif("mpich" not in MPIS, reason="only MPICH is started by this Slurm")
# One scene shows that a network is the same to every MPI; the others take their time.
each_mpi = pytest.mark.parametrize(
    "mpi", [pytest.param(mpi, id=name, marks=[pytest.mark.slow] * (name != next(iter(MPIS)))) for name, mpi in MPIS.items()])
TROUBLE = why_not()
pytestmark = pytest.mark.skipif(bool(TROUBLE), reason=f"a network on this machine {TROUBLE}")
TRIES = 3


def acts(scene, *cases):
    """A scene with some of its cases."""
    return scene._replace(cases={name: scene.cases[name] for name in cases},
                          ratios={pair: least for pair, least in scene.ratios.items() if set(pair) <= set(cases)})  # fmt: skip


def crossings(order):
    """How often a ring of ranks 0, 1, 2, ... on hosts n1, n2, n3, ... goes over the link between two switches."""
    return sum((a - b) % 2 for a, b in zip(order, (*order[1:], order[0])))


def kept(scene, lab, mpi):
    """The timings once every ratio is kept, after some tries."""
    for _ in range(TRIES):
        found = play(scene, mpi, lab)
        missed = {pair: speedup(found, *pair) for pair, least in scene.ratios.items() if speedup(found, *pair) < least}
        if not missed:
            return found
    raise AssertionError(f"after {TRIES} tries {missed}; wanted {scene.ratios}\n{json.dumps(found, indent=1)}")


@pytest.mark.parametrize("mpi", MPIS.values(), ids=MPIS)
def test_two_switches_and_a_slow_link_between(mpi):
    scene = SCENES["four hosts on two switches"]
    with scene.lab() as lab:
        found = kept(scene, lab, mpi)
    assert [crossings(found[name]["order"]) for name in ("natural", "addresses", "measured")] == [4, 2, 2]
    assert found["addresses"]["source"].startswith("SLURM_TOPOLOGY_ADDR")


@needs_mpich
def test_under_slurm_the_scheduler_tells_the_switches(tmp_path):
    """The same hosts, their switches from topology.conf: ``SLURM_TOPOLOGY_ADDR`` reaches the order, by srun."""
    scene = acts(SCENES["four hosts on two switches"], "natural", "addresses")
    job = json.dumps({"nbytes": scene.nbytes, "repeats": 3, "cases": scene.cases})
    with scene.lab() as lab, lab.slurm(tmp_path) as (srun, env):
        for _ in range(TRIES):
            done = lab.run([*srun, MPIS["mpich"].python, LAPS, job], 120, {**env, "PYTHONPATH": str(ROOT)})
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout.splitlines()[-1])
            if speedup(found, "natural", "addresses") >= 1.6:
                break
    assert (crossings(found["natural"]["order"]), crossings(found["addresses"]["order"])) == (4, 2)
    assert found["addresses"]["source"].startswith("SLURM_TOPOLOGY_ADDR") and speedup(found, "natural", "addresses") >= 1.6


@pytest.mark.slow
@each_mpi
@pytest.mark.parametrize("name", ["six hosts on two switches", "four switched hosts with one link each"])
def test_more_hosts(name, mpi):
    with SCENES[name].lab() as lab:
        found = kept(SCENES[name], lab, mpi)
    assert crossings(found.get("addresses", {"order": (0, 2, 1, 3)})["order"]) == 2


@each_mpi
def test_a_physical_ring(mpi):
    scene = SCENES["a physical ring of six hosts"]
    with scene.lab() as lab:
        found = kept(scene, lab, mpi)
    assert (found["torus"]["worst_hop"], found["torus"]["natural_worst_hop"]) == (1, 3)


@each_mpi
def test_one_link_a_host_is_no_loss_for_two_ways(mpi):
    scene = acts(SCENES["four switched hosts with one link each"], "ring", "bidirectional")
    with scene.lab() as lab:
        kept(scene, lab, mpi)


@each_mpi
def test_a_double_ring_spares_the_shared_uplink(mpi):
    scene = SCENES["two hosts of two ranks sharing one uplink"]
    with scene.lab() as lab:
        kept(scene, lab, mpi)


@each_mpi
def test_tiles_hide_hops(mpi):
    """Two ranks, a core each, where a hop takes as long as a step's tiles: forward takes little more than its tiles alone."""
    with pair("300mbit") as lab:
        run = partial(lab.mpiexec, mpi, ("n1", "n2"), NETWORK / "overlap.py",
                      env={"PYTHONPATH": f"{ROOT}:{NETWORK}", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})  # fmt: skip
        tries = []
        for _ in range(2 * TRIES):
            done = run()
            assert done.returncode == 0, done.stderr
            tries.append(json.loads(done.stdout.splitlines()[-1]))
            # A hop that is much shorter than the tiles would be hidden too easily.
            if tries[-1]["ratio"] <= 1.2 and tries[-1]["hop"] > 0.75 * tries[-1]["tile"]:
                return
    raise AssertionError(tries)


STANDS = """
import signal, subprocess, sys, time
from network.lab import pair
signal.signal(signal.SIGINT, signal.default_int_handler)  # Shells start what runs in the background without it.
with pair("100mbit") as lab:
    if sys.argv[1] == "lived in":
        subprocess.Popen(["ip", "netns", "exec", lab.name("n1"), "sleep", "60"], stdout=subprocess.DEVNULL)
    print(lab.prefix, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def stands():
    """Starts a process with a lab of its own; gives it and the beginning of the names of its namespaces."""
    began = []

    def start(how=""):
        env = {**os.environ, "PYTHONPATH": str(NETWORK.parent)}
        began.append(subprocess.Popen([sys.executable, "-c", STANDS, how], stdout=subprocess.PIPE, text=True, env=env))
        prefix = began[-1].stdout.readline().strip()
        assert len(namespaces(prefix)) == 5
        return began[-1], prefix

    yield start
    for process in began:
        process.kill()
        process.wait()
        process.stdout.close()
    sweep()


@pytest.mark.parametrize("how", ["", "lived in"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_lab_that_is_ended_takes_its_hosts_with_it(stands, number, how):
    process, prefix = stands(how)
    process.send_signal(number)
    process.wait(10)
    assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT) and namespaces(prefix) == []


def test_what_a_killed_lab_leaves_is_removed_once_nothing_runs_in_it(stands):
    process, prefix = stands("lived in")
    process.kill()
    process.wait()
    sweep()
    assert len(namespaces(prefix)) == 5
    for pid in processes(f"{prefix}n1"):
        os.kill(pid, signal.SIGKILL)
    while processes(f"{prefix}n1"):
        time.sleep(0.01)
    sweep()
    assert namespaces(prefix) == [] and not list(Path("/etc/netns").glob(f"{prefix}*"))
