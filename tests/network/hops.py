"""Hops of 8 bytes over the first link, in turn by a plain ping-pong and by the survey: JSON of their medians, on rank 0.

    hops.py ROUNDS
"""
import json
import sys
import time

import numpy as np
from mpi4py import MPI

import ringmpi
from ringmpi import survey
from ringmpi.profile import links

TIMES = 100


def plain(world):
    """Blocking sends and receives between ranks 0 and 1, the others asleep: half of the median round trip."""
    buffer, taken = np.zeros(8, np.uint8), []
    for _ in range(TIMES if world.rank < 2 else 0):
        began = time.perf_counter()
        if world.rank == 0:
            world.Send(buffer, 1)
            world.Recv(buffer, 1)
        else:
            world.Recv(buffer, 0)
            world.Send(buffer, 0)
        taken.append(time.perf_counter() - began)
    done = world.Ibarrier()
    while not done.Test():
        time.sleep(1e-3)
    return float(np.median(taken[1:])) / 2 if taken else None


def main(rounds):
    world = MPI.COMM_WORLD
    with ringmpi.Ring(world, timeout=60) as ring:
        report = survey.Report(ring.size, ring.nodes, links.crowded(ring._seats), 0.0, {})
        found = [(plain(world), survey.alone(ring._seats, report, [8], 0.2, [(0, 1)])[0].p50) for _ in range(rounds)]
        if world.rank == 0:
            print(json.dumps(dict(zip(("plain", "survey"), np.median(found, axis=0).tolist()))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
