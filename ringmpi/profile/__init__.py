"""What the ranks of a ring saw of their laps, put together.

A ``Trace`` is what ``ring.Lap`` calls with its events. It keeps sums for every link and step, the worst hops of every
link, and the newest hops, tiles and waits whole, so its memory does not grow with the run. When recording ends the ranks
tell their neighbours when they sent, in the ring's time (see ``links.Clock``), and every link's row is shared.

    in flight     from when both ends had posted to when the receiver saw the message: what a link is judged by
    exposed       the wait for it, when there was nothing else to do: what a step lost

A rank that is busy sees a message when it next polls, up to a strip late: while tiles run, ``in flight`` is an upper bound.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from time import perf_counter
from typing import Any

import numpy as np

from . import links
from .links import Clock
from .records import ALL, KINDS, HopRecord, LapRecord, LinkRow, RankRow, StepRecord, StepRow, TileRecord, WaitRecord

KEEP = 65_536
WORST = 4
EVENTS = ("lap", "step", "post", "done", "tile", "wait", "end")
# Events that wait to be added up, at most.
NOTED = 1024
# With more numbers than this, the steps of other ranks stay with them.
SHARED_STEPS = 1 << 20


@dataclass(slots=True)
class Sums:
    """Over all messages that came over a link, kept whole or not; and its worst hops, by the wait for them."""

    count: int = 0
    nbytes: int = 0
    exposed: float = 0.0
    worst: list[tuple[float, int, HopRecord]] = field(default_factory=list)

    def add(self, hop: HopRecord) -> None:
        """Takes a hop that was seen."""
        self.count += 1
        self.nbytes += hop.nbytes
        self.exposed += hop.exposed
        put = heappushpop if len(self.worst) >= WORST else heappush
        put(self.worst, (hop.exposed, self.count, hop))


class Newest:
    """The newest records of a kind: those of all events so far."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trace: Trace, owner: type) -> deque[Any]:
        trace._add_up()
        return trace._newest[self.name]


class Trace:
    """The hops, tiles and waits of the laps that ran while it was recording, as this rank saw them.

    Parameters
    ----------
    rank, order
        this rank, and the ranks in ring order.
    keep
        how many hops, tiles and waits are kept whole: the newest.

    Attributes
    ----------
    laps, steps, hops, tiles, waits
        the newest records of this rank.
    links, table, ranks
        once recording has ended, the same on all ranks: a row for every link, for every step of every rank (for this rank
        only in very large rings), and for every rank.
    seats
        the ring's seats, for what the ranks do with it together afterwards: see ``chrome.save``.
    clock
        how this rank's clock reads in the ring's time, and how far that may be off.
    """

    laps, steps, hops, tiles, waits = Newest(), Newest(), Newest(), Newest(), Newest()

    def __init__(self, rank: int = 0, order: Sequence[int] = (0,), keep: int = KEEP) -> None:
        self.rank, self.order, self.clock = rank, tuple(order), Clock()
        self._newest: dict[str, deque[Any]] = {kind: deque(maxlen=keep) for kind in ("laps", "steps", "hops", "tiles", "waits")}
        self.links: list[LinkRow] = []
        self.table: list[StepRow] = []
        self.ranks: list[RankRow] = []
        self.seats: Any = None
        self._sums: dict[int, Sums] = {}
        self._targets: set[int] = set()
        # Of every step, and of this one: messages and bytes that came, seconds busy and exposed.
        self._by_step: dict[tuple[bool, int], list[float]] = {}
        self._tally: list[float] = [0, 0, 0.0, 0.0]
        self._flying: dict[Any, HopRecord] = {}
        self._seen: dict[Any, HopRecord] = {}
        self._now, self._whole, self._step, self._pair = LapRecord(-1, False, 0.0), LapRecord(-1, False, 0.0), 0, None
        self._noted: list[tuple[str, float, dict[str, Any]]] = []
        self._adding = False
        self._listen()

    def _listen(self) -> None:
        self._take: dict[str, Callable[..., None]] = {name: getattr(self, "_on_" + name) for name in EVENTS}

    def __getstate__(self) -> dict[str, Any]:
        """What is known of the laps. The ring is left behind, and what was under way in it: a copy is to be read, not recorded into."""
        self._add_up()
        return {**vars(self), "seats": None, "_take": {}, "_flying": {}, "_seen": {}, "_pair": None, "_noted": [], "_adding": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._listen()

    def __call__(self, name: str, **facts: Any) -> None:
        """Takes an event of ``ring.Lap``.

        Only notes it: after a tile nothing of ours is in the caches, and every line that runs here is waited for.
        """
        self._noted.append((name, perf_counter(), facts))
        if len(self._noted) >= NOTED:
            self._add_up()

    def _add_up(self) -> None:
        """Takes the events that were noted. Called in the midst of it, by a signal, it leaves them to the one it interrupts."""
        if self._adding:
            return
        self._adding = True
        try:
            for name, now, facts in self._noted:
                self._take[name](now, **facts)
        finally:
            self._noted.clear()
            self._adding = False

    @property
    def worst(self) -> list[HopRecord]:
        """The hops to this rank that it waited for longest, the worst first, a few of every link."""
        self._add_up()
        return sorted((hop for sums in self._sums.values() for _, _, hop in sums.worst), key=lambda hop: -hop.exposed)

    def flying(self) -> list[HopRecord]:
        """The messages that are under way, and those seen since the step began."""
        self._add_up()
        return [*self._seen.values(), *self._flying.values()]

    # -------------------------------------------------------------------------------------------------------- events

    def _on_lap(self, now: float, backward: bool) -> None:
        self._flying.clear()
        self._now = LapRecord(self._now.lap + 1, backward, now)
        self._newest["laps"].append(self._now)

    def _on_step(self, now: float, index: int) -> None:
        self._file()
        self._step, self._tally = index, self._by_step.setdefault((self._now.backward, index), [0, 0, 0.0, 0.0])
        self._newest["steps"].append(StepRecord(self._now.lap, self._now.backward, index, now))

    def _on_post(self, now: float, message: Any, nbytes: int, polls: int, polling: float) -> None:
        hop, order, lap = message.hop, self.order, self._now
        peer = ALL if hop.peer < 0 else order[hop.peer]
        src, dst = (self.rank, peer) if message.sent else (peer, self.rank)
        self._flying[message] = HopRecord(lap.lap, lap.backward, hop.step, message.kind, hop.walk, hop.part, order[hop.owner],
                                          src, dst, nbytes, now, 0.0, polls, polling)  # fmt: skip

    def _on_done(self, now: float, message: Any, nbytes: int, polls: int, polling: float) -> None:
        hop = self._flying.pop(message)
        hop.seen, hop.polls, hop.polling = now, polls - hop.polls, polling - hop.polling
        self._seen[message] = hop

    def _on_tile(self, now: float, visit: Any, pair: Any, began: float, ended: float) -> None:
        busy = ended - began
        self._now.busy += busy
        self._tally[2] += busy
        if pair is self._pair and pair is not None:
            tile = self._newest["tiles"][-1]
            tile.ended, tile.busy, tile.strips = ended, tile.busy + busy, tile.strips + 1
            return
        self._pair = pair
        query, key = (pair.query.start, pair.query.count, pair.query.step), (pair.key.start, pair.key.count, pair.key.step)
        self._newest["tiles"].append(TileRecord(self._now.lap, self._now.backward, visit.step, visit.walk, visit.part,
                                                self.order[visit.owner], query, key, began, ended, busy))  # fmt: skip

    def _on_wait(self, now: float, messages: list[Any], began: float, ended: float, polls: int) -> None:
        self._now.exposed += ended - began
        self._tally[3] += ended - began
        self._newest["waits"].append(WaitRecord(self._now.lap, self._now.backward, self._step, began, ended, polls))
        for message in messages:
            if message in self._seen:
                self._seen[message].exposed += max(0.0, self._seen[message].seen - began)

    def _on_end(self, now: float, polls: int, polling: float) -> None:
        self._file()
        lap, whole = self._now, self._whole
        lap.ended, lap.polls, lap.polling = now, polls, polling
        whole.ended += lap.ended - lap.began
        whole.busy, whole.exposed, whole.polling = whole.busy + lap.busy, whole.exposed + lap.exposed, whole.polling + lap.polling

    def _file(self) -> None:
        """Files what was seen in the step that is over: no later wait is for it."""
        for hop in self._seen.values():
            self._newest["hops"].append(hop)
            if hop.dst != self.rank:
                self._targets |= {hop.dst} - {ALL}
                continue
            if hop.src != ALL:
                self._sums.setdefault(hop.src, Sums()).add(hop)
            self._tally[0], self._tally[1] = self._tally[0] + 1, self._tally[1] + hop.nbytes
        self._seen.clear()

    # ------------------------------------------------------------------------------------------------ put together

    def close(self, seats: Any, clock: Clock) -> None:
        """Puts the two ends of every hop together and shares the rows. Collective."""
        self._add_up()
        self.clock, self.seats = clock, seats
        self._meet(seats)
        rows = [self._row(src) for src in self._sums]
        steps = [StepRow(self.rank, backward, step, *sums) for (backward, step), sums in sorted(self._by_step.items())]  # type: ignore[arg-type]
        me = RankRow(self.rank, self._now.lap + 1, self._whole.ended, self._whole.busy, self._whole.exposed,
                     self._whole.polling, clock.error)  # fmt: skip
        small = len(steps) * seats.size <= SHARED_STEPS
        found = seats.gather((rows, me, steps if small else []))
        self.links = [row for rank in self.order for row in sorted(found[rank][0])]
        self.ranks = [rank for _, rank, _ in found]
        self.table = [row for _, _, its in found for row in its] if small else steps

    def _meet(self, seats: Any) -> None:
        """Asks the senders when they posted, and so finds how long each hop was in flight."""
        seat = {rank: i for i, rank in enumerate(self.order)}
        told: dict[int, list[tuple[float, ...]]] = {dst: [] for dst in self._targets}
        for hop in self.hops:
            if hop.dst in told:
                told[hop.dst].append((*hop.key, self.clock.read(hop.posted)))
        given = {seat[dst]: np.array(rows, np.float64).tobytes() for dst, rows in told.items()}
        for data in links.exchange(seats, given, [seat[src] for src in self._sums]).values():
            rows = np.frombuffer(data, np.float64).reshape(-1, 7)
            posted = {tuple(map(int, row[:6])): row[6] for row in rows.tolist()}
            for hop in self.hops:
                if hop.key in posted:
                    hop.flight = self.clock.read(hop.seen) - max(posted[hop.key], self.clock.read(hop.posted))

    def _row(self, src: int) -> LinkRow:
        sums = self._sums[src]
        flights = np.array([hop.flight for hop in self.hops if hop.src == src and hop.dst == self.rank and hop.flight == hop.flight])
        p50, p90, p99, most = np.percentile(flights, (50, 90, 99, 100)).tolist() if len(flights) else [float("nan")] * 4
        nbytes = np.median([hop.nbytes for hop in self.hops if hop.src == src]) if self.hops else 0
        return LinkRow(src, self.rank, sums.count, sums.nbytes, p50, p90, p99, most, float(nbytes) / p50 if p50 else float("nan"),
                       sums.exposed)  # fmt: skip

    def __str__(self) -> str:
        """The tables: by link, by step and by rank."""
        return "\n\n".join((by_link(self.links), by_step(self.table), by_rank(self.ranks)))


@contextmanager
def recording(seats: Any) -> Iterator[Trace]:
    """A trace whose clocks are read before and after. Collective at both ends."""
    trace, began = Trace(seats.rank, seats.order), links.mark(seats)
    yield trace
    trace.close(seats, Clock(began, links.mark(seats)))


def share_hidden(both: float, compute: float, messages: float) -> float:
    """How much of the messages' time the tiles hid: (compute + messages - both) / messages.

    ``both`` are the seconds of laps with tiles and messages, ``compute`` of the same tiles alone, ``messages`` of the same
    messages alone. 1: the messages cost nothing. 0: as slow as one after the other; below 0 the overlap itself costs. nan
    where the messages are less than a twentieth of the tiles: a difference of two large times says nothing of a small one.

    >>> share_hidden(both=1.2, compute=1.0, messages=0.8)
    0.75
    """
    return round((compute + messages - both) / messages, 9) if messages and messages > compute / 20 else float("nan")


def by_link(rows: Iterable[LinkRow]) -> str:
    """The table of links."""
    head = ("link", "count", "bytes", "p50 us", "p90 us", "p99 us", "max us", "GB/s", "exposed ms")
    cells = [(f"{r.src}>{r.dst}", r.count, r.nbytes, *(f"{1e6 * t:.1f}" for t in (r.p50, r.p90, r.p99, r.most)),
              f"{r.bandwidth / 1e9:.3f}", f"{1e3 * r.exposed:.3f}") for r in rows]  # fmt: skip
    return columns(head, cells)


def by_step(rows: Iterable[StepRow]) -> str:
    """The table of steps: all ranks together, and the longest wait and the rank that waited."""
    steps: dict[tuple[bool, int], list[StepRow]] = {}
    for row in rows:
        steps.setdefault((row.backward, row.step), []).append(row)
    cells = []
    for (backward, step), its in sorted(steps.items()):
        worst = max(its, key=lambda row: row.exposed)
        cells.append(("backward" if backward else "forward", step, sum(r.count for r in its), sum(r.nbytes for r in its),
                      f"{1e3 * max(r.busy for r in its):.3f}", f"{1e3 * float(np.median([r.exposed for r in its])):.3f}",
                      f"{1e3 * worst.exposed:.3f}", worst.rank))  # fmt: skip
    return columns(("lap", "step", "count", "bytes", "busy max ms", "exposed p50 ms", "exposed max ms", "of rank"), cells)


def by_rank(rows: Iterable[RankRow]) -> str:
    """The table of ranks."""
    head = ("rank", "laps", "total ms", "busy ms", "exposed ms", "polling ms", "clock +- us")
    cells = [(r.rank, r.laps, *(f"{1e3 * t:.3f}" for t in (r.total, r.busy, r.exposed, r.polling)), f"{1e6 * r.clock_error:.1f}")
             for r in rows]  # fmt: skip
    return columns(head, cells)


def columns(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A table in text, right-aligned.

    >>> print(columns(("a", "long"), [(1, 2), (10, 3)]))
     a  long
     1     2
    10     3
    """
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in cells)


__all__ = ["KINDS", "Trace", "by_link", "by_rank", "by_step", "columns", "share_hidden"]
