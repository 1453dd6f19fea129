"""The readable tile: a pair of runs in NumPy, blocked so that a block of scores stays in cache, BLAS inside.

Each block of scores is (query heads of a group x rows, keys) for one batch entry and one K/V head, so that GQA is one
larger product and K/V are never repeated. Half types are widened as they are read; all sums are float32 or float64.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..mask import Span
from ..pairs import Pair
from ..partial import Partial, Slices, accumulator

# A block of 256 x 1,024 scores in float32 is 1 MiB: it stays in a core's own cache and takes about 2 ms.
ROWS, KEYS = 256, 1024


class Where(NamedTuple):
    """A block of scores: one batch entry, one K/V head and its query heads, some rows, some keys of the pair."""

    batch: slice
    kv_head: int
    heads: slice
    rows: slice
    keys: slice
    visible: np.ndarray | None


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, pair: Pair) -> Iterator[tuple[tuple[slice, ...], Partial]]:
    """Attention of the pair, block by block: yields which (batch, rows, heads) of it, and their ``Partial``.

    q, k, v are ``(batch, tokens, heads, head_dim)`` of the pair's two runs.
    """
    dtype = accumulator(q.dtype)
    for at in blocks(q, k, pair):
        queries, keys, values = _queries(q, at, dtype), _keys(k, at, dtype), _keys(v, at, dtype)
        s, _ = scores(queries, keys, at, pair)
        m = s.max(axis=-1)
        p = np.exp(s - np.where(np.isneginf(m), 0, m)[..., None])
        o = (p.reshape(-1, p.shape[-1]) @ values).reshape(*m.shape, -1)
        yield (at.batch, at.rows, at.heads), Partial(o.swapaxes(0, 1)[None], m[None], p.sum(axis=-1)[None])


def backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, lse: np.ndarray, delta: np.ndarray, pair: Pair,
    dq: np.ndarray, dk: np.ndarray, dv: np.ndarray,
) -> Iterator[None]:  # fmt: skip
    """Adds the pair's gradients to dq, dk, dv, block by block: p is rebuilt from lse (arXiv:2205.14135, algorithm 4)."""
    dtype = accumulator(q.dtype)
    for at in blocks(q, k, pair):
        queries, d = _queries(q, at, dtype), _queries(dout, at, dtype)
        keys, values = _keys(k, at, dtype), _keys(v, at, dtype)
        rows = (at.batch, at.heads, at.rows)
        s, slope = scores(queries, keys, at, pair)
        p = np.exp(s - np.where(np.isneginf(lse[rows]), 0, lse[rows])[0][..., None])
        ds = p * ((d @ values.T) - delta[rows][0][..., None]) * slope
        if at.visible is not None:
            ds = np.where(at.visible, ds, 0)
        dq[at.batch, at.rows, at.heads] += (ds @ keys).swapaxes(0, 1)
        flat = (-1, ds.shape[-1])
        dk[at.batch, at.keys, at.kv_head] += ds.reshape(flat).T @ queries.reshape(-1, queries.shape[-1])
        dv[at.batch, at.keys, at.kv_head] += p.reshape(flat).T @ d.reshape(len(d) * len(d[0]), d.shape[-1])
        yield


def scores(queries: np.ndarray, keys: np.ndarray, at: Where, pair: Pair) -> tuple[np.ndarray, np.ndarray | float]:
    """The scores (heads, rows, keys) of a block, -inf where a key is not seen, and d(score)/d(q . k)."""
    score, kind = pair.score, queries.dtype.type
    slope: np.ndarray | float = kind(score.scale)
    s = slope * (queries.reshape(-1, queries.shape[-1]) @ keys.T).reshape(*queries.shape[:2], -1)
    if score.softcap is not None:
        t = np.tanh(s / kind(score.softcap))
        s, slope = kind(score.softcap) * t, slope * (1 - t * t)
    if score.alibi is not None:
        slopes = np.asarray(score.alibi[at.heads], queries.dtype)
        s = s - slopes[:, None, None] * pair.distance(at.rows, at.keys).astype(queries.dtype)
    return (s if at.visible is None else np.where(at.visible, s, -np.inf)), slope


def blocks(q: np.ndarray, k: np.ndarray, pair: Pair) -> Iterator[Where]:
    """The blocks of a pair that are not empty: a panel of keys is read by all strips of rows before the next."""
    group = q.shape[2] // k.shape[2]
    height = max(1, ROWS // group)
    lo, hi = pair.local()
    for batch in range(q.shape[0]):
        low, high = lo[batch % len(lo)], hi[batch % len(hi)]
        strips = [(slice(r, min(r + height, len(low))), Span.of(low[r : r + height], high[r : r + height]))
                  for r in range(0, len(low), height)]  # fmt: skip
        for kv_head in range(k.shape[2]):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            for first in range(0, k.shape[1], KEYS):
                for rows, span in strips:
                    keys = slice(max(first, span.lo_min), min(first + KEYS, span.hi_max))
                    if keys.start < keys.stop:
                        yield Where(slice(batch, batch + 1), kv_head, heads, rows, keys, _visible(low, high, span, rows, keys))


def _visible(lo: np.ndarray, hi: np.ndarray, span: Span, rows: slice, keys: slice) -> np.ndarray | None:
    """Which keys the rows see, (rows, keys), or None where all see all."""
    if span.lo_max <= keys.start and span.hi_min >= keys.stop:
        return None
    j = np.arange(keys.start, keys.stop)
    return (lo[rows, None] <= j) & (j < hi[rows, None])


def _queries(x: np.ndarray, at: Where, dtype: np.dtype) -> np.ndarray:
    """A block's rows of q or dout, (heads, rows, dim), in the dtype of its sums.

    Rows that see no key are read as zeros, and so below are keys that no row sees: they may hold NaN, and 0 * NaN is NaN.
    """
    rows = x[at.batch, at.rows, at.heads][0].swapaxes(0, 1).astype(dtype)
    return rows if at.visible is None else np.where(at.visible.any(axis=1, keepdims=True), rows, 0)


def _keys(x: np.ndarray, at: Where, dtype: np.dtype) -> np.ndarray:
    """A block's rows of k or v, (keys, dim), in the dtype of its sums."""
    keys = x[at.batch, at.keys, at.kv_head][0].astype(dtype, copy=False)
    return keys if at.visible is None else np.where(at.visible.any(axis=0, keepdims=True).T, keys, 0)


# ------------------------------------------------------------------------------------------------- the rest of a tile


def merge(into: Partial, where: Slices, other: Partial) -> None:
    """Merges a partial into the (batch, rows, heads) of the accumulator that it belongs to."""
    into.at(*where).absorb(other)


def empty(shape: tuple[int, int, int, int], dtype: Any) -> Partial:
    """An accumulator of nothing, for an ``o`` of this shape and dtype."""
    return Partial.empty(shape, dtype)


def finish(total: Partial, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """out rounded once to ``dtype``, and lse, of an accumulator."""
    return total.finish(dtype)


def delta(dout: np.ndarray, out: np.ndarray) -> np.ndarray:
    """sum(dout * out) over a row, (batch, heads, rows), in the dtype of the sums."""
    dtype = accumulator(out.dtype)
    return np.einsum("bqhd,bqhd->bhq", dout.astype(dtype, copy=False), out.astype(dtype, copy=False))


def status() -> str:
    """What computes: NumPy and its BLAS."""
    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})  # type: ignore[union-attr, call-overload]
    return f"NumPy {np.__version__} with BLAS {blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


class Space:
    """The memory a tile works in and messages pass through. NumPy's is always ready and goes to MPI as it is.

    The ring calls ``touched`` when work on a buffer was started and ``ready`` before it hands the buffer to MPI; for a
    device these record and await an event. ``carrier`` gives what messages go by: the seats themselves, or, where MPI does
    not take a device's memory, what takes them through host memory.
    """

    def empty(self, nbytes: int) -> np.ndarray:
        """A buffer of bytes, aligned to 64."""
        raw = np.empty(nbytes + 63, np.uint8)
        skip = -raw.ctypes.data % 64
        return raw[skip : skip + nbytes]

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array of zeros."""
        return np.zeros(shape, dtype)

    def start(self, strips: Iterator[Any]) -> Iterator[Any]:
        """Starts work. Host strips run as they are drawn; a device launches them all here and draws none."""
        return strips

    def clear(self, buffer: np.ndarray) -> None:
        """Fills a buffer with zeros."""
        buffer[:] = 0

    def add(self, into: np.ndarray, other: np.ndarray, dtype: np.dtype) -> None:
        """Adds a buffer of gradients to another."""
        total = into.view(dtype)
        total += other.view(dtype)

    def touched(self, buffer: np.ndarray) -> None:
        """Work that uses the buffer has been started."""

    def filled(self, buffer: np.ndarray) -> None:
        """Work that writes a block into the buffer has been started."""

    def busy(self, buffer: np.ndarray) -> bool:
        """Whether work on the buffer is still to be done: its receive is then posted at a later poll."""
        return False

    def ready(self, buffer: np.ndarray) -> None:
        """Returns when all work on the buffer is done."""

    def carrier(self, seats: Any) -> Any:
        """What carries the buffers of a lap to other seats: MPI takes them as they are."""
        return seats

    def to_host(self, array: np.ndarray) -> np.ndarray:
        """The array, contiguous, for MPI's collectives."""
        return np.ascontiguousarray(array)

    def from_host(self, array: np.ndarray) -> np.ndarray:
        """What came from MPI's collectives."""
        return array
