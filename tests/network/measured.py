"""Profiles the ring it is started in and prints its verdicts as JSON on rank 0.

    measured.py SECONDS [slow RANK MILLISECONDS]      the tiles of a rank take so much longer, each
"""
import json
import sys
import time

import numpy as np
from mpi4py import MPI

import ringmpi
from ringmpi import survey
from ringmpi.tiles import numpy as tile

TOKENS, HEADS, DIM = 512, 1, 128


def slowed(function, seconds):
    """The same tile, that takes longer over each strip."""

    def strips(*arguments):
        for strip in function(*arguments):
            time.sleep(seconds)
            yield strip

    return strips


def main(seconds, rank=None, delay=0.0):
    world = MPI.COMM_WORLD
    if world.rank == rank:
        tile.forward, tile.backward = slowed(tile.forward, delay), slowed(tile.backward, delay)
    with ringmpi.Ring(world, timeout=60) as ring:
        attn = ringmpi.RingAttention(ring, TOKENS * ring.size, mask="causal", layout="zigzag", tile="numpy")
        draw = np.random.default_rng(ring.rank)
        arrays = [draw.standard_normal((1, len(attn.positions), HEADS, DIM), np.float32) for _ in "qkv"]
        report = survey.profile(attn, arrays, seconds=seconds)
        if ring.rank == 0:
            verdicts = [verdict._asdict() for verdict in report.verdicts]
            print(json.dumps({"verdicts": verdicts, "seconds": report.seconds, "wrong": sum(row.wrong for row in report.timings)}))


if __name__ == "__main__":
    words = sys.argv[1:]
    main(float(words[0]), *((int(words[2]), float(words[3]) / 1e3) if words[1:2] == ["slow"] else ()))
