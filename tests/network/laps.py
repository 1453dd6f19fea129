"""A rank of a job that times laps round the ring, communication alone: the real engine with nothing to compute.

    mpiexec -n N python laps.py '{"nbytes": 1048576, "repeats": 3, "cases": {"name": {"order": "auto", "schedule": "ring"}}}'

Cases may have ``backward``, and ``order`` in any form that ``Ring`` takes, or ``{"dims": .., "coords": ..}`` for a torus. The
repeats of all cases are taken in turns. Rank 0 prints a JSON object: for every case the seconds, the order and its route.
"""
import json
import sys
import time
from statistics import median

import numpy as np
from mpi4py import MPI

from ringmpi import Ring, Torus, schedule
from ringmpi.ring import Lap, Shelf
from ringmpi.tiles.numpy import Space


class Case:
    """A ring and a lap round it that moves blocks of ``nbytes``, and backward gradients of twice that."""

    def __init__(self, comm, nbytes, order="auto", schedule="ring", backward=False):
        self.ring = Ring(comm, order=Torus(**order) if isinstance(order, dict) else order, timeout=60)
        self.plan = _plan(schedule, self.ring)
        self.column = _column(self.plan, self.ring)
        self.backward, self.size = backward, nbytes // self.plan.parts // 64 * 64
        space = Space()
        self.blocks = [space.empty(self.size) for _ in range(self.column.slots)]
        if self.plan.together == "gather":
            self.blocks = Shelf(space.empty(self.column.slots * self.size), self.size)
        self.gradients = [space.empty(2 * self.size) for _ in range(self.column.gradients)] if backward else []
        self.space = space

    def lap(self):
        lap = Lap(self.ring._seats, self.space, self.column, self.blocks, self.gradients, lambda owner, part: (self.size, 2 * self.size),
                  np.dtype(np.float32))  # fmt: skip
        lap.run(lambda visit: iter(()), (lambda visit, came: None) if self.backward else None)


def _plan(name, ring):
    return schedule.schedule(name, ring.nodes, ring.route.link_cycles)


def _column(plan, ring):
    return schedule.column(plan, ring._seats.seat)


def main(job):
    comm = MPI.COMM_WORLD
    cases = {name: Case(comm, job["nbytes"], **case) for name, case in job["cases"].items()}
    times = {name: [] for name in cases}
    for repeat in range(job.get("repeats", 3) + 1):
        for name, case in cases.items():
            comm.Barrier()
            began = time.perf_counter()
            case.lap()
            seconds = comm.allreduce(time.perf_counter() - began, op=MPI.MAX)
            if repeat:
                times[name].append(seconds)
    if comm.rank == 0:
        found = {}
        for name, case in cases.items():
            route, seconds = case.ring.route, times[name]
            found[name] = {"seconds": median(seconds), "least": min(seconds), "order": list(route.order), "source": route.source,
                           "worst_hop": route.worst_hop, "natural_worst_hop": route.natural_worst_hop,
                           "schedule": case.plan.name}  # fmt: skip
        print(json.dumps(found), flush=True)
    for case in cases.values():
        case.ring.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
