"""Attention of queries that every rank has, to keys that stay where they are: decoding with a K/V cache spread over the ranks.

    q -> a tile per pair with the keys held here -> Partial(o, m, l) -> MAX of m, SUM of scaled l and o -> finish: out, lse

With M = max m over the ranks, o = sum of exp(m - M) o and l likewise: the merge of ``partial.py``, of all ranks at once.
No key moves, and what is summed is as large as the output, whatever the length of the cache (Tree Attention,
arXiv:2408.04093). A rank that holds no key adds the empty partial, which changes nothing.
"""
from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from . import attention, tiles
from . import mask as masks
from .api import Ring, check_kinds, check_shapes, opened
from .comm import Fact
from .layout import Custom, Run, Runs, count, runs_of
from .mask import Mask
from .pairs import Work
from .partial import Partial, accumulator, namespace, rows_last, sink_partial
from .score import Score

Array = Any


def decode(q: Array, k_cache: Array, v_cache: Array, comm: Any = None, *, positions: Any = None, mask: str | Mask = "full",
           score: Score | None = None, sinks: Array | None = None, tile: str = "auto") -> tuple[Array, Array]:  # fmt: skip
    """Attention of queries that every rank has to keys and values that are spread over the ranks. Collective.

    Parameters
    ----------
    q
        ``(batch, queries, heads, head_dim)``, the same on all ranks: float16, bfloat16, float32 or float64.
    k_cache, v_cache
        ``(batch, keys held here, kv_heads, head_dim)`` and ``(.., v_dim)`` in any strides, of q's dtype; a rank may hold
        none. kv_heads divides heads.
    comm
        a ``Ring``, or a communicator for which a ring is made and closed in the call, or None: one rank, without MPI.
    positions
        integers ``(keys held here,)``: the global positions of the keys, in their order; over all ranks 0 .. keys - 1, each
        once. None: consecutive keys, in order of rank. Only masks and ALiBi look at them.
    mask, score, sinks, tile
        as in ``RingAttention`` and its ``forward``. The last query sees the last key: one query sees the whole cache
        under a causal mask, and several that were appended together see each other causally.

    Returns
    -------
    out
        ``(batch, queries, heads, v_dim)`` in q's dtype, on all ranks.
    lse
        ``(batch, heads, queries)``, natural logarithm, float32 (float64 for float64), on all ranks.

    Raises
    ------
    ValueError, TypeError
        on all ranks, for what any of them was given.
    RingTimeout
        when a rank does not come within the ring's time-out.

    >>> q, cache = np.ones((1, 1, 4, 8)), np.ones((1, 100, 2, 8))
    >>> out, lse = decode(q, cache, cache)
    >>> out.shape, lse.shape, bool(np.allclose(lse, 8 / np.sqrt(8) + np.log(100)))
    ((1, 1, 4, 8), (1, 4, 1), True)
    """
    given = {"q": q, "k": k_cache, "v": v_cache, "sinks": sinks}
    score = score or Score()
    with opened(comm) as ring:
        ring.agree("decode", lambda: _check(_own(given), positions, mask, score, tile))
        given = _own(given)
        sinks = given.pop("sinks")
        work, owner = _work(ring, given, positions, masks.mask(mask), score)
        try:
            total = _partial(ring, tiles.tile(tile, given["q"]), work, owner, **given)
        except BaseException:
            ring._seats.abandon(given)
            raise
    if sinks is not None:
        total.absorb(sink_partial(sinks, total.o))
    return total.finish(given["q"].dtype)


def _own(given: dict[str, Array]) -> dict[str, Array]:
    """Device arrays of other libraries as CuPy's."""
    return {name: tiles.own(x) for name, x in given.items()}


def _check(given: dict[str, Array], positions: Any, mask: Any, score: Score, tile: str) -> dict[str, Any]:
    """What all ranks must agree on; raises for what does not fit."""
    sinks = given.pop("sinks")
    check_kinds(given, tile)
    facts = check_shapes(given, sinks, score)
    held = given["k"].shape[1]
    if positions is not None and (np.shape(positions) != (held,) or np.asarray(positions).dtype.kind not in "iu"):
        found = f"{np.asarray(positions).dtype} {np.shape(positions)}"
        raise ValueError(f"positions are {found}; beside a cache of {held} keys they are {held} integers")
    rules = {"mask": Fact(masks.mask(mask)), "score": Fact(score)}
    return {**facts, **rules, "queries": given["q"].shape[1], "positions": "given" if positions is not None else "not given"}


def _work(ring: Ring, given: dict[str, Array], positions: Any, mask: Mask, score: Score) -> tuple[Work, int]:
    """What every rank computes, and which of its blocks is held here. Collective only if it matters who holds what."""
    (batch, rows), held = given["q"].shape[:2], given["k"].shape[1]
    queries = ((Run(0, rows),),)
    sees_all = mask == Mask() or (mask == Mask(causal=True) and rows == 1)
    if positions is None and sees_all and score.alibi is None:
        return Work(queries, ((Run(0, held),),), Mask(), score), 0
    everyone = ring._seats.gather(held if positions is None else runs_of(np.asarray(positions)))
    try:
        keys = Custom(everyone).partition(_count(everyone), ring.size)
        work = Work(queries, keys, mask, score)
        work.mask.check(*work.lengths, batch)
    except ValueError as error:
        raise ValueError(f"decode: {error}") from None
    return work, ring.rank


def _count(everyone: list[int | Runs]) -> int:
    """How many keys all ranks hold, each given as their number or as runs."""
    return sum(held if isinstance(held, int) else count(held) for held in everyone)


def _partial(ring: Ring, tile: ModuleType, work: Work, owner: int, q: Array, k: Array, v: Array) -> Partial:
    """Attention of the queries to the keys of all ranks, before it is normalised: the same on every rank."""
    space = ring.space(tile)
    here = Partial.empty((*q.shape[:3], v.shape[3]), accumulator(q.dtype), namespace(q))
    pairs = work.pairs(work.strips(0), work.score.resolve(q.shape[3]), owner)
    for _ in space.start(attention.fold(tile, here, pairs, q, k, v)):
        pass
    xp = namespace(here.o)
    m = _reduce(ring, space, "max", here.m)
    scale = xp.exp(here.m - xp.where(xp.isneginf(m), 0, m))
    sums = xp.concatenate([here.o * rows_last(scale), rows_last(here.l * scale)], axis=-1)
    sums = _reduce(ring, space, "sum", sums)
    return Partial(sums[..., :-1], m, sums[..., -1].swapaxes(1, 2))


def _reduce(ring: Ring, space: Any, op: str, x: Array) -> Array:
    """The "max" or "sum" of an array over all ranks, in host memory: it is small, and not every MPI takes a device's there."""
    given = space.to_host(x)
    total = np.empty_like(given)
    ring._seats.reduce_all(op, given, total)
    return space.from_host(total)
