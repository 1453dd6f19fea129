"""Hops over every link of the ring, alone and all at once: one-way time, bandwidth, and the bytes that arrived wrong.

    mpiexec -n 4 python bench/hop.py --sizes 8,65536,4194304

A plain ping-pong of blocking sends between the first two ranks is shown beside them, as what other tools would say.
"""
import statistics
import time

import driver
import numpy as np

import ringmpi
from ringmpi import comm, survey
from ringmpi.profile import links


def parse():
    parser = driver.arguments(__doc__.split("\n")[0], repeats=50)
    parser.add_argument("--sizes", default="8,512,32768,2097152", help="bytes, with commas between")
    parser.add_argument("--seconds", type=float, default=10.0, help="for all of it")
    return parser.parse_args()


def pingpong(world, nbytes, args):
    """Median of half a round trip of blocking sends between ranks 0 and 1, in seconds; the others sleep. Collective."""
    buffer, other = np.zeros(nbytes, np.uint8), 1 - world.rank

    def once():
        if world.rank == 0:
            world.Send(buffer, other)
            world.Recv(buffer, other)
        else:
            world.Recv(buffer, other)
            world.Send(buffer, other)

    seconds = driver.median(once, args) / 2 if world.rank < 2 else 0.0
    done = world.Ibarrier()
    while not done.Test():
        time.sleep(1e-3)
    return seconds


def main():
    args = parse()
    sizes, world = [int(size) for size in args.sizes.split(",")], comm.world()
    plain = {nbytes: pingpong(world, nbytes, args) for nbytes in sizes}
    with ringmpi.Ring(world) as ring:
        report = survey.Report(ring.size, ring.nodes, links.crowded(ring._seats), args.seconds, {})
        rows = survey.alone(ring._seats, report, sizes, args.seconds * 2 / 3)
        rows += survey.together(ring._seats, report, sizes, args.seconds / 3)
        table = driver.Table(args.json)
        for row in rows if ring.rank == 0 else ():
            first = (row.src, row.dst) == (0, 1) and not row.together
            table.row(size_B=row.nbytes, link=f"{row.src}>{row.dst}", tested="together" if row.together else "alone", count=row.count,
                      first_us=1e6 * row.first, time_us=1e6 * row.p50, p90_us=1e6 * row.p90, max_us=1e6 * row.most,
                      algbw_GBps=row.bandwidth / 1e9, busbw_GBps=row.bandwidth / 1e9,
                      pingpong_us=1e6 * plain[row.nbytes] if first else "", wrong=row.wrong)  # fmt: skip
        if ring.rank == 0 and not args.json:
            alone = [row.p50 for row in rows if not row.together and row.nbytes == min(sizes)]
            print(f"median of all links, {min(sizes)} bytes, alone: {1e6 * statistics.median(alone):.2f} us")


if __name__ == "__main__":
    main()
