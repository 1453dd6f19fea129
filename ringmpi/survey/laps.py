"""Laps of three kinds, in turn: as they are, their tiles alone, their messages alone."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from .. import attention
from ..api import RingAttention
from ..profile import Trace

LAPS = 40


class Silent:
    """A tile that computes nothing: what is left of a lap are its messages."""

    def __init__(self, tile: Any) -> None:
        self.empty, self.merge, self.finish, self.delta = tile.empty, tile.merge, tile.finish, tile.delta

    def forward(self, *args: Any) -> Iterator[Any]:
        """No strips."""
        return iter(())

    backward = forward


class Deaf:
    """Seats whose messages are done at once, and bring nothing: what is left of a lap are its tiles."""

    def __init__(self, seats: Any) -> None:
        self.order = seats.order

    def send(self, buffer: Any, seat: int, tag: int) -> None:
        """Goes nowhere."""

    receive = send

    def completed(self, requests: list[Any]) -> list[int]:
        """All of them."""
        return list(range(len(requests)))

    def patience(self, why: Callable[[], str]) -> Callable[[], None]:
        """Nothing is waited for twice."""
        return lambda: None


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "both": lambda walker, lap: walker,
    "tiles": lambda walker, lap: _deafened(walker, lap),
    "messages": lambda walker, lap: walker._replace(tile=Silent(walker.tile)),
}


def _deafened(walker: Any, lap: Any) -> Any:
    lap.comm = Deaf(lap.comm)
    return walker


class Laps:
    """Runs laps of the three kinds, forward and backward, each recorded.

    Attributes
    ----------
    traces
        a trace for every kind.
    seconds
        for every kind, and False (forward) or True (backward): the seconds of every pass here, all of it: packing and rounding too.
    """

    def __init__(self, attn: RingAttention, arrays: Sequence[Any]) -> None:
        self.attn, self.arrays, self.seats = attn, tuple(arrays), attn.ring._seats
        self.back: tuple[Any, ...] = ()
        self.forget()

    def forget(self) -> None:
        """Begins anew, with no lap in the records."""
        self.traces = {kind: Trace(self.seats.rank, self.seats.order) for kind in KINDS}
        self.seconds: dict[str, dict[bool, list[float]]] = {kind: {False: [], True: []} for kind in KINDS}

    def first(self) -> list[float]:
        """The seconds of the first lap forward and backward here, which are not recorded. Collective."""
        self.lap("both", False)
        out, lse = self.attn.forward(*self.arrays)
        self.back = (out, *self.arrays, out, lse)
        self.lap("both", True)
        taken = [self.seconds["both"][backward][0] for backward in (False, True)]
        self.forget()
        return taken

    def lap(self, kind: str, backward: bool = False) -> Any:
        """One lap, after all ranks have met; its record. Backward there must have been a first. Collective."""
        walk, arrays = (attention.backward, self.back) if backward else (attention.forward, self.arrays)
        self.seats.meet()

        def whole(walker: Any, lap: Any, *given: Any) -> None:
            found = walk(KINDS[kind](walker, lap), lap, *given)
            # A device has not computed before something of its results is here.
            walker.space.to_host(found[-1][:1, :1])

        with self.attn.record(self.traces[kind]):
            began = perf_counter()
            self.attn._walk(whole, backward, *arrays)
            self.seconds[kind][backward].append(perf_counter() - began)
        return self.traces[kind].laps[-1]

    def run(self, seconds: float, kinds: Sequence[str] = tuple(KINDS)) -> int:
        """Laps of all kinds in turn for about ``seconds``; returns how many of each. Collective."""
        if not self.back:
            self.first()

        def turn() -> None:
            for backward in (False, True):
                for kind in kinds:
                    self.lap(kind, backward)

        return turns(self.seats, seconds, turn)


def turns(seats: Any, seconds: float, turn: Callable[[], None]) -> int:
    """Does something as often on all ranks, for about ``seconds``, at least 3 times; returns how often. Collective.

    The clocks of the ranks differ: it is the least of their counts, after one.
    """
    began = perf_counter()
    turn()
    once = perf_counter() - began
    times = min(seats.gather(int(np.clip(seconds / once, 3, LAPS))))
    for _ in range(times - 1):
        turn()
    return times
