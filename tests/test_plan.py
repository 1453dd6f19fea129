"""The planner against programs walked through seat by seat, and against arithmetic done by hand."""
import itertools
import json
import time
from dataclasses import replace

import numpy as np
import pytest

from ringmpi import schedule as schedules
from ringmpi.layout import Custom, layout
from ringmpi.mask import Mask
from ringmpi.pairs import Work
from ringmpi.plan import EXACT, Job, Ring, hides, memory, price, price_exactly
from ringmpi.plan.machine import Link, Machine, Tile, machine, shipped
from ringmpi.plan.visible import visible
from ringmpi.score import Score

MASKS = [Mask(), Mask(causal=True), Mask(window=(7, 3)), Mask(causal=True, window=(20, 0)), Mask(causal=True, window=(3, 0), keep_first=4),
         Mask(documents=[0, 5, 60, 83], causal=True), Mask(kv_range=[50, 83]), Mask(causal=True, prefix=9)]  # fmt: skip
SLOW = Machine("slow", 2, Link(1e-4, 1e8), Link(5e-4, 1e7), 1e7, 1e9, {"float32": Tile(1e8, 8e7, 1e-5, 1e-5), "bfloat16": Tile(1e8, 8e7)})


def true_pairs(work, rank, owner, part, parts):
    """Visible pairs, and pairs of runs, that the tiles really get (mean over the batch)."""
    rows = [tuple(bound.sum() / len(bound) for bound in pair.local()) for pair in
            work.pairs(work.strips(rank), Score().resolve(1), owner, part, parts)]  # fmt: skip
    seen = [hi - lo for lo, hi in rows]
    return sum(seen), sum(n > 0 for n in seen)


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_visible_pairs_are_those_of_the_tiles(name, mask):
    tokens, size, parts = 83, 5, 2
    work = Work.over((layout(name),) * 2, (tokens, tokens), size, mask, Score())
    _, counts = visible(layout(name), tokens, size, mask)
    ranks, owners = map(np.array, zip(*itertools.product(range(size), repeat=2)))
    for part in range(parts):
        pairs, _ = counts(ranks, owners, part, parts)
        truth = [true_pairs(work, rank, owner, part, parts)[0] for rank, owner in zip(ranks, owners)]
        assert pairs.tolist() == pytest.approx(truth)


def test_custom_layouts_are_counted_too():
    rule = Custom([30, 0, 53])
    work = Work.over((rule, rule), (83, 83), 3, Mask(causal=True), Score())
    _, counts = visible(rule, 83, 3, Mask(causal=True))
    seen, runs = counts(np.array([2, 1, 0]), np.array([0, 2, 2]), 0, 1)
    assert list(zip(seen, runs)) == [true_pairs(work, *at, 0, 1) for at in ((2, 0), (1, 2), (0, 2))]


class Walked:
    """A lap as ``ring.Lap`` runs it, walked through from the seats' own columns, with buffers by their numbers."""

    def __init__(self, ring, plan, backward):
        self.ring, self.plan, self.backward, n = ring, plan, backward, ring.size
        needs = lambda seat, owner, part: ring.counts(np.array([seat]), np.array([owner]), part, plan.parts)[0][0] > 0  # noqa: E731
        self.columns = [schedules.column(plan, seat, needs) for seat in range(n)]
        self.now, self.free, self.arrived, self.ports, self.done = [0.0] * n, {}, {}, {}, [0.0]

    def run(self):
        for t in range(max(len(column.steps) for column in self.columns) + 1):
            self.step(t)
        return max(*self.now, *self.done)

    def at(self, seat, t):
        steps = self.columns[seat].steps
        return steps[t] if 0 <= t < len(steps) else schedules.Step(t)

    def step(self, t):
        seats = range(self.ring.size)
        began = list(self.now)
        for seat in seats:
            for visit in self.at(seat, t).visits:
                if self.backward and visit.filling is not None and visit.slot is not None:
                    self.now[seat] = max(self.now[seat], self.free.get((seat, "gradient", visit.filling), 0.0))
        due = [0.0] * len(self.now)
        hops = [(hop, seat) for seat in seats for hop in self.at(seat, t).receives]
        for hop, seat in sorted(hops, key=lambda at: (at[0].walk, at[1])):
            sent = next(h for h in self.at(hop.peer, t).sends if (h.walk, h.owner, h.peer) == (hop.walk, hop.owner, seat))
            ready = max(self.now[seat], self.free.get((seat, "block", hop.slot), 0.0))
            self.arrived[seat, hop.need] = max(
                self.arrived.get((seat, hop.need), 0.0),
                self.move("block", hop.peer, seat, hop.owner, hop.part, began[hop.peer], ready, sent.slot))  # fmt: skip
        if self.backward:
            self.hand_on(t)
        for seat in seats:
            for visit in self.at(seat, t).visits:
                if visit.slot is not None:
                    self.now[seat] += float(self.ring.visit(np.array([seat]), np.array([visit.owner]), visit.part, self.plan.parts,
                                                            self.backward)[0])  # fmt: skip
            due[seat] = self.arrived.get((seat, t + 1), 0.0)
        self.now = [max(pair) for pair in zip(self.now, due)]

    def hand_on(self, t):
        seats = range(self.ring.size)
        leaving = []
        for seat in seats:
            for visit in self.at(seat, t - 1).visits:
                if visit.source is not None:
                    self.now[seat] = max(self.now[seat], self.arrived.pop((seat, "gradient", visit.walk, visit.owner)))
                if visit.target is not None and visit.filling is not None:
                    leaving.append((visit, seat))
        # A walk's last gradients go home; they move first, as there may be both in a step.
        for visit, seat in sorted(leaving, key=lambda at: (at[0].walk, at[0].target != at[0].owner, at[1])):
            self.arrived[visit.target, "gradient", visit.walk, visit.owner] = self.move(
                "gradient", seat, visit.target, visit.owner, visit.part, self.now[seat], self.now[visit.target], visit.filling)  # fmt: skip

    def move(self, kind, src, dst, owner, part, sent, ready, buffer):
        ring = self.ring
        between = int(ring.node[src] != ring.node[dst])
        link = (ring.machine.inside, ring.machine.between)[between]
        nbytes = float(ring.nbytes(np.array([owner]), part, self.plan.parts, kind == "gradient")[0])
        if not nbytes:
            return 0.0
        begin = max(sent, ready, self.ports.get((src, "out", between), 0.0), self.ports.get((dst, "in", between), 0.0))
        ends = begin + nbytes / link.bandwidth
        self.ports[src, "out", between] = self.ports[dst, "in", between] = self.free[src, kind, buffer] = ends
        self.done.append(ends + link.latency)
        return ends + link.latency


@pytest.mark.parametrize("between", [Link(5e-4, 1e7), Link(1e-4, 1e5), Link(2e-2, 1e7)], ids=["tiles", "bandwidth", "latency"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("name", "size"), [*itertools.product(("ring", "bidirectional", "multi"), (1, 2, 3, 5)), ("double", 4),
                                           ("double", 6)])  # fmt: skip
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(causal=True, window=(25, 0))], ids=str)
def test_prices_are_those_of_the_columns(between, backward, name, size, mask):
    job = Job(tokens=97, ranks=size, heads=2, head_dim=8, dtype="float32", mask=mask)
    machine = replace(SLOW, between=between, node_bandwidth=1e12)
    ring = Ring(job, machine)
    plan = schedules.schedule(name, ring.nodes)
    walked = Walked(ring, plan, backward).run()
    # Where a window ends walks early, on the double ring's long hops, and among parts, which buffer is free next is not followed up.
    rough = 0.2 if mask.window else 0.03 if name == "double" else 1e-3 if plan.parts > 1 else 1e-9
    assert price(job, machine, name, backward).seconds == pytest.approx(walked, rel=rough)


def test_the_worked_example():
    """Two ranks, full mask: the hop is hidden behind step 0 or not, then step 1 has its tiles alone."""
    job = Job(tokens=2000, ranks=2, heads=1, head_dim=50, dtype="float32", mask="full", layout="contiguous")
    tiles = 1e-5 + 1000 * 1000 * 200 / 1e8
    hop = 1e-4 + 1000 * 100 * 4 / 1e8
    assert price(job, SLOW).seconds == pytest.approx(2 * tiles)
    far = replace(SLOW, inside=Link(1e-4, 1e5))
    hop = 1e-4 + 1000 * 100 * 4 / 1e5
    assert price(job, far).seconds == pytest.approx(hop + tiles)
    assert price(job, far).exposed == pytest.approx(hop - tiles)
    gradient_home = hop
    tiles = 1e-5 + 1000 * 1000 * 2 * 5 * 50 / 8e7
    assert price(job, far, backward=True).seconds == pytest.approx(max(hop, tiles) + tiles + gradient_home)


def test_hops_take_from_the_tiles_of_a_core():
    """The same two ranks: a hidden hop costs its bytes' work at both ends, one that is waited for nothing; rows cost once a lap."""
    job = Job(tokens=2000, ranks=2, heads=1, head_dim=50, dtype="float32", mask="full", layout="contiguous")
    tile = replace(SLOW.tiles["float32"], row=1e-6, row_backward=2e-6)
    busy = replace(SLOW, inside=replace(SLOW.inside, busy=3e-9), tiles={"float32": tile})
    tiles, hop, core = 1e-5 + 1000 * 1000 * 200 / 1e8, 1e-4 + 1000 * 400 / 1e8, 2 * 3e-9 * 1000 * 400
    assert price(job, busy).seconds == pytest.approx(2 * tiles + core + 1e-3)
    far = replace(busy, inside=replace(busy.inside, bandwidth=1e5))
    hop = 1e-4 + 1000 * 400 / 1e5
    assert price(job, far).seconds == pytest.approx(hop + tiles + 1e-3)
    tiles = 1e-5 + 1000 * 1000 * 500 / 8e7
    assert price(job, far, backward=True).seconds == pytest.approx(max(hop, tiles + core) + tiles + hop + 2e-3)
    found = hides(job, replace(busy, inside=Link(1e-4, 4e5, busy=1e-6))).rows
    assert 1e-5 + found**2 * 200 / 1e8 + 2e-6 * found * 400 == pytest.approx(1e-4 + found * 400 / 4e5, rel=0.02)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_smallest_block_that_hides_its_hop(backward, mask):
    job = Job(tokens=8000, ranks=8, heads=4, head_dim=16, dtype="float32", mask=mask)
    fast = replace(SLOW, between=Link(5e-4, 3e7), node_bandwidth=3e7)
    found = hides(job, fast, backward)
    at = lambda rows: price(replace(job, tokens=rows * 8), fast, "ring", backward)  # noqa: E731
    lost = [at(rows).exposed / at(rows).seconds for rows in (found.rows // 2, int(found.rows * 1.1))]
    assert lost[0] > 2 * lost[1]
    assert found.tokens == found.rows * 8


@pytest.mark.parametrize(("name", "mask"), [("ring", "causal"), ("bidirectional", "full"), ("double", "causal")])
def test_large_rings_go_on_in_a_straight_line(name, mask):
    job = Job(tokens=2 * EXACT * 1024, ranks=2 * EXACT, heads=8, head_dim=64, mask=mask)
    line, truth = price(job, "h100", name), price_exactly(job, machine("h100"), name, False)
    assert line.seconds == pytest.approx(truth.seconds, rel=0.01)
    assert line.nbytes == pytest.approx(truth.nbytes, rel=0.01)


def test_collectives_have_a_price():
    job = Job(tokens=64 * 4096, ranks=64, heads=32, head_dim=128)
    ring, gather, broadcast = (price(job, "h100", name) for name in ("ring", "gather", "broadcast"))
    hop = 5e-6 + 4096 * job.row(2) / 5e10
    assert gather.seconds == pytest.approx(gather.compute + 63 * hop)
    assert gather.memory > 10 * ring.memory
    assert broadcast.memory == ring.memory and broadcast.seconds < gather.seconds * 2


def test_65536_ranks_take_seconds():
    began = time.perf_counter()
    job = Job(tokens=65536 * 4096, ranks=65536, heads=32, head_dim=128)
    ring, double = price(job, "h100", "ring"), price(job, "h100", "double")
    assert 65535 * 4096**2 // 2 * job.flop(False) / machine("h100").tile("bfloat16").forward < double.seconds < ring.seconds
    assert time.perf_counter() - began < 20


def test_one_slow_rank_or_link_costs_what_it_takes():
    job = Job(tokens=800, ranks=8, heads=4, head_dim=16, dtype="float32", mask="full")
    base = price(job, SLOW)
    slow, lame = price(job, SLOW, slow={3: 4.0}), price(job, SLOW, lame={4: 20.0})
    hop, tiles = 5e-4 + 100 * 4 * 32 * 4 / 1e7, base.compute / 8
    assert base.seconds == pytest.approx(8 * tiles)
    assert slow.seconds == pytest.approx(4 * 8 * tiles)
    assert lame.seconds == pytest.approx(7 * 20 * hop + tiles)
    assert price(job, SLOW, slow={3: 1.0}) == base


def test_memory_counts_the_buffers_of_the_column():
    job = Job(tokens=64, ranks=4, heads=2, head_dim=8, dtype="float32", kv_heads=1)
    ring = Ring(job, SLOW)
    rows, block = 16, 16 * 16 * 4
    own = rows * 2 * 8 * 4 * 2 + block + rows * 2 * 4
    for name, slots in (("ring", 2), ("bidirectional", 2), ("double", 3)):
        assert memory(ring, schedules.schedule(name, ring.nodes), False) == own + slots * block + rows * 2 * 4 * 9


@pytest.mark.parametrize("name", shipped())
def test_shipped_machines_price_and_name_their_sources(name, tmp_path):
    its = machine(name)
    assert all(part.source for part in (its.inside, its.between, *its.tiles.values()))
    its.save(str(tmp_path / "m.json"))
    assert machine(str(tmp_path / "m.json")) == its
    assert price(Job(tokens=1 << 16, ranks=16, heads=8, head_dim=64), its).seconds > 0


@pytest.mark.parametrize(
    ("job", "said"),
    [({"dtype": "int8"}, "int8"), ({"ranks": 0}, "0 ranks"), ({"kv_heads": 3}, "3 K/V heads")],
)
def test_what_cannot_be_priced_is_said(job, said):
    with pytest.raises(ValueError, match=said):
        Job(**{"tokens": 64, "ranks": 2, "heads": 8, "head_dim": 16, **job})
    with pytest.raises(ValueError, match="no machine 'abacus'"):
        machine("abacus")
    with pytest.raises(ValueError, match="says nothing of float16"):
        price(Job(tokens=64, ranks=2, heads=8, head_dim=16, dtype="float16"), SLOW)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update(version=2), "version"),
        (lambda data: data.pop("tiles"), "tiles"),
        (lambda data: data.update(inside=3), "mapping"),
        (lambda data: data["inside"].update(bandwidth="fast"), "bandwidth is 'fast'"),
        (lambda data: data["between"].update(busy=-1e-9), "busy is -1e-09"),
        (lambda data: data["between"].update(latency=float("nan")), "latency is nan"),
        (lambda data: data["between"].update(ports="many"), "ports is 'many'"),
        (lambda data: data["tiles"]["float32"].update(forward=0), "forward is 0"),
        (lambda data: data.update(ranks_per_node=0), "ranks_per_node is 0"),
        (lambda data: data["tiles"]["float32"].update(row=True), "row is True"),
    ],
)
def test_a_damaged_machine_says_what_is_wrong(tmp_path, change, said):
    path = tmp_path / "m.json"
    SLOW.save(str(path))
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=said) as error:
        machine(str(path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe"])
def test_a_file_that_is_no_machine_is_named(tmp_path, content):
    path = tmp_path / "m.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"m\.json is not a machine"):
        machine(str(path))
    with pytest.raises(ValueError, match="is not a machine"):
        path.unlink()
        path.mkdir()
        machine(str(path))


def test_links_that_were_not_measured_are_not_guessed():
    job = Job(tokens=64, ranks=1, heads=2, head_dim=8, dtype="float32")
    alone = replace(SLOW, inside=Link(0.0, 0.0), between=Link(0.0, 0.0), node_bandwidth=0.0)
    for name in ("ring", "broadcast", "gather"):
        assert price(job, alone, name, True).seconds == price(job, SLOW, name, True).seconds == price(job, SLOW, name, True).compute
    assert hides(job, alone).rows == 1
    # Nor does what a node can send to others limit the links inside.
    two, mute = replace(job, ranks=2, tokens=4096), replace(SLOW, node_bandwidth=1.0)
    for name in ("ring", "broadcast", "gather"):
        assert price(two, mute, name, True).seconds == price(two, SLOW, name, True).seconds
    assert hides(two, mute) == hides(two, SLOW)
    with pytest.raises(ValueError, match="nothing of links inside nodes"):
        price(replace(job, ranks=2), alone)
    with pytest.raises(ValueError, match="nothing of links between nodes"):
        price(replace(job, ranks=4), replace(SLOW, between=Link(0.0, 0.0)))
    older = json.loads(json.dumps({**SLOW.tiles["float32"].__dict__}))
    assert Tile(**{name: value for name, value in older.items() if not name.startswith("row")}) == SLOW.tiles["float32"]
