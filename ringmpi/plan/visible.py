"""How many (query, key) pairs a rank sees in a block: what a visit costs, without walking over rows where a formula does.

Under causal and window rules a query at p sees the keys in [p + a, p + b). For runs of one step, row i of the queries
then sees clip(i + c, 0, keys) keys below a bound, and the sum over rows is a difference of triangular numbers.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..layout import Layout, Runs
from ..mask import Mask

# Rows x ranks that are walked over where no formula serves.
MOST = 1 << 29


class Table(NamedTuple):
    """Runs of every rank as arrays (ranks, most runs): starts, counts (0 where there is none), steps."""

    starts: np.ndarray
    counts: np.ndarray
    steps: np.ndarray

    @classmethod
    def of(cls, partition: tuple[Runs, ...]) -> Table:
        """The table of a partition."""
        most = max(map(len, partition))
        padded = np.array([[*runs, *[(0, 0, 1)] * (most - len(runs))] for runs in partition], np.int64).reshape(len(partition), most, 3)
        return cls(padded[..., 0], padded[..., 1], padded[..., 2])

    def part(self, part: int, parts: int) -> Table:
        """The runs of a part of every block."""
        begin, end = self.counts * part // parts, self.counts * (part + 1) // parts
        return Table(self.starts + begin * self.steps, end - begin, self.steps)

    def of_ranks(self, ranks: np.ndarray) -> Table:
        """The runs of some ranks."""
        return Table(*(array[ranks] for array in self))

    def rows(self) -> np.ndarray:
        """Tokens of every rank."""
        return self.counts.sum(axis=1)


Counts = Callable[[np.ndarray, np.ndarray, int, int], tuple[np.ndarray, np.ndarray]]


def visible(layout: Layout, tokens: int, size: int, mask: Mask) -> tuple[Table, Counts]:
    """The runs of all ranks, and ``counts(ranks, owners, part, parts)``: visible pairs, and pairs of runs with any."""
    table = Table.of(layout.partition(tokens, size))
    mask.check(tokens, tokens)
    plain = mask.documents is None and mask.kv_range is None and mask.prefix is None and not mask.keep_first
    if plain and len(np.unique(table.steps[table.counts > 0])) <= 1:
        return table, lambda ranks, owners, part, parts: _formula(mask, table.of_ranks(ranks), table.part(part, parts).of_ranks(owners))
    if tokens * size > MOST:
        raise ValueError(f"this mask and layout are counted row by row: {tokens} tokens x {size} ranks is more than {MOST}")
    return table, lambda ranks, owners, part, parts: _rows(mask, tokens, table.of_ranks(ranks), table.part(part, parts).of_ranks(owners))


def _formula(mask: Mask, queries: Table, keys: Table) -> tuple[np.ndarray, np.ndarray]:
    left, right = mask.window or (None, None)
    above = [1] * mask.causal + [bound + 1 for bound in (right,) if bound is not None]
    q_starts, rows, steps = (array[:, :, None] for array in queries)
    k_starts, columns = keys.starts[:, None], keys.counts[:, None]
    below = lambda bound: _triangle(-((k_starts - q_starts - bound) // steps), rows, columns)  # noqa: E731
    seen = below(min(above)) if above else rows * columns
    if left is not None:
        seen = seen - below(-left)
    return seen.sum(axis=(1, 2)), (seen > 0).sum(axis=(1, 2))


def _triangle(first: np.ndarray, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """sum(clip(first + i, 0, keys) for i in range(rows))."""

    def total(x: np.ndarray) -> np.ndarray:
        low = np.clip(x, 0, keys + 1)
        return low * (low - 1) // 2 + np.maximum(x - keys - 1, 0) * keys

    return total(first + rows) - total(first)


def _rows(mask: Mask, tokens: int, queries: Table, keys: Table) -> tuple[np.ndarray, np.ndarray]:
    seen = np.zeros((len(queries.starts), queries.starts.shape[1], keys.starts.shape[1]), np.float64)
    for n, i in zip(*np.nonzero(queries.counts)):
        positions = queries.starts[n, i] + queries.steps[n, i] * np.arange(queries.counts[n, i])
        start, step, most = (array[n][:, None, None] for array in (keys.starts, keys.steps, keys.counts))
        for bounds in mask.bounds(positions, tokens, tokens):
            lo, hi = (np.clip(-((start - bound) // step), 0, most) for bound in bounds)
            seen[n, i] += (hi - lo).sum(axis=(1, 2)) / len(bounds[0])
    return seen.sum(axis=(1, 2)), (seen > 0).sum(axis=(1, 2))
