"""Measures this job once, then runs blocks of other sizes: JSON lines of what the plan says and what it took, on rank 0.

    predicted.py ROWS ROWS,ROWS,... [paced]      the block that is measured, and those that are predicted, in tokens a rank

A paced tile sleeps for its time instead of computing, so that other work on the machine has no part in it.
"""
import json
import os
import sys
import time

import numpy as np
from mpi4py import MPI

import ringmpi
from ringmpi import survey
from ringmpi.partial import Partial
from ringmpi.plan import Job, hides, price
from ringmpi.survey.calibrate import QUIET
from ringmpi.tiles import numpy as readable

# Many heads share a block, so that short laps hide hops over slow wires, for which a core has little to do.
HEADS, KV_HEADS, DIM = 6, 1, 64
# Sizes take turns so often: the speed of a machine changes by the second.
ROUNDS = 3
# Queries x keys a second of a paced tile, forward and backward, and how long it sleeps before each poll.
PACE, STRIP = (2.2e7, 1.0e7), 1e-3


def paced(pace):
    """A tile that takes its time."""

    def strips(q, k, *others):
        ends = time.perf_counter() + q.shape[1] * k.shape[1] / pace
        while (left := ends - time.perf_counter()) > 0:
            time.sleep(min(left, STRIP))
            yield (slice(0), slice(0), slice(0)), Partial.empty((0, 0, 0, q.shape[3]), q.dtype)

    return strips


def attention(ring, rows):
    attn = ringmpi.RingAttention(ring, rows * ring.size, mask="full", tile="numpy" if PACED else "auto")
    draw = np.random.default_rng(ring.rank)
    return attn, [draw.standard_normal((1, rows, heads, DIM), np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def typical(laps, way):
    """The seconds of the slowest rank's laps of every kind; and what the ranks waited of them, of hops alone and with tiles."""
    waits = {kind: [lap.exposed for lap in laps.traces[kind].laps if lap.backward == way] for kind in ("both", "messages")}
    taken = laps.attn.ring.gather((laps.seconds, waits))
    found = {kind: float(np.quantile(np.max([seconds[kind][way] for seconds, _ in taken], axis=0), QUIET)) for kind in survey.KINDS}
    return {**found, **{f"wait {kind}": float(np.mean([np.median(waits[kind]) for _, waits in taken])) for kind in waits}}


def main(rows, sizes):
    if PACED:
        readable.forward, readable.backward = map(paced, PACE)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[MPI.COMM_WORLD.rank]})
    with ringmpi.Ring(MPI.COMM_WORLD, timeout=60) as ring:
        its = survey.machine(survey.profile(*attention(ring, rows), seconds=8.0), "measured")
        laps = {n: survey.Laps(*attention(ring, n)) for n in sizes}
        for _ in range(ROUNDS):
            for n in sizes:
                laps[n].run(0.2)
        for n in sizes:
            job = Job(n * ring.size, ring.size, HEADS, DIM, KV_HEADS, dtype="float32", mask="full", layout="contiguous")
            for way in (False, True):
                found = {"rows": n, "backward": way, **typical(laps[n], way), "planned": price(job, its, backward=way).seconds,
                         "hides": hides(job, its, way).rows}  # fmt: skip
                if ring.rank == 0:
                    print(json.dumps(found), flush=True)
        if ring.rank == 0:
            print(its, file=sys.stderr)


PACED = sys.argv[3:] == ["paced"]
if __name__ == "__main__":
    main(int(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")])
