"""What users call: ``Ring``, ``RingAttention`` and the one-call functions; and the checks of what they are given."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from . import attention, tiles, topology
from . import layout as layouts
from . import mask as masks
from . import schedule as schedules
from .attention import Block, Walker
from .comm import LINE, Alone, Fact, Seats, seats
from .layout import Custom, Layout
from .mask import Mask
from .pairs import Work
from .partial import DTYPES, accumulator, namespace
from .profile import flight, recording
from .ring import Lap, Shelf
from .schedule import Schedule
from .score import Score
from .topology import Route
from .topology.place import Place

Array = Any


class Ring:
    """A ring of ranks, with a communicator of its own. Making and closing one is collective.

    Parameters
    ----------
    comm
        an mpi4py intracommunicator. Its ranks keep their numbers and it sees one Ibarrier and one Split, nothing else.
        None: one rank, without MPI.
    order
        who is whose neighbour; it moves no data and renumbers nothing. "auto": ranks of a node stand together, and nodes of
        a switch, and neighbours on a torus that Slurm tells of are one link apart. "natural"; "measured", by timing
        messages; a list of all ranks; a ``Torus``; the path of a file that ``save_order`` wrote, ending in .json. ``route``
        says what was found.
    timeout
        seconds after which waiting for another rank raises ``RingTimeout``.

    A ring owns its message buffers: they are made at the first call of a signature and used again, so many
    ``RingAttention`` of many lengths, layouts and masks share one. After a time-out, or an error in the middle of a
    call, it is dead and can only be closed. Use ``with`` or ``close()``.

    >>> with Ring() as ring:
    ...     ring.size, ring.order
    (1, (0,))
    """

    def __init__(self, comm: Any = None, *, order: Any = "auto", timeout: float = 300.0) -> None:
        self._take(seats(comm, order, timeout))

    def _take(self, seats: Alone | Seats) -> None:
        self._seats = seats
        seats.alarm = flight.write
        self._buffers: dict[tuple[str, str], list[Array]] = {}
        self._spaces: dict[str, Any] = {}
        self.rank: int = seats.rank
        self.size: int = seats.size
        self.order: tuple[int, ...] = seats.order
        self.nodes: tuple[int, ...] = seats.nodes
        self.route: Route = seats.route
        self.places: list[Place] = seats.places

    def __reduce__(self) -> Any:
        raise TypeError("a ring's communicator and buffers have one owner: it cannot be copied or pickled; make another, or pass it on")

    def __repr__(self) -> str:
        return f"<Ring of {self.size} ranks on {len(self.nodes)} nodes, order {list(self.order)}>"

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Frees the communicator and the buffers. Collective, unless the ring is dead or MPI finalised; twice is once."""
        self._buffers.clear()
        self._seats.close()

    def save_order(self, path: str) -> None:
        """Writes the order to a .json file, for ``Ring(comm, order=path)`` on the same hosts. Collective; rank 0 writes."""
        def write() -> dict[str, Any]:
            if self.rank == 0:
                topology.save(path, self.route, self.places)
            return {}

        self.agree("save_order", write)

    def space(self, tile: ModuleType) -> Any:
        """The memory of a tile, one a ring. Collective, the first time of a tile of devices: see ``gpu``."""
        name = tile.__name__
        if name not in self._spaces:
            on_device = name.rpartition(".")[2] in tiles.ON_DEVICES
            self._spaces[name] = tile.Space(self._seats.device_memory(tile.device()).aware) if on_device else tile.Space()
        return self._spaces[name]

    def buffers(self, tile: ModuleType, kind: str, number: int, nbytes: int) -> list[Array]:
        """``number`` buffers of at least ``nbytes``, those of earlier calls where they serve."""
        held = self._buffers.setdefault((tile.__name__, kind), [])
        if held and len(held[0]) < nbytes:
            held.clear()
        while len(held) < number:
            held.append(self.space(tile).empty(max(nbytes, len(held[0]) if held else 0)))
        return held[:number]

    def agree(self, what: str, facts: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """``facts()`` if it says the same on all ranks, else the same error on all. Collective."""
        self._usable(what)
        return self._seats.agree(what, facts)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in order of rank; values may be of any type that pickles. Collective."""
        self._usable("gather")
        return self._seats.gather(value)

    def _usable(self, what: str) -> None:
        if not self._seats.alive:
            raise RuntimeError(f"{what}, rank {self.rank}: the ring is closed, or dead since a time-out or an error; make a new one")

    @property
    def alive(self) -> bool:
        """Whether it can be used: not closed, and no time-out or error in the middle of a call so far."""
        return self._seats.alive


class RingAttention:
    """Exact attention of sequences that are spread over a ring of ranks. Making one is collective, and cheap.

    Parameters
    ----------
    ring
        a ``Ring``, or a communicator (or None) to make one of, which is then closed with this object.
    seqlen
        the tokens of the whole sequence, or ``(queries, keys)``.
    mask
        "full", "causal" or a ``Mask``.
    score
        a ``Score``: scale, softcap, ALiBi. None: scale 1 / sqrt(head_dim).
    layout
        "contiguous" (how callers usually hold their rows), "zigzag", "striped" or ``Custom(...)``; or a pair of them for
        queries and keys. Under a causal mask zigzag and striped give every rank as much work.
    schedule
        "ring", "bidirectional", "double", "multi", "auto" (one of those, by placement), or a ``Schedule``; or by MPI's
        collectives, "broadcast" and "gather" (which holds the K and V of the whole sequence).
    tile
        "auto": by the type of the arrays.

    Raises
    ------
    ValueError, TypeError
        on all ranks, for what any of them was given.
    RingTimeout
        when a rank does not come within the ring's time-out.

    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 10, 2, 4))
    >>> with RingAttention(None, 10, mask="causal") as attn:
    ...     out, lse = attn.forward(q, k, v)
    ...     dq, dk, dv = attn.backward(np.ones_like(out), q, k, v, out, lse)
    >>> out.shape, lse.shape, dk.shape
    ((1, 10, 2, 4), (1, 2, 10), (1, 10, 2, 4))
    """

    def __init__(self, ring: Any, seqlen: int | tuple[int, int], *, mask: str | Mask = "full", score: Score | None = None,
                 layout: str | Layout | tuple[Any, Any] = "contiguous", schedule: str | Schedule = "ring",
                 tile: str = "auto") -> None:  # fmt: skip
        self.ring, self._own = (ring, False) if isinstance(ring, Ring) else (Ring(ring), True)
        self._tile = tile
        self._trace: Callable[..., None] | None = flight.recorder(self.ring.rank, self.ring.order)
        given = {"seqlen": seqlen, "mask": mask, "score": score, "layout": layout, "schedule": schedule}
        try:
            self.ring.agree("RingAttention", lambda: self._plan(**given))
        except (ValueError, TypeError, RuntimeError):
            if self._own:
                self.ring.close()
            raise

    def _plan(self, seqlen: Any, mask: Any, score: Any, layout: Any, schedule: Any) -> dict[str, Any]:
        """Lays the sequences out, finds this rank's pairs and the column of its seat."""
        queries, keys = (layouts.whole("seqlen", length) for length in _both("seqlen", seqlen))
        if min(queries, keys) < 0:
            raise ValueError(f"seqlen is {seqlen}; it must be a number of tokens >= 0, or (queries, keys)")
        of_queries, of_keys = map(layouts.layout, _both("layout", layout))
        tiles.check(self._tile)
        rules, rank, order = masks.mask(mask), self.ring.rank, self.ring.order
        if not isinstance(score, (Score, type(None))):
            raise TypeError(f"score is {score!r}; it must be a Score or None")
        self.work = work = Work.over((of_queries, of_keys), (queries, keys), self.ring.size, rules, score or Score())
        self.schedule = plan = schedules.schedule(schedule, self.ring.nodes, self.ring.route.link_cycles)
        self.column = schedules.column(plan, order.index(rank), _needs(work, order, plan.parts))
        self.strips = work.strips(rank)
        facts = {"seqlen": (queries, keys), "mask": rules, "score": work.score, "layout": (of_queries, of_keys), "schedule": plan}
        self._rows = {(seat, part): layouts.count(work.part(owner, part, plan.parts))
                      for seat, owner in enumerate(order) for part in range(plan.parts)}  # fmt: skip
        self._facts = {name: Fact(fact) for name, fact in facts.items()}
        return self._facts

    def __enter__(self) -> RingAttention:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("the buffers of a RingAttention's ring have one owner: it cannot be copied or pickled; make another on its ring")

    def close(self) -> None:
        """Closes the ring if this object made it. Collective."""
        if self._own:
            self.ring.close()

    # ------------------------------------------------------------------------------------------------ the two passes

    def forward(self, q: Array, k: Array, v: Array, sinks: Array | None = None) -> tuple[Array, Array]:
        """Attention of this rank's queries to all keys. Collective.

        Parameters
        ----------
        q, k, v
            ``(batch, tokens held here, heads, head_dim)`` in any strides, of one dtype: float16, bfloat16, float32 or
            float64. k and v may have fewer heads (a divisor), v its own head_dim.
        sinks
            ``(heads,)``: the score of a learned sink for every head, the same on all ranks.

        Returns
        -------
        out
            ``(batch, tokens, heads, v_dim)`` in q's dtype. A row that sees no key is 0.
        lse
            ``(batch, heads, tokens)``, natural logarithm, float32 (float64 for float64); -inf for a row that sees no key.
        """
        given = {"q": q, "k": k, "v": v}
        self.ring.agree("forward", lambda: self._check(given, sinks))
        q, k, v, sinks = map(tiles.own, (q, k, v, sinks))
        return self._walk(attention.forward, False, q, k, v, sinks)

    def backward(self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array,
                 sinks: Array | None = None) -> tuple[Array, ...]:  # fmt: skip
        """Gradients of what ``forward`` was given, from ``dout`` and what it returned. Collective.

        Returns dq, dk, dv of this rank's rows in the shapes and dtype of q, k, v, and when sinks are given dsinks,
        summed over all ranks, in theirs. They are summed in float32 (float64 for float64) in a fixed order and rounded once.
        """
        given = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
        self.ring.agree("backward", lambda: self._check(given, sinks))
        dout, q, k, v, out, lse, sinks = map(tiles.own, (dout, q, k, v, out, lse, sinks))
        gradients = self._walk(attention.backward, True, dout, q, k, v, out, lse, sinks)
        if sinks is None:
            return gradients
        space = self.ring.space(tiles.tile(self._tile, gradients[0]))
        dsinks = sum(self.ring._seats.gather(space.to_host(gradients[3])))
        return (*gradients[:3], space.from_host(dsinks.astype(sinks.dtype)))  # type: ignore[union-attr]

    def _walk(self, walk: Callable[..., Any], gradients: bool, *arrays: Any) -> Any:
        """Runs a walk of the data over this object's plan."""
        q, k, v = arrays[1:4] if gradients else arrays[:3]
        tile, seats = tiles.tile(self._tile, q), self.ring._seats
        block = Block(q.shape[0], k.shape[2], k.shape[3], v.shape[3])
        walker = Walker(self.work, self.strips, self.work.score.resolve(q.shape[3]), self.schedule.parts, self.ring.order,
                        seats.seat, tile, self.ring.space(tile), block)  # fmt: skip
        sums = accumulator(q.dtype)

        def size(owner: int, part: int) -> tuple[int, int]:
            rows = self._rows[owner, part]
            return block.nbytes(rows, k.dtype), block.nbytes(rows, sums)

        lap: Lap | None = None
        most = [block.nbytes(max(self._rows.values()), dtype) for dtype in (k.dtype, sums)]
        try:
            blocks = self._blocks(tile, most[0])
            filled = self.ring.buffers(tile, "gradients", self.column.gradients, most[1]) if gradients else []
            lap = Lap(walker.space.carrier(seats), walker.space, self.column, blocks, filled, size, sums, self._trace)
            return walk(walker, lap, *arrays)
        except BaseException:
            seats.abandon(lap, arrays)
            raise

    def _blocks(self, tile: ModuleType, nbytes: int) -> Any:
        """The buffers of blocks: side by side if they are gathered."""
        slots = self.column.slots
        if self.schedule.together != "gather":
            return self.ring.buffers(tile, "blocks", slots, nbytes)
        stride = -(-nbytes // LINE) * LINE
        return Shelf(self.ring.buffers(tile, "gathered", 1, slots * stride)[0], stride)

    # ---------------------------------------------------------------------------------------------- this rank's rows

    @property
    def positions(self) -> np.ndarray:
        """The global positions of the query rows held here, in order, int64 (for RoPE: add keys - queries)."""
        return layouts.positions(self.work.queries[self.ring.rank])

    @property
    def kv_positions(self) -> np.ndarray:
        """The global positions of the key rows held here, in order, int64."""
        return layouts.positions(self.work.keys[self.ring.rank])

    def shard(self, x: Array, axis: int = 1, *, kv: bool = False) -> Array:
        """The rows held here of a whole sequence: of queries, or with ``kv`` of keys. Local.

        >>> RingAttention(None, 3).shard(np.arange(3), axis=0)
        array([0, 1, 2])
        """
        x = tiles.own(x)
        length, given = self.work.lengths[kv], _rows_of(x, axis)
        if given != length:
            raise ValueError(f"rank {self.ring.rank}: axis {axis} has {given} rows; the sequence has {length}")
        return namespace(x).take(x, self.kv_positions if kv else self.positions, axis=axis)

    def unshard(self, x: np.ndarray, axis: int = 1, *, kv: bool = False) -> np.ndarray:
        """The whole sequence on every rank, from the rows that each holds along ``axis``. Collective.

        >>> RingAttention(None, 3).unshard(np.arange(3), axis=0)
        array([0, 1, 2])
        """
        runs = self.work.keys if kv else self.work.queries
        counts = [layouts.count(held) for held in runs]
        self.ring.agree("unshard", lambda: _same_rows(x, axis, counts[self.ring.rank], kv))
        rows = self.ring._seats.gather_rows(np.moveaxis(np.asarray(x), axis, 0), counts)
        whole = np.empty_like(rows)
        whole[np.concatenate([layouts.positions(held) for held in runs])] = rows
        return np.moveaxis(whole, 0, axis)

    @contextmanager
    def record(self, into: Any = None) -> Iterator[Any]:
        """Records every hop and tile of the calls made inside: in a ``Trace``, or in ``into``, called with each event.

        A ``Trace`` makes it collective at its beginning and end, where clocks are read and the two ends of hops put together.

        >>> with RingAttention(None, 2) as attn, attn.record() as trace:
        ...     _ = attn.forward(*np.ones((3, 1, 2, 1, 4)))
        >>> len(trace.tiles)
        1
        """
        self.ring._usable("record")
        with nullcontext(into) if into is not None else recording(self.ring._seats) as trace:
            before, self._trace = self._trace, flight.both(self._trace, trace)
            try:
                yield trace
            finally:
                self._trace = before

    # -------------------------------------------------------------------------------------------------------- checks

    def _check(self, given: dict[str, Array], sinks: Array | None) -> dict[str, Any]:
        """What all ranks must agree on of a call's arrays; raises for what does not fit this object or each other."""
        given, sinks = {name: tiles.own(x) for name, x in given.items()}, tiles.own(sinks)
        if self.schedule.together and not isinstance(given["q"], np.ndarray):
            raise TypeError(f"the schedule {self.schedule.name!r} uses MPI's collectives, which take arrays in host memory only")
        check_kinds(given, self._tile)
        self._check_counts(given["q"].shape[1], given["k"].shape[1])
        facts = check_shapes(given, sinks, self.work.score)
        self.work.mask.check(*self.work.lengths, facts["batch"])
        return {**self._facts, **facts}

    def _check_counts(self, rows: int, kv_rows: int) -> None:
        rank = self.ring.rank
        for name, given, runs in (("q", rows, self.work.queries[rank]), ("k", kv_rows, self.work.keys[rank])):
            if given != layouts.count(runs):
                raise ValueError(f"{name} has {given} tokens; its layout gives this rank {layouts.count(runs)}")


def ring_attention(q: Array, k: Array, v: Array, comm: Any = None, *, mask: str | Mask = "full", score: Score | None = None,
                   sinks: Array | None = None, schedule: str | Schedule = "ring", tile: str = "auto") -> tuple[Array, Array]:  # fmt: skip
    """Attention in one call, of rows as the ranks have them: contiguous, in order of rank, as many as each holds.

    Parameters as of ``RingAttention`` and its ``forward``; ``comm`` is a ``Ring`` or a communicator, for which a ring is
    made and closed in the call: make a ``Ring`` to call it often. Collective.

    >>> out, lse = ring_attention(*np.ones((3, 1, 5, 2, 4)), mask="causal")
    >>> out.shape, lse.shape
    ((1, 5, 2, 4), (1, 2, 5))
    """
    with _as_held(comm, q, k, mask=mask, score=score, schedule=schedule, tile=tile) as attn:
        return attn.forward(q, k, v, sinks)


def ring_attention_backward(dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, comm: Any = None, *,
                            mask: str | Mask = "full", score: Score | None = None, sinks: Array | None = None,
                            schedule: str | Schedule = "ring", tile: str = "auto") -> tuple[Array, ...]:  # fmt: skip
    """The gradients of ``ring_attention`` in one call: dq, dk, dv, and dsinks when sinks are given. Collective.

    >>> q = k = v = np.ones((1, 5, 2, 4))
    >>> dq, dk, dv = ring_attention_backward(np.ones_like(q), q, k, v, *ring_attention(q, k, v))
    >>> dq.shape, round(float(dv.sum()), 6)
    ((1, 5, 2, 4), 40.0)
    """
    with _as_held(comm, q, k, mask=mask, score=score, schedule=schedule, tile=tile) as attn:
        return attn.backward(dout, q, k, v, out, lse, sinks)


@contextmanager
def _as_held(comm: Any, q: Array, k: Array, **rules: Any) -> Iterator[RingAttention]:
    """A RingAttention over contiguous rows, as many as each rank has."""
    with opened(comm) as ring:
        ring.agree("ring_attention", lambda: {"dimensions": tuple(len(_four(tiles.own(x), name)) for name, x in (("q", q), ("k", k)))})
        counts = ring._seats.gather(tuple(tiles.own(x).shape[1] for x in (q, k)))
        held = tuple(Custom([rows[i] for rows in counts]) for i in (0, 1))
        yield RingAttention(ring, tuple(sum(rows[i] for rows in counts) for i in (0, 1)), layout=held, **rules)  # type: ignore[arg-type]


@contextmanager
def opened(comm: Any) -> Iterator[Ring]:
    """The ring that a call was given, or one of a communicator (or None) for the time of the call. Collective."""
    if isinstance(comm, Ring):
        yield comm
    else:
        with Ring(comm) as ring:
            yield ring


def check_kinds(given: dict[str, Array], tile: str) -> None:
    """Raises for what is no array that the tile computes on, for memories and dtypes that differ, and for q, k, v without four axes."""
    for name, x in given.items():
        tiles.tile(tile, x)
        if _memory(x) != _memory(given["q"]):
            raise TypeError(f"{name} is in {_memory(x)} memory, q in {_memory(given['q'])} memory; all must be in one")
        _check_dtype(name, x)
        if name != "lse" and x.dtype != given["q"].dtype:
            raise TypeError(f"{name} is {x.dtype}, q {given['q'].dtype}; all must have one dtype")
    for name in "qkv":
        _four(given[name], name)


def check_shapes(given: dict[str, Array], sinks: Array | None, score: Score) -> dict[str, Any]:
    """What all ranks must agree on of the shapes of a call's arrays; raises for what does not fit together."""
    q, k, v = (given[name] for name in "qkv")
    (batch, rows, heads, dim), (kv_rows, kv_heads), v_dim = q.shape, k.shape[1:3], v.shape[3]
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads and k {kv_heads}; k's must divide q's")
    shapes = {
        "k": (batch, kv_rows, kv_heads, dim),
        "v": (batch, kv_rows, kv_heads, v_dim),
        "dout": (batch, rows, heads, v_dim),
        "out": (batch, rows, heads, v_dim),
        "lse": (batch, heads, rows),
    }
    for name, shape in shapes.items():
        if name in given and tuple(given[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(given[name].shape)}; beside q {tuple(q.shape)} it must be {shape}")
    if sinks is not None:
        _check_sinks(sinks, heads)
    if score.alibi is not None and len(score.alibi) != heads:
        raise ValueError(f"alibi has {len(score.alibi)} numbers; q has {heads} heads")
    facts = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "v_dim": v_dim, "dtype": str(q.dtype),
             "memory": _memory(q)}  # fmt: skip
    return {**facts, "sinks": None if sinks is None else Fact(sinks.tolist())}


def _needs(work: Work, order: tuple[int, ...], parts: int) -> Callable[[int, int, int], bool] | None:
    """Which seat computes on which part of which seat's block; None where all do on all."""
    if work.everywhere:
        return None
    seats = np.array(order)
    needed = work.needed(parts)[np.ix_(seats, seats)].transpose(1, 2, 0)
    rows = [[who.tobytes() for who in block] for block in needed]
    return lambda seat, owner, part: rows[owner][part][seat] > 0


def _both(name: str, given: Any) -> tuple[Any, Any]:
    """What is given for queries and for keys: one for both, or a pair."""
    both = given if isinstance(given, tuple) else (given, given)
    if len(both) != 2:
        raise ValueError(f"{name} is {given}; it must be one for queries and keys, or a pair (queries, keys)")
    return both


def _check_sinks(sinks: Any, heads: int) -> None:
    if not hasattr(sinks, "dtype") or sinks.dtype.name not in DTYPES:
        raise TypeError(f"sinks is {getattr(sinks, 'dtype', type(sinks).__name__)}; it must be an array of {', '.join(DTYPES)}")
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; q has {heads} heads: it must be ({heads},)")


def _four(x: Array, name: str) -> tuple[int, int, int, int]:
    if getattr(x, "ndim", None) != 4:
        raise ValueError(f"{name} has shape {getattr(x, 'shape', None)}; it must be (batch, tokens, heads, head_dim)")
    return tuple(x.shape)  # type: ignore[return-value]


def _memory(x: Array) -> str:
    return "host" if isinstance(x, np.ndarray) else "device"


def _check_dtype(name: str, x: Array) -> None:
    if x.dtype.name not in DTYPES or not x.dtype.isnative:
        raise TypeError(f"{name} is {x.dtype.str}; it must be one of {', '.join(DTYPES)} in this machine's byte order")


def _rows_of(x: Any, axis: int) -> int:
    """How many rows an array has along an axis."""
    if not hasattr(x, "dtype") or not -x.ndim <= axis < x.ndim:
        found = f"has {x.ndim} axes" if hasattr(x, "ndim") else f"is a {type(x).__name__}"
        raise TypeError(f"rows are along axis {axis} of an array; what was given {found}")
    return int(x.shape[axis])


def _same_rows(x: Any, axis: int, count: int, kv: bool) -> dict[str, Any]:
    if _rows_of(x, axis) != count:
        raise ValueError(f"axis {axis} has {x.shape[axis]} rows; this rank holds {count}")
    if np.dtype(x.dtype).hasobject:
        raise TypeError(f"an array of {x.dtype} holds references, which mean nothing to another rank")
    return {"dtype": x.dtype.str, "shape": (*x.shape[:axis], "rows", *x.shape[axis:][1:]), "kv": kv}
