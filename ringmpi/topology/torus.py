"""Tori and meshes of nodes: where every rank is in one, and the way through all of its points.

A caller describes one (``Torus``), or Slurm tells coordinates. Slurm takes its tori and rings to close in every dimension
(its placements go over the edge), but the address that it gives a task does not say how large the network is, and a job
has some part of it. ``RINGMPI_TORUS=8x8x8``, for a ring ``RINGMPI_TORUS=12``, says it: what "scontrol show topology" prints
as Dims or RingSize. Without it nothing is taken to close, so that no hop is said to be of one link that may not be there.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from operator import index
from typing import Any

import numpy as np

from . import cycles, tour
from .place import SIZE, Place

Point = tuple[int, ...]
# Of more points that are no box no tour is searched for: they are walked there and back.
SOLVED = 500


@dataclass(frozen=True)
class Torus:
    """A torus or mesh of nodes: what ``order`` is given where the network is known to be one.

    Parameters
    ----------
    dims
        how many nodes it has along each dimension.
    wrap
        whether the dimensions close: one answer for all, or one for each.
    coords
        the coordinates of every rank's node, by rank; several ranks may have the same. None: what Slurm says, else the
        nodes (or where there are as many as points, the ranks) fill the torus in order, the last dimension fastest.

    Raises
    ------
    ValueError
        for dims that do not multiply to the number of nodes or of ranks, or coordinates outside.
    TypeError
        for dims or coordinates that are not integers.

    >>> Torus((2, 3), wrap=(False, True)).wraps
    (False, True)
    """

    dims: Point
    wrap: bool | tuple[bool, ...] = True
    coords: tuple[Point, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", _integers("dims", self.dims))
        if not self.dims or min(self.dims) < 1:
            raise ValueError(f"a torus has dimensions of 1 or more; these are {self.dims}")
        if isinstance(self.wrap, np.bool_):
            object.__setattr__(self, "wrap", bool(self.wrap))
        if not isinstance(self.wrap, bool):
            object.__setattr__(self, "wrap", _answers(self.wrap))
        if self.coords is not None:
            object.__setattr__(self, "coords", tuple(_integers("coordinates", point) for point in self.coords))
        if len(self.wraps) != len(self.dims):
            raise ValueError(f"the torus has {len(self.dims)} dimensions; wrap says something of {len(self.wraps)}")

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each dimension closes."""
        return self.wrap if isinstance(self.wrap, tuple) else (bool(self.wrap),) * len(self.dims)

    @property
    def name(self) -> str:
        """What it is, in a word or two.

        >>> Torus((4, 6)).name, Torus((4, 6), False).name, Torus((4, 6), (True, False)).name
        ('torus 4x6', 'mesh 4x6', 'torus 4x6 open in dimension 1')
        """
        name = "x".join(map(str, self.dims))
        opened = [str(axis) for axis, wraps in enumerate(self.wraps) if not wraps]
        if len(opened) == len(self.dims):
            return f"mesh {name}"
        return f"torus {name}" + (f" open in dimension {', '.join(opened)}" if opened else "")

    def links(self, a: Sequence[int], b: Sequence[int]) -> int:
        """How many links lie between two points."""
        return cycles.links(a, b, self.dims, self.wraps)

    def over(self, places: Sequence[Place]) -> tuple[Torus, str]:
        """The same with the coordinates of every rank filled in, and checked; and what they are, in words."""
        coords, how = (self.coords, "") if self.coords is not None else self._found(places)
        if len(coords) != len(places):
            raise ValueError(f"the torus has coordinates of {len(coords)} ranks; the ring has {len(places)}")
        for rank, point in enumerate(coords):
            if len(point) != len(self.dims) or not all(0 <= x < dim for x, dim in zip(point, self.dims)):
                raise ValueError(f"rank {rank} is at {point}, which is not in a torus of {self.dims}")
        return replace(self, coords=tuple(coords)), self.name + how

    def _found(self, places: Sequence[Place]) -> tuple[tuple[Point, ...], str]:
        """Slurm's coordinates if they are all there, of one network, and fit; else the nodes or the ranks in order."""
        grid = _grid(places)
        if grid and all(len(point) == len(self.dims) and all(x < dim for x, dim in zip(point, self.dims)) for point in grid):
            return grid, " at the coordinates of SLURM_TOPOLOGY_ADDR"
        nodes, size = sorted({place.node for place in places}), prod(self.dims)
        if size == len(places):
            return tuple(product(*map(range, self.dims))), " filled by ranks in order"
        if size == len(nodes):
            at = dict(zip(nodes, product(*map(range, self.dims))))
            return tuple(at[place.node] for place in places), " filled by nodes in order"
        raise ValueError(f"the dims {self.dims} multiply to {size}; there are {len(places)} ranks on {len(nodes)} nodes")


def _integers(what: str, values: Sequence[int]) -> Point:
    try:
        return tuple(index(value) for value in values)
    except TypeError:
        raise TypeError(f"{what} of a torus are integers; these are {values!r}") from None


def _answers(wrap: Any) -> tuple[bool, ...]:
    answers = tuple(wrap) if isinstance(wrap, Iterable) and not isinstance(wrap, str) else ()
    if not answers or any(answer not in (True, False) for answer in answers):
        raise TypeError(f"wrap says True or False, once or for every dimension of a torus; this is {wrap!r}")
    return tuple(map(bool, answers))


# ------------------------------------------------------------------------------------------------------ what Slurm tells


def told(places: Sequence[Place]) -> tuple[Torus, str] | None:
    """The torus, or ring, in which Slurm tells the coordinates of all ranks, and how it is known; None where it is no one.

    >>> told([Place(0, switches=("r8",), grid=(5,)), Place(1, switches=("r8",), grid=(6,))])[1]
    'SLURM_TOPOLOGY_ADDR: part of a torus, whose size RINGMPI_TORUS does not say: taken as mesh 2'
    >>> told([Place(rank, switches=("r8",), grid=(rank,), torus="2") for rank in range(2)])[1]
    'SLURM_TOPOLOGY_ADDR: torus 2, by RINGMPI_TORUS'
    """
    grid = _grid(places)
    if not grid:
        return None
    said = {place.torus: rank for rank, place in enumerate(places) if place.torus}
    if len(said) > 1:
        raise ValueError(f"{SIZE} differs: {', '.join(f'{size!r} on rank {rank}' for size, rank in said.items())}")
    if not said:
        low = [min(axis) for axis in zip(*grid)]
        coords = tuple(tuple(x - least for x, least in zip(point, low)) for point in grid)
        mesh = Torus(tuple(max(axis) + 1 for axis in zip(*coords)), False, coords)
        return mesh, f"SLURM_TOPOLOGY_ADDR: part of a torus, whose size {SIZE} does not say: taken as {mesh.name}"
    size = next(iter(said))
    try:
        torus, _ = Torus(tuple(map(int, size.split("x"))), True, grid).over(places)
    except ValueError as error:
        raise ValueError(f"{SIZE}={size} is not the size of the torus of SLURM_TOPOLOGY_ADDR, such as 8x8x8: {error}") from error
    return torus, f"SLURM_TOPOLOGY_ADDR: {torus.name}, by {SIZE}"


def _grid(places: Sequence[Place]) -> tuple[Point, ...]:
    """The coordinates that Slurm tells of every rank, if all are in one network; else none."""
    if len({(len(place.grid), place.switches) for place in places}) != 1:
        return ()
    return tuple(place.grid for place in places if place.grid)


# ------------------------------------------------------------------------------------------------- the way through all


def through(torus: Torus, ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a point one after another, as they come; the points along a cycle of single links where there is one."""
    at: dict[Point, list[int]] = {}
    for rank in ranks:
        at.setdefault((torus.coords or ())[rank], []).append(rank)
    return tuple(rank for point in points(torus, sorted(at)) for rank in at[point])


def points(torus: Torus, some: Sequence[Point]) -> list[Point]:
    """A cycle through some points of a torus: a box's own where they are one, also over the edge; else the best tour found.

    >>> points(Torus((8, 8)), [(7, 0), (7, 1), (0, 0), (0, 1)])
    [(7, 0), (0, 0), (0, 1), (7, 1)]
    """
    axes = [set(axis) for axis in zip(*some)]
    runs = [_run(values, dim, wraps) for values, dim, wraps in zip(axes, torus.dims, torus.wraps)]
    first = [at for at in runs if at is not None]
    if len(first) == len(axes) and prod(map(len, axes)) == len(some):
        box = cycles.box_cycle([len(axis) for axis in axes],
                               [wraps and len(axis) == dim for axis, dim, wraps in zip(axes, torus.dims, torus.wraps)])  # fmt: skip
        return [tuple((x + low) % dim for x, low, dim in zip(at, first, torus.dims)) for at in box]
    start = sorted(range(len(some)), key=lambda i: _turning(some[i]))
    if len(some) > SOLVED:
        return [some[i] for i in start]
    apart = np.abs(np.array(some)[:, None] - np.array(some))
    closes = [dim if wraps else 2 * dim for dim, wraps in zip(torus.dims, torus.wraps)]
    return [some[i] for i in tour.solve(np.minimum(apart, closes - apart).sum(axis=2).astype(float), [start])]


def _turning(point: Point) -> Point:
    """What points are sorted by to be walked there and back: a coordinate counts down where those before it add up to odd.

    >>> sorted([(0, 0), (0, 1), (1, 0), (1, 1)], key=_turning)
    [(0, 0), (0, 1), (1, 1), (1, 0)]
    """
    return tuple(-x if sum(point[:axis]) % 2 else x for axis, x in enumerate(point))


def _run(values: set[int], dim: int, wraps: bool) -> int | None:
    """The first of values that follow each other, over the edge where the dimension closes; None if there are gaps."""
    if len(values) == dim:
        return 0
    first = [value for value in values if ((value - 1) % dim if wraps else value - 1) not in values]
    return first[0] if len(first) == 1 else None
