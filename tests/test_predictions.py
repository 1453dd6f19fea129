"""What is measured and planned, against what happens on rate-limited and late wires. Of times, so each has three tries."""
import json
from pathlib import Path

import pytest
from network.wires import Lab, missing

NETWORK = Path(__file__).parent / "network"
# Two ranks, 10 MB/s each way: blocks below and above the size that hides its hop.
RATE, MEASURED, BELOW, ABOVE = "80mbit", 900, (300, 400, 500), (1600, 2000, 2400)

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def lines(lab, program, *words, timeout=120):
    done = lab.run(NETWORK / program, *words, timeout=timeout)
    assert done.returncode == 0, done.stdout
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def tried(check):
    """Runs a check up to three times: a busy neighbour may spoil a time, but not three in a row."""
    for left in (2, 1, 0):
        try:
            return check()
        except AssertionError:
            if not left:
                raise


def test_hop_latency_is_that_of_a_ping_pong_and_rises_with_the_wire():
    def check():
        with Lab(3) as lab:
            (near,) = lines(lab, "hops.py", 5)
        with Lab(3, late=(0, 5.0)) as lab:
            (far,) = lines(lab, "hops.py", 3)
        assert near["survey"] == pytest.approx(near["plain"], rel=0.10), (near, far)
        assert far["survey"] == pytest.approx(far["plain"], rel=0.10), (near, far)
        assert far["survey"] - near["survey"] == pytest.approx(far["plain"] - near["plain"], rel=0.10), (near, far)
        assert far["survey"] - near["survey"] == pytest.approx(5.0e-3, rel=0.10), (near, far)

    tried(check)


def test_a_plan_predicts_what_a_ring_takes():
    """Three block sizes on each side of the threshold, forward and backward, within 15%."""

    def check():
        with Lab(2, RATE) as lab:
            found = lines(lab, "predicted.py", MEASURED, ",".join(map(str, BELOW + ABOVE)))
        for row in found:
            assert row["planned"] == pytest.approx(row["took"], rel=0.15), found
        assert all(max(BELOW) < row["hides"] < min(ABOVE) for row in found if not row["backward"]), found

    tried(check)
