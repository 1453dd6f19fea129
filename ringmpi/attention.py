"""The walk of the data, forward and backward, on one screen each.

    forward     q, k, v -> blocks as they arrive -> a tile per pair -> merge -> finish: out, lse
    backward    delta = sum(dout * out) -> the same blocks, the same pairs, p rebuilt from lse -> dq here; dk, dv travel home

Queries, the accumulator (o, m, l) and dq never move. The tile, its space, the lap and the work are arguments.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from .layout import count, slices
from .pairs import Pair, Strip, Work
from .partial import EVERYTHING, Partial, accumulator, namespace, sink_partial
from .ring import Lap
from .schedule import Visit
from .score import Score

Array = Any


class Block(NamedTuple):
    """The shape of a block in bytes: K, then V, of all batch entries and K/V heads; their gradients alike."""

    batch: int
    kv_heads: int
    head_dim: int
    v_dim: int

    def nbytes(self, rows: int, dtype: Any) -> int:
        """How many bytes a block of ``rows`` tokens takes."""
        return self.batch * rows * self.kv_heads * (self.head_dim + self.v_dim) * dtype.itemsize

    def split(self, buffer: Array, rows: int, dtype: Any) -> tuple[Array, Array]:
        """The K and V of a block in a buffer of bytes: (batch, rows, kv_heads, head_dim) and (.., v_dim)."""
        whole = buffer.view(dtype)
        k, v = ((self.batch, rows, self.kv_heads, dim) for dim in (self.head_dim, self.v_dim))
        border = self.batch * rows * self.kv_heads * self.head_dim
        return whole[:border].reshape(k), whole[border:].reshape(v)


class Walker(NamedTuple):
    """What a walk of the data needs: this rank's share of the work, and what to walk with.

    ``owners`` are the ranks in ring order, for blocks are named by seats; ``parts`` says into how many parts each is cut.
    """

    work: Work
    strips: list[Strip]
    score: Score
    parts: int
    owners: tuple[int, ...]
    seat: int
    tile: ModuleType
    space: Any
    block: Block

    def rows(self, visit: Visit) -> int:
        """How many tokens the part of the block at a visit has."""
        return count(self.work.part(self.owners[visit.owner], visit.part, self.parts))

    def pairs(self, visit: Visit) -> Iterator[Pair]:
        """The pairs of this rank's queries with the block at a visit."""
        return self.work.pairs(self.strips, self.score, self.owners[visit.owner], visit.part, self.parts)

    def seen(self, rows: int) -> np.ndarray:
        """Which of this rank's ``rows`` queries see any key of the whole sequence: bool (1 or batch, rows)."""
        held = np.zeros((max((len(strip.bounds[0]) for strip in self.strips), default=1), rows), bool)
        for strip in self.strips:
            lo, hi = strip.bounds
            held[:, strip.rows] |= lo < hi
        return held

    def own(self, part: int) -> int:
        """How many tokens part ``part`` of this rank's own block has."""
        return count(self.work.part(self.owners[self.seat], part, self.parts))

    def own_rows(self, part: int) -> Iterator[tuple[slice, slice]]:
        """For every run of its own block: where part ``part`` of it stands in the part, and where among its rows."""
        runs = self.work.keys[self.owners[self.seat]]
        pieces = self.work.part(self.owners[self.seat], part, self.parts)
        for whole, run, piece, within in zip(slices(runs), runs, pieces, slices(pieces)):
            begin = whole.start + run.before(piece.start)
            yield within, slice(begin, begin + piece.count)


def forward(walker: Walker, lap: Lap, q: Array, k: Array, v: Array, sinks: Array | None = None) -> tuple[Array, Array]:
    """out (batch, rows, heads, v_dim) and lse (batch, heads, rows) of this rank's queries."""
    tile, total = walker.tile, walker.tile.empty((*q.shape[:3], v.shape[3]), accumulator(q.dtype))
    pack(walker, lap, k, v)

    def compute(visit: Visit) -> Iterator[Pair]:
        keys, values = walker.block.split(lap.block(visit), walker.rows(visit), k.dtype)
        return fold(tile, total, walker.pairs(visit), q, keys, values)

    lap.run(compute)
    if sinks is not None:
        tile.merge(total, EVERYTHING, sink_partial(sinks, total.o))
    return tile.finish(total, q.dtype)


def fold(tile: ModuleType, total: Partial, pairs: Iterable[Pair], q: Array, keys: Array, values: Array) -> Iterator[Pair]:
    """Merges the pairs of this rank's queries with some keys into ``total``, strip by strip."""
    for pair in pairs:
        mine = total.at(slice(None), pair.rows, slice(None))
        for where, partial in tile.forward(q[:, pair.rows], keys[:, pair.keys], values[:, pair.keys], pair):
            tile.merge(mine, where, partial)
            yield pair


def backward(walker: Walker, lap: Lap, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array,
             sinks: Array | None = None) -> tuple[Array, ...]:  # fmt: skip
    """dq, dk, dv of this rank's rows; with sinks also this rank's share of dsinks, in the dtype of the sums."""
    tile, sums, delta = walker.tile, accumulator(q.dtype), walker.tile.delta(dout, out)
    dq, lse = walker.space.zeros(q.shape, sums), lse.astype(sums, copy=False)
    home = [walker.space.zeros((lap.size(walker.seat, part)[1],), np.uint8) for part in range(walker.parts)]
    pack(walker, lap, k, v)

    def fold(visit: Visit) -> Iterator[Pair]:
        rows, gradient = walker.rows(visit), lap.gradient(visit)
        keys, values = walker.block.split(lap.block(visit), rows, k.dtype)
        dk, dv = walker.block.split(home[visit.part] if gradient is None else gradient, rows, sums)
        for pair in walker.pairs(visit):
            mine, its, heads = pair.rows, pair.keys, slice(None)
            for _ in tile.backward(q[:, mine], keys[:, its], values[:, its], dout[:, mine], lse[:, heads, mine],
                                   delta[:, heads, mine], pair, dq[:, mine], dk[:, its], dv[:, its]):  # fmt: skip
                yield pair

    lap.run(fold, lambda visit, came: walker.space.add(home[visit.part], came, sums))
    gradients = (dq.astype(q.dtype, copy=False), *unpack(walker, home, k, v))
    if sinks is None:
        return gradients
    # A sink of -inf is none: its row may see nothing at all.
    xp = namespace(q)
    share = xp.exp(xp.asarray(sinks)[:, None] - xp.where(xp.isneginf(lse), 0, lse))
    # Where no key is seen, out is 0 whatever the sink: it has no gradient from there, whatever dout holds.
    seen = xp.asarray(walker.seen(q.shape[1]))[:, None]
    return (*gradients, -xp.where(seen, share * delta, 0).sum(axis=(0, 2)))


def pack(walker: Walker, lap: Lap, k: Array, v: Array) -> None:
    """Copies this rank's K and V into the buffers in which its own parts start."""
    for part, slot in enumerate(lap.column.home):
        if slot is None:
            continue
        buffer = lap.buffers[True][slot][: lap.size(walker.seat, part)[0]]
        for given, packed in zip((k, v), walker.block.split(buffer, walker.own(part), k.dtype)):
            for within, own in walker.own_rows(part):
                packed[:, within] = given[:, own]
        walker.space.filled(buffer)


def unpack(walker: Walker, home: list[Array], k: Array, v: Array) -> tuple[Array, Array]:
    """This rank's dk and dv from the sums over all its parts, rounded once to the dtype of k and v."""
    gradients = walker.space.zeros(k.shape, k.dtype), walker.space.zeros(v.shape, v.dtype)
    for part, buffer in enumerate(home):
        for gradient, packed in zip(gradients, walker.block.split(buffer, walker.own(part), accumulator(k.dtype))):
            for within, own in walker.own_rows(part):
                gradient[:, own] = packed[:, within]
    return gradients
