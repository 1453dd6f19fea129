"""The engine over hostile fakes: no buffer reaches MPI before the work on it is done, nor is it used before its message is.

Planted bugs: each is the engine with one line broken, and one of the checks here must notice.
"""
import numpy as np
import pytest
from fakes import Events, ring_of_threads
from oracle import close, problem

import ringmpi.ring
import ringmpi.tiles.host
import ringmpi.tiles.numpy as numpy_tile
from ringmpi import RingAttention
from ringmpi.partial import Partial
from ringmpi.ring import Lap
from ringmpi.schedule import Group, Schedule, Walk, double

PLANS = ["ring", "bidirectional", "multi", double(2, 2), double(4, 1)]
# Walks that nobody would draw, but that the engine must execute: it knows of no schedule.
ODD = {
    "idle steps": (Walk(0, ((0, 0), (2, 1), (5, 2), (8, 3))),),
    "parts in any order": (Walk(1, ((0, 0), (1, 3), (2, 1), (3, 2))), Walk(0, ((0, 0), (1, 1), (2, 2), (3, 3)))),
    "a fork of a fork": (Walk(0, ((0, 0), (2, 2))), Walk(0, ((3, 1),), (0, 0)), Walk(0, ((6, 3),), (1, 0))),
}


class RecordingSpace(numpy_tile.Space):
    """A device whose kernels run late: work on a buffer is only done when ``ready`` is called for it.

    The tile's strips are all launched in ``start``, as a device's are, before anything is received.
    """

    def __init__(self):
        self.working, self.log = set(), []

    def _key(self, buffer):
        return buffer.__array_interface__["data"][0]

    def start(self, strips):
        list(strips)
        return iter(())

    def touched(self, buffer):
        self.working.add(self._key(buffer))

    def ready(self, buffer):
        self.working.discard(self._key(buffer))

    def carrier(self, seats):
        return Carrier(seats, self)


class Carrier:
    """The seats of a ring, seen to be given buffers that are ready, and to bring what they are to."""

    def __init__(self, seats, space):
        self.seats, self.space, self.coming = seats, space, {}

    def __getattr__(self, name):
        return getattr(self.seats, name)

    def send(self, buffer, seat, tag):
        assert self.space._key(buffer) not in self.space.working, "sent before the last kernel that wrote it"
        self.space.log.append(("out", self.space._key(buffer)))
        return self.seats.send(buffer, seat, tag)

    def receive(self, buffer, seat, tag):
        key = self.space._key(buffer)
        assert key not in self.space.working, "received into before the last kernel that read it"
        self.space.log.append(("in", key))
        request = self.seats.receive(buffer, seat, tag)
        self.coming[request] = key
        return request

    def completed(self, requests):
        done = self.seats.completed(requests)
        self.space.log += [("landed", self.coming.pop(requests[i])) for i in done if requests[i] in self.coming]
        return done


def solve(ring, given, plan="ring"):
    attn = RingAttention(ring, given.q.shape[1], mask="causal", layout="zigzag", schedule=plan, tile="numpy")
    q, k, v, dout = (attn.shard(x) for x in given[:4])
    out, lse = attn.forward(q, k, v)
    return [attn.unshard(x) for x in (out, *attn.backward(dout, q, k, v, out, lse))]


def check(given, want, plan, seed):
    for result in ring_of_threads(4, lambda ring: solve(ring, given, plan), seed=seed, delay=0.8):
        for name, got, reference in zip(("out", "dq", "dk", "dv"), result, want):
            close(got, reference, name)


@pytest.fixture(scope="module")
def given():
    return problem(83, batch=1)


@pytest.fixture(scope="module")
def want(given):
    out, _, *gradients = given.solve("causal")
    return [out, *gradients]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: getattr(plan, "name", plan))
def test_a_device_sees_every_buffer_ready(given, want, plan, monkeypatch):
    spaces = []

    class Space(RecordingSpace):
        def __init__(self):
            super().__init__()
            spaces.append(self)

    monkeypatch.setattr(numpy_tile, "Space", Space)
    check(given, want, plan, seed=0)
    assert len(spaces) == 4 and all(space.log for space in spaces)
    for space in spaces:
        ins = [key for kind, key in space.log if kind == "in"]
        assert sorted(ins) == sorted(key for kind, key in space.log if kind == "landed"), "whatever is received lands once"


@pytest.mark.parametrize("name", ODD)
def test_any_table_of_walks_is_executed(given, want, name):
    plan = Schedule(name, Group(1, 4), ODD[name], parts=1 + max(walk.part for walk in ODD[name]))
    for seed in range(3):
        check(given, want, plan, seed)


def no_ready(self, message, post=Lap._post):
    ready, self.space.ready = self.space.ready, lambda buffer: None
    post(self, message)
    self.space.ready = ready


def test_a_device_notices_a_buffer_that_is_not_ready(given, want, monkeypatch):
    monkeypatch.setattr(numpy_tile, "Space", RecordingSpace)
    monkeypatch.setattr(Lap, "_post", no_ready)
    with pytest.raises(AssertionError, match="before the last kernel"):
        check(given, want, "ring", seed=0)


def greedy_poll(self):
    """Posts receives at once, whether or not their buffer is still leaving."""
    messages = list(self.flying)
    for i in self.comm.completed([self.flying[message] for message in messages]):
        self._done(messages[i])
    while self.due:
        self._post(self.due.pop(0))


def hasty_settle(self, which):
    """Does not wait for blocks."""
    self.poll()


def forgetful_hand_on(self, visit, absorb, hand_on=Lap._hand_on):
    """Leaves out what arrived."""
    add, self.space.add = self.space.add, lambda into, other, dtype: None
    hand_on(self, visit, absorb)
    self.space.add = add


def unclear_start(self, visit, compute, backward, start=Lap._start):
    """Fills a gradient buffer that is not zero."""
    clear, self.space.clear = self.space.clear, lambda buffer: None
    strips = start(self, visit, compute, backward)
    self.space.clear = clear
    return strips


BUGS = {
    "received over what is leaving": ("poll", greedy_poll),
    "computed on before it arrived": ("_settle", hasty_settle),
    "gradient not handed on": ("_hand_on", forgetful_hand_on),
    "gradient buffer not cleared": ("_start", unclear_start),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_noticed(given, want, bug, monkeypatch):
    line, broken = BUGS[bug]
    monkeypatch.setattr(Lap, line, broken)
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError, TimeoutError)):
        for seed in range(6):
            check(given, want, "bidirectional", seed)


def test_gradients_that_go_the_wrong_way_are_noticed_at_three_ranks_and_more(given, want, monkeypatch):
    """Two ranks cannot tell left from right: a public fault of several peers."""
    from ringmpi import schedule

    stays = schedule._stays

    def wrong_way(plan, w, seat, needs):
        for stay in stays(plan, w, seat, needs):
            flip = [visit._replace(source=visit.target, target=visit.source) for visit in stay.visits]
            yield stay._replace(visits=tuple(flip))

    monkeypatch.setattr(schedule, "_stays", wrong_way)
    with pytest.raises((AssertionError, TimeoutError, ValueError)):
        check(given, want, "ring", 0)


def test_a_merge_that_forgets_the_maximum_is_noticed(given, want, monkeypatch):
    def careless(self, other):
        self.o[...] += other.o
        self.l[...] += other.l
        self.m[...] = np.maximum(self.m, other.m)

    monkeypatch.setattr(Partial, "absorb", careless)
    with pytest.raises(AssertionError):
        check(given, want, "ring", 0)


def test_messages_of_no_bytes_are_not_sent(given):
    from ringmpi import Custom

    def body(ring):
        attn = RingAttention(ring, 83, layout=Custom([83, 0, 0, 0]))
        with attn.record(Events()) as trace:
            attn.forward(*(attn.shard(x) for x in given[:3]))
        return [event["nbytes"] for event in trace.of("post")]

    for sizes in ring_of_threads(4, body):
        assert all(sizes)


def test_recording_sees_every_message_and_tile(given):
    def body(ring):
        attn = RingAttention(ring, 83, layout="striped")
        with attn.record(Events()) as trace:
            attn.forward(*(attn.shard(x) for x in given[:3]))
        attn.forward(*(attn.shard(x) for x in given[:3]))
        return trace

    for trace in ring_of_threads(3, body):
        posts, done = (sorted(event["message"] for event in trace.of(name)) for name in ("post", "done"))
        assert posts == done and len(posts) == 4
        assert {event["visit"].owner for event in trace.of("tile")} == {0, 1, 2}
        assert all(event["ended"] >= event["began"] for name in ("tile", "wait") for event in trace.of(name))
        (end,) = trace.of("end")
        assert end["polls"] > sum(event["polls"] for event in trace.of("wait")) and end["polling"] > 0
        for sent, seen in zip(trace.of("post"), trace.of("done")):
            assert 0 <= sent["polls"] <= seen["polls"] <= end["polls"] and sent["polling"] <= seen["polling"] <= end["polling"]


def test_an_error_in_the_middle_kills_the_ring(given):
    def body(ring):
        attn = RingAttention(ring, 83)
        arrays = [attn.shard(x) for x in given[:3]]
        attn.strips = [None]
        with pytest.raises(AttributeError):
            attn.forward(*arrays)
        with pytest.raises(RuntimeError, match="make a new one"):
            attn.forward(*arrays)
        return True

    assert ring_of_threads(1, body) == [True]


def test_tags_are_small():
    plan = double(8, 8)
    hops = [hop for step in ringmpi.schedule.column(plan, 3).steps for hop in step.sends]
    tags = {ringmpi.ring.Message(True, kind, hop).tag for hop in hops for kind in ringmpi.ring.KINDS}
    assert max(tags) < 32767 and len(tags) <= 3 * len(plan.walks)
