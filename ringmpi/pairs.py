"""Which query runs meet which key runs: a layout under a mask, as the work of every rank.

The rows a rank holds are runs of queries; a block is runs of keys. A tile computes one ``Pair`` of them. Pairs that the
mask leaves empty are never made, and what no pair of a rank needs decides how far a block has to travel.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .layout import Layout, Run, Runs, count, positions, slices
from .mask import NEVER, Interval, Mask, Meeting, Span
from .score import Score


@dataclass(frozen=True)
class Pair:
    """A run of this rank's queries and a run of keys of a block: what a tile computes.

    ``rows`` and ``keys`` say where the runs stand in the rank's queries and in the part of the block; ``query`` and
    ``key`` are their global positions. ``bounds`` are the rows' global intervals [lo, hi), int64 (1 or batch, rows), or
    None where every query sees every key. ``shift`` is a query's diagonal less its position.
    """

    rows: slice
    keys: slice
    query: Run
    key: Run
    bounds: Interval | None
    score: Score
    shift: int = 0

    def local(self) -> Interval:
        """The bounds as indices into the key run: int64 (1 or batch, rows), clipped to 0 .. count."""
        if self.bounds is None:
            zero = np.zeros((1, self.query.count), np.int64)
            return zero, zero + self.key.count
        lo, hi = self.bounds
        return self.key.before(lo), self.key.before(hi)

    def distance(self, rows: slice, keys: slice) -> np.ndarray:
        """|diagonal - key position| of some rows and keys, int64 (rows, keys): what ALiBi multiplies."""
        diagonal = self.query.positions()[rows] + self.shift
        return np.abs(diagonal[:, None] - self.key.positions()[keys])


class Strip(NamedTuple):
    """A run of this rank's queries under one interval of the mask."""

    rows: slice
    query: Run
    bounds: Interval
    span: Span
    shift: int


class Work:
    """What every rank of a ring computes: queries and keys laid out, and a mask between them.

    Parameters
    ----------
    queries, keys
        Every rank's runs of queries, and of keys.
    mask, score
        as in ``RingAttention``.

    >>> from ringmpi.layout import Contiguous
    >>> runs = Contiguous().partition(10, 2)
    >>> work = Work(runs, runs, Mask(causal=True), Score())
    >>> work.needed()[:, :, 0].tolist()
    [[True, False], [True, True]]
    """

    def __init__(self, queries: tuple[Runs, ...], keys: tuple[Runs, ...], mask: Mask, score: Score) -> None:
        self.queries, self.keys, self.mask, self.score = queries, keys, mask, score
        self.lengths = sum(map(count, queries)), sum(map(count, keys))
        mask.check(*self.lengths)

    @classmethod
    def over(cls, layouts: tuple[Layout, Layout], lengths: tuple[int, int], size: int, mask: Mask, score: Score) -> Work:
        """The work of ``size`` ranks whose queries and keys are laid out by two rules."""
        queries, keys = (layout.partition(length, size) for layout, length in zip(layouts, lengths))
        return cls(queries, keys, mask, score)

    def part(self, owner: int, part: int, parts: int) -> Runs:
        """The key runs of a part of a block."""
        return tuple(run.part(part, parts) for run in self.keys[owner])

    def pairs(self, strips: list[Strip], score: Score, owner: int, part: int = 0, parts: int = 1) -> Iterator[Pair]:
        """The pairs of a rank's strips with a part of a block that are not empty, each with its bounds if it needs them."""
        runs = self.part(owner, part, parts)
        for strip in strips:
            for keys, run in zip(slices(runs), runs):
                meeting = strip.span.meets(run) if run.count else Meeting.EMPTY
                if meeting is not Meeting.EMPTY:
                    bounds = strip.bounds if meeting is Meeting.PARTIAL else None
                    yield Pair(strip.rows, keys, strip.query, run, bounds, score, strip.shift)

    def strips(self, rank: int) -> list[Strip]:
        """The strips of a rank: its runs of queries, under each interval of the mask."""
        made = []
        for rows, query in self._query_runs(rank):
            shift = self.mask.shift(query.start, *self.lengths)
            for lo, hi in self.mask.bounds(query.positions(), *self.lengths):
                made.append(Strip(rows, query, (lo, hi), Span.of(lo, hi), shift))
        return made

    def needed(self, parts: int = 1) -> np.ndarray:
        """Which rank computes anything on which part of whose block: bool (rank, owner, part).

        This is ``Span.meets`` for all at once: of the rows' bounds, a batch of ranks at a time, only extremes are kept.
        """
        size = len(self.queries)
        runs = [(owner * parts + part, run.start, run.last) for owner in range(size) for part in range(parts)
                for run in self.part(owner, part, parts) if run.count]  # fmt: skip
        pieces, first, last = np.array(runs, np.int64).reshape(-1, 3).T
        needed = np.zeros((size, size * parts), bool)
        for rank, lowest, highest in self._extremes():
            needed[rank, pieces[(highest > first) & (lowest <= last)]] = True
        return needed.reshape(size, size, parts)

    def _extremes(self, rows: int = 1 << 18) -> Iterator[tuple[int, int, int]]:
        """(rank, lowest lo, highest hi) of every run of queries under every interval of the mask, about ``rows`` rows at a time."""
        runs = [(rank, run) for rank, held in enumerate(self.queries) for run in held if run.count]
        ends = np.cumsum([0, *(run.count for _, run in runs)])
        first = 0
        while first < len(runs):
            end = max(first + 1, int(np.searchsorted(ends, ends[first] + rows, side="right")) - 1)
            starts = ends[first:end] - ends[first]
            for lo, hi in self.mask.bounds(positions(tuple(run for _, run in runs[first:end])), *self.lengths):
                lowest = np.minimum.reduceat(np.where(hi > lo, lo, NEVER).min(axis=0), starts).tolist()
                highest = np.maximum.reduceat(np.where(hi > lo, hi, 0).max(axis=0), starts).tolist()
                yield from zip((rank for rank, _ in runs[first:end]), lowest, highest)
            first = end

    @property
    def everywhere(self) -> bool:
        """Whether every rank surely needs every block: none is empty, and the mask hides nothing."""
        return self.mask == Mask() and all(map(count, self.queries)) and all(map(count, self.keys))

    def _query_runs(self, rank: int) -> Iterator[tuple[slice, Run]]:
        """The query runs of a rank, cut where the diagonal jumps if distances from it matter."""
        borders = self.mask.query_borders() if self.score.alibi is not None else ()
        for rows, query in zip(slices(self.queries[rank]), self.queries[rank]):
            cuts = sorted({0, query.count, *(query.before(border) for border in borders)})
            for begin, end in zip(cuts, cuts[1:]):
                yield slice(rows.start + begin, rows.start + end), query.slice(begin, end)
