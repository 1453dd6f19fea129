"""What the planner must know of a machine, measured on a job: its tiles, its links, and what a hop takes from a core."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..api import Ring, RingAttention
from ..plan.machine import Link, Machine, Tile
from ..profile.links import Timing
from .laps import Laps, turns

# Of times, the lower quartile: other work on the machine only adds, and the very least is of a core whose neighbours were idle.
QUIET = 0.25
# A rank's queries are at most so many times its keys, where tiles must outlast a hop.
WIDEST = 32


def tile(attn: RingAttention, arrays: Sequence[Any], seconds: float) -> Tile:
    """The tile's rates and overheads: of full blocks, whole and a quarter, on all ranks at once. Collective."""
    seats = attn.ring._seats
    held = [n for n in seats.gather(min(x.shape[1] for x in arrays)) if n]
    if not held:
        return Tile(np.inf, np.inf, source="no rank held any tokens")
    rows, few = min(held), max(1, min(held) // 4)
    # Seconds (of the two sizes, of tiles and of the rest of a lap, forward and backward).
    whole, part = np.max(seats.gather([_lone(attn, [x[:, :n] for x in arrays], seconds / 2) for n in (rows, few)]), axis=0)
    (batch, _, heads, d), v = arrays[0].shape, arrays[2].shape[3]
    each = (whole[0] - part[0]) / max(1, rows**2 - few**2)
    each = np.where(each > 0, each, whole[0] / rows**2)
    rates = 2 * batch * heads * np.array([d + v, 3 * d + 2 * v]) / each
    overheads, besides = np.maximum(0.0, whole[0] - each * rows**2), whole[1] / (batch * rows * heads)
    names = ("forward", "backward", "overhead", "overhead_backward", "row", "row_backward")
    numbers: dict[str, Any] = dict(zip(names, np.concatenate([rates, overheads, besides]).tolist()))
    return Tile(**numbers, source=f"measured, full blocks of {rows**2} and {few**2} pairs")


def _lone(attn: RingAttention, arrays: list[Any], seconds: float) -> np.ndarray:
    """Seconds ((of tiles, of the rest), (forward, backward)) of a rank's rows alone, on all ranks at once. Collective."""
    seats = attn.ring._seats
    with Ring() as ring:
        laps = Laps(RingAttention(ring, arrays[0].shape[1], tile=attn._tile), arrays)
        laps.first()

        def turn() -> None:
            seats.meet()
            for backward in (False, True):
                laps.lap("both", backward)

        turns(seats, seconds, turn)
    taken = np.array([laps.seconds["both"][backward] for backward in (False, True)])
    # A device's tiles are only launched where they are recorded: all of the time is theirs.
    busy = [[lap.busy for lap in laps.traces["both"].laps if lap.backward == way] for way in (False, True)]
    tiles = np.array(busy) if isinstance(arrays[0], np.ndarray) else taken
    return np.quantile([tiles, taken - tiles], QUIET, axis=2)


def core(attn: RingAttention, arrays: Sequence[Any], timings: Sequence[Timing], its: Tile, seconds: float) -> float:
    """Seconds that a byte, sent or received, takes from the tiles of a core. Collective.

    Laps whose tiles outlast their hops, for every rank has several times as many queries as keys, in turn with the same tiles
    alone: what they take longer is the core's work for the hops. Waits, where there are any, are left out.
    """
    seats, q = attn.ring._seats, arrays[0]
    rows = min(seats.gather(min(x.shape[1] for x in arrays)))
    if seats.size == 1 or not rows or not timings:
        return 0.0
    q, k, v = (x[:, :rows] for x in arrays)
    nbytes = k.nbytes + v.nbytes
    hop = max(link(timings, between).time(nbytes) for between in {t.between for t in timings})
    alone = its.overhead + rows**2 * 2 * q.shape[0] * q.shape[2] * (q.shape[3] + v.shape[3]) / its.forward
    times = min(seats.gather(int(np.clip(np.ceil(hop / alone), 1, WIDEST))))
    laps = Laps(RingAttention(attn.ring, (times * rows * seats.size, rows * seats.size), tile=attn._tile), (q.repeat(times, axis=1), k, v))
    found: dict[str, list[float]] = {"both": [], "tiles": []}

    def turn() -> None:
        for kind, took in found.items():
            lap = laps.lap(kind)
            took.append(laps.seconds[kind][False][-1] - lap.exposed)

    turn()
    turns(seats, seconds, turn)
    more = np.median(np.subtract(found["both"], found["tiles"])[1:])
    return max(0.0, float(np.mean(seats.gather(more)))) / (2 * nbytes * (seats.size - 1))


def machine(report: Any, name: str, memory: float = 0.0) -> Machine:
    """The machine as it was measured, for the planner."""
    inside, between = (link(report.timings, far, report.core) for far in (False, True))
    known = between if any(t.between for t in report.timings) else inside
    return Machine(name, max(report.nodes), inside if inside.bandwidth else known, known, known.bandwidth, memory,
                   {report.job["dtype"]: report.tile}, {"node_bandwidth": "as of one link", "memory": "not measured"})  # fmt: skip


def link(timings: Sequence[Timing], between: bool, busy: float = 0.0) -> Link:
    """The links inside nodes, or between them: latency of the least message alone, bandwidth of the largest on all at once."""
    its = [t for t in timings if t.between == between]
    if not its:
        return Link(0.0, 0.0, source="not in the job that was measured")
    small, large = min(t.nbytes for t in its), max(t.nbytes for t in its)
    latency = float(np.median([t.p50 for t in its if t.nbytes == small and not t.together]))
    whole = float(np.median([t.p50 for t in its if t.nbytes == large and t.together]))
    source = f"measured, {large} bytes on all links at once; busy: what hops took from tiles that outlasted them"
    return Link(latency, large / max(whole - latency, 1e-9), busy, source=source)
