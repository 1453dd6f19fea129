"""Surveys the job it is started in: its links, alone and all at once, and a real schedule with its tiles and messages apart.

    links       every link of the ring one way, at sizes from 8 bytes to the block's: alone (in colours, so that no node is in
                two tests at once, all other ranks asleep), then all at once; suspects alone again
    schedule    laps of three kinds in turn: as they are, tiles alone, messages alone. What the tiles hide of the messages
                is what the three take, not what the waits say: see ``profile.share_hidden``
    machine     what the planner must know: tiles, and what hops take from them, see ``calibrate``
    verdict     who is slow, see ``verdict``

The whole takes ``seconds``, whatever the ring's size: more links or longer hops mean fewer repeats.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ..api import RingAttention
from ..plan.machine import Tile
from ..profile import Trace, links, share_hidden
from ..profile.links import Clock, Timing
from . import calibrate
from .calibrate import machine
from .laps import KINDS, Laps, turns
from .verdict import FLOOR, LinkTest, Pace, Verdict, slow_links, slow_ranks, suspects

# Shares of the time: links alone, links together, suspects again, and as much for tiles and for the core; the rest is for laps.
ALONE, TOGETHER, AGAIN = 0.4, 0.1, 0.1
MOST = 200
ASLEEP = 1e-3
# Ranks that share a core give it up for so long while they wait for each other, and latency is judged no finer than by CROWD.
NAP, CROWD = 20e-6, 1e-3


class HopRow(NamedTuple):
    """A step at the rank that a hop comes to: median seconds as it is, with tiles alone and messages alone; share hidden."""

    backward: bool
    step: int
    src: int
    dst: int
    nbytes: int
    both: float
    tiles: float
    messages: float
    hidden: float


class LapRow(NamedTuple):
    """Laps of one direction: median seconds of the slowest rank, as they are, tiles alone, messages alone; share hidden."""

    backward: bool
    laps: int
    first: float
    both: float
    tiles: float
    messages: float
    hidden: float


@dataclass
class Report:
    """What was measured; the same on all ranks."""

    ranks: int
    nodes: tuple[int, ...]
    crowded: bool
    seconds: float
    job: dict[str, Any]
    timings: list[Timing] = field(default_factory=list)
    laps: list[LapRow] = field(default_factory=list)
    hops: list[HopRow] = field(default_factory=list)
    paces: list[Pace] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    tile: Tile = field(default_factory=lambda: Tile(np.inf, np.inf))
    core: float = 0.0
    trace: Any = None


def profile(attn: RingAttention, arrays: Sequence[Any], sizes: Sequence[int] = (), seconds: float = 60.0) -> Report:
    """Measures for about ``seconds``. Collective.

    Parameters
    ----------
    attn, arrays
        the schedule to run, and this rank's q, k, v for it.
    sizes
        message sizes in bytes; the block's is added.
    """
    began, seats = perf_counter(), attn.ring._seats
    q, k, v = arrays
    block = max(seats.gather(k.nbytes + v.nbytes))
    job = {"tokens": attn.work.lengths[0], "heads": q.shape[2], "kv_heads": k.shape[2], "head_dim": q.shape[3], "v_dim": v.shape[3],
           "batch": q.shape[0], "dtype": str(q.dtype), "schedule": attn.schedule.name, "block": block}  # fmt: skip
    report = Report(seats.size, attn.ring.nodes, links.crowded(seats), seconds, job)
    sizes = sorted({*(sizes or default_sizes(block)), block} - {0})
    if seats.size > 1 and sizes:
        report.timings = alone(seats, report, sizes, ALONE * seconds)
        report.timings += together(seats, report, [sizes[0], sizes[-1]], TOGETHER * seconds)
    _schedule(report, attn, arrays, max(0.0, seconds * (1 - 3 * AGAIN) - (perf_counter() - began)))
    report.tile = calibrate.tile(attn, arrays, AGAIN * seconds)
    report.core = calibrate.core(attn, arrays, report.timings, report.tile, AGAIN * seconds)
    _judge(report, seats, sizes, AGAIN * seconds)
    report.seconds = max(seats.gather(perf_counter() - began))
    return report


def default_sizes(block: int) -> list[int]:
    """8 bytes, and on by factors of 16 up to the block.

    >>> default_sizes(100_000)
    [8, 128, 2048, 32768]
    """
    return [8 * 16**i for i in range(12) if 8 * 16**i < block]


# --------------------------------------------------------------------------------------------------------------- links


def alone(seats: Any, report: Report, sizes: Sequence[int], seconds: float,
          only: Sequence[tuple[int, int]] | None = None) -> list[Timing]:  # fmt: skip
    """Every link (or ``only`` those between given ranks) tested alone, in colours. The rows of all ranks. Collective."""
    node, nap = np.repeat(np.arange(len(report.nodes)), report.nodes).tolist(), NAP * report.crowded
    ring = [(seat, (seat + 1) % seats.size) for seat in range(seats.size)]
    ring = [ends for ends in ring if only is None or (seats.order[ends[0]], seats.order[ends[1]]) in only]
    colour = links.colours([(node[a], node[b]) for a, b in ring])
    share = seconds / max(1, len(sizes) * (max(colour, default=0) + 1))
    rows, wrong, half = [], [], 0.0
    for turn in range(max(colour, default=-1) + 1):
        for nbytes in sorted({8, *sizes}):
            seats.meet(ASLEEP)
            for (src, dst), its in zip(ring, colour):
                if its != turn:
                    continue
                if seats.seat == src:
                    times = links.echoes(seats, dst, nbytes, share, MOST, nap)
                    half = times.min() / 2 if nbytes == 8 else half
                    rows.append(_timing(seats, (src, dst), node, nbytes, False, times / 2 if nbytes == 8 else times - half))
                elif seats.seat == dst:
                    wrong.append(((src, dst, nbytes), links.echo_back(seats, src, nbytes, nap)))
    seats.meet(ASLEEP)
    return _with_wrong(seats, [row for row in rows if row.nbytes in sizes], wrong)


def together(seats: Any, report: Report, sizes: Sequence[int], seconds: float) -> list[Timing]:
    """All links at once: every rank sends to its right as soon as it knows that all are there. Collective."""
    node = np.repeat(np.arange(len(report.nodes)), report.nodes).tolist()
    left, rows, wrong = (seats.seat - 1) % seats.size, [], []
    for nbytes in dict.fromkeys(sizes):
        began = perf_counter()
        links.shifts(seats, nbytes, 2)
        once = max(seats.gather(perf_counter() - began)) / 2
        times, bad = links.shifts(seats, nbytes, int(np.clip(seconds / len(sizes) / once, 6, MOST)))
        rows.append(_timing(seats, (left, seats.seat), node, nbytes, True, times))
        wrong.append(((left, seats.seat, nbytes), bad))
    return _with_wrong(seats, rows, wrong)


def _timing(seats: Any, ends: tuple[int, int], node: Sequence[int], nbytes: int, together: bool, times: np.ndarray) -> Timing:
    (src, dst), later = ends, times[1:]
    p50, p90 = np.percentile(later, (50, 90)).tolist()
    return Timing(seats.order[src], seats.order[dst], node[src] != node[dst], nbytes, together, len(later), float(times[0]),
                  float(later.min()), p50, p90, float(later.max()), 0)  # fmt: skip


def _with_wrong(seats: Any, rows: list[Timing], wrong: list[tuple[tuple[int, int, int], int]]) -> list[Timing]:
    """The rows of all ranks, with what their receivers found wrong."""
    everything = seats.gather((rows, wrong))
    bad = {(seats.order[src], seats.order[dst], nbytes): n for _, its in everything for (src, dst, nbytes), n in its}
    rows = [row._replace(wrong=bad[row.src, row.dst, row.nbytes]) for its, _ in everything for row in its]
    return sorted(rows, key=lambda row: (row.together, row.nbytes, seats.order.index(row.src)))


# ------------------------------------------------------------------------------------------------------------ schedule


def _schedule(report: Report, attn: RingAttention, arrays: Sequence[Any], seconds: float) -> None:
    seats = attn.ring._seats
    began, laps = links.mark(seats), Laps(attn, arrays)
    first, count = laps.first(), laps.run(seconds)
    report.trace = laps.traces["both"]
    report.trace.close(seats, Clock(began, links.mark(seats)))
    its = {kind: (laps.seconds[kind], _step_seconds(trace)) for kind, trace in laps.traces.items()}
    everything = seats.gather((its, first, _pairs(attn), _busy(laps.traces), _comes(report.trace)))
    for backward in (False, True):
        both, tiles, messages = (float(np.median(np.max([rank[0][kind][0][backward] for rank in everything], axis=0))) for kind in KINDS)
        slowest = max(rank[1][backward] for rank in everything)
        report.laps.append(LapRow(backward, count, slowest, both, tiles, messages, share_hidden(both, tiles, messages)))
    report.hops = [row for rank in everything for row in _hop_rows(rank)]
    report.paces = _paces(everything)


def _pairs(attn: RingAttention) -> int:
    """Queries x keys that this rank's queries see."""
    score, owners = attn.work.score.resolve(1), range(attn.ring.size)
    bounds = (pair.local() for owner in owners for pair in attn.work.pairs(attn.strips, score, owner))
    return sum(int((hi - lo).sum() / len(hi)) for lo, hi in bounds)


def _step_seconds(trace: Trace) -> dict[tuple[bool, int], float]:
    """The median of every step's seconds."""
    ends = {lap.lap: lap.ended for lap in trace.laps}
    steps, found = list(trace.steps), {}  # type: ignore[var-annotated]
    for step, after in zip(steps, [*steps[1:], None]):
        stop = after.began if after and after.lap == step.lap else ends[step.lap]
        found.setdefault((step.backward, step.step), []).append(stop - step.began)
    return {key: float(np.median(taken)) for key, taken in found.items()}


def _busy(traces: dict[str, Trace]) -> dict[str, list[tuple[float, float]]]:
    """Seconds of tiles, and waited, in the forward laps with messages and in those without."""
    return {kind: [(lap.busy, lap.exposed) for lap in traces[kind].laps if not lap.backward] for kind in ("both", "tiles")}


def _comes(trace: Trace) -> dict[tuple[bool, int], tuple[int, int, int]]:
    """From where, to where, and how many bytes come in a step: of its first message."""
    found: dict[tuple[bool, int], tuple[int, int, int]] = {}
    for hop in trace.hops:
        if hop.dst == trace.rank:
            found.setdefault((hop.backward, hop.step), (hop.src, hop.dst, hop.nbytes))
    return found


def _hop_rows(rank: Any) -> Iterator[HopRow]:
    (its, *_, comes) = rank
    for (backward, step), (src, dst, nbytes) in sorted(comes.items()):
        both, tiles, messages = (its[kind][1].get((backward, step), 0.0) for kind in KINDS)
        yield HopRow(backward, step, src, dst, nbytes, both, tiles, messages, share_hidden(both, tiles, messages))


def _paces(everything: Sequence[Any]) -> list[Pace]:
    mean = float(np.mean([rank[2] for rank in everything]))
    found = []
    for rank, (_, _, pairs, busy, _) in enumerate(everything):
        if pairs:
            both, alone = (np.array(busy[kind])[:, 0] * (mean / pairs) for kind in ("both", "tiles"))
            waited = np.median([waited for _, waited in busy["both"]])
            found.append(Pace(rank, *map(float, (both.min(), np.median(both), alone.min(), np.median(alone), waited))))
    return found


# ------------------------------------------------------------------------------------------------------------- verdict


def _judge(report: Report, seats: Any, sizes: Sequence[int], seconds: float) -> None:
    tests, floor = _tests(report.timings), CROWD if report.crowded else FLOOR
    again = suspects(tests, floor)
    redone = _tests(alone(seats, report, sizes, seconds, again)) if again else []
    report.verdicts = [*slow_ranks(report.paces), *slow_links(tests, redone, floor)]


def _tests(timings: Sequence[Timing]) -> list[LinkTest]:
    return [LinkTest(t.src, t.dst, t.between, t.nbytes, t.low, t.p50) for t in timings if not t.together]


__all__ = ["KINDS", "HopRow", "LapRow", "Laps", "Report", "alone", "machine", "profile", "together", "turns"]
