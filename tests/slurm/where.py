"""What every rank of a job saw: its node, its place in Slurm's network, its cores, its threads; and the order of the ring."""
import json
import os
import sys

from mpi4py import MPI

import ringmpi

comm = MPI.COMM_WORLD
with ringmpi.Ring(comm) as ring:
    seen = {
        "rank": comm.rank,
        "node": os.environ["SLURMD_NODENAME"],
        "address": os.environ.get("SLURM_TOPOLOGY_ADDR"),
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": os.environ["OMP_NUM_THREADS"],
    }
    seen = comm.gather(seen)
    if comm.rank == 0:
        print(json.dumps({"words": sys.argv[1:], "order": ring.order, "nodes": ring.nodes, "ranks": seen}))
