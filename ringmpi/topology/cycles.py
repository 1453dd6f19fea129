"""Hamiltonian cycles: of boxes and tori with single-link hops, and sets of them that share no link.

    box_cycle       one cycle through a box of any dimensions, wrapped or not: single links wherever that can be
    torus_cycles    the four directed cycles of a 2-D torus that use every directed link once
    switch_cycles   directed cycles through seats that can all reach each other, no directed link in two of them

Integers only. What is searched for (cycles of a switch of few seats) is searched for with a fixed seed: the same
everywhere, always.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random

Point = tuple[int, ...]


def links(a: Sequence[int], b: Sequence[int], dims: Sequence[int], wrap: Sequence[bool]) -> int:
    """How many links lie between two points of a box.

    >>> links((0, 0), (3, 1), (4, 4), (True, False)), links((0, 0), (3, 1), (4, 4), (False, False))
    (2, 4)
    """
    apart = [abs(x - y) for x, y in zip(a, b)]
    return sum(min(n, dim - n) if wraps else n for n, dim, wraps in zip(apart, dims, wrap))


# ------------------------------------------------------------------------------------------------ one cycle of a box


def box_cycle(dims: Sequence[int], wrap: Sequence[bool]) -> list[Point]:
    """All points of a box, in the order of a cycle whose worst hop is as short as it can be.

    Two dimensions or more allow single links all the way if the number of points is even or a dimension wraps; one
    dimension if it wraps or has two points. Otherwise one hop is of two links (two dimensions or more), or all but two
    are (a line, folded).

    >>> box_cycle((2, 3), (False, False))
    [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]
    >>> box_cycle((5,), (False,))
    [(0,), (2,), (4,), (3,), (1,)]
    """
    axes = [axis for axis, dim in enumerate(dims) if dim > 1]
    if len(axes) < 2:
        length = dims[axes[0]] if axes else 1
        line = list(range(length)) if not axes or wrap[axes[0]] else [*range(0, length, 2), *reversed(range(1, length, 2))]
        return [point(len(dims), axes, (i,)) for i in line]
    lane = next((axis for axis in axes if _closes(dims, wrap, axis)), axes[-1])
    others = [axis for axis in axes if axis != lane]
    rows = _snake([dims[axis] for axis in others])
    return [point(len(dims), [*others, lane], (*rows[row], column)) for row, column in _comb(len(rows), dims[lane], wrap[lane])]


def _closes(dims: Sequence[int], wrap: Sequence[bool], lane: int) -> bool:
    """Whether a comb whose lane runs across this axis closes with single links."""
    rows = 1
    for axis, dim in enumerate(dims):
        rows *= dim if axis != lane else 1
    return rows % 2 == 0 or wrap[lane]


def _comb(rows: int, columns: int, wraps: bool) -> list[tuple[int, int]]:
    """(row, column) of a cycle: the teeth are rows, there and back; column 0 is the lane home."""
    whole = rows if rows % 2 == 0 or wraps else rows - 2
    teeth = [(r, c) for r in range(whole) for c in (range(1, columns) if r % 2 == 0 else range(columns - 1, 0, -1))]
    if whole < rows:
        # An odd box without a wrap: the last two rows are walked column by column, which leaves one hop of two links.
        pairs = (rows - 2, rows - 1), (rows - 1, rows - 2)
        teeth += [(r, c) for i, c in enumerate(range(columns - 1, 0, -1)) for r in pairs[i % 2]]
    return [(0, 0), *teeth, *((r, 0) for r in range(rows - 1, 0, -1))]


def _snake(dims: Sequence[int]) -> list[Point]:
    """A path through all points of a box by single links."""
    path: list[Point] = [()]
    for dim in dims:
        there, back = range(dim), range(dim - 1, -1, -1)
        path = [(*point, i) for n, point in enumerate(path) for i in (back if n % 2 else there)]
    return path


def point(dimensions: int, axes: Sequence[int], values: Sequence[int]) -> Point:
    """The point that has these values on some axes, and 0 on the others."""
    given = dict(zip(axes, values))
    return tuple(given.get(axis, 0) for axis in range(dimensions))


# ------------------------------------------------------------------------------------------- cycles that share no link


@lru_cache
def torus_cycles(rows: int, columns: int) -> tuple[tuple[Point, ...], ...]:
    """Two cycles of a torus of 3 x 3 or more that share no link, each there and back: every directed link once.

    They exist for all sizes (Kotzig 1973). Here the lines across and the lines down are made two cycles by flipping some
    squares: a flip gives a square's two links across to the lines down, and its two links down to the lines across.

    >>> [len(cycle) for cycle in torus_cycles(3, 4)]
    [12, 12, 12, 12]
    """
    owner = {(r, c, axis): axis for r in range(rows) for c in range(columns) for axis in (0, 1)}
    for r, c in _flips(rows, columns):
        for side in ((r, c, 0), ((r + 1) % rows, c, 0), (r, c, 1), (r, (c + 1) % columns, 1)):
            owner[side] ^= 1
    there = [_line(owner, rows, columns, which) for which in (0, 1)]
    return tuple(tuple(line[::way]) for line in there for way in (1, -1))


def _flips(rows: int, columns: int) -> list[Point]:
    """The corners, low row and column, of the squares to flip; for no more rows than columns, else the other way round.

    Flips down the diagonal join all rows to one cycle, which walks them there and back in turn, and as many columns to
    another. Each column beyond is joined to the one on its right by a flip that keeps the rows one cycle: two rows that
    are walked the same way (the last and the first of an odd number), or flips in turn that cut a loop off and put it back.
    Rows even and columns odd is a row less, and that row joined to the last by a flip between columns walked the same way.
    """
    if rows > columns:
        return [(r, c) for c, r in _flips(columns, rows)]
    if rows % 2 == 0 and columns % 2:
        return [*_flips(rows - 1, columns), (rows - 1, rows - 2)]
    pair = (1, 0) if (columns - rows) % 2 == 0 else (rows - 1, rows - 2)
    return [*((i, i) for i in range(rows - 1)), *((pair[(columns - 1 - c) % 2], c) for c in range(rows, columns))]


def _line(owner: dict[tuple[int, int, int], int], rows: int, columns: int, which: int) -> list[Point]:
    """The closed line through (0, 0) of the links that are in one of the two sets."""
    path: list[Point] = [(0, 0)]
    before = at = path[0]
    while len(path) == 1 or at != path[0]:
        r, c = at
        up, left = (r - 1) % rows, (c - 1) % columns
        ways = (((r, c, 0), (r, (c + 1) % columns)), ((r, left, 0), (r, left)),
                ((r, c, 1), ((r + 1) % rows, c)), ((up, c, 1), (up, c)))  # fmt: skip
        before, at = at, next(point for link, point in ways if owner[link] == which and point != before)
        path.append(at)
    return path[:-1]


# How many parts a block is cut into at most: beyond it messages get small, and searching long.
MOST = 16


@lru_cache
def switch_cycles(size: int) -> tuple[tuple[int, ...], ...]:
    """Directed cycles through ``size`` seats, no directed link in two of them: N - 1 of them, at most 16.

    N odd: Walecki's zigzag 0, 1, -1, 2, -2, ... of Z_(N-1) and one seat beside it, turned. N even to 16: searched for;
    they exist but for 4 and 6 (Tillson 1980), where 2 and 4 are the most. N even beyond: steps prime to N.

    >>> switch_cycles(3), switch_cycles(4)
    (((0, 1, 2), (1, 0, 2)), ((0, 1, 2, 3), (0, 3, 2, 1)))
    """
    if size < 3:
        return (tuple(range(size)),)
    if size % 2:
        turn = size - 1
        zigzag = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(turn)]
        return tuple((*((z + by) % turn for z in zigzag), turn) for by in range(min(turn, MOST)))
    if size > MOST:
        steps = [way for step in range(1, size // 2) if _prime_to(step, size) for way in (step, size - step)]
        return tuple(tuple(i * step % size for i in range(size)) for step in steps[:MOST])
    return _search(size)


def _prime_to(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def _search(size: int) -> tuple[tuple[int, ...], ...]:
    """A Latin square whose rows are next-seat tables; row 0 stays put, and as many others as can be are one cycle.

    Rows, and now and then columns, exchange what they hold over places where both hold the same; what leaves more lines
    is taken back. (Exchanges of rows alone keep the parity of the rows, which is the wrong one where 4 divides N.)
    """
    goal = {4: 2, 6: 4}.get(size, size - 1)
    chance = Random(size)
    square = [tuple((seat + step) % size for seat in range(size)) for step in range(size)]
    while True:
        loops = [_loops(row) for row in square]
        if loops[1:].count(1) >= goal:
            return tuple(_cycle(row) for row in square[1:] if _loops(row) == 1)
        across = chance.random() < 0.9
        table = square if across else list(zip(*square))
        crooked = [i for i in range(1, size) if loops[i] > 1] if across else range(size)
        a, b = crooked[int(chance.random() * len(crooked))], int(chance.random() * size)
        if a == b or (across and b == 0):
            continue
        kept = [places for places in _exchanges(table[a], table[b]) if across or 0 not in places]
        moved = {place for places in kept if chance.random() < 0.5 for place in places}
        table = _exchanged(table, a, b, moved)
        after = table if across else list(zip(*table))
        if sum(map(_loops, after)) <= sum(loops) or (not across and chance.random() < 0.02):
            square = after


def _exchanged(table: list[tuple[int, ...]], a: int, b: int, places: set[int]) -> list[tuple[int, ...]]:
    """The table with what two of its rows hold at some places exchanged."""
    one, two = table[a], table[b]
    new = list(table)
    new[a] = tuple(two[i] if i in places else one[i] for i in range(len(one)))
    new[b] = tuple(one[i] if i in places else two[i] for i in range(len(one)))
    return new


def _exchanges(one: tuple[int, ...], two: tuple[int, ...]) -> list[list[int]]:
    """The smallest sets of places over which two rows hold the same seats."""
    place, left, sets = {seat: i for i, seat in enumerate(two)}, set(range(len(one))), []
    while left:
        at, places = min(left), []
        while at in left:
            left.remove(at)
            places.append(at)
            at = place[one[at]]
        sets.append(places)
    return sets


def _cycle(follows: Sequence[int], start: int = 0) -> tuple[int, ...]:
    """The loop through ``start`` of a next-seat table."""
    path = [start]
    while follows[path[-1]] != start:
        path.append(follows[path[-1]])
    return tuple(path)


def _loops(follows: Sequence[int]) -> int:
    """How many loops a next-seat table has."""
    seen: set[int] = set()
    number = 0
    for start in range(len(follows)):
        if start not in seen:
            seen.update(_cycle(follows, start))
            number += 1
    return number
