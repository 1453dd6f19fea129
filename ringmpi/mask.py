"""Which keys a query sees: an interval per query row.

A query at global position i sees the keys whose global position lies in [lo, hi). Its diagonal is
``i + keys - queries``: the last query sees the last key. Each rule below only moves lo and hi, so rules combine
freely, and a tile needs two integers a row whatever the mask:

    documents     lo, hi = the borders of the query's document; its diagonal is aligned at the document's end
    causal        hi = min(hi, diagonal + 1)
    prefix        hi = max(causal hi, document start + prefix), before every cut
    window        lo = max(lo, diagonal - left);  hi = min(hi, diagonal + right + 1)
    kv_range      lo, hi cut to the keys of this batch entry that are real
    keep_first    a second interval: the first n keys of the document that the window left out

To add a rule, add a field and move lo or hi in ``Mask.bounds``.
"""
from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .layout import Run, whole

Interval = tuple[np.ndarray, np.ndarray]
NEVER = np.iinfo(np.int64).max


class Meeting(enum.Enum):
    """How a run of queries meets a run of keys."""

    EMPTY = "no query sees any key"
    PARTIAL = "some queries see some keys"
    FULL = "every query sees every key"


class Span(NamedTuple):
    """The extremes of the intervals of a run of queries: lo and hi of the rows that see anything.

    A row that sees nothing sets ``lo_max`` to NEVER, so that no pair with it is FULL.
    """

    lo_min: int
    lo_max: int
    hi_min: int
    hi_max: int

    @classmethod
    def of(cls, lo: np.ndarray, hi: np.ndarray) -> Span:
        """The span of rows with intervals [lo, hi)."""
        some = hi > lo
        if not some.any():
            return cls(NEVER, NEVER, 0, 0)
        highest = NEVER if not some.all() else int(lo.max())
        return cls(int(lo[some].min()), highest, int(hi[some].min()), int(hi[some].max()))

    def meets(self, keys: Run) -> Meeting:
        """Four comparisons: may any query see any key of the run, does every query see every key of it?

        >>> Span(0, 4, 5, 9).meets(Run(4, 1)), Span(0, 4, 5, 9).meets(Run(9, 3))
        (<Meeting.FULL: 'every query sees every key'>, <Meeting.EMPTY: 'no query sees any key'>)
        """
        if self.hi_max <= keys.start or self.lo_min > keys.last:
            return Meeting.EMPTY
        if self.lo_max <= keys.start and self.hi_min > keys.last:
            return Meeting.FULL
        return Meeting.PARTIAL


@dataclass(frozen=True)
class Mask:
    """Rules for which keys each query sees. All rules given must hold; none given: every query sees every key.

    Parameters
    ----------
    causal
        A query sees no key beyond its diagonal (its own position, where queries and keys are equally long).
    window
        ``(left, right)``: at most that many keys before and after the diagonal; None or -1 is no limit on that side.
    documents
        Borders ``[0, ..., length]`` of packed sequences (cu_seqlens), or a pair of them for queries and keys. No query
        sees a key of another document.
    kv_range
        The real keys of each batch entry: a length for all, ``(batch,)`` lengths, or ``(batch, 2)`` of
        ``[start, stop)`` for left padding. Numbers >= 0; one that is longer than the keys is all of them.
    prefix
        With ``causal``: every query also sees the first ``prefix`` keys of its document (prefix-LM).
    keep_first
        With ``window``: the first n keys of the document stay visible beside the window (StreamingLLM,
        arXiv:2309.17453), as far as ``causal`` and ``kv_range`` allow.

    Raises
    ------
    ValueError
        where a rule has no meaning alone or its numbers are impossible.

    >>> Mask(causal=True, window=(1, 0)).bounds(np.arange(4), 4, 4)
    [(array([[0, 0, 1, 2]]), array([[1, 2, 3, 4]]))]
    """

    causal: bool = False
    window: Any = None
    documents: Any = None
    kv_range: Any = None
    prefix: int | None = None
    keep_first: int = 0

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("window", _window(self.window))
        put("documents", _documents(self.documents))
        put("kv_range", _ranges(self.kv_range))
        if not (isinstance(self.causal, (bool, np.bool_, int, np.integer)) and self.causal in (0, 1)):
            raise TypeError(f"causal is {self.causal!r}; it must be True or False (a mask's name is given in place of a Mask)")
        put("causal", bool(self.causal))
        put("prefix", None if self.prefix is None else whole("prefix", self.prefix))
        put("keep_first", whole("keep_first", self.keep_first))
        if self.prefix is not None and not (self.causal and self.prefix >= 0):
            raise ValueError(f"prefix={self.prefix} needs causal=True and a number of keys >= 0")
        if self.keep_first and (self.window is None or self.keep_first < 0):
            raise ValueError(f"keep_first={self.keep_first} keeps keys beside a window, and needs one, and a number >= 0")

    def bounds(self, positions: np.ndarray, queries: int, keys: int) -> list[Interval]:
        """One or two disjoint intervals a row: pairs (lo, hi) of int64 arrays of shape (1 or batch, rows).

        ``positions`` are the rows' global positions among ``queries``; lo <= hi, both within 0 .. keys.
        """
        start, stop, diagonal = self._document(positions, queries, keys)
        lo, hi = start, stop
        # No limit is longer than everything, so that none overflows.
        left, right = (None if side is None else min(side, queries + keys) for side in self.window or (None, None))
        if self.causal:
            hi = np.minimum(stop, np.maximum(diagonal + 1, start + min(self.prefix or 0, keys)))
        seen = hi
        if left is not None:
            lo = np.maximum(lo, diagonal - left)
        if right is not None:
            hi = np.minimum(hi, diagonal + right + 1)
        intervals = [(lo, hi)]
        if self.keep_first:
            kept = np.minimum(start + min(self.keep_first, keys), seen)
            joined = lo <= kept
            intervals = [
                (np.where(joined, start, lo), np.where(joined, np.maximum(hi, kept), hi)),
                (start, np.where(joined, start, kept)),
            ]
        return [self._cut(*interval, keys) for interval in intervals]

    def check(self, queries: int, keys: int, batch: int | None = None) -> None:
        """Raises ValueError where the rules do not fit these lengths or this batch."""
        if self.documents is not None:
            for borders, length, name in zip(self._borders(), (queries, keys), ("queries", "keys")):
                if borders[-1] != length:
                    raise ValueError(f"the documents end at {borders[-1]}; there are {length} {name}")
        if batch is not None and isinstance(self.kv_range, tuple) and len(self.kv_range) not in (1, batch):
            raise ValueError(f"kv_range is given for {len(self.kv_range)} batch entries; the batch has {batch}")

    def query_borders(self) -> tuple[int, ...]:
        """Where the diagonal may jump: the borders of the queries' documents, if they differ from the keys'."""
        return self.documents[0] if self.documents is not None and isinstance(self.documents[0], tuple) else ()

    def shift(self, position: int, queries: int, keys: int) -> int:
        """The diagonal of a query less its position."""
        return int(self._document(np.array([position]), queries, keys)[2][0]) - position

    def _borders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.documents if self.query_borders() else (self.documents, self.documents)

    def _document(self, positions: np.ndarray, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """First key, end of keys and diagonal of each row's document."""
        q_borders, k_borders = map(np.asarray, self._borders() if self.documents is not None else ((0, queries), (0, keys)))
        doc = np.searchsorted(q_borders, positions, side="right")
        start, stop = k_borders[doc - 1], k_borders[doc]
        return start, stop, positions - q_borders[doc] + stop

    def _cut(self, lo: np.ndarray, hi: np.ndarray, keys: int) -> Interval:
        first, end = np.zeros((1, 1), np.int64), np.full((1, 1), keys)
        if self.kv_range is not None:
            ranges = np.reshape(np.asarray(self.kv_range, np.int64), (-1, 2))
            first, end = np.maximum(ranges[:, :1], 0), np.minimum(ranges[:, 1:], keys)
        lo = np.maximum(lo[None], first)
        hi = np.minimum(hi[None], end)
        return np.minimum(lo, np.maximum(hi, 0)), np.maximum(hi, 0)


def mask(which: str | Mask) -> Mask:
    """A mask by name ("full" or "causal"), or the mask itself.

    >>> mask("causal") == Mask(causal=True)
    True
    """
    if isinstance(which, Mask):
        return which
    named = {"full": Mask(), "causal": Mask(causal=True)}
    if not isinstance(which, str) or which not in named:
        raise ValueError(f"no mask is called {which!r}; there are 'full', 'causal' and Mask(...)")
    return named[which]


def _window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    if np.ndim(window) != 1 or len(window) != 2:
        raise ValueError(f"window={window}: a window is (left, right), a number of keys on each side")
    left, right = (None if side is None or side == -1 else whole("window", side) for side in window)
    if (left or 0) < 0 or (right or 0) < 0:
        raise ValueError(f"window={(left, right)}: a side is a number of keys >= 0, or None (or -1) for no limit")
    return None if left is None and right is None else (left, right)


def _documents(documents: Any) -> Any:
    if documents is None:
        return None
    if not hasattr(documents, "__len__") or len(documents) == 0:
        raise ValueError(f"documents={documents}: a list of borders from 0 to the length, or a pair of them")
    if np.ndim(documents[0]) == 1:
        pair = tuple(_documents(borders) for borders in documents)
        if len(pair) != 2 or len(pair[0]) != len(pair[1]):
            raise ValueError(f"documents of queries and keys: two lists of as many borders, not {[len(b) for b in pair]}")
        return pair
    borders = tuple(whole("documents", b) for b in documents)
    if len(borders) < 2 or borders[0] != 0 or any(a > b for a, b in zip(borders, borders[1:])):
        raise ValueError(f"document borders rise from 0 to the length; got {borders[:8]}{'...' if len(borders) > 8 else ''}")
    return borders


def _ranges(kv_range: Any) -> tuple[tuple[int, int], ...] | None:
    """[start, stop) per batch entry, from a length, lengths or ranges."""
    if kv_range is None:
        return None
    given = np.asarray(kv_range)
    if given.ndim > 2 or (given.ndim == 2 and given.shape[1] != 2) or given.size == 0 or given.dtype.kind not in "iu":
        raise ValueError(f"kv_range is a length, (batch,) lengths or (batch, 2) ranges; got shape {given.shape}, {given.dtype}")
    if given.min() < 0:
        raise ValueError(f"kv_range has {given.min()}; lengths, and ends of ranges, are numbers of keys >= 0")
    if given.ndim < 2:
        given = np.stack([np.zeros_like(np.atleast_1d(given)), np.atleast_1d(given)], axis=1)
    return tuple((int(a), int(b)) for a, b in given)
