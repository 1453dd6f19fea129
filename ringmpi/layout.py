"""Which global positions each rank holds.

A layout is a rule ``runs(length, size, rank)`` that cuts the positions 0 .. length-1 into arithmetic runs. A rank may
hold several runs, or none, and lengths need not divide. Eight tokens on two ranks:

    contiguous   0 0 0 0 1 1 1 1     one run a rank
    zigzag       0 0 1 1 1 1 0 0     an early and a late run: equal work under a causal mask
    striped      0 1 0 1 0 1 0 1     every size-th token

To add a layout, write one class with ``runs`` and name it in ``LAYOUTS``.
"""
from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

Bound = TypeVar("Bound", int, np.ndarray)


def whole(name: str, number: Any) -> int:
    """A number as an int. Raises TypeError, with the name, for what is none: 2.7 tokens are not 2.

    >>> whole("seqlen", np.int64(3))
    3
    """
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} is {number!r}; it must be an integer") from None


class Run(NamedTuple):
    """``count`` positions from ``start`` on, ``step`` apart.

    >>> Run(3, 4, 2).positions()
    array([3, 5, 7, 9])
    """

    start: int
    count: int  # type: ignore[assignment]
    step: int = 1

    @property
    def last(self) -> int:
        """The last position of a run that holds any."""
        return self.start + (self.count - 1) * self.step

    def positions(self) -> np.ndarray:
        """Its positions, int64."""
        return self.start + self.step * np.arange(self.count, dtype=np.int64)

    def before(self, position: Bound) -> Bound:
        """How many of the run's positions lie before ``position``: a global bound as a local one.

        >>> [Run(3, 4, 2).before(p) for p in (0, 3, 4, 9, 10, 99)]
        [0, 0, 1, 3, 4, 4]
        """
        ahead = position - self.start if self.step == 1 else -((self.start - position) // self.step)
        if isinstance(ahead, np.ndarray):
            return np.clip(ahead, 0, self.count)
        return min(max(ahead, 0), self.count)

    def slice(self, begin: int, end: int) -> Run:
        """Its members ``begin`` .. ``end - 1``.

        >>> Run(3, 4, 2).slice(1, 3)
        Run(start=5, count=2, step=2)
        """
        return Run(self.start + begin * self.step, end - begin, self.step)

    def part(self, part: int, parts: int) -> Run:
        """Piece ``part`` of ``parts`` nearly equal ones, in order.

        >>> [Run(0, 5).part(c, 2) for c in range(2)]
        [Run(start=0, count=2, step=1), Run(start=2, count=3, step=1)]
        """
        return self.slice(self.count * part // parts, self.count * (part + 1) // parts)


Runs = tuple[Run, ...]


def count(runs: Runs) -> int:
    """How many positions the runs hold together."""
    return sum(run.count for run in runs)


def positions(runs: Runs) -> np.ndarray:
    """The positions of the runs one after another, int64: the global position of every row a rank holds."""
    return np.concatenate([np.empty(0, np.int64), *(run.positions() for run in runs)])


def slices(runs: Runs) -> list[slice]:
    """Where each run stands among the rows that its rank holds.

    >>> slices((Run(0, 2), Run(6, 3)))
    [slice(0, 2, None), slice(2, 5, None)]
    """
    ends = np.cumsum([0, *(run.count for run in runs)]).tolist()
    return [slice(a, b) for a, b in zip(ends, ends[1:])]


def runs_of(positions: np.ndarray) -> Runs:
    """The runs that hold these positions, in their order: each as long as the step stays what it is, and rises.

    >>> runs_of(np.array([0, 1, 2, 10, 12, 14, 13]))
    (Run(start=0, count=3, step=1), Run(start=10, count=3, step=2), Run(start=13, count=1, step=1))
    """
    steps = np.diff(positions)
    turns = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))
    runs, first = [], 0
    while first < len(positions):
        step = int(steps[first]) if first < len(steps) else 0
        last = int(turns[np.searchsorted(turns, first, side="right")]) if step > 0 else first
        runs.append(Run(int(positions[first]), last - first + 1, max(step, 1)))
        first = last + 1
    return tuple(runs)


def chunk(length: int, chunks: int, i: int) -> Run:
    """Chunk ``i`` of a length cut as evenly as can be, the longer chunks first.

    >>> [chunk(2999, 4, i).count for i in range(4)]
    [750, 750, 750, 749]
    """
    short, longer = divmod(length, chunks)
    return Run(i * short + min(i, longer), short + (i < longer))


class Layout:
    """A rule for which positions each of ``size`` ranks holds: subclass it with a ``runs`` of your own.

    Rules are compared between ranks by their ``repr``, so that must say all there is to them (a frozen dataclass's does).
    """

    def runs(self, length: int, size: int, rank: int) -> Runs:
        """The runs of ``rank``, in the order of its rows."""
        raise NotImplementedError

    def partition(self, length: int, size: int) -> tuple[Runs, ...]:
        """Every rank's runs, empty ones left out.

        >>> Contiguous().partition(5, 2)
        ((Run(start=0, count=3, step=1),), (Run(start=3, count=2, step=1),))
        """
        held = tuple(tuple(run for run in self.runs(length, size, r) if run.count) for r in range(size))
        if sum(map(count, held)) != length:
            raise ValueError(f"{self} holds {sum(map(count, held))} positions on {size} ranks; the sequence has {length}")
        return held


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r holds the r-th of ``size`` consecutive chunks: how callers usually hold their rows."""

    def runs(self, length: int, size: int, rank: int) -> Runs:  # noqa: D102
        return (chunk(length, size, rank),)


@dataclass(frozen=True)
class Zigzag(Layout):
    """Rank r holds chunks r and 2*size-1-r of 2*size: every rank sees as many keys under a causal mask.

    The pairing is Llama 3's (arXiv:2407.21783, section 3.3.2) and zhuzilin/ring-flash-attention's.

    >>> [positions(runs).tolist() for runs in Zigzag().partition(8, 2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    def runs(self, length: int, size: int, rank: int) -> Runs:  # noqa: D102
        return chunk(length, 2 * size, rank), chunk(length, 2 * size, 2 * size - 1 - rank)


@dataclass(frozen=True)
class Striped(Layout):
    """Rank r holds positions r, r + size, r + 2*size, ... (Striped Attention, arXiv:2311.09431).

    >>> [positions(runs).tolist() for runs in Striped().partition(8, 3)]
    [[0, 3, 6], [1, 4, 7], [2, 5]]
    """

    def runs(self, length: int, size: int, rank: int) -> Runs:  # noqa: D102
        return (Run(rank, max(0, -((rank - length) // size)), size),)


def _runs(rank: int, part: Any) -> Runs:
    """What a rank of a custom layout holds: runs, each of two or three integers."""
    try:
        runs = [tuple(run) for run in part]
    except TypeError:
        raise TypeError(f"rank {rank} of the custom layout holds {part!r}; it must be a number of tokens, or a list of runs") from None
    for run in runs:
        if len(run) not in (2, 3):
            raise TypeError(f"rank {rank} of the custom layout holds {run}; a run is (start, count) or (start, count, step)")
    return tuple(Run(*(whole(f"{name} of a run of rank {rank}", number) for name, number in zip(Run._fields, run))) for run in runs)


class Custom(Layout):
    """A distribution of the caller's own.

    Parameters
    ----------
    parts
        One entry a rank: how many tokens it holds (ranks in order, consecutive tokens), or its runs as
        ``Run(start, count, step)`` or tuples. Together they must hold every position exactly once.

    >>> [positions(runs).tolist() for runs in Custom([3, 0, 2]).partition(5, 3)]
    [[0, 1, 2], [], [3, 4]]
    >>> [positions(runs).tolist() for runs in Custom([[(0, 2), (4, 1)], [(2, 2)]]).partition(5, 2)]
    [[0, 1, 4], [2, 3]]
    """

    def __init__(self, parts: Sequence[int | Iterable[tuple[int, ...]]]) -> None:
        if all(isinstance(part, (int, np.integer)) for part in parts):
            starts = np.cumsum([0, *parts]).tolist()
            parts = [[(start, int(n))] for start, n in zip(starts, parts)]  # type: ignore[arg-type]
        self.parts: tuple[Runs, ...] = tuple(_runs(rank, part) for rank, part in enumerate(parts))
        for rank, runs in enumerate(self.parts):
            for run in runs:
                if run.start < 0 or run.count < 0 or run.step < 1:
                    raise ValueError(f"rank {rank} of the custom layout holds {run}; start and count must be >= 0, step >= 1")

    def __repr__(self) -> str:
        return f"Custom({[[tuple(run) for run in runs] for runs in self.parts]})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def runs(self, length: int, size: int, rank: int) -> Runs:  # noqa: D102
        return self.parts[rank]

    def partition(self, length: int, size: int) -> tuple[Runs, ...]:  # noqa: D102
        if len(self.parts) != size:
            raise ValueError(f"the custom layout is for {len(self.parts)} ranks; the ring has {size}")
        self._once(length)
        return super().partition(length, size)

    def _once(self, length: int) -> None:
        """Raises unless every position below ``length`` is held exactly once."""
        held = sum(count(runs) for runs in self.parts)
        if held != length:
            raise ValueError(f"the custom layout holds {held} positions; the sequence has {length}")
        taken = np.zeros(length, bool)
        for rank, runs in enumerate(self.parts):
            for run in runs:
                if run.count and run.last >= length:
                    raise ValueError(f"rank {rank} of the custom layout holds position {run.last}; the sequence has {length}")
                mine = taken[run.start : run.start + run.count * run.step : run.step]
                if mine.any():
                    twice = run.start + int(np.argmax(mine)) * run.step
                    raise ValueError(f"rank {rank} of the custom layout holds position {twice} that is held more than once")
                mine[:] = True


LAYOUTS: dict[str, type[Layout]] = {"contiguous": Contiguous, "zigzag": Zigzag, "striped": Striped}


def layout(which: str | Layout) -> Layout:
    """A layout by name, or the layout itself.

    >>> layout("zigzag")
    Zigzag()
    """
    if isinstance(which, Layout):
        return which
    if not isinstance(which, str) or which not in LAYOUTS:
        raise ValueError(f"no layout is called {which!r}; there are {', '.join(LAYOUTS)} and Custom(...)")
    return LAYOUTS[which]()
