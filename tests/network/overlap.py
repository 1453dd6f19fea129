"""A rank of a job that shows whether tiles hide hops: forward, beside its tiles alone and its hops alone, in the same run.

    mpiexec -n 2 python overlap.py

Every rank has a core of its own. The number of rows is chosen so that a hop takes as long as a step's tiles. Rank 0 prints a
JSON object: the least seconds of a step's tiles, of a hop and of forward, and forward as a multiple of all its tiles.
"""
import json
import os
import time

import numpy as np
from laps import Case
from mpi4py import MPI

from ringmpi import Ring, RingAttention

HEADS, DIM, START, MOST, REPEATS = 4, 64, 1024, 8192, 4
comm = MPI.COMM_WORLD


def prepare(ring, rows):
    """Calls of forward, of its tiles alone, and of its hops alone, for so many rows a rank."""
    size = comm.size
    k, v = np.random.default_rng(1).standard_normal((2, 1, rows * size, HEADS, DIM)).astype(np.float32)
    q = k[:, :rows]
    whole = RingAttention(ring, rows * size)
    alone = RingAttention(None, (rows, rows * size))
    hops = Case(comm, 2 * rows * HEADS * DIM * 4)
    mine = slice(comm.rank * rows, (comm.rank + 1) * rows)
    return (lambda: whole.forward(q, k[:, mine], v[:, mine])), (lambda: alone.forward(q, k, v)), hops.lap


def timed(calls, repeats):
    """The least seconds of each call on the slowest rank; the repeats of all are taken in turns, a first one is not counted."""
    least = [np.inf] * len(calls)
    for repeat in range(repeats + 1):
        for i, call in enumerate(calls):
            comm.Barrier()
            began = time.perf_counter()
            call()
            seconds = comm.allreduce(time.perf_counter() - began, op=MPI.MAX)
            least[i] = min(least[i], seconds) if repeat else np.inf
    return least


def main():
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    with Ring(comm, timeout=60) as ring:
        # Tiles grow with the square of the rows, hops with the rows; a link so slow that MOST rows are too few has no such number.
        rows = START
        for _ in range(3):
            _, tiles, hops = timed(prepare(ring, rows), 3)
            rows = min(MOST, max(256, int(rows * (hops / (comm.size - 1)) / (tiles / comm.size)) // 64 * 64))
        forward, tiles, hops = timed(prepare(ring, rows), REPEATS)
    if comm.rank == 0:
        found = {"rows": rows, "tile": tiles / comm.size, "hop": hops / (comm.size - 1), "forward": forward, "ratio": forward / tiles}
        print(json.dumps(found), flush=True)


main()
