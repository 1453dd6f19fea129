"""An order found by timing messages.

    1. tournament   every pair of nodes is timed, both directions at once, a small message and one of a block's size. One
                    rank of each node takes part, and rounds are colours: a node is never in two tests at once
    2. tours        on one rank: the best tours by block time and by latency (``tour.py``)
    3. rings        those, the order known before and natural order are timed as whole rings, all hops at once: where
                    links are shared, as on a ring of switches, pairs measure alike and only this tells
    4. verdict      the fastest ring is adopted if it beats natural order by more than the noise

All ranks get the same timings and come to the same verdict. Ranks of one node are timed each with each if there is no
other node.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import numpy as np

from . import Measured, Route, depth_first, priced, tour

TAG = 32760
SMALL = 8
TURNS = 2
NOISE = 0.05


def measured(seats: Any, known: Route, how: Measured) -> Route:
    """The order to take, by timing. Collective over ``seats``, whose numbers are still the ranks."""
    units, buffers = _units(seats.places), _buffers(seats, how.nbytes)
    of_rank = {rank: unit for unit, ranks in enumerate(units) for rank in ranks}
    latency, block, tested = tournament(seats, [ranks[0] for ranks in units], buffers, how)
    found = seats.gather([tour.solve(cost) for cost in (block, latency)] if seats.rank == 0 else None)[0]
    orders = [tuple(range(seats.size)), known.order, *(tuple(rank for unit in way for rank in units[unit]) for way in found)]
    times = whole_rings(seats, list(dict.fromkeys(orders)), buffers, how)
    order, source = verdict(times)

    def cost(a: int, b: int) -> float:
        return float(block[of_rank[a], of_rank[b]])

    natural = tuple(range(seats.size))
    notes = {"lower_bound": tour.lower_bound(block), "ring": median(times[order]), "natural_ring": median(times[natural]),
             "noise": noise(times[natural]), "pairs_measured": tested}  # fmt: skip
    return priced(order, cost, source, "seconds")._replace(torus=known.torus, notes=tuple(notes.items()))


def _units(places: Sequence[Any]) -> list[list[int]]:
    """The ranks of every node; of a single node, every rank by itself."""
    nodes: dict[int, list[int]] = {}
    for rank in depth_first(places):
        nodes.setdefault(places[rank].node, []).append(rank)
    return list(nodes.values()) if len(nodes) > 1 else [[rank] for rank in range(len(places))]


# -------------------------------------------------------------------------------------------------------- tournament


def partner(player: int, turn: int, players: int) -> int | None:
    """Whom a player meets in a round of a tournament of all with all; None if it has a rest (the circle method).

    >>> [[partner(player, turn, 4) for player in range(4)] for turn in range(3)]
    [[3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1]]
    """
    rounds = turns(players)
    if player == rounds:
        other = turn * (rounds + 1) // 2 % rounds
    else:
        other = (turn - player) % rounds
        other = rounds if other == player else other
    return other if other < players else None


def turns(players: int) -> int:
    """How many rounds a tournament has."""
    return max(players - 1 + players % 2, 1)


def tournament(seats: Any, heads: Sequence[int], buffers: list[np.ndarray], how: Measured) -> tuple[np.ndarray, np.ndarray, float]:
    """Seconds of a small and of a block-sized exchange between any two heads, and the share of pairs that was timed.

    Pairs that there was no time for count as the slowest that was timed.
    """
    small, block = np.full(len(heads), np.nan), np.full(len(heads), np.nan)
    if seats.rank in heads:
        me, begun = heads.index(seats.rank), monotonic()
        for turn in range(turns(len(heads))):
            other = partner(me, turn, len(heads))
            if other is not None:
                late = monotonic() - begun > how.seconds / 2
                small[other], block[other] = _pair(seats, heads[other], buffers, late, how.repeats)
    rows = seats.gather((small, block))
    costs = [np.array([rows[head][i] for head in heads]) for i in (0, 1)]
    timed = np.isfinite(costs[1]).sum() / max(len(heads) * (len(heads) - 1), 1)
    return _symmetric(costs[0]), _symmetric(costs[1]), float(timed)


def _pair(seats: Any, other: int, buffers: list[np.ndarray], late: bool, repeats: int) -> tuple[float, float]:
    """The least seconds of a small and of a large exchange with another rank; the large one only if neither is late."""
    out, into = (buffer[:SMALL] for buffer in buffers)
    out[:] = late
    exchange(seats, other, out, other, into)
    over = late or bool(into[0])
    small = min(exchange(seats, other, out, other, into) for _ in range(repeats + 1))
    large = np.nan if over else min(exchange(seats, other, buffers[0], other, buffers[1]) for _ in range(repeats))
    return small, large


def _symmetric(cost: np.ndarray) -> np.ndarray:
    """The slower of both ends' timings; the slowest of all where there is none."""
    cost = np.fmax(cost, cost.T)
    cost = np.where(np.isnan(cost), np.nanmax(cost, initial=0.0), cost)
    np.fill_diagonal(cost, 0)
    return cost


# ------------------------------------------------------------------------------------------------------- whole rings


def whole_rings(
    seats: Any, orders: Sequence[tuple[int, ...]], buffers: list[np.ndarray], how: Measured
) -> dict[tuple[int, ...], list[float]]:
    """Seconds of a block's hop in rings of these orders, all hops at once: ``repeats`` of each, taken in turns.

    The first round makes connections and is not counted; the time bound ends them early.
    """
    times: dict[tuple[int, ...], list[float]] = {order: [] for order in orders}
    begun = monotonic()
    for repeat in range(how.repeats + 1):
        for order in orders:
            seats.gather(None)
            seconds = seats.gather((_ring(seats, order, buffers), monotonic() - begun))
            if repeat:
                times[order].append(max(taken for taken, _ in seconds))
        if repeat and max(since for _, since in seconds) > how.seconds / 2:
            break
    return times


def _ring(seats: Any, order: Sequence[int], buffers: list[np.ndarray]) -> float:
    at = order.index(seats.rank)
    right, left = order[(at + 1) % len(order)], order[at - 1]
    return sum(exchange(seats, right, buffers[0], left, buffers[1]) for _ in range(TURNS)) / TURNS


def verdict(times: dict[tuple[int, ...], list[float]]) -> tuple[tuple[int, ...], str]:
    """The fastest order if it beats natural order, the first, by more than the noise; and a word on why.

    >>> verdict({(0, 1, 2): [1.0, 1.02, 1.01], (0, 2, 1): [0.99, 1.0, 1.02]})
    ((0, 1, 2), 'measured: natural order, which no other beats by more than the noise')
    >>> verdict({(0, 1, 2): [1.0, 1.02, 1.01], (0, 2, 1): [0.5, 0.6, 0.5]})
    ((0, 2, 1), 'measured: the fastest of 2 whole rings')
    """
    natural = next(iter(times))
    fastest = min(times, key=lambda order: median(times[order]))
    if median(times[fastest]) < (1 - noise(times[natural])) * median(times[natural]):
        return fastest, f"measured: the fastest of {len(times)} whole rings"
    return natural, "measured: natural order, which no other beats by more than the noise"


def noise(times: Sequence[float]) -> float:
    """How far repeats of the same lie apart, as a share of their median: at least 5%.

    >>> round(noise([1.0, 1.2, 1.0, 1.1, 9.0]), 3)
    0.091
    """
    middle = median(times)
    return max(NOISE, median(abs(time - middle) for time in times) / middle)


# ----------------------------------------------------------------------------------------------------------- messages


def exchange(seats: Any, to: int, out: np.ndarray, source: int, into: np.ndarray) -> float:
    """Sends one buffer and receives another, both at once; returns the seconds."""
    began = perf_counter()
    if to != seats.rank:
        requests = [seats.receive(into, source, TAG), seats.send(out, to, TAG)]
        patience: Callable[[], None] = seats.patience(lambda: f"timing the hops to rank {to} and from rank {source}")
        while requests:
            done = seats.completed(requests)
            requests = [request for i, request in enumerate(requests) if i not in done]
            patience()
    return perf_counter() - began


def _buffers(seats: Any, nbytes: int) -> list[np.ndarray]:
    """One to send and one to receive. Collective: a rank that has no memory for them is heard of on all."""
    made: list[np.ndarray] = []

    def make() -> dict[str, Any]:
        made.extend(np.zeros(max(nbytes, SMALL), np.uint8) for _ in range(2))
        return {}

    seats.agree("measuring an order", make)
    return made
