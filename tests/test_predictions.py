"""What is measured and planned, against what happens on rate-limited and late wires. Of times, so each has three tries."""
import json
import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from launch import ROOT, launchers
from network.lab import ring_of_hosts, why_not
from network.trials import run


class Wire(NamedTuple):
    """Two ranks on a rate-limited link: the block that is measured, and blocks below and above the size that hides its hop."""

    rate: str
    measured: int
    below: tuple[int, ...]
    above: tuple[int, ...]


# A paced tile sleeps, so that other work on the machine has no part in it; the compiled one shares its core with what hops need.
PACED, COMPUTED = Wire("160mbit", 600, (250, 330, 410), (900, 1050, 1200)), Wire("160mbit", 600, (300, 380, 460), (780, 890, 1000))

needs_network = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def lines(lab, ranks, program, *words):
    done = run(lab, ranks, program, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


SPIN = """
import time
began = time.perf_counter()
while time.perf_counter() < began + 0.5:
    pass
print(time.process_time() / 0.5)
"""


def share_of_cores():
    """How much of every core this machine gives to processes that ask for one each: 1 where nobody else works."""
    spins = [subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE, text=True) for _ in range(os.cpu_count() or 1)]
    return min(float(spin.communicate()[0]) for spin in spins)


def tried(check):
    """Runs a check up to three times. A failure counts only if nobody else had the cores: times of a busy machine are not ours."""
    for left in (2, 1, 0):
        free = share_of_cores()
        try:
            return check()
        except AssertionError:
            free = min(free, share_of_cores())
            if not left and free > 0.9:
                raise
    return pytest.skip(f"other work has {1 - free:.0%} of a core: no time can be held to 15%")


@needs_network
@pytest.mark.slow
def test_hop_latency_is_that_of_a_ping_pong_and_rises_with_the_wire():
    def check():
        with ring_of_hosts((1, 2, 3), None) as lab:
            (near,) = lines(lab, 3, "hops.py", 5)
        with ring_of_hosts((1, 2, 3), None, late=(0, 20.0)) as lab:
            (far,) = lines(lab, 3, "hops.py", 3)
        assert near["survey"] == pytest.approx(near["plain"], rel=0.10), (near, far)
        assert far["survey"] == pytest.approx(far["plain"], rel=0.10), (near, far)
        assert far["survey"] - near["survey"] == pytest.approx(far["plain"] - near["plain"], rel=0.10), (near, far)
        assert far["survey"] - near["survey"] == pytest.approx(20.0e-3, rel=0.10), (near, far)

    tried(check)


def threshold(found, wire, backward):
    """The rows from which on the tiles hide a hop: where a step's tiles, and what the hop takes from their core, last as long as it.

    The hop's part of the core is what laps above the threshold take longer than their tiles alone; backward there are two hops.
    Divided by the rows, the difference grows by a straight line, whose zero lies between the two sizes nearest to it.
    """
    its = {(row["rows"], row["backward"]): row for row in found}
    core = np.median([(its[n, False]["both"] - its[n, False]["tiles"]) / n for n in wire.above])
    near = [its[n, backward] for n in (wire.below[-1], wire.above[0])]
    lacks = [(row["tiles"] / 2 - row["messages"]) / row["rows"] + core * (1 + backward) for row in near]
    return np.interp(0.0, lacks, [row["rows"] for row in near])


@needs_network
@pytest.mark.parametrize("wire, words", [(PACED, ["paced"]), pytest.param(COMPUTED, [], marks=pytest.mark.slow)], ids=["paced", "computed"])
def test_a_plan_predicts_what_a_ring_takes(wire, words):
    """Three block sizes on each side of the threshold, forward and backward, within 15%.

    And within 20% the threshold, the block from which on no hop is waited for.
    """

    def check():
        with ring_of_hosts((1, 2, 3), wire.rate, burst="16k") as lab:
            found = lines(lab, 2, "predicted.py", wire.measured, ",".join(map(str, wire.below + wire.above)), *words)
        for row in found:
            assert row["planned"] == pytest.approx(row["both"], rel=0.15), found
        for way in (False, True):
            level = threshold(found, wire, way)
            (hides,) = {row["hides"] for row in found if row["backward"] == way}
            assert hides == pytest.approx(level, rel=0.20), (level, found)
            assert max(wire.below) < hides < min(wire.above), found

    tried(check)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "clock"), [(1, "cpu"), (1, "wall"), (2, "wall")])
def test_recording_costs_at_most_a_hundredth_of_a_pass(ranks, clock):
    """Passes of tiles of a millisecond and more, with and without a trace in turn, until what it adds is known to 0.3%."""
    words = ROOT / "bench" / "record.py", "--json", "--within", 0.3, "--seconds", 40, "--clock", clock
    done = launchers()[0].run(ranks, *words, timeout=120)
    assert done.returncode == 0, done.stdout
    (found,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found["tile_ms"] >= 1 and found["pairs"] >= 20
    assert found["from_percent"] <= 1, found
    if found["to_percent"] > 1:
        pytest.skip(f"other work on the machine: {found}")
