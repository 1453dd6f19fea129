"""The CUDA tile: pairs of runs on CuPy arrays, by the kernels in ``kernels/cuda``. The one room that imports CuPy.

Kernels are compiled on first use, for the device at hand, and launched on the caller's current stream. ``forward`` yields
a partial that is not computed yet: merging it computes straight into the accumulator, so that no partial takes memory and the
merge is free. The bounds of a plan are uploaded once and cut to each key run on the device.
"""
from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np

from .. import gpu
from ..pairs import Pair
from ..partial import EVERYTHING, Partial, Slices, Unmerged, accumulator
from . import registry, staging
from .registry import ALIGNED, ROW, RUN, SOURCES, SPAN_ROWS, TILE, TYPES, Kernel

Array = Any
NULL = np.uint64(0)
THREADS = 128
MOST_BLOCKS = (1 << 31) - 1


def forward(q: Array, k: Array, v: Array, pair: Pair) -> Iterator[tuple[tuple[slice, ...], Partial]]:
    """Attention of the pair, all of it at once: yields which (batch, rows, heads) of it, and their ``Partial``."""
    shape = (*q.shape[:3], v.shape[3])
    yield EVERYTHING, Unmerged(partial(_forward, q, k, v, pair), shape, accumulator(q.dtype), _cupy())


def empty(shape: tuple[int, int, int, int], dtype: Any) -> Partial:
    """An accumulator of nothing, for an ``o`` of this shape and dtype."""
    return Partial.empty(shape, dtype, _cupy())


def merge(into: Partial, where: Slices, other: Partial) -> None:
    """Merges a partial into the (batch, rows, heads) of an accumulator whose tokens are contiguous in m and l."""
    made = other.merge_into(into, where) if isinstance(other, Unmerged) else other
    if made is None:
        return
    into, other = into.at(*where), made
    xp = _cupy()
    o, m, l = (xp.ascontiguousarray(xp.broadcast_to(x, y.shape)) for x, y in ((other.o, into.o), (other.m, into.m), (other.l, into.l)))
    rows = _rows(into.o, o, into.m, m)
    _on_rows(f"merge<{TYPES[str(into.o.dtype)]}>", into.o, (into.o, into.m, into.l, o, m, l, rows))


def backward(
    q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array, pair: Pair, dq: Array, dk: Array, dv: Array
) -> Iterator[None]:
    """Adds the pair's gradients to dq, dk, dv, in an order that never changes."""
    if q.size and k.size:
        q, k, v, dout = map(_last_contiguous, (q, k, v, dout))
        lse, delta = _tokens_contiguous(lse, delta)
        bounds, tile = _bounds(pair, q.shape[0]), _tile(q, k, v, dout, lse, pair, dq=dq, dk=dk, dv=dv)
        given = (q, k, v, dout, lse, delta, *bounds, _slopes(pair, q.dtype))
        for kind, owner, sums in (("backward_dq", q, (dq,)), ("backward_dkdv", k, (dk, dv))):
            kernel = registry.find(kind, q.dtype, q.shape[3], v.shape[3])
            _launch(kernel, owner.shape[1], owner.shape[2] * owner.shape[0], (*given, *sums, tile))
    yield


def delta(dout: Array, out: Array) -> Array:
    """sum(dout * out) over a row, (batch, heads, rows), in the dtype of the sums."""
    dout, out = map(_last_contiguous, (dout, out))
    sums = _cupy().empty((out.shape[0], out.shape[2], out.shape[1]), accumulator(out.dtype))
    _on_rows(f"delta<{TYPES[str(out.dtype)]}>", out, (dout, out, sums, _rows(dout, out, sums, sums)))
    return sums


def taken(array: Any, by_dlpack: bool) -> Array:
    """A device array of another library as CuPy's, without a copy. Raises TypeError for one with a mask."""
    if by_dlpack:
        return _cupy().from_dlpack(array)
    if array.__cuda_array_interface__.get("mask") is not None:
        raise TypeError(f"a {type(array).__module__}.{type(array).__name__} with a mask: say by a Mask what is not to be seen, or fill it")
    return _cupy().asarray(array)


def check_place(array: Array) -> None:
    """Raises ValueError for an array of another device than that on which this process computes."""
    here, there = _cupy().cuda.Device().id, array.data.device_id
    if array.size and here != there:
        raise ValueError(f"an array is on device {there}; this rank computes on device {here} until cupy.cuda.Device({there}).use()")


def finish(total: Partial, dtype: Any) -> tuple[Array, Array]:
    """out (batch, tokens, heads, v_dim) rounded once to ``dtype``, and lse (batch, heads, tokens), of contiguous o, m, l."""
    xp, o = _cupy(), total.o
    out, lse = xp.empty(o.shape, dtype), xp.empty(total.m.shape, o.dtype)
    _on_rows(f"finish<{TYPES[str(out.dtype)]}>", o, (o, total.m, total.l, out, lse, _rows(o, out, total.m, lse)))
    return out, lse


def status() -> str:
    """A line: the GPU that computes here and how it is reached by MPI, or why there is none."""
    try:
        xp = _cupy()
    except ImportError as error:
        return f"no, {error}"
    if device() is None:
        return f"no, CuPy {xp.__version__} sees no device"
    here = xp.cuda.Device()
    name = xp.cuda.runtime.getDeviceProperties(here.id)["name"].decode()
    return f"yes, on {name} (sm_{here.compute_capability}) by CuPy {xp.__version__}"


def device() -> int | None:
    """The number of the device that this process computes on; None if there is none, or no CuPy."""
    try:
        xp = _cupy()
    except ImportError:
        return None
    return xp.cuda.Device().id if xp.cuda.is_available() else None


def choose_gpu(environ: Mapping[str, str] = os.environ) -> int:
    """Makes this rank's GPU the current one, before MPI first touches CUDA, and returns its number.

    It is the rank's number on its node, as the launcher tells it, modulo the GPUs that this process sees: ranks beyond those
    share them. All GPUs stay visible, so that MPI can copy from one to another. Not collective; needs CuPy. Call it first::

        import ringmpi
        ringmpi.choose_gpu()
        from mpi4py import MPI

    Raises RuntimeError where a launcher does not tell a rank's number on its node, and where no GPU is seen. Warns if MPI was started
    before: some MPIs have then chosen a device already.
    """
    count = _cupy().cuda.runtime.getDeviceCount()
    if not count:
        raise RuntimeError("this process sees no GPU")
    if "mpi4py.MPI" in sys.modules:
        warnings.warn("MPI was started before this rank's GPU was chosen: call choose_gpu() before importing mpi4py.MPI",
                      RuntimeWarning, stacklevel=2)  # fmt: skip
    number = gpu.local_rank(environ) % count
    _cupy().cuda.Device(number).use()
    return number


def arrives(echo: Callable[[Array, Array], None], device: int) -> bool:
    """Whether the bytes that ``echo(give, take)`` sends from one place of a device to another arrive: a few, and some MiB."""
    xp = _cupy()
    with xp.cuda.Device(device):
        for nbytes in (64, 3 << 20):
            sent = np.random.default_rng(nbytes).integers(1, 256, nbytes, np.uint8)
            give, take = xp.asarray(sent), xp.zeros(nbytes, np.uint8)
            xp.cuda.get_current_stream().synchronize()
            echo(give, take)
            if not np.array_equal(take.get(), sent):
                return False
    return True


# ------------------------------------------------------------------------------------------------------------ launches


def _forward(q: Array, k: Array, v: Array, pair: Pair, into: Partial, where: Slices) -> None:
    """Computes a pair into (batch, rows, heads) of an accumulator: what it sums to is merged with what is there."""
    if not (q.size and k.size):
        return
    into = into.at(*where)
    q, k, v = map(_last_contiguous, (q, k, v))
    kernel = registry.find("forward", q.dtype, q.shape[3], v.shape[3])
    tile = _tile(q, k, v, into.o, into.m, pair)
    given = (q, k, v, *_bounds(pair, q.shape[0]), _slopes(pair, q.dtype), into.o, into.m, into.l, tile)
    _launch(kernel, q.shape[1], q.shape[2] * q.shape[0], given)


def _launch(kernel: Kernel, rows: int, columns: int, arguments: tuple[Any, ...]) -> None:
    """A block for every tile of rows that a block owns, and every head of every batch entry."""
    _run(kernel.file, kernel.name, -(-rows // kernel.owned) * columns, kernel.threads, kernel.shared, arguments)


def _on_rows(name: str, rows: Array, arguments: tuple[Any, ...]) -> None:
    """A small kernel with a warp for every row of (batch, tokens, heads, dim)."""
    count = rows.shape[0] * rows.shape[1] * rows.shape[2]
    if count:
        _run("rows.cu", name, -(-count * 32 // THREADS), THREADS, 0, arguments)


def _run(file: str, name: str, blocks: int, threads: int, shared: int, arguments: tuple[Any, ...]) -> None:
    if blocks > MOST_BLOCKS:
        raise ValueError(f"{name} would take {blocks} blocks; a launch has at most {MOST_BLOCKS}: use more ranks")
    _compiled(_cupy().cuda.Device().id, file, name, shared)((blocks,), (threads,), arguments, shared_mem=shared)


@cache
def _compiled(device: int, file: str, name: str, shared: int) -> Any:
    """A kernel on a device. The sources' digest is among the options, for CuPy's key of compiled kernels leaves includes out."""
    options = ("-std=c++17", f"-I{SOURCES}", f"-DRINGMPI_SOURCES=0x{registry.digest()}")
    code = f'#include "{file}"\n'
    function = _cupy().RawModule(code=code, options=options, name_expressions=[name]).get_function(name)
    if shared > 48 << 10:
        function.max_dynamic_shared_size_bytes = shared
    return function


# ---------------------------------------------------------------------------------------------------------- parameters


def _tile(q: Array, k: Array, v: Array, o: Array, stats: Array, pair: Pair, **gradients: Array) -> np.ndarray:
    """The parameters of a pair, as ``struct Tile`` has them. ``o`` is the partial's o, or dout."""
    tile = np.zeros((), TILE)
    for name, x in {"q": q, "k": k, "v": v, "o": o, **gradients}.items():
        tile[name] = _strides(x)
    batches = 1 if pair.bounds is None else max(len(bound) for bound in pair.bounds)
    groups = -(-q.shape[1] // SPAN_ROWS)
    values = {
        "stats_batch": _strides(stats)[0], "stats_head": _strides(stats)[1],
        "bounds_batch": q.shape[1] * (batches > 1), "spans_batch": groups * (batches > 1),
        "ahead": pair.query.start + pair.shift - pair.key.start, "query_step": pair.query.step, "key_step": pair.key.step,
        "scale": pair.score.scale, "softcap": pair.score.softcap or 0,
        "queries": q.shape[1], "keys": k.shape[1], "heads": q.shape[2], "group": q.shape[2] // k.shape[2],
        "dim": q.shape[3], "v_dim": v.shape[3], "resume": 1,
        "aligned": sum(ALIGNED[name] * _is_aligned(x) for name, x in (("q", q), ("k", k), ("v", v), ("dout", o))),
    }  # fmt: skip
    for name, value in values.items():
        tile[name] = value
    return tile


def _rows(a: Array, b: Array, a_stats: Array, b_stats: Array) -> np.ndarray:
    """The parameters of a small kernel, as ``struct Rows`` has them."""
    rows = np.zeros((), ROW)
    rows["a"], rows["b"] = _strides(a), _strides(b)
    rows["a_batch"], rows["a_head"], _ = _strides(a_stats)
    rows["b_batch"], rows["b_head"], _ = _strides(b_stats)
    rows["batches"], rows["tokens"], rows["heads"], rows["dim"] = a.shape
    return rows


def _strides(x: Array) -> tuple[int, ...]:
    """The strides of the first three axes in elements."""
    return tuple(stride // x.itemsize for stride in x.strides[:3])


def _is_aligned(x: Array) -> bool:
    """Whether every row is whole pieces of 16 bytes, at addresses that are."""
    row = x.shape[3] * x.itemsize
    return not any(number % 16 for number in (x.data.ptr, row, *(s for s, n in zip(x.strides[:3], x.shape) if n > 1)))


def _last_contiguous(x: Array) -> Array:
    """The array itself, or a copy if a row's numbers do not lie side by side."""
    return x if x.shape[3] <= 1 or x.strides[3] == x.itemsize else _cupy().ascontiguousarray(x)


def _tokens_contiguous(lse: Array, delta: Array) -> tuple[Array, Array]:
    """Both with the same strides and tokens side by side."""
    same = lse.strides == delta.strides and (lse.shape[2] <= 1 or lse.strides[2] == lse.itemsize)
    return (lse, delta) if same else (_cupy().ascontiguousarray(lse), _cupy().ascontiguousarray(delta))


# -------------------------------------------------------------------------------------------------------------- memory


class Space:
    """Device memory, and what MPI is handed for it: see ``tiles.numpy.Space``.

    Every buffer has one event, of the last work on it; nothing ever waits for the whole device. Tiles run on the caller's
    current stream. Gradients that arrived are added on a stream of their own, after the tile that filled the buffer and not
    behind the next one, which has been launched by then.

    Parameters
    ----------
    aware
        whether MPI takes device memory: see ``gpu``. If not, messages go by way of pinned host memory: see ``staging``.
    piece
        bytes of a piece of those messages; the same on all ranks.
    """

    def __init__(self, aware: bool, piece: int = staging.PIECE) -> None:
        xp = _cupy()
        self.aware, self.pinned = aware, staging.Pinned(xp, piece)
        self._sums, self._warned = xp.cuda.Stream(non_blocking=True), False
        self._events: dict[int, Any] = {}
        self._streams: dict[int, Any] = {}

    def empty(self, nbytes: int) -> Array:
        """A buffer of bytes. Its memory may have been another's: what was known of that is forgotten."""
        buffer = _cupy().empty(nbytes, np.uint8)
        self.pinned.changed(buffer)
        weakref.finalize(buffer, self._forget, buffer.data.ptr).atexit = False
        if self.aware and nbytes and not self._warned:
            self._warned = _warned_of(buffer)
        return buffer

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of zeros."""
        return _cupy().zeros(shape, dtype)

    def start(self, strips: Iterator[Any]) -> Iterator[Any]:
        """Launches everything; what is then drawn has been launched."""
        return iter(list(strips))

    def clear(self, buffer: Array) -> None:
        """Fills a buffer with zeros."""
        self._after(_cupy().cuda.get_current_stream(), buffer)
        self.pinned.changed(buffer)
        buffer.fill(0)

    def add(self, into: Array, other: Array, dtype: Any) -> None:
        """Adds a buffer of gradients to another, or to this rank's own sums, on which only the current stream works."""
        stream = self._sums if into.data.ptr in self._events else _cupy().cuda.get_current_stream()
        for buffer in (into, other):
            self._after(stream, buffer)
            self._streams[buffer.data.ptr] = stream
        self.pinned.changed(into)
        with stream:
            total = into.view(dtype)
            total += other.view(dtype)

    def touched(self, buffer: Array) -> None:
        """Work that uses the buffer has been started: on the current stream, or where ``add`` put it."""
        pointer = buffer.data.ptr
        if pointer not in self._events:
            self._events[pointer] = _cupy().cuda.Event(disable_timing=True)
        self._events[pointer].record(self._streams.pop(pointer, None) or _cupy().cuda.get_current_stream())

    def filled(self, buffer: Array) -> None:
        """Work that writes a block into the buffer has been started."""
        self.pinned.changed(buffer)
        self.touched(buffer)

    def busy(self, buffer: Array) -> bool:
        """Whether work on the buffer is still to be done."""
        event = self._events.get(buffer.data.ptr)
        return event is not None and not event.done

    def ready(self, buffer: Array) -> None:
        """Returns when all work on the buffer is done."""
        event = self._events.get(buffer.data.ptr)
        if event is not None:
            event.synchronize()

    def carrier(self, seats: Any) -> Any:
        """What carries the buffers of a lap to other seats."""
        return seats if self.aware else staging.Staged(seats, self)

    def touched_on(self, stream: Any, buffer: Array) -> None:
        """Work that uses the buffer has been started on a stream: what is started on the current one from now on waits for it."""
        self._streams[buffer.data.ptr] = stream
        self.touched(buffer)
        self._after(_cupy().cuda.get_current_stream(), buffer)

    def to_host(self, array: Array) -> np.ndarray:
        """A contiguous copy in host memory, for MPI's collectives: not all that take device memory take it there."""
        return _cupy().ascontiguousarray(array).get()

    def from_host(self, array: np.ndarray) -> Array:
        """What came from MPI's collectives."""
        return _cupy().asarray(array)

    def _forget(self, pointer: int) -> None:
        """A buffer is gone, and with it what was held for it."""
        self._events.pop(pointer, None)
        self._streams.pop(pointer, None)
        self.pinned.forget(pointer)

    def _after(self, stream: Any, buffer: Array) -> None:
        """What is started on the stream from now on waits for the work on the buffer."""
        event = self._events.get(buffer.data.ptr)
        if event is not None:
            stream.wait_event(event)


def _warned_of(buffer: Array) -> bool:
    """Warns of memory that MPIs fail on, or are slow with, though they take a device's; whether it did."""
    runtime = _cupy().cuda.runtime
    if type(buffer.data.mem).__name__ == "MemoryAsync":
        text = "in CuPy's asynchronous pool (cudaMallocAsync), which other processes cannot open by CUDA IPC"
    elif runtime.pointerGetAttributes(buffer.data.ptr).type == runtime.memoryTypeManaged:
        text = "in managed memory, whose pages may be anywhere"
    else:
        return False
    remedy = f"use CuPy's default allocator, or {gpu.OVERRIDE}=0"
    warnings.warn(f"the ring's buffers are {text}: some MPIs fail or slow down; {remedy}", RuntimeWarning, stacklevel=3)
    return True


# --------------------------------------------------------------------------------------------- what a plan has uploaded

_uploaded: dict[tuple[int, int], Array] = {}
_scratch: dict[tuple[int, int, str], Array] = {}


def _bounds(pair: Pair, batch: int) -> tuple[Any, Any]:
    """The rows' bounds in the key run and their spans, on the device; two null pointers where every row sees every key."""
    if pair.bounds is None:
        return NULL, NULL
    rows, batches = pair.query.count, max(len(bound) for bound in pair.bounds)
    lo, hi = (_upload(bound, batches) for bound in pair.bounds)
    groups = -(-rows // SPAN_ROWS)
    bounds = _room("bounds", batches * rows * 8).view(np.int32)
    spans = _room("spans", batches * groups * 16).view(np.int32)
    run = np.array((pair.key.start, pair.key.step, pair.key.count, 0), RUN)
    arguments = (lo, hi, bounds, spans, run, np.int32(rows), np.int32(batches))
    _run("rows.cu", "clip", -(-batches * groups * 32 // THREADS), THREADS, 0, arguments)
    return bounds, spans


def _upload(bound: np.ndarray, batches: int) -> Array:
    """A plan's array on the device, sent there once and forgotten with the plan's own."""
    xp = _cupy()
    key = (xp.cuda.Device().id, id(bound))
    if key not in _uploaded:
        _uploaded[key] = xp.asarray(np.ascontiguousarray(np.broadcast_to(bound, (batches, bound.shape[1]))))
        weakref.finalize(bound, _uploaded.pop, key, None)
    return _uploaded[key]


def _room(name: str, nbytes: int) -> Array:
    """Scratch memory of a stream: what runs on one stream never runs at once."""
    xp = _cupy()
    key = (xp.cuda.Device().id, xp.cuda.get_current_stream().ptr, name)
    if key not in _scratch or _scratch[key].size < nbytes:
        _scratch[key] = xp.empty(nbytes, np.uint8)
    return _scratch[key][:nbytes]


def _slopes(pair: Pair, dtype: Any) -> Any:
    """The ALiBi slopes on the device, or a null pointer."""
    if pair.score.alibi is None:
        return NULL
    return _slopes_on(_cupy().cuda.Device().id, pair.score.alibi, str(accumulator(dtype)))


@cache
def _slopes_on(device: int, slopes: tuple[float, ...], dtype: str) -> Array:
    return _cupy().asarray(np.array(slopes, dtype))


def forget() -> None:
    """Drops compiled kernels, uploads and scratch memory: before another CuPy takes the place of this one."""
    for kept in (_compiled, _slopes_on):
        kept.cache_clear()
    _uploaded.clear()
    _scratch.clear()


def _cupy() -> Any:
    import cupy  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return cupy
