"""The host tile: the same contract as the readable one, in compiled C (``kernels/host``) on the cores of this rank.

Work is cut into calls of about two milliseconds (``cut.py``), so that the ring can move messages between them; the GIL is released
meanwhile. Results have the same bits for every number of threads.

A partial is computed where it is merged, strip by strip: what a strip gives is still in the core's caches then.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..pairs import Pair
from ..partial import EVERYTHING, Partial, Slices, Unmerged, accumulator
from . import cores, native, numpy
from .cut import SLAB, Cut, Part, Shape
from .library import PART, PARTIAL, PLACE, REQUEST, Library, described, stored, summing, threads
from .native import Unavailable
from .numpy import Space

__all__ = ["Space", "Unavailable", "backward", "build", "delta", "empty", "finish", "forward", "merge", "status", "threads"]

# What partials and gradients are summed in.
SUMS = frozenset(map(np.dtype, native.REALS))


class _Call(NamedTuple):
    """A call as the library is told of it; which (batch, rows, heads) of the pair it computes, and how many, and columns."""

    part: bytes
    where: Slices
    size: tuple[int, int, int, int]


class _Plan:
    """The calls of a pass; remembered if they are few."""

    def __init__(self, cut: Cut) -> None:
        self.cut, self.widest = cut, PART.pack(*cut.widest())
        self._all: list[_Call] = []

    def slabs(self) -> Iterator[list[_Call]]:
        """The calls, some at a time."""
        if self._all:
            yield self._all
            return
        for first, parts in enumerate(self.cut.slabs()):
            calls = [self._call(part) for part in parts]
            if first == 0 and len(calls) < SLAB:
                self._all = calls
            yield calls

    def _call(self, part: Part) -> _Call:
        cut, row, head = self.cut, int(self.cut.starts[part.strip0]), part.kv0 * self.cut.group + part.group0
        rows, heads = int(cut.starts[part.strip1]) - row, (part.kv1 - 1) * cut.group + part.group1 - head
        where = slice(part.batch0, part.batch1), slice(row, row + rows), slice(head, head + heads)
        return _Call(PART.pack(*part), where, (part.batch1 - part.batch0, rows, heads, cut.shape.v_dim))


@lru_cache(maxsize=64)
def _even_plan(which: str, shape: Shape, library: Library, threads: int) -> _Plan:
    """The plan of a pair in which every row sees every key."""
    return _Plan(Cut(which, shape, None, library, threads))


class _Job:
    """A pass ("forward" or "backward") over a pair of runs, as the library is told of it: of q, k, v, and backward of dout, lse, delta,
    dq, dk, dv."""

    def __init__(self, which: str, pair: Pair, *arrays: np.ndarray) -> None:
        q, k, v = arrays[:3]
        self.which, self.library = which, summing(accumulator(q.dtype))
        (batch, rows, heads, head_dim), (_, keys, kv_heads, _), number = q.shape, k.shape, threads() if self.library.threaded else 1
        shape, (bounds, seen) = Shape(batch, rows, keys, heads, kv_heads, head_dim, v.shape[3]), _bounds(pair, keys)
        about = which, shape, self.library, number
        self.plan = _even_plan(*about) if bounds is None else _Plan(Cut(which, shape, bounds, self.library, number))
        score = pair.score.resolve(head_dim)
        alibi = None if score.alibi is None else np.asarray(score.alibi, np.float64)
        none = [None] * (9 - len(arrays))
        self.held, addresses = described(*arrays, *none, *bounds or (None, None), seen, alibi)
        self.request = REQUEST.pack(
            *addresses, score.scale, score.softcap or 0, stored(q.dtype), pair.query.start + pair.shift - pair.key.start,
            pair.query.step, pair.key.step, number)  # fmt: skip
        self.current: _Call | None = None

    def __enter__(self) -> _Job:
        """Has the library work in a space that no other job uses meanwhile, large enough for any of the calls."""
        code = self.library.code
        self.run, needed = getattr(code, self.which), getattr(code, f"{self.which}_space_of")(self.request, self.plan.widest)
        self.space = _Workspace.taken()
        self.scratch = self.space.scratch(needed)
        return self

    def __exit__(self, *why: object) -> None:
        """Others may use the space now."""
        self.current = None
        _Workspace.free.append(self.space)

    def unmerged(self, call: _Call) -> Unmerged:
        """The partial of a call of a forward pass."""
        return Unmerged(partial(self.compute, call), call.size, self.library.dtype)

    def compute(self, call: _Call, into: Partial, where: Slices) -> None:
        """The partial of the current call, merged into an accumulator."""
        if call is not self.current:
            raise RuntimeError("the host tile is past this call: merge a partial once, or look at it, before the next is asked for")
        place = _place(into, where, call.size, self.library)
        if not place:
            made = Partial.empty(call.size, self.library.dtype)
            self.compute(call, made, EVERYTHING)
            _cleared(into.at(*where)).absorb(made)
            return
        self.run(self.request, self.scratch, call.part, place)
        self.current = None


def _bounds(pair: Pair, keys: int) -> tuple[tuple[np.ndarray, np.ndarray] | None, np.ndarray | None]:
    """The bounds of a pair's rows; and where there are keys that no row sees, which ones are seen: what the others hold is not read."""
    if pair.bounds is None:
        return None, None
    lo, hi = (np.ascontiguousarray(x, np.int32) for x in np.broadcast_arrays(*pair.local()))
    seen = np.stack([_covered(*bounds, keys) for bounds in zip(lo, hi)])
    return (lo, hi), None if seen.all() else seen


def _covered(lo: np.ndarray, hi: np.ndarray, keys: int) -> np.ndarray:
    """Which keys lie in any of the intervals, uint8 (keys).

    >>> _covered(np.array([1, 3, 2]), np.array([2, 4, 0]), 5)
    array([0, 1, 0, 1, 0], dtype=uint8)
    """
    some = lo < hi
    edges = np.bincount(lo[some], minlength=keys + 1) - np.bincount(hi[some], minlength=keys + 1)
    return (np.cumsum(edges)[:keys] > 0).astype(np.uint8)


class _Workspace:
    """Memory of the library. Jobs take it from jobs before them: fresh pages would cost per cents."""

    free: ClassVar[list[_Workspace]] = []

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)
        self._address = 0

    @classmethod
    def taken(cls) -> _Workspace:
        """One that nobody uses, a new one if need be. Taking it is one step: other threads may do so too."""
        try:
            return cls.free.pop()
        except IndexError:
            return cls()

    def scratch(self, nbytes: int) -> int:
        """The address of as many bytes. They keep what they hold, unless more are asked for than ever."""
        if len(self._scratch) < nbytes:
            self._scratch = Space().empty(nbytes)
            self._scratch[:] = 0
            self._address = self._scratch.ctypes.data
        return self._address


class _Told(NamedTuple):
    """What the library is told of a partial: where NumPy says how o, m and l lie."""

    library: Library
    held: list[Any]
    addresses: list[int]
    shape: tuple[int, int, int, int]

    @property
    def partial(self) -> bytes:
        return PARTIAL.pack(*self.addresses)

    @property
    def threads(self) -> int:
        return self.library.threads(math.prod(self.shape))


def _told(partial: Partial) -> _Told | None:
    """Of any partial, which remembers it: calls and merges take it again and again. None: not what the library reads."""
    held = vars(partial)
    if "told" not in held:
        o, m, l = partial.o, partial.m, partial.l
        whole = np.ndim(o) == 4 and (o.shape[0], o.shape[2], o.shape[1]) == np.shape(m) == np.shape(l) and o.dtype in SUMS
        plain = whole and _in_rows(o, o.dtype) and _regular(m, o.dtype) and _regular(l, o.dtype)
        held["told"] = _Told(summing(o.dtype), *described(o, m, l), o.shape) if plain else None
    return held["told"]


def _writable(partial: Partial) -> bool:
    """Whether a partial may be changed where it is."""
    return partial.o.flags.writeable and partial.m.flags.writeable and partial.l.flags.writeable


def _regular(x: np.ndarray, dtype: np.dtype) -> bool:
    """Whether an array is of this type, and each of its numbers lies where it would in an array of them."""
    return x.dtype == dtype and x.flags.aligned


def _in_rows(x: np.ndarray, dtype: np.dtype) -> bool:
    """Whether an array is regular, and columns lie beside each other."""
    return (x.strides[-1] == dtype.itemsize or x.shape[-1] < 2) and _regular(x, dtype)


def _cleared(partial: Partial) -> Partial:
    """A partial for NumPy, which would read what ``o`` holds of rows over no keys: in its own memory, where it may be written."""
    none = ((partial.l == 0) & np.isneginf(partial.m)).swapaxes(1, 2)
    if not none.any():
        return partial
    if not partial.o.flags.writeable:
        return Partial(np.where(none[..., None], 0, partial.o), partial.m, partial.l)
    partial.o[none] = 0
    return partial


def _place(into: Partial, where: Slices, size: tuple[int, int, int, int], library: Library) -> bytes | None:
    """Where the library finds (batch, rows, heads) of an accumulator. None: they are none of this size that it can add to."""
    told = _told(into)
    if not told or told.library is not library or not _writable(into):
        return None
    (batch, end, b), (row, last, r), (head, behind, h) = map(slice.indices, where, told.shape)
    if (end - batch, last - row, behind - head, told.shape[3]) != size or not b == r == h == 1:
        return None
    return PLACE.pack(*told.addresses, batch, row, head)


# ------------------------------------------------------------------------------------------------------- the contract


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, pair: Pair) -> Iterator[tuple[tuple[slice, ...], Partial]]:
    """Attention of the pair, a call at a time: yields which (batch, rows, heads) of it, and their ``Partial``.

    q, k, v are ``(batch, tokens, heads, head_dim)`` of the pair's two runs, of any strides. A partial is to be merged, or looked at,
    before the next is asked for.
    """
    if not (q.size and k.size):
        return
    with _Job("forward", pair, q, k, v) as job:
        for slab in job.plan.slabs():
            for job.current, unmerged in [(call, job.unmerged(call)) for call in slab]:
                yield job.current.where, unmerged
                if job.current:  # Nobody wanted it: but the calls after it use the keys that it packs.
                    unmerged.made  # noqa: B018


def backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, lse: np.ndarray, delta: np.ndarray, pair: Pair,
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray,
) -> Iterator[None]:  # fmt: skip
    """Adds the pair's gradients to dq, dk, dv, a call at a time; shapes as in ``forward``, lse and delta (batch, heads, rows)."""
    if not (q.size and k.size):
        return
    sums = accumulator(q.dtype)
    fit = [_in_rows(given, sums) and given.flags.writeable for given in (dq, dk, dv)]
    gradients = [(given, given if fits else np.zeros(given.shape, sums)) for given, fits in zip((dq, dk, dv), fit)]
    dout, lse, delta = dout.astype(q.dtype, copy=False), *(x if _regular(x, sums) else np.array(x, sums) for x in (lse, delta))
    with _Job("backward", pair, q, k, v, dout, lse, delta, *(used for _, used in gradients)) as job:
        for slab in job.plan.slabs():
            for call in slab:
                job.run(job.request, job.scratch, call.part)
                yield
    for given, used in gradients:
        if used is not given:
            given += used


def empty(shape: tuple[int, int, int, int], dtype: Any) -> Partial:
    """An accumulator of nothing, for an ``o`` of this shape and dtype. What ``o`` holds of a row over no keys is never read."""
    batch, rows, heads, _ = shape
    m, l = np.empty((2, batch, heads, rows), dtype)
    m.fill(-np.inf)
    l.fill(0)
    return Partial(np.empty(shape, dtype), m, l)


def merge(into: Partial, where: Slices, other: Partial) -> None:
    """Merges a partial into the (batch, rows, heads) of the accumulator that it belongs to."""
    made = other.merge_into(into, where) if isinstance(other, Unmerged) else other
    if made is None:
        return
    of = _told(made)
    place = _place(into, where, of.shape, of.library) if of else None
    if of and place:
        of.library.code.merge(place, of.partial, of.threads)
    else:
        _cleared(into.at(*where)).absorb(_cleared(made))


def finish(total: Partial, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """out rounded once to ``dtype``, and lse, of an accumulator, whose ``o`` is used up: out is in its memory where it is of its dtype."""
    told, dtype = _told(total), total.o.dtype if dtype is None else dtype
    if not told or not _writable(total):
        return _cleared(total).finish(dtype)
    lse = np.empty((told.shape[0], told.shape[2], told.shape[1]), told.library.dtype)
    _held, (address,) = described(lse)
    told.library.code.finish(told.partial, address, told.threads)
    return total.o.astype(dtype, copy=False), lse


def delta(dout: np.ndarray, out: np.ndarray) -> np.ndarray:
    """sum(dout * out) over a row, (batch, heads, rows), in the dtype of the sums."""
    dtype = accumulator(out.dtype)
    if dout.shape != out.shape or not (_in_rows(dout, dtype) and _in_rows(out, dtype)):
        return numpy.delta(dout, out)
    (batch, rows, heads, _), library = out.shape, summing(dtype)
    sums = np.empty((batch, heads, rows), dtype)
    _held, addresses = described(dout, out, sums)
    library.code.delta(*addresses, library.threads(out.size))
    return sums


# ------------------------------------------------------------------------------------------------- what it runs with


def build() -> Path:
    """Compiles the libraries for this processor, unless the cache holds them; the folder they are in. Raises ``Unavailable``."""
    libraries = [native.library(real) for real in native.REALS]
    return libraries[0].parent


def rounds_weights(dtype: Any) -> bool:
    """Whether weights are rounded to bfloat16 before they meet v: where the processor has dot products of bfloat16, for bfloat16."""
    return np.dtype(dtype).name == "bfloat16" and bool(summing(np.dtype("float32")).dots)


def available(dtype: Any) -> str | None:
    """None if the tile runs for arrays of a dtype, compiling it if need be; else why not."""
    try:
        summing(accumulator(dtype))
    except Unavailable as why:
        return str(why)
    return None


def status() -> str:
    """What computes here, or why it cannot and NumPy does."""
    why = available(np.float32)
    if why:
        return f"not here, the NumPy tile computes instead: {why}"
    library = summing(np.dtype("float32"))
    isa = f"{library.isa} with bfloat16 dot products" if library.dots else library.isa
    return f"{isa}, {cores.counted(threads(), 'thread')} ({cores.threads()[1]}), {native.library('float32')}"
