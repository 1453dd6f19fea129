"""The order of ranks round the ring.

Order is routing only: it decides who is whose neighbour, never who owns which tokens. MPI's own ``reorder=True`` does
nothing in the MPIs that people run, so the order is computed here and the communicator is made to follow it.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def ring_order(order: Any, groups: Sequence[int]) -> tuple[int, ...]:
    """The ranks in ring order.

    Parameters
    ----------
    order
        "auto": ranks that share memory stand together, so each node is entered once and left once; "natural": as
        they are; or a list with every rank once.
    groups
        for every rank, what is the same for ranks that share memory.

    >>> ring_order("auto", [0, 1, 0, 1])
    (0, 2, 1, 3)
    """
    ranks = range(len(groups))
    if isinstance(order, str):
        if order not in ("auto", "natural"):
            raise ValueError(f"no order is called {order!r}; there are 'auto', 'natural' and a list of ranks")
        first = {group: rank for rank, group in reversed(list(enumerate(groups)))}
        return tuple(ranks) if order == "natural" else tuple(sorted(ranks, key=lambda rank: (first[groups[rank]], rank)))
    given = tuple(int(rank) for rank in order)
    if sorted(given) != list(ranks):
        missing, twice = sorted(set(ranks) - set(given)), sorted({rank for rank in given if given.count(rank) > 1})
        found = f"{len(given)}, of which missing {missing}, twice {twice}: {list(given)}"
        raise ValueError(f"an order of {len(ranks)} ranks holds each once; this one holds {found}")
    return given


def node_sizes(order: Sequence[int], groups: Sequence[int]) -> tuple[int, ...]:
    """How many seats each node has, going round the ring: a node that is entered twice counts as two.

    >>> node_sizes((0, 2, 1, 3), [0, 1, 0, 1])
    (2, 2)
    """
    sizes: list[int] = []
    for seat, rank in enumerate(order):
        if seat and groups[rank] == groups[order[seat - 1]]:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return tuple(sizes)
