"""Measures this job once, then runs blocks of other sizes: JSON lines of what the plan says and what it took, on rank 0.

    predicted.py ROWS ROWS,ROWS,... [paced]      the block that is measured, and those that are predicted, in tokens a rank

A paced tile sleeps for its time instead of computing, so that other work on the machine has no part in it.
"""
import json
import sys
import time

import numpy as np
from mpi4py import MPI

import ringmpi
from ringmpi import survey
from ringmpi.partial import Partial
from ringmpi.plan import Job, hides, price
from ringmpi.tiles import numpy as readable

HEADS, DIM = 1, 64
# Queries x keys a second of a paced tile, forward and backward, and how long it sleeps before each poll.
PACE, STRIP = (2.2e7, 1.0e7), 1e-3


def paced(pace):
    """A tile that takes its time."""

    def strips(q, k, *others):
        ends = time.perf_counter() + q.shape[1] * k.shape[1] / pace
        while (left := ends - time.perf_counter()) > 0:
            time.sleep(min(left, STRIP))
            nothing = q[:0, :0, :0]
            yield (slice(0), slice(0), slice(0)), Partial.empty(nothing)

    return strips


def attention(ring, rows):
    attn = ringmpi.RingAttention(ring, rows * ring.size, mask="full", tile="numpy" if PACED else "auto")
    draw = np.random.default_rng(ring.rank)
    return attn, [draw.standard_normal((1, rows, HEADS, DIM), np.float32) for _ in "qkv"]


def main(rows, sizes):
    if PACED:
        readable.forward, readable.backward = map(paced, PACE)
    with ringmpi.Ring(MPI.COMM_WORLD, timeout=60) as ring:
        its = survey.machine(survey.profile(*attention(ring, rows), seconds=5.0), "measured")
        for n in sizes:
            laps = survey.Laps(*attention(ring, n))
            laps.run(0.5)
            taken = ring.gather({kind: survey.lap_seconds(trace) for kind, trace in laps.traces.items()})
            job = Job(n * ring.size, ring.size, HEADS, DIM, dtype="float32", mask="full", layout="contiguous")
            for way in (False, True):
                # The least of the laps' times: other work on the machine only ever adds.
                laps_of = {kind: np.max([rank[kind][way] for rank in taken], axis=0) for kind in survey.KINDS}
                # Tiles grow with the square of the rows, hops with the rows: at this many a step's tiles take as long as its hops.
                level = n * (laps_of["messages"].min() / (ring.size - 1)) / (laps_of["tiles"].min() / ring.size)
                found = {"rows": n, "backward": way, "took": float(laps_of["both"].min()), "planned": price(job, its, backward=way).seconds,
                         "level": float(level), "hides": hides(job, its, way).rows}  # fmt: skip
                if ring.rank == 0:
                    print(json.dumps(found), flush=True)
        if ring.rank == 0:
            print(its, file=sys.stderr)


PACED = sys.argv[3:] == ["paced"]
if __name__ == "__main__":
    main(int(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")])
