"""What is written down of a lap at one rank: hops, tiles, waits, laps.

Ranks are the caller's. Times are seconds of this rank's ``perf_counter``.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("block", "gradient", "home")
# The other end of a collective, which is no link.
ALL = -1


@dataclass(slots=True)
class HopRecord:
    """One message at one end.

    ``polls`` and ``polling`` count the polls between posting and seeing, and the seconds in them. ``exposed`` are the
    seconds waited for it. ``flight`` are the seconds from when both ends had posted to when it was seen: nan at the
    sending end, and until the ends have been put together.
    """

    lap: int
    backward: bool
    step: int
    kind: str
    walk: int
    part: int
    owner: int
    src: int
    dst: int
    nbytes: int
    posted: float
    seen: float = 0.0
    polls: int = 0
    polling: float = 0.0
    exposed: float = 0.0
    flight: float = float("nan")

    @property
    def key(self) -> tuple[int, ...]:
        """What the two ends of a message have in common, and no other message."""
        return self.lap, KINDS.index(self.kind), self.walk, self.owner, self.src, self.dst


@dataclass(slots=True)
class TileRecord:
    """A pair of runs (start, count, step), computed in ``strips`` strips: ``busy`` of the seconds from ``began`` to ``ended``."""

    lap: int
    backward: bool
    step: int
    walk: int
    part: int
    owner: int
    query: tuple[int, int, int]
    key: tuple[int, int, int]
    began: float
    ended: float
    busy: float
    strips: int = 1


class WaitRecord(NamedTuple):
    """A wait of ``polls`` polls."""

    lap: int
    backward: bool
    step: int
    began: float
    ended: float
    polls: int


class StepRecord(NamedTuple):
    """The beginning of a step."""

    lap: int
    backward: bool
    step: int
    began: float


@dataclass(slots=True)
class LapRecord:
    """One lap: the seconds its tiles were busy and it waited (``exposed``), its polls and the seconds in them."""

    lap: int
    backward: bool
    began: float
    ended: float = 0.0
    busy: float = 0.0
    exposed: float = 0.0
    polls: int = 0
    polling: float = 0.0


class LinkRow(NamedTuple):
    """A link: messages and bytes; seconds in flight of the newest; bytes a second at their median; seconds waited for it."""

    src: int
    dst: int
    count: int  # type: ignore[assignment]
    nbytes: int
    p50: float
    p90: float
    p99: float
    most: float
    bandwidth: float
    exposed: float


class StepRow(NamedTuple):
    """A step of all laps of one direction at one rank: messages and bytes that came, seconds busy and exposed."""

    rank: int
    backward: bool
    step: int
    count: int  # type: ignore[assignment]
    nbytes: int
    busy: float
    exposed: float


class RankRow(NamedTuple):
    """A rank: laps, and their seconds: altogether, busy, exposed, in polls; and how far its clock may be off."""

    rank: int
    laps: int
    total: float
    busy: float
    exposed: float
    polling: float
    clock_error: float
