"""Measuring links: how far the ranks' clocks are apart, how long a message takes, whether it arrives whole.

Everything goes through a ring's own seats, under its time-out. Ranks that a measurement does not concern sleep, so that
they take no core from those it does.

    clocks      Cristian's method: the round trip that took least bounds the offset by half of what it took. Along a
                binomial tree (Hunold and Carpen-Amarie, CLUSTER 2018), so n ranks take log2(n) rounds; offset and
                error add up on the way to seat 0. Marks before and after a run give the drift between them.
    one way     a message of n bytes there and 8 bytes back, less half of the round trip of 8 bytes
"""
from __future__ import annotations

import os
from collections.abc import Iterable
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np

PROBE = 32766
PINGS = 16
# A message that takes longer than this many tests is waited for with the core given up in between.
EAGER = 200
BATCH = 5


class Mark(NamedTuple):
    """At a rank's clock ``at``, the ring's time was ``at + offset``, give or take ``error``. All in seconds."""

    at: float = 0.0
    offset: float = 0.0
    error: float = 0.0


class Clock(NamedTuple):
    """How a rank's ``perf_counter`` reads in the ring's time, which is seat 0's: linear between two marks.

    >>> clock = Clock(Mark(10.0, 1.0, 0.1), Mark(20.0, 2.0, 0.2))
    >>> clock.read(15.0), clock.drift, clock.error
    (16.5, 0.1, 0.2)
    """

    first: Mark = Mark()
    last: Mark = Mark()

    def read(self, time: float) -> float:
        """The ring's time, when this rank's clock says ``time``."""
        return time + self.first.offset + self.drift * (time - self.first.at)

    @property
    def drift(self) -> float:
        """Seconds a second."""
        elapsed = self.last.at - self.first.at
        return (self.last.offset - self.first.offset) / elapsed if elapsed > 0 else 0.0

    @property
    def error(self) -> float:
        """How far ``read`` may be off: the larger of the two marks' bounds."""
        return max(self.first.error, self.last.error)


def mark(seats: Any) -> Mark:
    """Where this rank's clock stands in the ring's time. Collective."""
    mine, size = (Mark(perf_counter()), 0), seats.size
    for bit in (1 << i for i in range(size.bit_length())):
        if seats.size == 1:
            break
        if seats.seat & bit:
            mine = _ask(seats, seats.seat - bit), seats.seat - bit
            break
        if seats.seat + bit < size:
            _answer(seats, seats.seat + bit)
    found = seats.gather(mine)
    offset = error = 0.0
    seat = seats.seat
    while seat:
        step, parent = found[seats.order[seat]]
        offset, error, seat = offset + step.offset, error + step.error, parent
    return Mark(mine[0].at, offset, error)


def _ask(seats: Any, parent: int) -> Mark:
    """This rank's mark in its parent's time: of the round trip that took least."""
    best = Mark(error=float("inf"))
    for _ in range(PINGS):
        back, asked, answered = _echo(seats, parent, np.zeros(8, np.uint8))
        (theirs,) = back.view(np.float64)
        middle, half = (asked + answered) / 2, (answered - asked) / 2
        best = min(best, Mark(middle, float(theirs) - middle, half), key=lambda m: m.error)
    return best


def _answer(seats: Any, child: int) -> None:
    for _ in range(PINGS):
        spin(seats, seats.receive(np.empty(8, np.uint8), child, PROBE))
        spin(seats, seats.send(np.array([perf_counter()]).view(np.uint8), child, PROBE))


def _echo(seats: Any, peer: int, given: np.ndarray, nap: float = 0.0) -> tuple[np.ndarray, float, float]:
    """Sends bytes: the 8 that come back, when they were sent and when the answer was seen.

    The answer is awaited before anything is sent, as in a ring: making it ready is no part of the way.
    """
    back = np.empty(8, np.uint8)
    coming = seats.receive(back, peer, PROBE)
    sent = perf_counter()
    going = seats.send(given, peer, PROBE)
    spin(seats, coming, nap)
    seen = perf_counter()
    spin(seats, going, nap)
    return back, sent, seen


def spin(seats: Any, request: Any, nap: float = 0.0) -> None:
    """Returns when a request is done; gives up the core in between when it is not done soon, for ``nap`` seconds."""
    test = request.Test
    for _ in range(EAGER):
        if test():
            return
    patience = seats.patience(lambda: "a probe of a link")
    while not test():
        patience()
        if nap:
            sleep(nap)


def exchange(seats: Any, given: dict[int, bytes], sources: Iterable[int]) -> dict[int, bytes]:
    """Gives seats some bytes each, and returns what came from ``sources``. Collective among those that it concerns."""
    sizes = {seat: np.array([len(data)]) for seat, data in given.items()}
    going = [seats.send(size.view(np.uint8), seat, PROBE) for seat, size in sizes.items()]
    data = {seat: np.frombuffer(data, np.uint8) for seat, data in given.items()}
    going += [seats.send(its, seat, PROBE) for seat, its in data.items() if len(its)]
    came = {}
    for seat in sources:
        size = np.empty(1, np.int64)
        spin(seats, seats.receive(size.view(np.uint8), seat, PROBE))
        came[seat] = np.empty(size[0], np.uint8)
        if size[0]:
            spin(seats, seats.receive(came[seat], seat, PROBE))
    for request in going:
        spin(seats, request)
    return {seat: its.tobytes() for seat, its in came.items()}


# ------------------------------------------------------------------------------------------------- a message, timed


class Timing(NamedTuple):
    """A link timed with messages of ``nbytes``: ``together`` with all others or alone, how often, and seconds one way.

    ``first`` is the first message, which may open the connection; the others exclude it. ``low`` is the least, ``wrong`` the
    number of bytes that did not arrive as sent; ``between`` says whether the ranks are on two nodes.
    """

    src: int
    dst: int
    between: bool
    nbytes: int
    together: bool
    count: int  # type: ignore[assignment]
    first: float
    low: float
    p50: float
    p90: float
    most: float
    wrong: int

    @property
    def bandwidth(self) -> float:
        """Bytes a second, at the median."""
        return self.nbytes / self.p50 if self.p50 > 0 else float("inf")


def colours(nodes: list[tuple[int, int]]) -> list[int]:
    """A colour for every link between two nodes (or inside one), so that no node is in two links of a colour.

    >>> colours([(0, 1), (1, 2), (2, 3), (3, 0)])
    [0, 1, 0, 1]
    >>> colours([(0, 0), (0, 1), (1, 1), (1, 0)])
    [0, 1, 0, 2]
    """
    used: dict[int, set[int]] = {}
    given = []
    for ends in nodes:
        taken = used.setdefault(ends[0], set()) | used.setdefault(ends[1], set())
        colour = next(c for c in range(len(taken) + 1) if c not in taken)
        for node in ends:
            used[node].add(colour)
        given.append(colour)
    return given


def pattern(nbytes: int, seed: int) -> np.ndarray:
    """Bytes to send that a swap, a shift or another sender's would not pass for."""
    return ((np.arange(nbytes, dtype=np.uint32) * 2654435761 >> 13) + 37 * seed).astype(np.uint8)


def echoes(seats: Any, dst: int, nbytes: int, seconds: float, most: int, nap: float = 0.0) -> np.ndarray:
    """Seconds for ``nbytes`` to ``dst`` and 8 bytes back, the first of them included. ``dst`` calls ``echo_back``.

    In batches, until the time is over or ``most`` are done; at least two. ``nap``: see ``spin``.
    """
    data, times, began = pattern(nbytes, seats.seat), [0.0], perf_counter()
    times[0] = _timed_echo(seats, dst, data, nap)
    while len(times) <= 2 * BATCH or (len(times) < most and perf_counter() - began < seconds):
        _echo(seats, dst, np.ones(8, np.uint8))
        times += [_timed_echo(seats, dst, data, nap) for _ in range(BATCH)]
    _echo(seats, dst, np.zeros(8, np.uint8))
    return np.array(times)


def _timed_echo(seats: Any, dst: int, data: np.ndarray, nap: float) -> float:
    _, sent, seen = _echo(seats, dst, data, nap)
    return seen - sent


def echo_back(seats: Any, src: int, nbytes: int, nap: float = 0.0) -> int:
    """The other end of ``echoes``. Returns how many bytes of the last message were wrong."""
    data, more = np.zeros(nbytes, np.uint8), np.ones(8, np.uint8)
    _return(seats, src, data, nap)
    while True:
        _return(seats, src, more, nap)
        if not more[0]:
            return int(np.count_nonzero(data != pattern(nbytes, src)))
        data[:] = 0
        for _ in range(BATCH):
            _return(seats, src, data, nap)


def _return(seats: Any, src: int, into: np.ndarray, nap: float) -> None:
    """Receives, and sends 8 bytes back."""
    answer = np.zeros(8, np.uint8)
    spin(seats, seats.receive(into, src, PROBE), nap)
    spin(seats, seats.send(answer, src, PROBE), nap)


def crowded(seats: Any) -> bool:
    """Whether ranks share cores: on some machine there are more of them than cores they may use. Collective."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        everyone = seats.gather((file.read(), tuple(os.sched_getaffinity(0))))
    machines: dict[str, list[tuple[int, ...]]] = {}
    for machine, cores in everyone:
        machines.setdefault(machine, []).append(cores)
    return any(len(ranks) > len(set().union(*ranks)) for ranks in machines.values())


def shifts(seats: Any, nbytes: int, times: int) -> tuple[np.ndarray, int]:
    """Seconds of every seat's message to its right, all at once, as its receiver sees them; and the bytes that were wrong."""
    right, left = (seats.seat + 1) % seats.size, (seats.seat - 1) % seats.size
    data, came, taken = pattern(nbytes, seats.seat), np.zeros(nbytes, np.uint8), []
    for _ in range(times):
        seats.meet()
        began = perf_counter()
        coming, going = seats.receive(came, left, PROBE), seats.send(data, right, PROBE)
        spin(seats, coming)
        taken.append(perf_counter() - began)
        spin(seats, going)
    return np.array(taken), int(np.count_nonzero(came != pattern(nbytes, left)))
