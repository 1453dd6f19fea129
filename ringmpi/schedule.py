"""Where every block is, and when: walks of one block, in offsets.

Seats form a group. A walk lists visits ``(step, offset)``: at that step the block of owner o is computed on at seat
o + offset. Every other block's walk is a translation of the same list, so one seat's program (its ``Column``) and
the proof that every seat meets every part once need one block only. Consecutive visits are hops: posted at the step
of the first, needed at the step of the second.

    ring            0 > 1 > 2 > 3                      one walk over all offsets
    bidirectional   half the rows 0 > 1 > 2 > 3, the other half 0 > -1 > -2 > -3
    double          node x local: a walk per node, which forks off the walk before it a whole inner lap ahead
    multi           k parts, each once round a cycle of its own that shares no directed link with the others

Two more have no walks: all seats meet the blocks in the same order, and MPI's collectives bring them.

    broadcast       every owner's block in turn, to all, one step ahead; gradients by a reduction to the owner
    gather          all blocks to all seats at once: O(sequence) memory, the baseline

To add a schedule, return its walks from one function and name it in ``SCHEDULES``.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

from .topology.cycles import switch_cycles

log = logging.getLogger("ringmpi")


# The peer of a message that all seats take part in.
ALL = -1


class Turns(Protocol):
    """What translates walks: seats that are added."""

    def add(self, seat: int, offset: int) -> int:
        """The seat that lies ``offset`` beyond ``seat``."""

    def subtract(self, seat: int, offset: int) -> int:
        """The seat from which ``seat`` lies ``offset`` beyond."""


class Group(NamedTuple):
    """Seats 0 .. size-1 as ``nodes`` x ``local``, added component by component.

    >>> Group(2, 3).add(4, 5), Group(2, 3).subtract(0, 5)
    (0, 4)
    """

    nodes: int
    local: int

    def add(self, seat: int, offset: int) -> int:
        """The seat that lies ``offset`` beyond ``seat``."""
        (n, i), (dn, di) = divmod(seat, self.local), divmod(offset, self.local)
        return (n + dn) % self.nodes * self.local + (i + di) % self.local

    def subtract(self, seat: int, offset: int) -> int:
        """The seat from which ``seat`` lies ``offset`` beyond."""
        (n, i), (dn, di) = divmod(seat, self.local), divmod(offset, self.local)
        return (n - dn) % self.nodes * self.local + (i - di) % self.local


@dataclass(frozen=True)
class Cycle:
    """Seats added along a cycle through all of them: offset 1 is the next seat of the cycle.

    >>> Cycle((0, 2, 1)).add(2, 1), Cycle((0, 2, 1)).subtract(0, 1)
    (1, 1)
    """

    seats: tuple[int, ...]

    def add(self, seat: int, offset: int) -> int:
        """The seat that lies ``offset`` beyond ``seat``."""
        return self.seats[(self._place[seat] + offset) % len(self.seats)]

    def subtract(self, seat: int, offset: int) -> int:
        """The seat from which ``seat`` lies ``offset`` beyond."""
        return self.seats[(self._place[seat] - offset) % len(self.seats)]

    @cached_property
    def _place(self) -> dict[int, int]:
        return {seat: place for place, seat in enumerate(self.seats)}


class Walk(NamedTuple):
    """One part of a block on its way: visits ``(step, offset)``, steps rising.

    ``fork = (walk, visit)`` says that its copy is picked up at that visit of another walk of the same part; without
    one it starts at home. ``cycle`` is what its offsets are added along, if not the schedule's group.
    """

    part: int
    visits: tuple[tuple[int, int], ...]
    fork: tuple[int, int] | None = None
    cycle: Cycle | None = None


@dataclass(frozen=True)
class Schedule:
    """The walks of one block over a group of seats; each block is cut into ``parts`` by rows of every run.

    ``together`` is "broadcast" or "gather" for a schedule without walks, whose blocks come by collectives.
    """

    name: str
    group: Group
    walks: tuple[Walk, ...]
    parts: int = 1
    together: str | None = None

    @property
    def size(self) -> int:
        """How many seats it is for."""
        return self.group.nodes * self.group.local

    def turns(self, walk: Walk) -> Turns:
        """What a walk's offsets are added along."""
        return walk.cycle or self.group

    @cached_property
    def forks(self) -> dict[tuple[int, int], list[int]]:
        """The walks that fork off each visit of another."""
        found: dict[tuple[int, int], list[int]] = {}
        for number, walk in enumerate(self.walks):
            if walk.fork:
                found.setdefault(walk.fork, []).append(number)
        return found

    def prove(self) -> None:
        """Raises AssertionError unless every seat meets every part of every block exactly once, in order.

        Translations of one block cover all pairs of seats and owners if its offsets cover the group, so this is O(size).
        """
        assert self.size > 0 and self.parts > 0, f"{self.name} is for {self.size} seats and {self.parts} parts"
        assert self.together in (None, "broadcast", "gather"), f"{self.name} has its blocks come by {self.together!r}"
        if self.together:
            # Every seat has the same list of owners, and its own block beside it.
            return
        for part in range(self.parts):
            met = sorted(offset for walk in self.walks if walk.part == part for _, offset in walk.visits)
            assert met == list(range(self.size)), f"part {part} of {self.name} visits {met}"
            steps = [step for walk in self.walks if walk.part == part for step, _ in walk.visits]
            assert len(set(steps)) == len(steps), f"part {part} of {self.name} is in two places in one step"
        for walk in self.walks:
            steps = [step for step, _ in self.stations(walk)]
            assert steps == sorted(set(steps)), f"a walk of {self.name} goes back in time: {steps}"
            assert walk.fork or walk.visits[0] == (0, 0), f"a walk of {self.name} starts away from home"
            assert walk.cycle is None or sorted(walk.cycle.seats) == list(range(self.size)), f"{walk.cycle} is not all seats"
            assert not (walk.cycle and walk.fork), f"a walk of {self.name} forks off another cycle"
        for w, walk in enumerate(self.walks):
            assert walk.part in range(self.parts), f"a walk of {self.name} has part {walk.part} of {self.parts}"
            source = self.walks[walk.fork[0]] if walk.fork and walk.fork[0] < w else walk
            assert source.part == walk.part and (source is walk) == (walk.fork is None), f"walk {w} of {self.name} forks off {walk.fork}"

    def stations(self, walk: Walk) -> tuple[tuple[int, int], ...]:
        """Where its copy is picked up, then its visits."""
        if walk.fork is None:
            return walk.visits
        source, visit = walk.fork
        return (self.walks[source].visits[visit], *walk.visits)


def ring(size: int) -> Schedule:
    """Every block goes once round: N steps, whole blocks to the right neighbour (arXiv:2310.01889).

    >>> ring(3).walks[0].visits
    ((0, 0), (1, 1), (2, 2))
    """
    return Schedule("ring", Group(1, size), (Walk(0, tuple((t, t) for t in range(size))),))


def bidirectional(size: int) -> Schedule:
    """Two opposite rings, each with half the rows of every run: both directions of every link at once.

    >>> [walk.visits for walk in bidirectional(3).walks]
    [((0, 0), (1, 1), (2, 2)), ((0, 0), (1, 2), (2, 1))]
    """
    there = tuple((t, t) for t in range(size))
    back = tuple((t, -t % size) for t in range(size))
    return Schedule("bidirectional", Group(1, size), (Walk(0, there), Walk(1, back)), parts=2)


def double(nodes: int, local: int) -> Schedule:
    """Rings inside the nodes, and hops between nodes that are posted a whole inner lap before they are needed.

    The idea of LoongTrain's double ring (arXiv:2406.18485) with one walk a node: it enters node n at local offset 0 and
    laps round that node, while its copy is already on the way to node n + 1.

    >>> double(2, 2).walks[1]
    Walk(part=0, visits=((2, 2), (3, 3)), fork=(0, 0), cycle=None)
    """
    walks = (
        Walk(0, tuple((n * local + i, n * local + i) for i in range(local)), (n - 1, 0) if n else None) for n in range(nodes)
    )
    return Schedule("double", Group(nodes, local), tuple(walks))


def multi(size: int, cycles: Sequence[Sequence[int]] | None = None) -> Schedule:
    """Every block cut into as many parts as there are cycles, each part once round its own.

    The cycles share no directed link, so no link is used twice in a step. Without any, those of seats that all reach
    each other directly: N - 1, so that every seat sends to every other at once (TASP, arXiv:2509.26541).

    >>> multi(3).parts, [walk.cycle.seats for walk in multi(3).walks]
    (2, [(0, 1, 2), (1, 0, 2)])
    """
    lap = tuple((t, t) for t in range(size))
    walks = (Walk(part, lap, cycle=Cycle(tuple(cycle))) for part, cycle in enumerate(cycles or switch_cycles(size)))
    made = tuple(walks)
    return Schedule("multi", Group(1, size), made, parts=len(made))


def broadcast(size: int) -> Schedule:
    """Own block first, then every owner's in turn, broadcast one step ahead (RingX's pattern, SC 2025).

    No hop is longer than another and nothing is forwarded by hand; but nobody is spared a block that another needs.
    """
    return Schedule("broadcast", Group(1, size), (), together="broadcast")


def gather(size: int) -> Schedule:
    """Own block first, while all others come at once: the simple baseline. Every rank holds the whole sequence's K and V."""
    return Schedule("gather", Group(1, size), (), together="gather")


class Machine(NamedTuple):
    """What a schedule is made for: how many seats each node has, in ring order, and cycles of its links.

    ``cycles()`` are directed cycles through all seats that share no link between nodes; none where nodes hang on switches.
    """

    nodes: tuple[int, ...]
    cycles: Callable[[], Sequence[Sequence[int]]] = tuple

    @property
    def size(self) -> int:
        """How many seats there are."""
        return sum(self.nodes)


SCHEDULES: dict[str, Callable[[Machine], Schedule]] = {
    "ring": lambda machine: ring(machine.size),
    "bidirectional": lambda machine: bidirectional(machine.size),
    "double": lambda machine: _double(machine),
    "multi": lambda machine: multi(machine.size, machine.cycles()),
    "broadcast": lambda machine: broadcast(machine.size),
    "gather": lambda machine: gather(machine.size),
}


def cheapest(machine: Machine) -> str:
    """The name of the schedule that puts the least on the busiest link between nodes: what "auto" means.

    A model, by placement only, so that the same ranks get the same bits: blocks that cross it in a lap are N - 1 on a plain
    ring, of which k cycles of separate links carry a k-th each; where the L ranks of a node share its uplink, the double
    ring takes each block out once, L (nodes - 1). All of these hold a few blocks; "gather" holds the sequence and is never
    chosen.

    >>> [cheapest(Machine(nodes)) for nodes in ((1, 1, 1), (4,), (2, 2), (2, 1))]
    ['ring', 'ring', 'double', 'ring']
    >>> cheapest(Machine((1, 1, 1), lambda: [(0, 1, 2), (2, 1, 0)]))
    'multi'
    """
    loads = {"ring": float(machine.size - 1)}
    cycles = len(machine.cycles())
    if cycles:
        loads["multi"] = (machine.size - 1) / cycles
    elif len(machine.nodes) > 1 and len(set(machine.nodes)) == 1:
        loads["double"] = float(machine.nodes[0] * (len(machine.nodes) - 1))
    return min(loads, key=lambda name: loads[name])


def schedule(which: str | Schedule, nodes: Sequence[int], cycles: Callable[[], Sequence[Sequence[int]]] = tuple) -> Schedule:
    """A schedule by name, or "auto", for a ring of ``nodes`` (how many seats each has, in ring order); or one that fits it.

    ``cycles`` as in ``Machine``.

    >>> schedule("double", [2, 2, 2]).group
    Group(nodes=3, local=2)
    """
    if not isinstance(which, Schedule):
        machine = Machine(tuple(nodes), cycles)
        which = cheapest(machine) if which == "auto" else which
        if not isinstance(which, str) or which not in SCHEDULES:
            raise ValueError(f"no schedule is called {which!r}; there are auto, {', '.join(SCHEDULES)}")
        return SCHEDULES[which](machine)
    if which.size != sum(nodes):
        raise ValueError(f"the schedule {which.name!r} is for {which.size} ranks; the ring has {sum(nodes)}")
    try:
        which.prove()
    except (AssertionError, LookupError, TypeError) as wrong:
        raise ValueError(f"the schedule {which.name!r} is wrong: {wrong}") from wrong
    return which


def _double(machine: Machine) -> Schedule:
    """The double ring; where nodes hold different numbers of seats, the plain one, and a word in the log."""
    if len(set(machine.nodes)) == 1:
        return double(len(machine.nodes), machine.nodes[0])
    log.warning("the double ring needs as many ranks on every node; they hold %s: the plain ring it is", list(machine.nodes))
    return ring(machine.size)


# ---------------------------------------------------------------------------------------------- one seat's program


class Hop(NamedTuple):
    """A message with a part of a block between this seat and ``peer``: posted at ``step``, needed at ``need``.

    It is read from, or written to, buffer ``slot``. Peer ``ALL``: a collective that brings the block of ``owner``, or
    adds up its gradient.
    """

    step: int
    walk: int
    part: int
    owner: int
    peer: int
    slot: int
    need: int


class Visit(NamedTuple):
    """A part of a block at this seat: computed on at ``step`` out of buffer ``slot``.

    Backward, its gradient is filled into buffer ``filling``; what the walk collected so far comes from seat ``source``
    into buffer ``arriving`` and is added; the sum goes to seat ``target``. Each is None where there is none: a block at
    home fills its owner's own gradient. A visit without a slot is a gradient that has come home.
    """

    step: int
    walk: int
    part: int
    owner: int
    slot: int | None = None
    source: int | None = None
    target: int | None = None
    filling: int | None = None
    arriving: int | None = None


@dataclass
class Step:
    """What a seat does in one step: send, compute, receive; ``shared`` are the collectives that all seats post in it."""

    index: int
    sends: list[Hop] = field(default_factory=list)
    shared: list[Hop] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)
    receives: list[Hop] = field(default_factory=list)


@dataclass(frozen=True)
class Column:
    """The program of one seat.

    ``home[part]`` is the buffer in which its own part starts, None if nobody needs it; ``slots`` and ``gradients`` count the
    buffers that are in use at once, for blocks and for their gradients. ``together`` as in ``Schedule``.
    """

    steps: tuple[Step, ...]
    home: tuple[int | None, ...]
    slots: int
    gradients: int
    together: str | None = None


Needs = Callable[[int, int, int], bool]
# How many visits of each walk of an owner's block are made.
Reached = Callable[[int], list[int]]


def reach(schedule: Schedule, owner: int, needs: Needs | None = None) -> list[int]:
    """How many visits of each walk of ``owner``'s block are made: up to the last seat, or fork, that needs it.

    ``needs(seat, owner, part)`` says whether a seat computes anything on that part; None means that all do.

    >>> reach(ring(4), 1, lambda seat, owner, part: seat in (1, 2))
    [2]
    """
    if needs is None:
        return [len(walk.visits) for walk in schedule.walks]
    made = [0] * len(schedule.walks)
    for w in reversed(range(len(schedule.walks))):
        walk = schedule.walks[w]
        wanted = (i + 1 for i in reversed(range(made[w], len(walk.visits)))
                  if needs(schedule.turns(walk).add(owner, walk.visits[i][1]), owner, walk.part))  # fmt: skip
        made[w] = next(wanted, made[w])
        if walk.fork and made[w]:
            source, visit = walk.fork
            made[source] = max(made[source], visit + 1)
    return made


def column(schedule: Schedule, seat: int, needs: Needs | None = None) -> Column:
    """The program of ``seat``: the visits and hops of all blocks that touch it, and the buffer each of them uses.

    >>> [[hop.owner for hop in step.sends] for step in column(ring(3), 0).steps]
    [[0], [2], [], [], []]
    """
    if schedule.together:
        return _together(schedule, seat, needs)
    everywhere = reach(schedule, seat)
    made: Reached = cache(lambda owner: reach(schedule, owner, needs)) if needs else lambda owner: everywhere
    stays = [stay for walk in range(len(schedule.walks)) for stay in _stays(schedule, walk, seat, made)]
    slots, held = _assign({(stay.walk, stay.owner): stay.held for stay in stays})
    visits = [visit._replace(slot=slots[stay.walk, stay.owner]) for stay in stays for visit in stay.visits]
    visits += [visit for walk in range(len(schedule.walks)) for visit in _homecoming(schedule, walk, seat, made)]
    taken = {(stay.walk, stay.owner): hop.need for stay in stays for hop in stay.sends if hop.walk == stay.walk}
    buffers, filled = _assign(dict(use for visit in visits for use in _gradients(visit, taken)))
    steps = tuple(Step(t) for t in range(2 + max((visit.step for visit in visits), default=0)))
    for visit in visits:
        filling, arriving = (buffers.get((kind, visit)) for kind in ("filling", "arriving"))
        steps[visit.step].visits.append(visit._replace(filling=filling, arriving=arriving))
    for stay in stays:
        for hop in stay.sends:
            steps[hop.step].sends.append(hop._replace(slot=slots[stay.walk, stay.owner]))
        for hop in stay.receives:
            steps[hop.step].receives.append(hop._replace(slot=slots[stay.walk, stay.owner]))
    roots = sorted((walk.part, w) for w, walk in enumerate(schedule.walks) if walk.fork is None)
    home = tuple(slots.get((w, seat)) for _, w in roots)
    return Column(steps, home, held, filled)


def _together(schedule: Schedule, seat: int, needs: Needs | None) -> Column:
    """The program of a seat where collectives bring the blocks: its own in step 0, the i-th other owner's in step i + 1.

    All seats post the same collectives in the same order: blocks one step ahead, and the sum of a gradient one step
    after the visits. A gathered block is in the buffer of its owner's number.
    """
    size, at_once = schedule.size, schedule.together == "gather"
    owners = [owner for owner in range(size) if any(needs is None or needs(s, owner, 0) for s in range(size) if s != owner)]
    home = seat if at_once else 0
    steps = tuple(Step(t) for t in range(len(owners) + 4))
    steps[0].visits.append(Visit(0, 0, 0, seat, slot=home))
    if at_once and owners:
        steps[0].shared.append(Hop(0, 0, 0, seat, ALL, home, 1))
    for i, owner in enumerate(owners):
        slot = owner if at_once else home if owner == seat else 1 + i % 2
        if not at_once:
            steps[i].shared.append(Hop(i, 0, 0, owner, ALL, slot, i + 1))
        # Three buffers of gradients: one is filled, one is being added up, one has the time of a step to be done.
        if owner == seat:
            steps[i + 2].visits.append(Visit(i + 2, 0, 0, owner, source=ALL, arriving=i % 3))
        else:
            steps[i + 1].visits.append(Visit(i + 1, 0, 0, owner, slot, target=ALL, filling=i % 3))
    return Column(steps, (home,), size if at_once or size < 2 else 3, min(len(owners), 3), schedule.together)


# A buffer is held over half-steps: 2t is the start of step t, 2t + 1 the time at which it posts its receives.
_Held = tuple[int, int]


class _Stay(NamedTuple):
    """A copy at this seat: how it came, what is computed on it, where it goes on to."""

    walk: int
    owner: int
    held: _Held
    receives: tuple[Hop, ...]
    visits: tuple[Visit, ...]
    sends: tuple[Hop, ...]


def _stays(schedule: Schedule, w: int, seat: int, reached: Reached) -> Iterable[_Stay]:
    """The stays of walk ``w`` of every block at ``seat``."""
    walk = schedule.walks[w]
    add, subtract = schedule.turns(walk).add, schedule.turns(walk).subtract
    forked = walk.fork is not None
    stations = schedule.stations(walk)
    for i, (step, offset) in enumerate(walk.visits):
        owner = subtract(seat, offset)
        made = reached(owner)
        if made[w] <= i:
            continue
        hop = Hop(step, w, walk.part, owner, peer=seat, slot=0, need=step)
        receives: tuple[Hop, ...] = ()
        if i or forked:
            posted, came = stations[i - 1 + forked]
            receives = (hop._replace(step=posted, peer=add(owner, came)),)
        sends = [hop._replace(walk=to, peer=add(owner, goes), need=need) for to, need, goes in _onward(schedule, made, w, i)]
        source = add(owner, walk.visits[i - 1][1]) if i else owner
        target = add(owner, walk.visits[i + 1][1]) if made[w] > i + 1 else owner
        visit = Visit(step, w, walk.part, owner)
        if owner != seat:
            visit = visit._replace(source=None if source == owner else source, target=target)
        held = (2 * receives[0].step + 1 if receives else 0, 1 + 2 * max([step, *(send.need - 1 for send in sends)]))
        yield _Stay(w, owner, held, receives, (visit,), tuple(sends))


def _onward(schedule: Schedule, made: list[int], w: int, i: int) -> Iterable[tuple[int, int, int]]:
    """(walk, step, offset) of the visits that the copy at visit ``i`` of walk ``w`` is sent to."""
    if made[w] > i + 1:
        yield (w, *schedule.walks[w].visits[i + 1])
    for fork in schedule.forks.get((w, i), ()):
        if made[fork]:
            yield (fork, *schedule.walks[fork].visits[0])


def _homecoming(schedule: Schedule, w: int, seat: int, reached: Reached) -> Iterable[Visit]:
    """The gradient that walk ``w`` of this seat's own block sends home from its last visit, one step after it."""
    made = reached(seat)[w]
    if made:
        step, offset = schedule.walks[w].visits[made - 1]
        if offset:
            walk = schedule.walks[w]
            yield Visit(step + 1, w, walk.part, seat, source=schedule.turns(walk).add(seat, offset))


def _gradients(visit: Visit, taken: dict[tuple[int, int], int]) -> Iterable[tuple[tuple[str, Visit], _Held]]:
    """The gradient buffers of a visit: filled in its step until the next seat takes it; arriving until the next step adds it.

    ``taken`` says at which step that is, by walk and owner: of its next visit. It is taken home in the next step.
    """
    if visit.target is not None:
        yield ("filling", visit), (2 * visit.step, 2 * taken.get((visit.walk, visit.owner), visit.step + 1) + 1)
    if visit.source is not None:
        yield ("arriving", visit), (2 * visit.step + 1, 2 * visit.step + 2)


def _assign(uses: dict[Any, _Held]) -> tuple[dict[Any, int], int]:
    """A buffer for every use, the lowest that is free, and how many there are."""
    free_at: list[int] = []
    given = {}
    for key, (begin, end) in sorted(uses.items(), key=lambda use: use[1]):
        buffer = next((b for b, free in enumerate(free_at) if free < begin), len(free_at))
        free_at[buffer : buffer + 1] = [end]
        given[key] = buffer
    return given, len(free_at)
