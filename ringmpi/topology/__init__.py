"""The order of ranks round the ring.

Order is routing only: it decides who is whose neighbour, never who owns which tokens. MPI's own ``reorder=True`` does
nothing in the MPIs that people run, so the order is computed here and the communicator is made to follow it.

    natural     0 1 2 3 4 5
    auto        ranks that share memory stand together, nodes of a switch stand together; every node, every switch is
                entered once and left once; where Slurm tells coordinates, neighbours are one link apart if they
                can be
    Torus       the same for a torus or mesh that the caller describes
    measured    found by timing messages: see ``measure.py``

What an order costs is said in its own unit: levels of the tree that a hop climbs, links of a torus that it takes, or
seconds. A computed order is dropped where natural order is better by that measure: has a smaller worst hop, or as small
a one and a smaller sum.
"""
from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from . import cycles
from . import torus as tori
from .place import Place
from .torus import Torus

NAMES = ("auto", "natural", "measured")
# How many ranks of a wrong order are shown.
SHOWN = 10


@dataclass(frozen=True)
class Measured:
    """How an order is measured: what ``order`` is given for another block size or time than "measured" has.

    Parameters
    ----------
    nbytes
        of a message: a block's size, tokens x kv_heads x (head_dim + v_dim) x itemsize.
    seconds
        how long it may take, about.
    repeats
        how often everything is timed.
    """

    nbytes: int = 4 << 20
    seconds: float = 20.0
    repeats: int = 5

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.repeats < 1 or not self.seconds > 0:
            raise ValueError(f"an order is measured with nbytes, seconds and repeats above 0; these are {self}")


class Route(NamedTuple):
    """An order of ranks, where the knowledge for it came from, and what its hops cost by that knowledge.

    ``torus`` has the coordinates of every rank if the network is one. ``notes`` are figures worth printing.
    """

    order: tuple[int, ...]
    source: str = "as given"
    unit: str = "levels"
    worst_hop: float = 0.0
    mean_hop: float = 0.0
    natural_worst_hop: float = 0.0
    natural_mean_hop: float = 0.0
    torus: Torus | None = None
    notes: tuple[tuple[str, float], ...] = ()

    def link_cycles(self) -> list[list[int]]:
        """Directed cycles of all seats that share no link between nodes; none where the links are not known.

        A 2-D torus of 3 x 3 or more has four; any other ring of single links two, there and back.
        """
        if self.torus is None or len(self.order) < 3:
            return []
        coords = self.torus.coords or ()
        seats: dict[tuple[int, ...], list[int]] = {}
        for seat, rank in enumerate(self.order):
            seats.setdefault(coords[rank], []).append(seat)
        return [_through(seats, cycle, c) for c, cycle in enumerate(self._point_cycles(list(seats)))]

    def _point_cycles(self, points: list[tuple[int, ...]]) -> Sequence[Sequence[tuple[int, ...]]]:
        torus = self.torus
        assert torus is not None
        long = [axis for axis, dim in enumerate(torus.dims) if dim > 1]
        if len(points) == prod(torus.dims) and len(long) == 2 and all(torus.dims[axis] > 2 and torus.wraps[axis] for axis in long):
            lines = cycles.torus_cycles(torus.dims[long[0]], torus.dims[long[1]])
            return [[cycles.point(len(torus.dims), long, at) for at in line] for line in lines]
        single = all(torus.links(a, b) == 1 for a, b in zip(points, points[1:] + points[:1]))
        return (points, points[::-1]) if single and len(points) > 2 else ()


def _through(seats: dict[tuple[int, ...], list[int]], cycle: Sequence[tuple[int, ...]], number: int) -> list[int]:
    """A cycle of points as one of seats: through all seats of a point before the next point's.

    Inside the points the cycles share no link either, while there are seats enough.
    """
    made = []
    for point in cycle:
        ways = cycles.switch_cycles(len(seats[point]))
        made += [seats[point][i] for i in ways[number % len(ways)]]
    return made


# ----------------------------------------------------------------------------------------------------- which order


def route(order: Any, places: Sequence[Place]) -> Route:
    """The order that is asked for, of ranks at these places.

    Parameters
    ----------
    order
        "auto", "natural", a list with every rank once, a ``Torus``, or the path of a file written by ``save``. For
        "measured" and ``Measured`` the order that measuring starts from: "auto".
        These may be spelled: see ``spelled``.
    places
        of every rank, by rank.

    Raises
    ------
    ValueError
        for a list that does not hold every rank once, a torus that does not fit, an order saved on other hosts.

    >>> route("auto", [Place(0), Place(1), Place(0), Place(1)]).order
    (0, 2, 1, 3)
    """
    order, natural = spelled(order), tuple(range(len(places)))
    if isinstance(order, Torus):
        return best(places, *order.over(places))
    if isinstance(order, Measured):
        return best(places, *(tori.told(places) or ()))
    if isinstance(order, os.PathLike) or (isinstance(order, str) and order.endswith(".json")):
        return described(load(Path(order), places), places, f"saved in {os.fspath(order)}")
    if not isinstance(order, str):
        return described(checked(order, len(places)), places, "as given")
    if order == "natural":
        return described(natural, places, "natural order")
    if order == "auto":
        return best(places, *(tori.told(places) or ()))
    raise ValueError(f"no order is called {order!r}; there are {', '.join(NAMES)}, a list of ranks, a Torus and a .json file")


def spelled(order: Any) -> Any:
    """What an order in words means: "torus:4x6", "mesh:4x6", "measured", "measured:BYTES:SECONDS"; anything else is itself.

    >>> spelled("torus:4x6")
    Torus(dims=(4, 6), wrap=True, coords=None)
    >>> spelled("measured:65536")
    Measured(nbytes=65536, seconds=20.0, repeats=5)
    """
    if not isinstance(order, str):
        return order
    name, *values = order.split(":")
    try:
        if name in ("torus", "mesh") and len(values) == 1:
            return Torus(tuple(map(int, values[0].split("x"))), name == "torus")
        if name == "measured" and len(values) <= 2:
            return Measured(*(kind(value) for kind, value in zip((int, float), values)))
    except ValueError as error:
        raise ValueError(f"the order {order!r} cannot be read: {error}") from error
    return order


def checked(order: Any, size: int) -> tuple[int, ...]:
    """The order if it holds each of ``size`` ranks once; else a ValueError that says which not."""
    try:
        given = tuple(index(rank) for rank in order)
    except TypeError:
        raise TypeError(f"order is {order!r}; it must be a name, a Torus, a Measured or a list of ranks") from None
    if sorted(given) != list(range(size)):
        missing, twice = sorted(set(range(size)) - set(given)), sorted(rank for rank, times in Counter(given).items() if times > 1)
        found = f"{len(given)}, of which missing {_some(missing)}, twice {_some(twice)}: {_some(given)}"
        raise ValueError(f"an order of {size} ranks holds each once; this one holds {found}")
    return given


def _some(ranks: Sequence[int]) -> str:
    """A list of ranks in words: the first of many.

    >>> _some(range(100))
    '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, and 90 more]'
    """
    return str(list(ranks)) if len(ranks) <= SHOWN else f"{str(list(ranks[:SHOWN]))[:-1]}, and {len(ranks) - SHOWN} more]"


def best(places: Sequence[Place], torus: Torus | None = None, source: str = "") -> Route:
    """The best order by what is known of the places, never worse than natural order; ``source`` says how a torus is known."""
    found = depth_first(places)
    found = tori.through(torus, found) if torus else found
    cost = _hop_cost(torus, places)
    natural = tuple(range(len(places)))
    order = min(found, natural, key=lambda order: _cost(order, cost))
    return priced(order, cost, source or _tree_source(places), "links" if torus else "levels")._replace(torus=torus)


def described(order: Sequence[int], places: Sequence[Place], source: str) -> Route:
    """An order that was not computed here, with what it costs by what is known of the places."""
    torus, _ = tori.told(places) or (None, "")
    return priced(order, _hop_cost(torus, places), source, "links" if torus else "levels")._replace(torus=torus)


def priced(order: Sequence[int], cost: Callable[[int, int], float], source: str, unit: str) -> Route:
    """The route along an order whose hops cost ``cost(rank, rank)``."""
    size = len(order)
    (worst, total), (natural_worst, natural_total) = _cost(order, cost), _cost(range(size), cost)
    return Route(tuple(order), source, unit, worst, total / size, natural_worst, natural_total / size)


def _cost(order: Sequence[int], cost: Callable[[int, int], float]) -> tuple[float, float]:
    hops = [cost(a, b) for a, b in zip(order, (*order[1:], order[0]))] if len(order) > 1 else [0.0]
    return max(hops), sum(hops)


def _hop_cost(torus: Torus | None, places: Sequence[Place]) -> Callable[[int, int], float]:
    if torus is not None:
        coords = torus.coords or ()
        return lambda a, b: torus.links(coords[a], coords[b])
    return lambda a, b: levels(places[a], places[b])


def levels(a: Place, b: Place) -> int:
    """How many levels a hop climbs: 0 within a NUMA domain, 1 within a node, 2 within a switch, ...

    >>> levels(Place(0), Place(0)), levels(Place(0), Place(1)), levels(Place(0, switches=("a",)), Place(1, switches=("b",)))
    (0, 2, 3)
    """
    common = next((i for i, (x, y) in enumerate(zip(a.path, b.path)) if x != y), min(len(a.path), len(b.path)))
    return max(len(a.path), len(b.path)) - common


# ------------------------------------------------------------------------------------------------------- trees, tori


def depth_first(places: Sequence[Place], ranks: Sequence[int] | None = None, level: int = 0) -> tuple[int, ...]:
    """All ranks below a switch, then all below the next, in the order of their lowest ranks; by GPU at the end."""
    ranks = range(len(places)) if ranks is None else ranks
    if all(level >= len(places[rank].path) for rank in ranks):
        return tuple(sorted(ranks, key=lambda rank: (places[rank].gpu, rank)))
    below: dict[Any, list[int]] = {}
    for rank in ranks:
        below.setdefault(places[rank].path[level : level + 1], []).append(rank)
    return tuple(rank for group in below.values() for rank in depth_first(places, group, level + 1))


def _tree_source(places: Sequence[Place]) -> str:
    if any(place.switches for place in places):
        return "SLURM_TOPOLOGY_ADDR: switches"
    return "which ranks share memory"


# -------------------------------------------------------------------------------------------------- nodes round it


def node_sizes(order: Sequence[int], places: Sequence[Place]) -> tuple[int, ...]:
    """How many seats each node has, going round the ring: a node that is entered twice counts as two.

    >>> node_sizes((0, 2, 1, 3), [Place(0), Place(1), Place(0), Place(1)])
    (2, 2)
    """
    return tuple(len(list(seats)) for _, seats in groupby(order, key=lambda rank: places[rank].node))


def links_between_nodes(order: Sequence[int], places: Sequence[Place]) -> int:
    """How many hops of the closed ring lead from one node to another.

    >>> links_between_nodes((0, 1, 2, 3), [Place(0), Place(1), Place(0), Place(1)])
    4
    """
    return sum(places[a].node != places[b].node for a, b in zip(order, (*order[1:], order[0])))


# --------------------------------------------------------------------------------------------------- saved and loaded


def report(found: Route, places: Sequence[Place]) -> dict[str, Any]:
    """What there is to say of an order, as JSON: see ``ringmpi order``."""
    nodes: dict[int, list[int]] = {}
    for rank in found.order:
        nodes.setdefault(places[rank].node, []).append(rank)
    return {
        "order": list(found.order),
        "nodes": list(nodes.values()),
        "hosts": [places[rank].host for rank in range(len(places))],
        "links_between_nodes": links_between_nodes(found.order, places),
        "unit": found.unit,
        "worst_hop": found.worst_hop,
        "natural_worst_hop": found.natural_worst_hop,
        "mean_hop": found.mean_hop,
        "natural_mean_hop": found.natural_mean_hop,
        "source": found.source,
        **dict(found.notes),
    }


def save(path: str | os.PathLike[str], found: Route, places: Sequence[Place]) -> None:
    """Writes an order, with the hosts it is for, for ``order="file.json"``."""
    if not os.fspath(path).endswith(".json"):
        raise ValueError(f"an order is saved in a file that ends in .json; this one is {os.fspath(path)}")
    Path(path).write_text(json.dumps(report(found, places), indent=1) + "\n")


def load(path: Path, places: Sequence[Place]) -> tuple[int, ...]:
    """The order in a file, if it is for these hosts."""
    try:
        saved = json.loads(path.read_text())
        given, hosts = checked(saved["order"], len(places)), list(saved["hosts"])
    except (OSError, LookupError, TypeError, UnicodeError, json.JSONDecodeError) as error:
        raise ValueError(f"no order can be read from {path}: {error!r}") from error
    except ValueError as error:
        raise ValueError(f"the order in {path} is of another job: {error}") from error
    if len(hosts) != len(places):
        raise ValueError(f"the order in {path} is for ranks on {len(hosts)} hosts; there are {len(places)} ranks: measure anew")
    for rank, (host, place) in enumerate(zip(hosts, places)):
        if host != place.host:
            raise ValueError(f"the order in {path} is for rank {rank} on {host}; it is on {place.host}: measure anew")
    return given
