"""What a ring will cost on a machine: which hops hide behind the tiles, and what stalls. No MPI, no data.

It prices the walks that the ring executes, step by step and for all seats at once. With T[s] the time at which seat s begins
a step, and as ``ring.Lap`` works:

    a block leaves      when its sender has begun the step, its receiver has a free buffer and the ports are free
    it arrives          nbytes / bandwidth + latency later
    tiles               overhead x pairs of runs + FLOP of the visible pairs / rate + busy x bytes sent and received in the step
    once a lap          the rows' packing, delta and rounding
    backward, before    the gradient of the step before must have come; the sum leaves then
    the next step       begins when the tiles are done and the blocks that it needs are there

Beyond ``EXACT`` ranks it prices two smaller rings with the same blocks and goes on in a straight line: with every rank more,
a lap has one step more like those before.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import layout as layouts
from .. import mask as masks
from .. import schedule as schedules
from ..schedule import Schedule
from .machine import Link, Machine
from .machine import machine as machine_of
from .visible import visible

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# Rings of more ranks are priced as two smaller ones, this large and half.
EXACT = 256
NEVER = -np.inf


@dataclass(frozen=True)
class Job:
    """What is to be computed: ``tokens`` on ``ranks``, and everything that decides its cost."""

    tokens: int
    ranks: int
    heads: int
    head_dim: int
    kv_heads: int | None = None
    v_dim: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"
    mask: Any = "causal"
    layout: Any = "zigzag"

    def __post_init__(self) -> None:
        if self.dtype not in BYTES:
            raise ValueError(f"dtype is {self.dtype}; it must be one of {', '.join(BYTES)}")
        if min(self.tokens, self.ranks, self.batch, self.heads, self.kv, *self.dims) < 1 or self.heads % self.kv:
            raise ValueError(f"{self.tokens} tokens, {self.ranks} ranks, {self.heads} heads over {self.kv} K/V heads: all >= 1, dividing")

    @property
    def kv(self) -> int:
        """K/V heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def dims(self) -> tuple[int, int]:
        """head_dim of q and k, and of v."""
        return self.head_dim, self.head_dim if self.v_dim is None else self.v_dim

    @property
    def sums(self) -> int:
        """Bytes of a number of the sums, and of travelling gradients."""
        return max(4, BYTES[self.dtype])

    def row(self, itemsize: int) -> int:
        """Bytes of one token's K and V."""
        return self.batch * self.kv * sum(self.dims) * itemsize

    def flop(self, backward: bool) -> int:
        """Useful floating-point operations of one visible pair: two products forward, five backward (arXiv:2205.14135)."""
        d, v = self.dims
        return 2 * self.batch * self.heads * (3 * d + 2 * v if backward else d + v)


class Price(NamedTuple):
    """A lap: seconds altogether, of tiles alone on the busiest seat, lost to waiting; bytes a rank sends at most.

    ``steps`` are (busiest tiles, longest hop posted, longest wait) of every step; of repeated ones the first few.
    """

    schedule: str
    backward: bool
    seconds: float
    compute: float
    exposed: float
    nbytes: float
    memory: int
    steps: tuple[tuple[float, float, float], ...]


class Hide(NamedTuple):
    """The smallest block, in tokens a rank, whose hop is not waited for, and the sequence that gives it.

    ``core``: how much of a step the core's work for hops takes at most, from there on.
    """

    backward: bool
    rows: int
    tokens: int
    core: float


class Ring:
    """A job on a machine, seat by seat: what every seat holds, and what a visit of any block costs.

    ``slow`` makes the tiles of single seats slower, ``lame`` the links into them: {seat: factor}.
    """

    def __init__(self, job: Job, machine: Machine, slow: dict[int, float] | None = None, lame: dict[int, float] | None = None) -> None:
        self.job, self.machine, self.size = job, machine, job.ranks
        self.tile, self.seats = machine.tile(job.dtype), np.arange(job.ranks)
        self.runs, self.counts = visible(layouts.layout(job.layout), job.tokens, job.ranks, masks.mask(job.mask))
        self.rows = int(self.runs.rows().max())
        self.slow, self.lame = (_factors(job.ranks, given) for given in (slow, lame))
        full, rest = divmod(job.ranks, machine.ranks_per_node)
        self.nodes = (machine.ranks_per_node,) * full + (rest,) * bool(rest)
        self.node = self.seats // machine.ranks_per_node
        machine.connects(self.nodes)

    def link(self) -> Link:
        """The slowest kind of link that a message of one rank of a node meets. One rank sends none, and its machine may know none."""
        its = self.machine.between
        if self.size == 1:
            return Link(0.0, np.inf)
        return self.machine.inside if len(self.nodes) == 1 else replace(its, bandwidth=min(its.bandwidth, self.machine.node_bandwidth))

    def besides(self, backward: bool) -> float:
        """Seconds that the rows of a rank take once a lap, whatever the tiles."""
        return self.rows * self.job.batch * self.job.heads * self.tile.besides(backward)

    def visit(self, seats: np.ndarray, owners: np.ndarray, part: int, parts: int, backward: bool) -> np.ndarray:
        """Seconds of the tiles of ``seats`` on a part of the blocks of ``owners``; 0 where they see nothing of it."""
        pairs, runs = self.counts(seats, owners, part, parts)
        rate, overhead = self.tile.of(backward)
        return (pairs * (self.job.flop(backward) / rate) + runs * overhead) * self.slow[seats]

    def nbytes(self, owners: np.ndarray, part: int, parts: int, gradient: bool) -> np.ndarray:
        """Bytes of a part of the blocks of ``owners``, or of their gradients."""
        rows = self.runs.part(part, parts).rows()[owners]
        return rows * float(self.job.row(self.job.sums if gradient else BYTES[self.job.dtype]))


def price(job: Job, which: str | Machine, schedule: str | Schedule = "ring", backward: bool = False, *,
          slow: dict[int, float] | None = None, lame: dict[int, float] | None = None) -> Price:  # fmt: skip
    """Prices one lap of a schedule on a machine.

    ``slow`` ({seat: factor}) makes the tiles of seats slower, ``lame`` the links into them.

    >>> job = Job(tokens=1 << 20, ranks=64, heads=32, head_dim=128)
    >>> ring, gather = price(job, "h100"), price(job, "h100", "gather")
    >>> ring.seconds < gather.seconds, ring.memory < gather.memory
    (True, True)
    """
    machine = machine_of(which)
    if job.ranks > EXACT:
        return _straight_on(job, machine, schedule, backward, slow, lame)
    return price_exactly(job, machine, schedule, backward, slow, lame)


def _straight_on(job: Job, machine: Machine, schedule: Any, backward: bool, slow: Any, lame: Any) -> Price:
    """The price of a large ring from those of two smaller ones with the same blocks, both wider than a window reaches if they can."""
    if not isinstance(schedule, str) or not isinstance(job.layout, str):
        raise ValueError(f"a ring of {job.ranks} > {EXACT} ranks is priced by names of a schedule and a layout")
    rows, step = -(-job.tokens // job.ranks), 2 * machine.ranks_per_node
    reach = max([0, *(2 * (side or 0) // rows for side in masks.mask(job.mask).window or ())])
    large = min(8 * EXACT, max(EXACT, 6 * reach)) // step * step or step
    sizes = (large // 2, large)
    near, far = (price_exactly(replace(job, tokens=rows * size, ranks=size), machine, schedule, backward, slow, lame) for size in sizes)
    more = (job.ranks - sizes[1]) / (sizes[1] - sizes[0])
    seconds, compute, exposed, nbytes = (b + more * (b - a) for a, b in zip(near[2:6], far[2:6]))
    memory = far.memory + int(more * (far.memory - near.memory))
    return Price(far.schedule, backward, seconds, compute, exposed, nbytes, memory, far.steps)


def price_exactly(job: Job, machine: Machine, schedule: str | Schedule, backward: bool, slow: Any = None, lame: Any = None) -> Price:
    """The price seat by seat, however large the ring is."""
    ring = Ring(job, machine, slow, lame)
    plan = schedules.schedule(schedule, ring.nodes)
    return together(ring, plan, backward) if plan.together else Lap(ring, plan, backward).run()


class Lap:
    """Prices a lap. The state is, for every seat, the time at which it begins a step and what is still under way."""

    def __init__(self, ring: Ring, plan: Schedule, backward: bool) -> None:
        self.ring, self.plan, self.backward, n = ring, plan, backward, ring.size
        self.visits = [(walk, i, step, offset) for walk, its in enumerate(plan.walks) for i, (step, offset) in enumerate(its.visits)]
        self.tiles = {(w, i): self._tiles(w, offset) for w, i, _, offset in self.visits}
        self.made = self._made()
        self.now = np.zeros(n)
        self.out, self.into = np.zeros((2, n)), np.zeros((2, n))
        self.gone: dict[tuple[str, int], np.ndarray] = {}
        self.came: dict[int, list[np.ndarray]] = {}
        self.sums: dict[tuple[int, int], np.ndarray] = {}
        self.leaving: dict[tuple[int, int], np.ndarray] = {}
        self.sent, self.busy, self.compute, self.waited = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
        self.longest, self.steps = 0.0, []  # type: ignore[var-annotated]

    def run(self) -> Price:
        """The price of the whole lap."""
        for t in range(3 + max(step for *_, step, _ in self.visits)):
            self._step(t)
        self.now = np.maximum.reduce([self.now, *self.gone.values(), *(time for its in self.came.values() for time in its)])
        seconds = float(self.now.max()) + self.ring.besides(self.backward)
        return Price(self.plan.name, self.backward, seconds, float(self.compute.max()), float(self.waited.max()),
                     float(self.sent.max()), memory(self.ring, self.plan, self.backward), tuple(self.steps))  # fmt: skip

    def _step(self, t: int) -> None:
        """The lines of a step, in the ring's order."""
        began, now, self.longest, self.busy = self.now, self.now, 0.0, 0 * self.busy
        visits = [visit for visit in self.visits if visit[2] == t]
        if self.backward:
            now = np.maximum.reduce([now, *(self._cleared(w, i, offset) for w, i, _, offset in visits if offset)])
        for walk, i, source, offset in self._hops(t):
            free = self.gone.get(("block", walk), now)
            came = self._move("block", walk, source, offset, began, np.maximum(now, free), self._alive(walk, i, offset))
            self.came.setdefault(self.plan.walks[walk].visits[i][0], []).append(came)
        if self.backward:
            now = self._hand_on(t, now)
        tiles = sum((self._at_seats(w, self.tiles[w, i], offset) for w, i, _, offset in visits), 0 * now)
        self.compute += tiles
        done = now + tiles + self.busy
        self.now = np.maximum.reduce([done, *self.came.pop(t + 1, [])])
        self.waited += self.now - done + now - began
        if visits:
            self.steps.append((float(tiles.max()), self.longest, float((self.now - done + now - began).max())))

    def _cleared(self, walk: int, i: int, offset: int) -> np.ndarray:
        """When the buffer of the gradient before the last has left, at the seats that fill it anew."""
        return np.where(self._alive(walk, i, offset), self.gone.get(("gradient", walk), NEVER), NEVER)

    def _hand_on(self, t: int, now: np.ndarray) -> np.ndarray:
        """The gradients of the step before: waits for what came, and sends the sums; then those due in this step move."""
        for w, i, _, offset in (visit for visit in self.visits if visit[2] == t - 1):
            if (w, i) in self.sums:
                now = np.maximum(now, self.sums.pop((w, i)))
            if offset:
                self.leaving[w, i] = now
        now = np.maximum.reduce([now, *(self.sums.pop(key) for key in [key for key in self.sums if key == (-1, t)])])
        for w, i in list(self.leaving):
            (step, offset), visits = self.plan.walks[w].visits[i], self.plan.walks[w].visits
            last = self.made[w] == i + 1
            if step == t - 1 and last.any():
                self._sum((-1, t + 1), self._move("gradient", w, offset, 0, self.leaving[w, i], now, last))
            if i + 1 == len(visits) or visits[i + 1][0] == t:
                posted = self.leaving.pop((w, i))
                if i + 1 < len(visits):
                    goes = visits[i + 1][1]
                    self._sum((w, i + 1), self._move("gradient", w, offset, goes, posted, now, self._alive(w, i + 1, goes)))
        return now

    def _sum(self, key: tuple[int, int], came: np.ndarray) -> None:
        self.sums[key] = np.maximum(self.sums.get(key, came), came)

    # -------------------------------------------------------------------------------------------------------- a message

    def _move(self, kind: str, walk: int, source: int, target: int, sent: np.ndarray, ready: np.ndarray, alive: np.ndarray) -> np.ndarray:
        """Moves a part of every block from offset ``source`` to ``target``; when each seat has it, -inf where none is sent it.

        ``sent`` are the times at which senders post, ``ready`` at which receivers do; ``alive`` says which receive anything.
        """
        ring, seats = self.ring, self.ring.seats
        owners = self._seats(walk, seats, -target)
        src = self._seats(walk, owners, source)
        between = np.asarray(ring.node[src] != ring.node, int)
        nbytes = ring.nbytes(owners, self.plan.walks[walk].part, self.plan.parts, kind == "gradient") * alive
        alive = alive & (nbytes > 0)
        port, latency, busy = self._link(between, src, nbytes, alive)
        begin = np.maximum(sent[src], ready)
        if ring.machine.between.ports == "one":
            begin = np.where(between, np.maximum(begin, np.maximum(self.out[1, src], self.into[1])), begin)
        if ring.machine.inside.ports == "one":
            begin = np.where(between, begin, np.maximum(begin, np.maximum(self.out[0, src], self.into[0])))
        ends, there = (begin + port)[alive], src[alive]
        self.out[between[alive], there] = ends
        self.into[between[alive], seats[alive]] = ends
        np.add.at(self.sent, there, nbytes[alive])
        np.add.at(self.busy, there, (busy * nbytes)[alive])
        self.busy += busy * nbytes
        gone = self.gone.setdefault((kind, walk), np.zeros(ring.size))
        gone[there] = ends
        self.longest = max(self.longest, float((port + latency)[alive].max(initial=0.0)))
        return np.where(alive, begin + port + latency, NEVER)

    def _link(self, between: np.ndarray, src: np.ndarray, nbytes: np.ndarray, alive: np.ndarray) -> tuple[np.ndarray, ...]:
        """Seconds in the ports, latency, and seconds of a core for a byte, of a message into every seat."""
        machine, ring = self.ring.machine, self.ring
        links = (machine.inside, machine.between)
        latency, bandwidth, busy = (np.array(pair)[between] for pair in zip(*((x.latency, x.bandwidth, x.busy) for x in links)))
        leaving = np.bincount(ring.node[src], between * alive, minlength=len(ring.nodes))[ring.node[src]]
        shared = np.where(between, machine.node_bandwidth / np.maximum(leaving, 1), np.inf)
        return nbytes / np.minimum(bandwidth, shared) * ring.lame, latency * ring.lame, busy

    # ------------------------------------------------------------------------------------------------------ what is where

    def _seats(self, walk: int, seats: np.ndarray, offset: int) -> Any:
        """The seats that lie ``offset`` beyond others on a walk; before them if it is negative."""
        cycle, group = self.plan.walks[walk].cycle, self.plan.group
        if cycle is None:
            return group.add(seats, offset) if offset >= 0 else group.subtract(seats, -offset)  # type: ignore[arg-type]
        along = np.array(cycle.seats)
        return along[(np.argsort(along)[seats] + offset) % len(along)]

    def _at_seats(self, walk: int, by_owner: np.ndarray, offset: int) -> np.ndarray:
        return by_owner[self._seats(walk, self.ring.seats, -offset)]

    def _alive(self, walk: int, i: int, offset: int) -> np.ndarray:
        """Which seats get to see visit ``i`` of a walk."""
        return self._at_seats(walk, self.made[walk] > i, offset)

    def _tiles(self, walk: int, offset: int) -> np.ndarray:
        """Seconds of a visit by owner of the block."""
        owners, its = self.ring.seats, self.plan.walks[walk]
        return self.ring.visit(self._seats(walk, owners, offset), owners, its.part, self.plan.parts, self.backward)

    def _made(self) -> list[np.ndarray]:
        """How many visits of every walk are made, by owner: ``schedule.reach`` of all blocks at once."""
        made = [np.zeros(self.ring.size, int) for _ in self.plan.walks]
        for w in reversed(range(len(made))):
            for i in range(len(self.plan.walks[w].visits)):
                made[w] = np.where(self.tiles[w, i] > 0, np.maximum(made[w], i + 1), made[w])
            fork = self.plan.walks[w].fork
            if fork:
                made[fork[0]] = np.where(made[w] > 0, np.maximum(made[fork[0]], fork[1] + 1), made[fork[0]])
        return made

    def _hops(self, t: int) -> Iterator[tuple[int, int, int, int]]:
        """(walk, visit, from offset, to offset) of the hops that are posted at a step."""
        for w, walk in enumerate(self.plan.walks):
            stations = self.plan.stations(walk)
            for k, (posted, source) in enumerate(stations[:-1]):
                if posted == t:
                    yield w, k + (walk.fork is None), source, stations[k + 1][1]


def memory(ring: Ring, plan: Schedule, backward: bool) -> int:
    """Bytes a rank holds: its rows of everything, the sums, and the blocks (and gradients) that visit."""
    job, itemsize = ring.job, BYTES[ring.job.dtype]
    column = schedules.column(plan, 0)  # of any seat: they hold as much
    rows = ring.rows * job.batch * job.heads
    queries, out, sums = rows * job.dims[0] * itemsize, rows * job.dims[1] * itemsize, rows * job.sums
    part = -(-ring.rows // plan.parts)
    held = queries + out + ring.rows * job.row(itemsize) + column.slots * part * job.row(itemsize) + sums
    if not backward:
        return held + sums * (job.dims[1] + 1)
    gradients = (column.gradients * part + ring.rows) * job.row(job.sums)
    return held + out + sums * (job.dims[0] + 1) + queries + ring.rows * job.row(itemsize) + gradients


def together(ring: Ring, plan: Schedule, backward: bool) -> Price:
    """Blocks by collectives. "gather": round the ring, n - 1 hops that nothing hides, then all tiles; the gradients back likewise.

    "broadcast": each block in log2(n) latencies and twice its bytes (scatter and gather: van de Geijn), behind the tiles of the
    step before; the gradient's reduction takes as long and has the next step to hide in. A core sends and receives as many bytes
    as in a ring.
    """
    n, link = ring.size, ring.link()
    steps = [ring.visit(ring.seats, (ring.seats - k) % n, 0, 1, backward) for k in range(n)]
    tiles, lame = float(sum(steps).max()), float(ring.lame.max())  # type: ignore[union-attr]
    itemsizes = [BYTES[ring.job.dtype], *[ring.job.sums] * backward]
    nbytes = [ring.rows * ring.job.row(itemsize) for itemsize in itemsizes]
    bandwidth = link.bandwidth / lame
    gathered, work = plan.together == "gather", 2 * link.busy * sum(nbytes)
    held = memory(ring, schedules.ring(min(n, 2)), backward) + (n - 2) * sum(nbytes) * gathered
    if gathered:
        hop = max(work, sum(link.latency * lame + size / bandwidth for size in nbytes))
        seconds = tiles + (n - 1) * hop
    else:
        hop = sum(link.latency * lame * np.ceil(np.log2(n)) + 2 * size / bandwidth for size in nbytes)
        seconds = sum(max(float(step.max()) + work, hop) for step in steps[:-1]) + float(steps[-1].max()) + backward * hop
    seconds += ring.besides(backward)
    rows = tuple((float(step.max()), float(hop), 0.0 if gathered else max(0.0, float(hop - step.max()))) for step in steps)
    sent = (n - 1) * sum(nbytes) if gathered else n * sum(nbytes)
    return Price(plan.name, backward, float(seconds), tiles, max(0.0, float(seconds) - tiles), float(sent), held, rows)


def hides(job: Job, which: str | Machine, backward: bool = False) -> Hide:
    """The smallest block of the plain ring that hides its hop over the slowest link.

    A visit costs what the visits of this job cost on average after the first step, for a block of any size r: overhead +
    share of visible pairs x r x r x FLOP / rate + 2 busy x r x bytes of a row = latency + r x bytes of a row / bandwidth.

    >>> hides(Job(tokens=1 << 20, ranks=64, heads=32, head_dim=128), "h100").rows
    29637
    """
    machine = machine_of(which)
    small = job if job.ranks <= EXACT else replace(job, ranks=EXACT, tokens=-(-job.tokens // job.ranks) * EXACT)
    ring = Ring(small, machine)
    link = ring.link()
    offsets = range(1, ring.size) if ring.size > 1 else [0]
    pairs, runs = (np.array([ring.counts(ring.seats, (ring.seats - k) % ring.size, 0, 1)[x] for k in offsets]) for x in (0, 1))
    seen = pairs > 0
    if not seen.any():
        return Hide(backward, 0, 0, 0.0)
    rate, overhead = ring.tile.of(backward)
    share, overhead = float(pairs[seen].mean()) / ring.rows**2, float(runs[seen].mean()) * overhead
    itemsize = BYTES[job.dtype] + backward * job.sums
    a = share * job.flop(backward) / rate
    core = 2 * link.busy * job.row(itemsize)
    b, c = job.row(itemsize) / link.bandwidth - core, (1 + backward) * link.latency - overhead
    disc = b * b + 4 * a * c
    rows = max(1, int(np.ceil((b + np.sqrt(disc)) / (2 * a)))) if disc >= 0 else 1
    worst = max(rows, np.sqrt(overhead / a))
    return Hide(backward, rows, rows * job.ranks, float(core / (overhead / worst + a * worst + core)))


def _factors(size: int, given: dict[int, float] | None) -> np.ndarray:
    factors = np.ones(size)
    for seat, factor in (given or {}).items():
        factors[seat] = factor
    return factors
