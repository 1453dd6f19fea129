"""Attention over some of the keys, and how two such results become one.

Over a set of keys with scores s_j (natural logarithms) a query row has

    m = max s_j        l = sum exp(s_j - m)        o = sum exp(s_j - m) v_j

and attention over all of them is out = o / l, lse = m + log l. Two disjoint sets merge by bringing both to the larger
maximum (Milakov & Gimelshein, arXiv:1805.02867). The merge is associative and commutative to rounding, and the
empty set, o = 0, m = -inf, l = 0, is its neutral element: no finite stand-in for -inf, and never a NaN.

One query, scores [1, 2] with values [1, 2], then [3, 0] with [3, 4]:

>>> a = Partial(np.array([[[[2.367879441171442]]]]), np.array([[[2.0]]]), np.array([[[1.367879441171442]]]))
>>> b = Partial(np.array([[[[3.199148273471456]]]]), np.array([[[3.0]]]), np.array([[[1.049787068367864]]]))
>>> c = merge(a, b)
>>> [round(float(x.item()), 3) for x in (c.m, c.l, c.o, c.finish()[0])]
[3.0, 1.553, 4.07, 2.621]
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

Array = Any
# Which (batch, rows, heads) of a partial.
Slices = tuple[slice, slice, slice]
EVERYTHING: Slices = (slice(None), slice(None), slice(None))
# What attention is computed of.
DTYPES = ("float16", "bfloat16", "float32", "float64")


def namespace(array: Array) -> ModuleType:
    """The array module that an array belongs to: NumPy, or the package of the array's type (CuPy's arrays do not say)."""
    return np if isinstance(array, np.ndarray) else sys.modules[type(array).__module__.partition(".")[0]]


def rows_last(x: Array) -> Array:
    """(batch, heads, tokens) as (batch, tokens, heads, 1), to scale an ``o`` with."""
    return x.swapaxes(1, 2)[..., None]


def accumulator(dtype: Any) -> np.dtype:
    """The dtype in which partials and gradients of this dtype are summed: float64 for float64, else float32."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


@dataclass(frozen=True)
class Partial:
    """Attention over some keys, before it is normalised.

    Parameters
    ----------
    o
        ``(batch, tokens, heads, v_dim)``: the sum of exp(s - m) v.
    m, l
        ``(batch, heads, tokens)``: the largest score, and the sum of exp(s - m). All three are float32, or float64 for
        float64. A row over no keys is o = 0, m = -inf, l = 0.

    ``Partial(out, lse, 1)`` is a result that was already normalised.
    """

    o: Array
    m: Array
    l: Array

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: Any, xp: ModuleType = np) -> Partial:
        """The neutral element, for an ``o`` of this shape and dtype, in memory of the array module ``xp``."""
        batch, rows, heads, _ = shape
        of_rows = (batch, heads, rows)
        return cls(xp.zeros(shape, dtype), xp.full(of_rows, -np.inf, dtype), xp.zeros(of_rows, dtype))

    @classmethod
    def from_lse(cls, out: Array, lse: Array) -> Partial:
        """A normalised result ``out`` (batch, tokens, heads, v_dim) with ``lse`` (batch, heads, tokens) as a partial.

        A row over no keys may say lse = -inf, or +inf as FlashAttention does.

        >>> out, lse = Partial.from_lse(np.ones((1, 1, 1, 2)), np.array([[[np.inf]]])).finish()
        >>> out.tolist(), lse.tolist()
        ([[[[0.0, 0.0]]]], [[[-inf]]])
        """
        xp, dtype = namespace(out), accumulator(out.dtype)
        some = ~xp.isinf(lse)
        o = xp.where(rows_last(some), out, 0).astype(dtype)
        return cls(o, xp.where(some, lse, -np.inf).astype(dtype), some.astype(dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has arrays of its own, and nothing that a tile remembered of these."""
        return Partial, (self.o, self.m, self.l)

    def at(self, batch: slice, rows: slice, heads: slice) -> Partial:
        """A view of some of its rows."""
        return Partial(self.o[batch, rows, heads], self.m[batch, heads, rows], self.l[batch, heads, rows])

    def absorb(self, other: Partial) -> None:
        """Merges ``other`` into this one in place."""
        xp = namespace(self.o)
        m = xp.maximum(self.m, other.m)
        at = xp.where(xp.isneginf(m), 0, m)
        mine, its = xp.exp(self.m - at), xp.exp(other.m - at)
        self.o[...] = self.o * rows_last(mine) + other.o * rows_last(its)
        self.l[...] = self.l * mine + other.l * its
        self.m[...] = m

    def finish(self, dtype: Any = None) -> tuple[Array, Array]:
        """out ``(batch, tokens, heads, v_dim)`` rounded once to ``dtype``, and lse ``(batch, heads, tokens)``.

        A row over no keys gives out 0 and lse -inf.
        """
        xp = namespace(self.o)
        l = xp.broadcast_to(xp.asarray(self.l, self.m.dtype), self.m.shape)
        l = xp.where(l > 0, l, 1)
        # Rounded as it is divided: no third array of the output's size.
        out = xp.empty(self.o.shape, self.o.dtype if dtype is None else dtype)
        xp.divide(self.o, rows_last(l), out=out, casting="unsafe")
        return out, self.m + xp.log(l)


class Unmerged(Partial):
    """A partial that a tile computes where it is merged; or in memory of its own, when it is looked at.

    ``compute(into, where)`` merges it into (batch, rows, heads) of an accumulator; ``like`` are the shape and dtype of its ``o``, and
    the array module.
    """

    compute: Callable[[Partial, Slices], None]
    like: tuple[Any, ...]

    def __init__(self, compute: Callable[[Partial, Slices], None], *like: Any) -> None:
        held = vars(self)
        held["compute"], held["like"] = compute, like

    def merge_into(self, into: Partial, where: Slices) -> Partial | None:
        """Computes it there; or, if it was looked at, gives what it is, to be merged."""
        if "made" in vars(self):
            return self.made
        self.compute(into, where)
        return None

    @cached_property
    def made(self) -> Partial:
        """What it is, in memory of its own."""
        made = Partial.empty(*self.like)
        self.compute(made, EVERYTHING)
        return made

    o = property(lambda self: self.made.o)  # type: ignore[assignment]
    m = property(lambda self: self.made.m)  # type: ignore[assignment]
    l = property(lambda self: self.made.l)  # type: ignore[assignment]


def merge(a: Partial, b: Partial) -> Partial:
    """The partial over the keys of both, which must not overlap. Shapes and dtypes as in ``Partial``."""
    both = Partial.empty(a.o.shape, accumulator(a.o.dtype), namespace(a.o))
    both.absorb(a)
    both.absorb(b)
    return both


def sink_partial(sinks: Array, o: Array) -> Partial:
    """A learned sink: one more key a head with score ``sinks[head]`` and value 0, for the rows of ``o``."""
    xp = namespace(o)
    shape = (o.shape[0], o.shape[2], o.shape[1])
    m = xp.broadcast_to(xp.asarray(sinks, o.dtype)[None, :, None], shape)
    return Partial(xp.zeros((), o.dtype), m, xp.ones((), o.dtype))
