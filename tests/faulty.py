"""The command line with a fault: ``python faulty.py FAULT RANK attend ...``; the fault is on that rank alone, or for -1 on all.

    full     the disk is full after 20,000 bytes of a file
    stuck    a rank stops in the middle of a pass and never goes on
    bug      a rank meets an error of the program in the middle of a pass
    wrong    a tile is a little wrong
    slow     every rank leaves its process id in $PIDS, and writes slowly, so that it can be killed while it does
    trace    a rank cannot write its records of a trace
    memory   a rank has no memory left for its rows
"""
import errno
import os
import resource
import sys
import time

import numpy as np

from ringmpi import cli, comm, io, tiles
from ringmpi.partial import Partial
from ringmpi.profile import chrome

SIZE, RANK = comm.launched()
tile = tiles.tile("auto", np.zeros(1, np.float32))
forward, write, pwrite = tile.forward, io.Stored.write, os.pwrite


def full():
    def limited(*given):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            write(*given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    io.Stored.write = limited


def stuck():
    def never(*given):
        yield from forward(*given)
        time.sleep(1000)

    tile.forward = never


def bug():
    def broken(*given):
        yield from forward(*given)
        raise KeyError("planted")

    tile.forward = broken


def wrong():
    def off(*given):
        for where, partial in forward(*given):
            yield where, Partial(partial.o * (1 + 1e-2), partial.m, partial.l)

    tile.forward = off


def slow():
    with open(os.path.join(os.environ["PIDS"], str(RANK)), "w") as file:
        file.write(str(os.getpid()))

    def late(file, piece, at):
        time.sleep(0.01)
        return pwrite(file, piece[:20_000], at)

    os.pwrite = late


def trace():
    def no_room(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    chrome.lines = no_room


def memory():
    def none(*_):
        raise MemoryError("planted")

    io.Stored.read = none


if __name__ == "__main__":
    fault, rank, *words = sys.argv[1:]
    if int(rank) in (RANK, -1):
        globals()[fault]()
    sys.argv[1:] = words
    sys.exit(cli.main(words))
