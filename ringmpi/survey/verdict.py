"""Who is to blame. Pure judgement of numbers that ``survey`` brings.

Waits blame the victims: everybody waits for a slow rank, but itself. So a rank is named by its tiles, which wait for nobody,
and only if it also waited no more than the others; a link by a test of its own, with everything else still, twice.

Something is an outlier if its best is worse than the typical of all others by a factor: noise, which makes the typical
worse and leaves the best, then makes the judge careful instead of wrong.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SLOW_RANK, SLOW_LINK = 1.3, 1.6
# A link is not blamed for less than this, in seconds.
FLOOR = 20e-6


class Verdict(NamedTuple):
    """A culprit: a "rank" or a "link" (its two ranks), and the sentence that says why."""

    what: str
    ranks: tuple[int, ...]
    sentence: str


def outliers(best: Sequence[float], typical: Sequence[float], factor: float, floor: float = 0.0, most: int = 1) -> list[int]:
    """Those, at most ``most``, whose best is more than ``factor`` times, and ``floor`` more than, the typical of all others.

    >>> outliers([5.0, 1.0, 1.1], [5.2, 1.2, 1.3], factor=1.5)
    [0]
    >>> outliers([1.3, 1.0, 1.1], [1.5, 1.2, 1.3], factor=1.5)
    []
    """
    order = np.argsort(best)[::-1]
    for few in range(min(most, len(order) - 1), 0, -1):
        rest = max(typical[i] for i in order[few:])
        if best[order[few - 1]] > max(factor * rest, rest + floor):
            return sorted(order[:few].tolist())
    return []


class Pace(NamedTuple):
    """A rank's laps: seconds of its tiles, for as much work as an average rank has, with messages and alone; and its waits."""

    rank: int
    best: float
    typical: float
    alone_best: float
    alone_typical: float
    waited: float


def slow_ranks(paces: Sequence[Pace]) -> list[Verdict]:
    """The ranks whose tiles are slow, with messages and without, and that waited no more than the others."""
    most = max(1, (len(paces) - 1) // 2)
    with_messages = outliers([p.best for p in paces], [p.typical for p in paces], SLOW_RANK, most=most)
    alone = outliers([p.alone_best for p in paces], [p.alone_typical for p in paces], SLOW_RANK, most=most)
    found = []
    for i in sorted({*with_messages} & {*alone}):
        pace, others = paces[i], [p for k, p in enumerate(paces) if k not in with_messages]
        typical, waited = (float(np.median(numbers)) for numbers in ([p.typical for p in others], [p.waited for p in others]))
        if pace.waited <= waited or len(paces) == 1:
            text = (f"rank {pace.rank} is slow: its tiles take {1e3 * pace.typical:.1f} ms a lap, those of the others "
                    f"{1e3 * typical:.1f} ms; alone {1e3 * pace.alone_typical:.1f} ms. It waited {1e3 * pace.waited:.1f} ms a lap, "
                    f"the others {1e3 * waited:.1f} ms, for it.")  # fmt: skip
            found.append(Verdict("rank", (pace.rank,), text))
    return found


class LinkTest(NamedTuple):
    """A link tested alone with messages of one size: the least and the median seconds one way."""

    src: int
    dst: int
    between: bool
    nbytes: int
    low: float
    p50: float


def suspects(tests: Sequence[LinkTest], floor: float = FLOOR) -> list[tuple[int, int]]:
    """Links that are slower than their like, inside nodes or between them, at some size, by ``floor`` seconds at least."""
    found = set()
    for between in (False, True):
        for nbytes in {test.nbytes for test in tests}:
            its = [test for test in tests if (test.between, test.nbytes) == (between, nbytes)]
            slow = outliers([t.low for t in its], [t.p50 for t in its], SLOW_LINK, floor, most=len(its) // 2 if len(its) > 2 else 0)
            found |= {(its[i].src, its[i].dst) for i in slow}
    return sorted(found)


def slow_links(tests: Sequence[LinkTest], again: Sequence[LinkTest], floor: float = FLOOR) -> list[Verdict]:
    """The suspects that are slow again: ``again`` are second tests of the suspects, which replace the first."""
    redone = {(t.src, t.dst, t.nbytes): t for t in again}
    twice = {*suspects(tests, floor)} & {*suspects([redone.get((t.src, t.dst, t.nbytes), t) for t in tests], floor)}
    return [_blame(link, [*again, *tests], twice) for link in sorted(twice)]


def _blame(link: tuple[int, int], tests: Sequence[LinkTest], slow: set[tuple[int, int]]) -> Verdict:
    words = []
    for nbytes in sorted({test.nbytes for test in tests}):
        mine = next(test for test in tests if (test.src, test.dst) == link and test.nbytes == nbytes)
        like = [t.p50 for t in tests if (t.between, t.nbytes) == (mine.between, nbytes) and (t.src, t.dst) not in slow]
        if nbytes in (min(t.nbytes for t in tests), max(t.nbytes for t in tests)):
            words.append(f"{1e3 * mine.p50:.3f} ms for {nbytes:,} bytes, its like {1e3 * float(np.median(like)):.3f} ms")
    kind = "between nodes" if mine.between else "inside a node"
    text = f"the link from rank {link[0]} to rank {link[1]}, {kind}, is slow: {'; '.join(words)}. Tested twice, with everything else still."
    return Verdict("link", link, text)
