"""What recording costs a forward pass: passes with and without it in turn, each pair compared with itself.

    python bench/record.py                      one rank
    mpiexec -n 2 python bench/record.py         two, each on a core of its own

Pairs go on until the median of what recording adds is known to ``--within`` (95% of confidence, by ranks of the pairs, which assumes
nothing about what disturbs them), or for ``--seconds``. Which of a pair comes first changes from pair to pair.
"""
import contextlib
import os
import time

import driver
import numpy as np

import ringmpi
from ringmpi import comm
from ringmpi.profile import Trace


def parse():
    parser = driver.arguments(__doc__.split("\n")[0], repeats=20)
    for name, number in (("rows", 1024), ("heads", 2), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=number, help="of a rank" if name == "rows" else " ")
    parser.add_argument("--within", type=float, default=0.2, help="per cent")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: the thread's own time, on a busy machine")
    parser.add_argument("--seconds", type=float, default=30.0, help="at most")
    return parser.parse_args()


def interval(added):
    """The median, and where it lies with 95% of confidence: between two of the sorted numbers."""
    added, half = np.sort(added), 0.98 * np.sqrt(len(added))
    low, high = int(max(0, np.floor(len(added) / 2 - half))), int(min(len(added) - 1, np.ceil(len(added) / 2 + half)))
    return float(np.median(added)), float(added[low]), float(added[high])


def seconds_of(ring, attn, arrays, trace, clock):
    """Seconds of a pass here, recorded where there is a trace. Collective."""
    ring._seats.meet()
    with attn.record(trace) if trace else contextlib.nullcontext():
        began = clock()
        attn.forward(*arrays)
        return clock() - began


def main():
    args, world = parse(), comm.world()
    clock = {"wall": time.perf_counter, "cpu": time.thread_time}[args.clock]
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) >= world.size:
        os.sched_setaffinity(0, {mine[world.rank]})
    with ringmpi.Ring(world if world.size > 1 else None) as ring:
        attn, trace = ringmpi.RingAttention(ring, args.rows * ring.size), Trace(ring.rank, ring.order)
        arrays = [np.random.default_rng(ring.rank).standard_normal((1, args.rows, args.heads, args.head_dim), np.float32) for _ in "qkv"]
        pairs, plain, ends = [], [], time.monotonic() + args.seconds
        for _ in range(args.warmup):
            seconds_of(ring, attn, arrays, trace, clock)
        more = True
        while more:
            for turn in range(args.repeats):
                pair = [seconds_of(ring, attn, arrays, its, clock) for its in ((None, trace), (trace, None))[turn % 2]]
                taken = np.max(ring.gather(pair[:: 1 - 2 * (turn % 2)]), axis=0)
                pairs.append(100 * (taken[1] / taken[0] - 1))
                plain.append(taken[0])
            found, low, high = interval(pairs)
            more = ring.gather(high - low > 2 * args.within and time.monotonic() < ends)[0]
        tile = float(np.median([its.busy / its.strips for its in trace.tiles]))
        if ring.rank == 0:
            driver.Table(args.json).row(ranks=ring.size, pairs=len(pairs), pass_ms=1e3 * float(np.median(plain)), tile_ms=1e3 * tile,
                                        added_percent=found, from_percent=low, to_percent=high)  # fmt: skip


if __name__ == "__main__":
    main()
