"""A pair of runs with its arrays, and what a dense float64 computation makes of it: the cases the CUDA tile is held against."""
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ringmpi.layout import Run
from ringmpi.pairs import Pair
from ringmpi.partial import Partial
from ringmpi.score import Score

DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float16", "bfloat16", "float32", "float64")}
PLAIN = Score()
# What the sums of a type may err by, relative to numbers of size 1: as on the host.
NOISE = {"float16": 2e-6, "bfloat16": 2e-6, "float32": 4e-6, "float64": 1e-13}


class Case:
    """Arrays of a pair, in rows that are wider than their data and filled with NaN beside it.

    ``bounds`` are local (lo, hi), (1 or batch, queries), or None; the key run starts at ``start`` with ``step``.
    """

    def __init__(
        self, dtype: str, dims: tuple[int, int], rows: tuple[int, int], heads: tuple[int, int] = (2, 1), batch: int = 1,
        bounds: Any = None, score: Score = PLAIN, key: tuple[int, int] = (7, 3), seed: int = 0, pad: int = 8,
    ) -> None:  # fmt: skip
        self.dtype, self.dims, self.rows, self.heads, self.batch, self.pad = dtype, dims, rows, heads, batch, pad
        random = np.random.default_rng(seed)
        shapes = {"q": (rows[0], heads[0], dims[0]), "k": (rows[1], heads[1], dims[0]), "v": (rows[1], heads[1], dims[1]),
                  "dout": (rows[0], heads[0], dims[1])}  # fmt: skip
        for name, shape in shapes.items():
            setattr(self, name, self._array(shape, random))
        run = Run(key[0], rows[1], key[1])
        local = () if bounds is None else np.broadcast_arrays(*bounds)
        lengths = tuple(np.array(run.start + run.step * bound, np.int64) for bound in local) or None
        self.seen = np.ones((1, 1, *rows), bool)
        if bounds is not None:
            self.seen = ((lengths[0][..., None] <= run.positions()) & (run.positions() < lengths[1][..., None]))[:, None]
        self.pair = Pair(slice(0, rows[0]), slice(0, rows[1]), Run(11, rows[0], 2), run, lengths, score.resolve(dims[0]), shift=5)
        self.lse, self.delta = np.zeros((batch, heads[0], rows[0])), np.zeros((batch, heads[0], rows[0]))
        truth = self.forward()
        with np.errstate(all="ignore"):
            out, self.lse = truth.finish()
        self.delta = np.einsum("bqhd,bqhd->bhq", self.dout.astype(float), out)

    def _array(self, shape: tuple[int, int, int], random: np.random.Generator) -> np.ndarray:
        tokens, heads, dim = shape
        wide = np.full((self.batch, tokens + 1, heads, dim + self.pad), np.nan).astype(DTYPES[self.dtype])
        x = wide[:, :tokens, :, :dim]
        x[...] = random.standard_normal(x.shape).astype(x.dtype)
        return x

    # ------------------------------------------------------------------------------------------------- dense, float64

    def scores(self) -> tuple[np.ndarray, Any]:
        q, k, score = self.q.astype(float), self._repeated(self.k), self.pair.score
        s, bend = score.scale * np.einsum("bqhd,bkhd->bhqk", q, k), 1.0
        if score.softcap is not None:
            t = np.tanh(s / score.softcap)
            s, bend = score.softcap * t, 1 - t * t
        if score.alibi is not None:
            everything = slice(None)
            s = s - np.array(score.alibi)[:, None, None] * self.pair.distance(everything, everything)
        return np.where(self.seen, s, -np.inf), bend

    def forward(self, rounded: Any = float) -> Partial:
        """The partial; p rounded to a type before it meets v."""
        s, _ = self.scores()
        m = s.max(axis=-1, initial=-np.inf)
        p = np.exp(s - np.where(np.isneginf(m), 0, m)[..., None])
        v = np.where(self._some_row().any(axis=(1, 2))[..., None, None], self._repeated(self.v), 0)
        return Partial(np.einsum("bhqk,bkhd->bqhd", p.astype(rounded).astype(float), v), m, p.sum(axis=-1))

    def backward(self, rounded: Any = float) -> tuple[np.ndarray, ...]:
        """dq, dk, dv; p and ds rounded to a type before they meet the other factor."""
        s, bend = self.scores()
        some = self._some_row()
        lse = np.where(np.isneginf(self.lse), 0, self.lse)
        p = np.exp(s - lse[..., None])
        q, dout = (np.where(some.any(axis=(1, 3))[..., None, None], x.astype(float), 0) for x in (self.q, self.dout))
        k, v = (np.where(some.any(axis=(1, 2))[..., None, None], self._repeated(x), 0) for x in (self.k, self.v))
        ds = np.where(self.seen, p * (np.einsum("bqhd,bkhd->bhqk", dout, v) - self.delta[..., None]) * bend, 0)
        p, ds = (x.astype(rounded).astype(float) for x in (p, ds))
        scale = self.pair.score.scale
        return (scale * np.einsum("bhqk,bkhd->bqhd", ds, k), scale * self._summed(np.einsum("bhqk,bqhd->bkhd", ds, q)),
                self._summed(np.einsum("bhqk,bqhd->bkhd", p, dout)))  # fmt: skip

    def _some_row(self) -> np.ndarray:
        return np.broadcast_to(self.seen, (self.batch, 1, *self.rows))

    def _repeated(self, x: np.ndarray) -> np.ndarray:
        return np.repeat(x.astype(float), self.heads[0] // self.heads[1], axis=2)

    def _summed(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], self.heads[1], self.heads[0] // self.heads[1], x.shape[3]).sum(axis=3)


def masks(queries: int, keys: int, batch: int = 1) -> dict[str, Any]:
    """Local bounds by name: what rings produce, and some that they do not."""
    i, zero = np.arange(queries)[None], np.zeros((1, queries), int)
    random = np.random.default_rng(queries * keys)
    return {
        "full": None,
        "all, given": (zero, zero + keys),
        "causal ahead": (zero, i + 31),
        "causal behind": (zero, i - 49),
        "window": (i - 40, i + 9),
        "far window": (i - 170, i - 60),
        "nothing": (zero + 5, zero + 5),
        "mostly nothing": (zero + 3, np.where(i % 37 == 5, 40, 0)),
        "random": (random.integers(-5, keys, (1, queries)), random.integers(0, keys + 9, (1, queries))),
        "one key": (i * 7 % max(keys, 1), i * 7 % max(keys, 1) + 1),
        "one key past a tile": (zero + 63, zero + 65),
        "documents": (i // 33 * 33, i // 33 * 33 + 33),
        "padding": (np.zeros((batch, queries), int), np.broadcast_to([[max(keys - 13 * b, 0)] for b in range(batch)], (batch, queries))),
    }


def worst(got: Any, want: np.ndarray) -> float:
    """The largest difference; infinite where one is NaN or infinite and the other is not."""
    got, want = np.asarray(got, float), np.asarray(want, float)
    if got.shape != want.shape or not np.array_equal(np.isinf(got), np.isinf(want)):
        return float("inf")
    with np.errstate(all="ignore"):
        difference = np.where(got == want, 0, np.abs(got - want))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0))
