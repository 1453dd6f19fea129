"""The best tour of places whose hops have been measured: the smallest worst hop, then the smallest sum.

A ring is as slow as its slowest hop, so the worst one counts first. Few places are solved exactly, over all subsets
(Held and Karp 1962); more by exchanges of two hops and moves of short stretches, until none helps.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

EXACT = 11
STRETCH = 3
MANY = 500
# How many pairs of hops are looked at in all, about, whatever the number of places: some seconds.
PATIENCE = 10_000_000


def score(tour: Sequence[int], cost: np.ndarray) -> tuple[float, float]:
    """The worst hop of a closed tour, and the sum of all."""
    hops = _hops(tour, cost)
    return float(hops.max(initial=0)), float(hops.sum())


def solve(cost: np.ndarray, starts: Iterable[Sequence[int]] = ()) -> list[int]:
    """The best tour found. ``cost`` is (n, n), symmetric; ``starts`` are tours to improve on if n is large.

    >>> ring = np.minimum((np.arange(6)[:, None] - np.arange(6)) % 6, (np.arange(6) - np.arange(6)[:, None]) % 6)
    >>> shuffled = [2, 0, 4, 1, 5, 3]
    >>> score(solve(ring[shuffled][:, shuffled]), ring[shuffled][:, shuffled])
    (1.0, 6.0)
    """
    n = len(cost)
    if n < 4:
        return list(range(n))
    if n <= EXACT:
        worst = score(_exact(cost, np.maximum), cost)[0]
        return _exact(np.where(cost <= worst, cost, np.inf), np.add)
    tours = sorted(([*map(list, starts), list(range(n)), _nearest(cost)]), key=lambda tour: score(tour, cost))
    return min((_improve(tour, cost, PATIENCE // 2 // n**2) for tour in tours[:2]), key=lambda tour: score(tour, cost))


def lower_bound(cost: np.ndarray) -> float:
    """No tour's worst hop is smaller: below it the hops leave some place with one neighbour, or cut by losing one.

    Of many places only the first is looked at.

    >>> float(lower_bound(np.array([[0, 1, 9], [1, 0, 5], [9, 5, 0]])))
    9.0
    """
    values = np.unique(cost[~np.eye(len(cost), dtype=bool)])
    if len(cost) < 3:
        return float(values.max(initial=0))
    if len(cost) > MANY:
        return float(np.partition(cost + np.diag(np.full(len(cost), np.inf)), 1)[:, 1].max())
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _holds_together(cost <= values[middle]) else (middle + 1, high)
    return float(values[low])


# ------------------------------------------------------------------------------------------------------------- exact


def _exact(cost: np.ndarray, join: Callable[..., Any]) -> list[int]:
    """The tour that is best over all subsets of places, when hops are joined by sum or maximum."""
    n = len(cost) - 1
    best, came = np.full((1 << n, n), np.inf), np.zeros((1 << n, n), int)
    best[1 << np.arange(n), np.arange(n)] = cost[0, 1:]
    for seen in range(1, 1 << n):
        through = join(best[seen][:, None], cost[1:, 1:])
        last = through.argmin(axis=0)
        for new in range(n):
            if not seen >> new & 1:
                best[seen | 1 << new, new], came[seen | 1 << new, new] = through[last[new], new], last[new]
    seen = (1 << n) - 1
    at = int(join(best[seen], cost[1:, 0]).argmin())
    tour = []
    for _ in range(n):
        tour.append(at + 1)
        seen, at = seen & ~(1 << at), int(came[seen, at])
    return [0, *reversed(tour)]


# ------------------------------------------------------------------------------------------------------- by exchanges


def _nearest(cost: np.ndarray) -> list[int]:
    """Always on to the nearest place that is left."""
    tour, taken = [0], np.zeros(len(cost))
    while len(tour) < len(cost):
        taken[tour[-1]] = np.inf
        tour.append(int((cost[tour[-1]] + taken).argmin()))
    return tour


def _improve(tour: list[int], cost: np.ndarray, changes: int) -> list[int]:
    """Hops as bad as the worst are made rare, then are the next worst, and at last the sum is made small."""
    while True:
        worst = score(tour, cost)[0]
        better, changes = _settle(tour, cost + np.where(cost >= worst, cost.sum(), 0), changes)
        if score(better, cost)[0] >= worst:
            return min((tour, better), key=lambda t: score(t, cost))
        tour = better


def _settle(tour: list[int], weight: np.ndarray, changes: int) -> tuple[list[int], int]:
    """Takes the best exchange or move, while one makes the sum of weights smaller; and how many changes are then left."""
    while changes > 0:
        found = [_best_exchange(tour, weight), *(_best_move(tour, weight, length) for length in range(1, STRETCH + 1))]
        gain, change = min(found, key=lambda change: change[0])
        changes -= 1
        if gain >= -1e-9 * weight.max():
            break
        tour = change()
    return tour, changes


def _best_exchange(tour: list[int], weight: np.ndarray) -> tuple[float, Callable[[], list[int]]]:
    """The best pair of hops to take out, with the way between walked backwards: 2-opt."""
    o = np.array(tour)
    follows = np.roll(o, -1)
    hop = weight[o, follows]
    gain = np.triu(weight[o[:, None], o] + weight[follows[:, None], follows] - hop[:, None] - hop, 1)
    i, j = np.unravel_index(gain.argmin(), gain.shape)
    return float(gain[i, j]), lambda: [*tour[: i + 1], *reversed(tour[i + 1 : j + 1]), *tour[j + 1 :]]


def _best_move(tour: list[int], weight: np.ndarray, length: int) -> tuple[float, Callable[[], list[int]]]:
    """The best stretch of ``length`` places to put elsewhere, either way round: Or-opt."""
    n = len(tour)
    if n < length + 3:
        return 0.0, lambda: tour
    o = np.array(tour)
    first, last, before, after = o, np.roll(o, 1 - length), np.roll(o, 1), np.roll(o, -length)
    follows = np.roll(o, -1)
    out = weight[before, after] - weight[before, first] - weight[last, after]
    hop = weight[o, follows]
    ways = [weight[o, a[:, None]] + weight[b[:, None], follows] - hop for a, b in ((first, last), (last, first))]
    gain = out[:, None] + np.stack(ways)
    # A stretch cannot go between its own places, nor back to where it was.
    distance = (np.arange(n) - np.arange(n)[:, None]) % n
    gain[:, (distance < length) | (distance == n - 1)] = np.inf
    way, i, j = np.unravel_index(gain.argmin(), gain.shape)

    def change() -> list[int]:
        stretch = [tour[(i + k) % n] for k in range(length)]
        rest = [tour[(i + length + k) % n] for k in range(n - length)]
        at = rest.index(tour[j]) + 1
        return [*rest[:at], *(reversed(stretch) if way else stretch), *rest[at:]]

    return float(gain[way, i, j]), change


def _hops(tour: Sequence[int], cost: np.ndarray) -> np.ndarray:
    o = np.array(tour, int)
    return cost[o, np.roll(o, -1)]


def _holds_together(joined: np.ndarray) -> bool:
    """Whether a graph is connected and stays so without any one of its places: depth-first, by lowest reach (Tarjan)."""
    n = len(joined)
    neighbours = [[j for j in np.flatnonzero(row).tolist() if j != i] for i, row in enumerate(joined)]
    depth, low = [-1] * n, [n] * n
    depth[0] = low[0] = 0
    path = [(0, iter(neighbours[0]))]
    branches = 0
    while path:
        at, left = path[-1]
        new = next(left, None)
        if new is None:
            path.pop()
            if path:
                above = path[-1][0]
                low[above] = min(low[above], low[at])
                if above != 0 and low[at] >= depth[above]:
                    return False
                branches += above == 0
        elif depth[new] >= 0:
            low[at] = min(low[at], depth[new])
        else:
            depth[new] = low[new] = depth[at] + 1
            path.append((new, iter(neighbours[new])))
    return branches == 1 and min(depth) >= 0
