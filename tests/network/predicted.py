"""Measures this job once, then runs blocks of other sizes: JSON lines of what the plan says and what it took, on rank 0.

    predicted.py ROWS ROWS,ROWS,...      the block that is measured, and those that are predicted, in tokens a rank
"""
import json
import sys

import numpy as np
from mpi4py import MPI

import ringmpi
from ringmpi import survey
from ringmpi.plan import Job, hides, price

HEADS, DIM = 1, 64


def attention(ring, rows):
    attn = ringmpi.RingAttention(ring, rows * ring.size, mask="full")
    draw = np.random.default_rng(ring.rank)
    return attn, [draw.standard_normal((1, rows, HEADS, DIM), np.float32) for _ in "qkv"]


def main(rows, sizes):
    with ringmpi.Ring(MPI.COMM_WORLD, timeout=60) as ring:
        its = survey.machine(survey.profile(*attention(ring, rows), seconds=5.0), "measured")
        for n in sizes:
            laps = survey.Laps(*attention(ring, n))
            laps.run(1.0, ("both",))
            taken = ring.gather(survey.lap_seconds(laps.traces["both"]))
            job = Job(n * ring.size, ring.size, HEADS, DIM, dtype="float32", mask="full", layout="contiguous")
            for way in (False, True):
                found = {"rows": n, "backward": way, "took": float(np.median(np.max([rank[way] for rank in taken], axis=0))),
                         "planned": price(job, its, backward=way).seconds, "hides": hides(job, its, way).rows}  # fmt: skip
                if ring.rank == 0:
                    print(json.dumps(found), flush=True)
        if ring.rank == 0:
            print(its, file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")])
