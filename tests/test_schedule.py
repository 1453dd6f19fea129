"""Schedules, proved as integers: every rank meets every part once, gradients get home once, buffers are never shared."""
import inspect
from collections import Counter

import pytest

from ringmpi.schedule import Group, Schedule, Walk, bidirectional, column, double, reach, ring, schedule

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 31, 64)
GRIDS = [(n, m) for n in (1, 2, 3, 5, 8) for m in (1, 2, 3, 4, 8)]
ALL = [make(p) for make in (ring, bidirectional) for p in range(1, 65)] + [double(n, m) for n in range(1, 9) for m in range(1, 9)]
IDLE = Schedule("idle", Group(1, 4), (Walk(0, ((0, 0), (2, 1), (5, 2), (8, 3))),))
SMALL = [plan for plan in ALL if plan.size <= 16] + [IDLE]
LARGE = [ring(31), ring(64), bidirectional(63), double(8, 8), double(7, 8), double(8, 5)]


def named(plan):
    return f"{plan.name}-{plan.group.nodes}x{plan.group.local}"


@pytest.mark.parametrize("plan", ALL, ids=named)
def test_every_rank_meets_every_part_once(plan):
    plan.prove()


def simulate(plan, needs=None):
    """Runs all columns side by side; checks every message, buffer and gradient. Returns who met what, and the columns."""
    columns = [column(plan, seat, needs) for seat in range(plan.size)]
    sent = Counter((hop.walk, hop.part, hop.owner, seat, hop.peer, hop.step, hop.need)
                   for seat, col in enumerate(columns) for step in col.steps for hop in step.sends)  # fmt: skip
    received = Counter((hop.walk, hop.part, hop.owner, hop.peer, seat, hop.step, hop.need)
                       for seat, col in enumerate(columns) for step in col.steps for hop in step.receives)  # fmt: skip
    assert sent == received and all(n == 1 for n in sent.values()), "every message has two ends"
    met = Counter()
    for seat, col in enumerate(columns):
        met.update(walk_buffers(seat, col))
    follow_gradients(columns)
    return met, columns


def walk_buffers(seat, col):
    """Plays a column's block buffers: what a step sends or computes on must be there, whole, and nothing else's."""
    inside = {slot: (walk, seat) for walk, slot in enumerate(col.home) if slot is not None}
    parts = {slot: part for part, slot in enumerate(col.home) if slot is not None}
    leaving, met = {}, []
    for step in col.steps:
        for hop in step.sends:
            assert inside[hop.slot][1] == hop.owner and parts[hop.slot] == hop.part
            leaving[hop.slot] = max(leaving.get(hop.slot, 0), hop.need)
        for visit in step.visits:
            if visit.slot is not None:
                assert inside[visit.slot][1] == visit.owner and parts[visit.slot] == visit.part
                met.append((seat, visit.owner, visit.part))
        for hop in step.receives:
            assert leaving.get(hop.slot, 0) <= step.index, "received over a block that may still be leaving"
            inside[hop.slot], parts[hop.slot] = (hop.walk, hop.owner), hop.part
            assert hop.slot < col.slots
        used = [visit.slot for visit in step.visits if visit.slot is not None]
        assert not {hop.slot for hop in step.receives} & set(used), "received over a block that is computed on"
    return met


def follow_gradients(columns):
    """Every gradient that is sent is received by the visit that expects it, and what a walk collected comes home once."""
    targets, sources, homes = Counter(), Counter(), Counter()
    steps = {(seat, visit.walk, visit.owner, visit.slot is None): visit.step for seat, col in enumerate(columns)
             for step in col.steps for visit in step.visits}  # fmt: skip
    for col in columns:
        uses = {}
        for visit in (visit for step in col.steps for visit in step.visits):
            if visit.filling is not None:
                taken = steps[visit.target, visit.walk, visit.owner, visit.target == visit.owner]
                uses.setdefault(visit.filling, []).append((2 * visit.step, 2 * taken + 1))
            if visit.arriving is not None:
                uses.setdefault(visit.arriving, []).append((2 * visit.step + 1, 2 * visit.step + 2))
        for held in map(sorted, uses.values()):
            assert all(end < begin for (_, end), (begin, _) in zip(held, held[1:])), "a gradient is filled in before it was taken"
    for seat, col in enumerate(columns):
        for step in col.steps:
            for visit in step.visits:
                if visit.target is not None:
                    targets[visit.walk, visit.owner, seat, visit.target] += 1
                    assert visit.filling is not None and visit.filling < col.gradients
                if visit.source is not None:
                    sources[visit.walk, visit.owner, visit.source, seat] += 1
                    assert visit.arriving is not None and visit.arriving < col.gradients
                if visit.slot is None:
                    homes[seat, visit.walk] += 1
    assert targets == sources and all(n == 1 for n in (*targets.values(), *homes.values()))
    for walk, owner, _, seat in targets:
        assert owner != seat or homes[owner, walk] == 1, "what is sent home is taken there"


@pytest.mark.parametrize("plan", SMALL + LARGE, ids=named)
def test_all_columns_fit_together(plan):
    met, columns = simulate(plan)
    everyone = {(seat, owner, part) for seat in range(plan.size) for owner in range(plan.size) for part in range(plan.parts)}
    assert set(met) == everyone and all(n == 1 for n in met.values())
    assert len({(col.slots, col.gradients) for col in columns}) == 1


NEEDS = {
    "causal": lambda seat, owner, part: seat >= owner,
    "window": lambda seat, owner, part: 0 <= seat - owner <= 1,
    "both sides": lambda seat, owner, part: abs(seat - owner) <= 1,
    "nobody": lambda seat, owner, part: False,
    "one part": lambda seat, owner, part: part == 0 and seat % 2 == 0,
    "one rank": lambda seat, owner, part: seat == 0,
}


@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
@pytest.mark.parametrize("plan", SMALL, ids=named)
def test_cut_walks_fit_together(plan, needs):
    met, _ = simulate(plan, needs)
    wanted = {(seat, owner, part) for seat in range(plan.size) for owner in range(plan.size)
              for part in range(plan.parts) if needs(seat, owner, part)}  # fmt: skip
    assert wanted <= set(met) and all(n == 1 for n in met.values())


@pytest.mark.parametrize("p", SIZES[2:])
def test_a_window_smaller_than_a_block_costs_one_hop(p):
    for seat in range(p):
        hops = [hop for step in column(ring(p), seat, NEEDS["window"]).steps for hop in step.sends]
        assert len(hops) == (seat < p - 1)


@pytest.mark.parametrize("p", SIZES[2:])
def test_live_buffers_of_rings(p):
    assert column(ring(p), 0).slots == 2
    assert column(bidirectional(p), 0).slots == 4
    assert column(ring(p), 0).gradients == 3


@pytest.mark.parametrize(("nodes", "local"), [grid for grid in GRIDS if min(grid) > 1])
def test_live_buffers_of_double_rings(nodes, local):
    """The block that leaves a node stays until it has left: beside two that lap and one that arrives from L = 3 on."""
    assert column(double(nodes, local), 0).slots == (3 if local == 2 else 4)
    inner = [step for step in column(double(nodes, local), 0).steps]
    hops = [hop for step in inner for hop in step.sends if hop.need - hop.step > 1]
    assert all(hop.need - hop.step == local for hop in hops) and len(hops) == nodes - 1


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_hops_of_a_ring_go_to_the_right_neighbour(p):
    for seat in range(p):
        for step in column(ring(p), seat).steps:
            assert all(hop.peer == (seat + 1) % p for hop in step.sends)
            assert all(visit.target in (None, (seat + 1) % p) for visit in step.visits)


def test_bidirectional_uses_both_directions_in_every_step():
    for step in column(bidirectional(5), 2).steps[:4]:
        assert sorted(hop.peer for hop in step.sends) == [1, 3]


def test_reach_keeps_what_a_fork_needs():
    plan = double(3, 2)
    assert reach(plan, 0, lambda seat, owner, part: seat == 4) == [1, 1, 1]
    assert reach(plan, 0, lambda seat, owner, part: seat == 1) == [2, 0, 0]


def test_group_is_a_group():
    group = Group(3, 4)
    for a in range(12):
        assert [group.subtract(group.add(a, b), b) for b in range(12)] == [a] * 12
        assert sorted(group.add(a, b) for b in range(12)) == list(range(12))


def test_choice_by_name():
    assert schedule("ring", [3, 1]).size == 4 and schedule("double", [2, 2]).group == Group(2, 2)
    assert schedule("double", [3, 1]) == ring(4)
    with pytest.raises(ValueError, match="no schedule is called 'spiral'"):
        schedule("spiral", [4])
    with pytest.raises(ValueError, match="'ring' is for 3 ranks; the ring has 4"):
        schedule(ring(3), [4])


def leap(size):
    """A ring that goes round in steps of two: for odd sizes."""
    return Schedule("leap", Group(1, size), (Walk(0, tuple((t, 2 * t % size) for t in range(size))),))


def test_a_schedule_is_one_small_function():
    assert len(inspect.getsource(leap).splitlines()) <= 3
    leap(7).prove()
    met, _ = simulate(leap(7))
    assert len(met) == 49


BROKEN = {
    "a seat twice": Schedule("x", Group(1, 3), (Walk(0, ((0, 0), (1, 1), (2, 1))),)),
    "a seat never": Schedule("x", Group(1, 3), (Walk(0, ((0, 0), (1, 1))),)),
    "back in time": Schedule("x", Group(1, 3), (Walk(0, ((0, 0), (2, 1), (1, 2))),)),
    "not from home": Schedule("x", Group(1, 3), (Walk(0, ((0, 1), (1, 2), (2, 0))),)),
    "two places at once": Schedule("x", Group(1, 3), (Walk(0, ((0, 0), (1, 1))), Walk(0, ((1, 2),), (0, 0)))),
    "off a later walk": Schedule("x", Group(1, 3), (Walk(0, ((2, 2),), (1, 0)), Walk(0, ((0, 0), (1, 1))))),
    "off another part": Schedule("x", Group(1, 2), (Walk(0, ((0, 0), (1, 1))), Walk(1, ((0, 0),)), Walk(1, ((1, 1),), (0, 0))), parts=2),
    "a part too many": Schedule("x", Group(1, 2), (Walk(0, ((0, 0), (1, 1))), Walk(1, ((0, 0), (1, 1))))),
}


@pytest.mark.parametrize("plan", BROKEN.values(), ids=BROKEN)
def test_the_proof_finds_a_broken_schedule(plan):
    with pytest.raises(AssertionError):
        plan.prove()
    with pytest.raises(ValueError, match="the schedule 'x' is wrong: "):
        schedule(plan, [plan.size])


def test_who_needs_what_is_asked_once():
    """Planning asks for every seat and block at most once: not for every visit again."""
    asked = Counter()

    def needs(*what):
        asked[what] += 1
        return False

    for plan in (ring(16), bidirectional(16), double(4, 4)):
        asked.clear()
        column(plan, 5, needs)
        assert len(asked) == 16 * 16 * plan.parts and set(asked.values()) == {1}
