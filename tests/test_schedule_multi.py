"""The multi-ring as integers: every seat meets every part once, and no directed link carries two messages in a step.

And all schedules against the oracle, on 1 to 8 hostile seats.
"""
from __future__ import annotations

import itertools
import logging
import math

import pytest
from fakes import ring_of_threads
from oracle import MASKS, close, problem

from ringmpi import RingAttention, schedule
from ringmpi.topology import cycles


def columns(plan: schedule.Schedule) -> list[schedule.Column]:
    return [schedule.column(plan, seat) for seat in range(plan.size)]


def sent(programs: list[schedule.Column]) -> list[tuple[int, int, int]]:
    """(step, from, to) of every message of a block."""
    return [(step.index, seat, hop.peer) for seat, column in enumerate(programs) for step in column.steps for hop in step.sends]


def check(plan: schedule.Schedule) -> list[tuple[int, int, int]]:
    """Every seat meets every part once; no directed link is used twice in a step; what is sent is received. The messages."""
    plan.prove()
    programs = columns(plan)
    met = sorted((seat, visit.owner, visit.part) for seat, column in enumerate(programs)
                 for step in column.steps for visit in step.visits if visit.slot is not None)  # fmt: skip
    assert met == sorted(itertools.product(range(plan.size), range(plan.size), range(plan.parts)))
    links = sent(programs)
    assert len(set(links)) == len(links)
    received = [(step.index, hop.peer, seat) for seat, column in enumerate(programs) for step in column.steps for hop in step.receives]
    assert sorted(links) == sorted(received)
    return links


@pytest.mark.parametrize("size", range(1, 17))
def test_switch(size):
    plan = schedule.schedule("multi", [1] * size)
    assert plan.parts == {1: 1, 4: 2, 6: 4}.get(size, size - 1)
    check(plan)


@pytest.mark.parametrize("size", [17, 18, 22])
def test_large_switches_use_some_of_the_links(size):
    plan = schedule.schedule("multi", [1] * size)
    assert 6 <= plan.parts <= cycles.MOST
    check(plan)


@pytest.mark.parametrize("dims", [*itertools.product((3, 4), (3, 4, 5, 6)), (5, 4), (7, 7)])
def test_torus_uses_every_directed_link_in_every_step(dims):
    plan = torus_plan(dims)
    assert plan.parts == 4
    links = check(plan)
    places = list(itertools.product(*map(range, dims)))
    assert all(cycles.links(places[a], places[b], dims, (True, True)) == 1 for _, a, b in links)
    steps = math.prod(dims) - 1
    assert len(links) == steps * 4 * math.prod(dims), "a step uses all four links of every node"


def torus_plan(dims: tuple[int, int]) -> schedule.Schedule:
    places = {place: node for node, place in enumerate(itertools.product(*map(range, dims)))}
    return schedule.multi(len(places), [[places[p] for p in cycle] for cycle in cycles.torus_cycles(*dims)])


def test_two_way_cycles_are_the_bidirectional_ring():
    plan = schedule.schedule("multi", [1] * 5, lambda: [range(5), [0, 4, 3, 2, 1]])
    assert sorted(sent(columns(plan))) == sorted(sent(columns(schedule.bidirectional(5))))


def test_few_parts_are_held_at_once():
    for size in (5, 8, 13):
        plan = schedule.schedule("multi", [1] * size)
        assert schedule.column(plan, 0).slots <= 2 * plan.parts + 1


@pytest.mark.parametrize("size", range(2, 9))
def test_what_nobody_needs_does_not_travel(size):
    plan = schedule.schedule("multi", [1] * size)
    hops = [len(step.sends) for seat in range(size)
            for step in schedule.column(plan, seat, lambda seat, owner, part: owner <= seat).steps]  # fmt: skip
    assert sum(hops) < plan.parts * size * (size - 1)


@pytest.mark.parametrize(("nodes", "cycles", "name"), [
    ([1], (), "ring"), ([5], (), "ring"), ([1] * 4, (), "ring"), ([2, 2], (), "double"), ([3, 3, 3], (), "double"),
    ([2, 3], (), "ring"), ([1] * 3, ((0, 1, 2), (2, 1, 0)), "multi"), ([2, 2], ((0, 1, 2, 3), (3, 2, 1, 0)), "multi"),
])  # fmt: skip
def test_auto_is_by_placement(nodes, cycles, name):
    assert schedule.schedule("auto", nodes, lambda: cycles).name == name


def test_unequal_nodes_fall_back_with_a_word(caplog):
    with caplog.at_level(logging.WARNING, "ringmpi"):
        assert schedule.schedule("double", [2, 3]) == schedule.ring(5)
    assert "[2, 3]" in caplog.text


@pytest.mark.parametrize(("plan", "words"), [
    (schedule.Schedule("odd", schedule.Group(1, 2), (), together="gossip"), "come by 'gossip'"),
    (schedule.Schedule("odd", schedule.Group(1, 2), (), parts=0), "0 parts"),
    (schedule.Schedule("odd", schedule.Group(1, 2), (schedule.Walk(0, ((0, 0),)), schedule.Walk(0, ((1, 1),), (0, 7)))), "out of range"),
    (schedule.Schedule("odd", schedule.Group(1, 2), (schedule.Walk(0, ((0, 0), (1, "1"))),)), "not supported"),
])  # fmt: skip
def test_a_schedule_that_is_wrong_is_refused(plan, words):
    with pytest.raises(ValueError, match=f"the schedule 'odd' is wrong: .*{words}"):
        schedule.schedule(plan, [1, 1])
    with pytest.raises(ValueError, match=r"no schedule is called \['ring'\]"):
        schedule.schedule(["ring"], [1, 1])


def test_a_broken_cycle_is_found():
    with pytest.raises(AssertionError, match="not all seats"):
        schedule.multi(3, [(0, 1, 1)]).prove()


# ------------------------------------------------------------------------------------------------ against the oracle

NODES = {4: (2, 2), 6: (2, 2, 2), 8: (4, 4)}
LAYOUTS = ("contiguous", "zigzag", "striped")


def agrees(plan: str, size: int, mask: str, layout: str) -> None:
    """Forward and backward on a ring of threads are what dense attention gives."""
    given = problem(101, heads=2, kv_heads=1)
    want = given.solve(MASKS[mask])

    def body(ring):
        attn = RingAttention(ring, 101, mask=MASKS[mask], layout=layout, schedule=plan)
        q, k, v, dout = (attn.shard(x) for x in given[:4])
        out, lse = attn.forward(q, k, v)
        return [attn.unshard(x) for x in (out, *attn.backward(dout, q, k, v, out, lse))]

    for result in ring_of_threads(size, body, seed=size, delay=0.3, nodes=NODES.get(size)):
        for name, got, reference in zip(("out", "dq", "dk", "dv"), result, (want[0], *want[2:])):
            close(got, reference, f"{name} of {plan} on {size} seats, {mask}, {layout}")


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("plan", schedule.SCHEDULES)
def test_every_schedule_is_exact(plan, size):
    """Masks and layouts in turn; all of them with all schedules in the slow test below."""
    if plan == "double" and size not in NODES:
        pytest.skip("nodes of one size; the fallback is the plain ring")
    for i, mask in enumerate(list(MASKS)[size % 4 :: 4 if size < 5 else 8]):
        agrees(plan, size, mask, LAYOUTS[(i + size) % 3])


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("plan", ["multi", "broadcast", "gather"])
def test_every_schedule_mask_and_layout(plan, size):
    for mask, layout in itertools.product(MASKS, LAYOUTS):
        agrees(plan, size, mask, layout)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ["broadcast", "gather"])
def test_collectives_are_posted_alike_and_ahead(name, size):
    programs = columns(schedule.schedule(name, [1] * size))
    for seat, column in enumerate(programs):
        assert sorted(visit.owner for step in column.steps for visit in step.visits if visit.slot is not None) == list(range(size))
        shared = [(hop.step, hop.need) for step in column.steps for hop in step.shared]
        assert shared == [(hop.step, hop.need) for step in programs[0].steps for hop in step.shared]
        assert all(need == step + 1 for step, need in shared) and len(shared) == (0 if size == 1 else 1 if name == "gather" else size)
        assert column.slots == (size if name == "gather" or size == 1 else 3)
        homecomings = [(step.index, visit.owner) for step in column.steps for visit in step.visits if visit.slot is None]
        assert homecomings == ([(seat + 2, seat)] if size > 1 else [])


def test_a_block_that_nobody_else_needs_is_not_broadcast():
    column = schedule.column(schedule.broadcast(4), 3, lambda seat, owner, part: owner <= seat)
    assert [hop.owner for step in column.steps for hop in step.shared] == [0, 1, 2]
