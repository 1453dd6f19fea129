"""How a pass over a pair of runs is cut into calls of about two milliseconds: by shape alone, never by measured speed.

    heads    small ones go several to a call, each computed by one thread ("alone") if there are enough for all
    panel    keys that are packed once and serve all strips of rows and all query heads of a K/V head
    strip    rows that the library takes at a time; a forward call takes some of them, or some heads
    chunk    strips that the threads take together in a backward pass, against blocks of keys
"""
from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

# Multiply-adds count two: 2 ms of an AVX2 core that does 65e9 of them a second; half of that time in AVX-512.
FLOPS = {"float32": 1.3e8, "float64": 0.65e8}
# Packed keys and values of a panel: they stay in the last cache that the cores share.
PANEL_BYTES = 2 << 20
PACK_KEYS, PACK_QUERIES = 1, 2
# Calls that are planned in one go: after a call Python's own code is no longer in the core's caches, and takes ten times as long.
SLAB = 32

Range = tuple[int, int]


class Geometry(Protocol):
    """How a library takes rows and keys."""

    real: str
    dtype: np.dtype
    block_strips: int
    gradient_keys: int

    def __hash__(self) -> int:
        """One library is not another."""

    def strips(self, rows: int) -> int:
        """How many strips rows are cut into."""

    def strip_row(self, rows: int, strip: int) -> int:
        """The first row of a strip; of the one behind the last, where the last row's vector ends."""

    def block_of_keys(self, panel: int) -> int:
        """How many of the keys of a panel a backward call takes at a time."""


class Shape(NamedTuple):
    """Of a pair of runs."""

    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int


class Part(NamedTuple):
    """What a call computes, ``part`` of call.h: batch entries, K/V heads, query heads of each group, strips of rows and keys of a
    panel, each from the first to the one behind the last; what is to be packed; whether each head is the work of one thread."""

    batch0: int
    batch1: int
    kv0: int
    kv1: int
    group0: int
    group1: int
    strip0: int
    strip1: int
    panel0: int
    panel1: int
    key0: int
    key1: int
    pack: int
    alone: bool


class Cut:
    """The calls of a pass, "forward" or "backward". ``bounds`` are the rows' lo and hi, int32 (1 or batch, rows), or None.

    ``flops`` are those of a (row, key) pair, ``most`` how many pairs make a call; ``together`` is how many heads make a call, or 0 if
    one is more than a thread's share of a call; ``alone``: each of these is computed by one thread; ``side`` is how many larger ones
    are computed side by side, each by a thread; ``wide`` is how many keys a panel has at most. Where panels and their blocks begin
    never depends on how many threads there are, or sums would.
    """

    def __init__(self, which: str, shape: Shape, bounds: tuple[np.ndarray, np.ndarray] | None, library: Geometry, threads: int) -> None:
        self.which, self.shape, self.bounds, self.library, self.threads = which, shape, bounds, library, threads
        d, dv, self.group = shape.head_dim, shape.v_dim, shape.heads // shape.kv_heads
        self.flops, packed = (2 * (d + dv), d + dv) if which == "forward" else (2 * (3 * d + 2 * dv), 2 * d + dv)
        self.most, self.starts = FLOPS[library.real] * threads / self.flops, starts(library, shape.rows)
        self.together, self.alone, self.wide = self._together(), shape.batch * shape.kv_heads >= threads, shape.keys
        self.side = threads if which == "backward" and shape.kv_heads >= threads else 1
        if not self.together:
            self.wide = _whole(PANEL_BYTES // (packed * library.dtype.itemsize) + 1, library.gradient_keys)
        self._cuts: dict[tuple[int, ...], list[tuple[Range, Range]]] = {}

    def slabs(self) -> Iterator[list[Part]]:
        """The calls, some at a time."""
        parts = self.parts()
        while some := [*islice(parts, SLAB)]:
            yield some

    def parts(self) -> Iterator[Part]:
        """The calls."""
        if self.together:
            return self._whole()
        return self._forward() if self.which == "forward" else self._backward()

    def widest(self) -> Part:
        """What needs the most space of all calls."""
        alone = self.alone if self.together else self.side > 1
        return Part(*(0,) * 9, min(self.wide, self.shape.keys), 0, 0, 0, alone)

    def _together(self) -> int:
        shape, rows = self.shape, self.library.strip_row(self.shape.rows, self.library.strips(self.shape.rows))
        head, budget = self.group * rows * shape.keys * self.flops, FLOPS[self.library.real]
        return 0 if head > budget else int(budget / max(head, 1)) * self.threads

    def _whole(self) -> Iterator[Part]:
        """Calls of whole heads."""
        batch, kv_heads, keys = self.shape.batch, self.shape.kv_heads, self.shape.keys
        batches, heads, strips = max(1, self.together // kv_heads), min(self.together, kv_heads), len(self.starts) - 1
        for b in range(0, batch, batches):
            for h in range(0, kv_heads, heads):
                yield Part(b, min(b + batches, batch), h, min(h + heads, kv_heads), 0, self.group, 0, strips, 0, keys, 0, keys,
                           PACK_KEYS | PACK_QUERIES, self.alone)  # fmt: skip

    def _panels(self, step: int = 1) -> Iterator[tuple[int, Range, Range]]:
        """Batch entry, ``step`` K/V heads, or one of those that are left, and panel of keys."""
        kv_heads = self.shape.kv_heads
        heads = [(h, h + step) for h in range(0, kv_heads - step + 1, step)]
        heads += [(h, h + 1) for h in range(kv_heads - kv_heads % step, kv_heads)]
        for b in range(self.shape.batch):
            ((first, end),) = self.seen(b, np.array([0, self.shape.rows]))
            wide = _whole(_evenly(end - first, self.wide), self.library.gradient_keys) if first < end else 1
            for of in heads:
                for at in range(first, end, wide):
                    yield b, of, (at, min(at + wide, end))

    def _of(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """The bounds of a batch entry's rows, where there are any."""
        lo, hi = self.bounds  # type: ignore[misc]
        return lo[batch % len(lo)], hi[batch % len(hi)]

    def seen(self, batch: int, borders: np.ndarray) -> list[Range]:
        """The least and greatest key that any of the rows from each border to the next sees; (0, 0) if none."""
        keys = self.shape.keys
        if self.bounds is None:
            return [(0, keys)] * (len(borders) - 1)
        lo, hi = self._of(batch)
        some = lo < hi
        least = np.minimum.reduceat(np.where(some, lo, keys), borders[:-1]).tolist()
        most = np.maximum.reduceat(np.where(some, hi, 0), borders[:-1]).tolist()
        return [(first, end) if first < end else (0, 0) for first, end in zip(least, most)]

    def pairs(self, batch: int, panel: Range) -> np.ndarray:
        """How many (row, key) pairs each strip has in a panel of keys, where there are bounds."""
        lo, hi = self._of(batch)
        kept = np.maximum(np.minimum(hi, panel[1]) - np.maximum(lo, panel[0]), 0, dtype=np.int64)
        return np.add.reduceat(kept, self.starts[:-1])

    def _forward(self) -> Iterator[Part]:
        """Some strips, or some heads of a group, against a panel of keys."""
        for b, kv, panel in self._panels():
            pack = PACK_KEYS
            for group, strips in self._of_panel(b, panel):
                yield Part(b, b + 1, *kv, *group, *strips, *panel, *panel, pack, False)
                pack = 0

    def _of_panel(self, batch: int, panel: Range) -> list[tuple[Range, Range]]:
        """The query heads and strips of each forward call on a panel, alike for all K/V heads."""
        if self.bounds is None:
            return _even(self.library, self.shape.rows, panel[1] - panel[0], self.group, self.most, self.threads)
        this = batch % len(self.bounds[0]), *panel
        if this not in self._cuts:
            self._cuts[this] = [*_cut(self.pairs(batch, panel), self.group, self.most, self.threads)]
        return self._cuts[this]

    def _backward(self) -> Iterator[Part]:
        """Chunks of strips of a head, or of several heads, against some keys of a panel.

        Where there are as many K/V heads as threads, each thread computes one by itself: they need not wait for each other.
        """
        chunks = {team: self._chunks(team) for team in {1, self.threads}}
        for b, kv, panel in self._panels(self.side):
            team = 1 if kv[1] - kv[0] == self.side > 1 else self.threads
            pack, block, most = PACK_KEYS, self.library.block_of_keys(panel[1] - panel[0]), self.most * team / self.threads
            strips, seen = chunks[team]
            pieces = [*_pieces(strips, seen[b % len(seen)], panel, block, most)]
            heads = _evenly(self.group, most / pieces[0].pairs) if len(pieces) == 1 else 1
            for g in range(0, self.group, heads):
                for its in pieces:
                    first, end = PACK_QUERIES * its.first, min(g + heads, self.group)
                    yield Part(b, b + 1, *kv, g, end, *its.strips, *panel, *its.keys, pack | first, team < self.threads)
                    pack = 0

    def _chunks(self, team: int) -> tuple[list[_Chunk], list[list[Range]]]:
        """The chunks of a team of threads, and which keys each sees, of each batch entry that has bounds of its own."""
        many, chunk = len(self.starts) - 1, self.library.block_strips * team
        borders = np.append(self.starts[:many:chunk], self.shape.rows)
        chunks = [_Chunk((s, min(s + chunk, many)), rows) for s, rows in zip(range(0, many, chunk), np.diff(borders).tolist())]
        return chunks, [self.seen(b, borders) for b in range(1 if self.bounds is None else len(self.bounds[0]))]


@lru_cache(maxsize=64)
def starts(library: Geometry, rows: int) -> np.ndarray:
    """The first row of each strip, and where the last ends."""
    ends = range(library.strips(rows) + 1)
    return np.array([min(rows, library.strip_row(rows, strip)) for strip in ends])


@lru_cache(maxsize=256)
def _even(library: Geometry, rows: int, keys: int, group: int, most: float, threads: int) -> list[tuple[Range, Range]]:
    """``_cut`` where every row sees every key."""
    return [*_cut(np.diff(starts(library, rows)) * keys, group, most, threads)]


def _cut(pairs: np.ndarray, group: int, most: float, threads: int) -> Iterator[tuple[Range, Range]]:
    """Ranges of query heads and of strips with about ``most`` pairs together; a head that has many more is cut by strips."""
    some = np.flatnonzero(pairs)
    if not len(some):
        return
    first, end = int(some[0]), int(some[-1]) + 1
    upto = np.cumsum(pairs[first:end])
    heads, pieces = _evenly(group, most / upto[-1]), max(1, round(upto[-1] / most))
    marks = np.searchsorted(upto, upto[-1] * np.arange(1, pieces) / pieces)
    marks = [first, *(first + m for m in sorted({int(m) // threads * threads for m in marks} - {0})), end]
    for g in range(0, group, heads):
        for cut in zip(marks, marks[1:]):
            yield (g, min(g + heads, group)), cut


class _Chunk(NamedTuple):
    """Strips that the threads take together, and how many rows they have."""

    strips: Range
    rows: int


class _Piece(NamedTuple):
    """Strips of some chunks against some keys; how many pairs these are, and whether the keys are the first that the strips see."""

    strips: Range
    keys: Range
    pairs: int
    first: bool


def _pieces(chunks: list[_Chunk], seen: list[Range], panel: Range, block: int, most: float) -> Iterator[_Piece]:
    """Chunks against the keys they see of a panel, as many as make ``most`` pairs; a chunk that has many more is cut by blocks of keys.

    >>> chunks, seen = [_Chunk((i, i + 1), 10) for i in range(4)], [(0, 12), (0, 24), (0, 0), (12, 240)]
    >>> for piece in _pieces(chunks, seen, (0, 240), 12, 1000): print(*piece)
    (0, 2) (0, 24) 360 True
    (3, 4) (12, 132) 1200 True
    (3, 4) (132, 240) 1080 False
    """
    held: _Piece | None = None
    for chunk, (low, high) in zip(chunks, seen):
        # Keys begin where a block does: sums do not depend on how many threads there are, and so on chunks.
        start, end = panel[0] + max(0, low - panel[0]) // block * block, min(high, panel[1])
        pairs = chunk.rows * (end - start)
        if pairs <= 0:
            continue
        if held and held.pairs + pairs <= most:
            keys = min(held.keys[0], start), max(held.keys[1], end)
            held = _Piece((held.strips[0], chunk.strips[1]), keys, held.pairs + pairs, True)
            continue
        if held:
            yield held
        wide, held = _whole(-(-(end - start) // max(1, round(pairs / most))), block), None
        if end - start <= wide:
            held = _Piece(chunk.strips, (start, end), pairs, True)
            continue
        for at in range(start, end, wide):
            stop = min(at + wide, end)
            yield _Piece(chunk.strips, (at, stop), chunk.rows * (stop - at), at == start)
    if held:
        yield held


def _whole(number: int, unit: int) -> int:
    """The least multiple of a unit that is no less."""
    return -(-number // unit) * unit


def _evenly(number: int, most: float) -> int:
    """How long the parts of a number are that are about ``most`` long: 2 and 2 rather than 3 and 1.

    >>> _evenly(4, 3.2), _evenly(4, 0.1), _evenly(4, 99)
    (2, 1, 4)
    """
    return -(-number // -(-number // max(1, round(most))))
