"""The host tile: the same contract as the readable one, in compiled C (``kernels/host``) on the cores of this rank.

Work is cut into calls of about two milliseconds (``cut.py``), so that the ring can move messages between them; the GIL is released
meanwhile. Results have the same bits for every number of threads.

A partial is computed where it is merged, strip by strip: what a strip gives is still in the core's caches then.
"""
from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..pairs import Pair
from ..partial import EVERYTHING, Partial, Slices, Unmerged, accumulator
from . import cores, native, numpy
from .cut import Cut, Part, Shape
from .native import Unavailable
from .numpy import Space

__all__ = ["Space", "Unavailable", "backward", "build", "delta", "empty", "finish", "forward", "merge", "status", "threads"]

# What partials and gradients are summed in.
SUMS = frozenset(map(np.dtype, native.REALS))


class _Array(ctypes.Structure):
    """``array`` of call.h: where an array lies, and its strides in bytes by (batch, token, head, column)."""

    _fields_ = [("data", ctypes.c_void_p), *((axis, ctypes.c_int64) for axis in ("batch", "token", "head", "column"))]

    @classmethod
    def of(cls, x: np.ndarray) -> _Array:
        """Of (batch, tokens, heads, columns)."""
        return cls(x.ctypes.data, *x.strides)

    @classmethod
    def of_rows(cls, x: np.ndarray) -> _Array:
        """Of (batch, heads, rows)."""
        batch, head, token = x.strides
        return cls(x.ctypes.data, batch, token, head, 0)


class _Sums(ctypes.Structure):
    """``partial`` of call.h: where o, m and l lie."""

    _fields_ = [(name, _Array) for name in "oml"]


class _Place(ctypes.Structure):
    """``place`` of call.h: some rows of a partial, by the first of them."""

    _fields_ = [("whole", _Sums), *((name, ctypes.c_int64) for name in ("batch0", "row0", "head0"))]


class _Part(ctypes.Structure):
    """``part`` of call.h."""

    _fields_ = [(name, ctypes.c_int64) for name in Part._fields]


class _Call(ctypes.Structure):
    """``call`` of call.h."""

    _fields_ = [
        *((name, _Array) for name in ("q", "k", "v", "dout", "lse", "delta", "dq", "dk", "dv")),
        *((name, ctypes.c_int64) for name in ("rows", "keys", "heads", "kv_heads", "head_dim", "v_dim", "storage")),
        ("lo", ctypes.c_void_p), ("hi", ctypes.c_void_p), ("bounds_batch", ctypes.c_int64),
        ("seen", ctypes.c_void_p), ("seen_batch", ctypes.c_int64),
        ("scale", ctypes.c_double), ("softcap", ctypes.c_double), ("alibi", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("distance", "query_step", "key_step")),
        ("threads", ctypes.c_int64), ("workspace", ctypes.c_void_p), ("part", _Part), ("into", _Place),
    ]  # fmt: skip


class _Extent(ctypes.Structure):
    """``extent`` of rows.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "rows", "heads", "v_dim", "threads")]


class _Merging(ctypes.Structure):
    """``merging`` of rows.h."""

    _fields_ = [("into", _Place), ("other", _Sums), ("of", _Extent)]


class _Finishing(ctypes.Structure):
    """``finishing`` of rows.h."""

    _fields_ = [("total", _Sums), ("lse", _Array), ("of", _Extent)]


class _Dotting(ctypes.Structure):
    """``dotting`` of rows.h."""

    _fields_ = [("dout", _Array), ("out", _Array), ("delta", _Array), ("of", _Extent)]


class _Library:
    """A loaded library, and how it cuts rows."""

    def __init__(self, real: str) -> None:
        threads()  # Before the library is there: where OMP_PROC_BIND says so, OpenMP binds the thread that loads it to one place.
        self.real, self.dtype, self.code = real, np.dtype(real), native.load(real)
        for name in ("strips", "strip_row", "block_of_keys", "constant", "threaded", "forward_space_of", "backward_space_of"):
            getattr(self.code, name).restype = ctypes.c_int64
        self.code.isa.restype = ctypes.c_char_p
        sizes = [self.code.constant(ctypes.c_int64(i)) for i in range(9)]
        if sizes[:5] != [*map(ctypes.sizeof, (_Call, _Merging, _Finishing, _Dotting)), self.dtype.itemsize]:
            raise Unavailable(f"the library for {real} was compiled from other sources: its structures take {sizes[:5]} bytes")
        self.block_strips, self.gradient_keys, self.dots = sizes[6:9]
        self.block_rows = self.strip_row(1 << 20, self.block_strips)
        self.threaded = bool(self.code.threaded())
        self.isa = self.code.isa().decode()

    def strips(self, rows: int) -> int:
        """How many strips rows are cut into."""
        return self.code.strips(ctypes.c_int64(rows))

    def strip_row(self, rows: int, strip: int) -> int:
        """The first row of a strip; of the one behind the last, where the last row's vector ends."""
        return self.code.strip_row(ctypes.c_int64(rows), ctypes.c_int64(strip))

    def block_of_keys(self, panel: int) -> int:
        """How many of so many keys a backward call takes at a time."""
        return self.code.block_of_keys(ctypes.c_int64(panel))

    def extent(self, shape: tuple[int, ...]) -> _Extent:
        """The rows of an ``o`` of this shape, and how many threads they are worth."""
        return _Extent(*shape, threads() if self.threaded and math.prod(shape) > 1 << 16 else 1)


@cache
def _library(real: str | np.dtype) -> _Library:
    return _Library(real) if isinstance(real, str) else _library(real.name)


@cache
def _storage(dtype: np.dtype) -> int:
    return {"float16": 1, "bfloat16": 2}.get(dtype.name, 0)


class _Job:
    """A pass ("forward" or "backward") over a pair of runs, as the library is told of it."""

    def __init__(self, which: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, pair: Pair) -> None:
        self.which, self.library = which, _library(accumulator(q.dtype))
        (batch, rows, heads, head_dim), (_, keys, kv_heads, _), v_dim = q.shape, k.shape, v.shape[3]
        bounds, number = self._bounds(pair), threads() if self.library.threaded else 1
        self.cut = Cut(which, Shape(batch, rows, keys, heads, kv_heads, head_dim, v_dim), bounds, self.library, number)
        self.current: _Part | None = None
        self.held: list[Any] = [q, k, v, bounds]
        self.call = _Call(q=_Array.of(q), k=_Array.of(k), v=_Array.of(v), rows=rows, keys=keys, heads=heads, kv_heads=kv_heads,
                          head_dim=head_dim, v_dim=v_dim, storage=_storage(q.dtype), threads=number)  # fmt: skip
        if bounds is not None:
            self._tell_mask(*bounds)
        self._tell_score(pair)

    @staticmethod
    def _bounds(pair: Pair) -> tuple[np.ndarray, np.ndarray] | None:
        if pair.bounds is None:
            return None
        lo, hi = np.broadcast_arrays(*pair.local())
        return np.ascontiguousarray(lo, np.int32), np.ascontiguousarray(hi, np.int32)

    def _tell_mask(self, lo: np.ndarray, hi: np.ndarray) -> None:
        """The bounds, and where there are keys that no row sees, which ones: what they hold is not read."""
        call = self.call
        seen = np.stack([_covered(*bounds, call.keys) for bounds in zip(lo, hi)])
        many = len(lo) > 1
        call.lo, call.hi, call.bounds_batch = lo.ctypes.data, hi.ctypes.data, call.rows * many
        if not seen.all():
            self.held.append(seen)
            call.seen, call.seen_batch = seen.ctypes.data, call.keys * many

    def _tell_score(self, pair: Pair) -> None:
        score, call = pair.score, self.call
        call.scale, call.softcap = score.resolve(call.head_dim).scale, score.softcap or 0.0
        if score.alibi is not None:
            slopes = np.asarray(score.alibi, np.float64)
            self.held.append(slopes)
            call.alibi = slopes.ctypes.data
        call.distance = pair.query.start + pair.shift - pair.key.start
        call.query_step, call.key_step = pair.query.step, pair.key.step

    def __enter__(self) -> _Job:
        """Has the library work in a space that no other job uses meanwhile, large enough for any of the calls."""
        self.told, code = ctypes.byref(self.call), self.library.code
        self.call.part = _Part(*self.cut.widest())
        self.run, needed = getattr(code, self.which), getattr(code, f"{self.which}_space_of")(self.told)
        self.space = _Workspace.taken()
        self.call.workspace = self.space.scratch(needed)
        return self

    def __exit__(self, *why: object) -> None:
        """Others may use the space now."""
        self.current = None
        _Workspace.free.append(self.space)

    def unmerged(self, part: Part) -> tuple[_Part, Slices, Unmerged]:
        """A call, which (batch, rows, heads) of the pair it computes, and their partial."""
        cut, told = self.cut, _Part(*part)
        batch, row, head = part.batch0, int(cut.starts[part.strip0]), part.kv0 * cut.group + part.group0
        rows, heads = int(cut.starts[part.strip1]) - row, (part.kv1 - 1) * cut.group + part.group1 - head
        where = slice(batch, part.batch1), slice(row, row + rows), slice(head, head + heads)
        size = part.batch1 - batch, rows, heads, cut.shape.v_dim
        return told, where, Unmerged(partial(self.compute, told, size), size, self.library.dtype)

    def compute(self, part: _Part, size: tuple[int, int, int, int], into: Partial, where: Slices) -> None:
        """The current call of a forward pass, of so many (batch, rows, heads, columns), merged into an accumulator."""
        if part is not self.current:
            raise RuntimeError("the host tile is past this call: merge a partial once, or look at it, before the next is asked for")
        place = _place(into, where, size, self.library)
        if not place:
            made = Partial.empty(size, self.library.dtype)
            self.compute(part, size, made, EVERYTHING)
            _cleared(into.at(*where)).absorb(made)
            return
        self.call.part, self.call.into = part, place
        self.run(self.told)
        self.current = None


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
    """What the library is told of a partial."""

    library: _Library
    sums: _Sums
    extent: _Extent
    shape: tuple[int, int, int, int]
    writable: bool

    @classmethod
    def of(cls, o: np.ndarray, m: np.ndarray, l: np.ndarray) -> _Told:
        library, writable = _library(o.dtype), o.flags.writeable and m.flags.writeable and l.flags.writeable
        return cls(library, _Sums(_Array.of(o), _Array.of_rows(m), _Array.of_rows(l)), library.extent(o.shape), o.shape, writable)


def _told(partial: Partial) -> _Told | None:
    """Of any partial, which remembers it: calls and merges take it again and again. None: not what the library reads."""
    held = vars(partial)
    if "told" not in held:
        o, m, l = partial.o, partial.m, partial.l
        whole = (np.ndim(o), np.ndim(m), np.ndim(l)) == (4, 3, 3) and o.dtype in SUMS
        plain = whole and _in_rows(o, o.dtype) and _regular(m, o.dtype) and _regular(l, o.dtype)
        held["told"] = _Told.of(o, m, l) if plain else None
    return held["told"]


def _regular(x: np.ndarray, dtype: np.dtype) -> bool:
    """Whether an array is of this type, aligned, and its strides are whole numbers."""
    return x.dtype == dtype and x.flags.aligned and not any(stride % dtype.itemsize for stride in x.strides)


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


def _place(into: Partial, where: Slices, size: tuple[int, ...], library: _Library) -> _Place | None:
    """Where the library finds (batch, rows, heads) of an accumulator. None: they are none of this size that it can add to."""
    told = _told(into)
    if not told or not told.writable or told.library is not library or size != (*map(_length, where, told.shape), told.shape[3]):
        return None
    batch, rows, heads = where
    return _Place(told.sums, batch.start or 0, rows.start or 0, heads.start or 0)


def _length(its: slice, of: int) -> int:
    """How many of ``of`` rows a slice takes; -1 if it does not go forward one by one."""
    first, end = its.start or 0, of if its.stop is None else its.stop
    return min(end, of) - first if its.step in (None, 1) and 0 <= first <= end else -1


# ------------------------------------------------------------------------------------------------------- the contract


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, pair: Pair) -> Iterator[tuple[tuple[slice, ...], Partial]]:
    """Attention of the pair, a call at a time: yields which (batch, rows, heads) of it, and their ``Partial``.

    q, k, v are ``(batch, tokens, heads, head_dim)`` of the pair's two runs, of any strides. A partial is to be merged, or looked at,
    before the next is asked for.
    """
    if not (q.size and k.size):
        return
    with _Job("forward", q, k, v, pair) as job:
        for slab in job.cut.slabs():
            for job.current, where, unmerged in [job.unmerged(part) for part in slab]:
                yield where, unmerged
                if job.current:  # Nobody wanted it: but the calls after it use the keys that it packs.
                    unmerged.made  # noqa: B018


def backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, lse: np.ndarray, delta: np.ndarray, pair: Pair,
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray,
) -> Iterator[None]:  # fmt: skip
    """Adds the pair's gradients to dq, dk, dv, a call at a time; shapes as in ``forward``, lse and delta (batch, heads, rows)."""
    if not (q.size and k.size):
        return
    job = _Job("backward", q, k, v, pair)
    sums = job.library.dtype
    gradients = [(given, given if _in_rows(given, sums) else np.zeros(given.shape, sums)) for given in (dq, dk, dv)]
    dout, lse, delta = dout.astype(q.dtype, copy=False), *(x if _regular(x, sums) else np.array(x, sums) for x in (lse, delta))
    job.held += [dout, lse, delta]
    job.call.dout, job.call.lse, job.call.delta = _Array.of(dout), _Array.of_rows(lse), _Array.of_rows(delta)
    job.call.dq, job.call.dk, job.call.dv = (_Array.of(used) for _, used in gradients)
    with job:
        for slab in job.cut.slabs():
            for job.call.part in [_Part(*part) for part in slab]:
                job.run(job.told)
                yield
    for given, used in gradients:
        if used is not given:
            given += used


def empty(shape: tuple[int, int, int, int], dtype: Any) -> Partial:
    """An accumulator of nothing, for an ``o`` of this shape and dtype. What ``o`` holds of a row over no keys is never read."""
    batch, rows, heads, _ = shape
    return Partial(np.empty(shape, dtype), np.full((batch, heads, rows), -np.inf, dtype), np.zeros((batch, heads, rows), dtype))


def merge(into: Partial, where: Slices, other: Partial) -> None:
    """Merges a partial into the (batch, rows, heads) of the accumulator that it belongs to."""
    made = other.merge_into(into, where) if isinstance(other, Unmerged) else other
    if made is None:
        return
    of = _told(made)
    place = _place(into, where, of.shape, of.library) if of else None
    if of and place:
        of.library.code.merge(ctypes.byref(_Merging(place, of.sums, of.extent)))
    else:
        _cleared(into.at(*where)).absorb(_cleared(made))


def finish(total: Partial, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """out rounded once to ``dtype``, and lse, of an accumulator, whose ``o`` is used up: out is in its memory where it is of its dtype."""
    told, dtype = _told(total), total.o.dtype if dtype is None else dtype
    if not told or not told.writable:
        return _cleared(total).finish(dtype)
    lse = np.empty((told.shape[0], told.shape[2], told.shape[1]), told.library.dtype)
    told.library.code.finish(ctypes.byref(_Finishing(told.sums, _Array.of_rows(lse), told.extent)))
    return total.o.astype(dtype, copy=False), lse


def delta(dout: np.ndarray, out: np.ndarray) -> np.ndarray:
    """sum(dout * out) over a row, (batch, heads, rows), in the dtype of the sums."""
    dtype = accumulator(out.dtype)
    if dout.shape != out.shape or not (_in_rows(dout, dtype) and _in_rows(out, dtype)):
        return numpy.delta(dout, out)
    (batch, rows, heads, _), library = out.shape, _library(dtype)
    sums = np.empty((batch, heads, rows), dtype)
    library.code.delta(ctypes.byref(_Dotting(_Array.of(dout), _Array.of(out), _Array.of_rows(sums), library.extent(out.shape))))
    return sums


# ------------------------------------------------------------------------------------------------- what it runs with


def build() -> Path:
    """Compiles the libraries for this processor, unless the cache holds them; the folder they are in. Raises ``Unavailable``."""
    libraries = [native.library(real) for real in native.REALS]
    return libraries[0].parent


def rounds_weights(dtype: Any) -> bool:
    """Whether weights are rounded to bfloat16 before they meet v: where the processor has dot products of bfloat16, for bfloat16."""
    return np.dtype(dtype).name == "bfloat16" and bool(_library("float32").dots)


def available(dtype: Any) -> str | None:
    """None if the tile runs for arrays of a dtype, compiling it if need be; else why not."""
    try:
        _library(accumulator(dtype).name)
    except Unavailable as why:
        return str(why)
    return None


def status() -> str:
    """What computes here, or why it cannot and NumPy does."""
    why = available(np.float32)
    if why:
        return f"not here, the NumPy tile computes instead: {why}"
    library = _library("float32")
    isa = f"{library.isa} with bfloat16 dot products" if library.dots else library.isa
    return f"{isa}, {cores.counted(threads(), 'thread')} ({cores.threads()[1]}), {native.library('float32')}"


def threads() -> int:
    """How many threads a call uses."""
    return cores.threads()[0]
