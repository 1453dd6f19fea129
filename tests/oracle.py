"""Problems, and how far from dense attention a result may be.

The bound is the dtype's own rounding, and does not grow with the number of ranks: BASE times the largest value of the
reference. Results in half types are float32 results rounded once: half an ulp of the row's largest value more.
"""
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ringmpi import Mask, Score, attention_reference, attention_reference_backward

BASE = {"float64": 1e-13, "float32": 5e-6, "float16": 5e-6, "bfloat16": 5e-6}
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


class Problem(NamedTuple):
    """Whole sequences: q, k, v, dout, and sinks or None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    sinks: "np.ndarray | None" = None

    def solve(self, mask="full", score=None, dtype=np.float64):
        """out, lse, dq, dk, dv (and dsinks) by definition."""
        rules = {"mask": mask, "score": score, "sinks": self.sinks, "dtype": dtype}
        forward = attention_reference(self.q, self.k, self.v, **rules)
        return (*forward, *attention_reference_backward(self.dout, self.q, self.k, self.v, *forward, **rules))


def problem(queries, keys=None, *, heads=4, kv_heads=2, dim=8, v_dim=6, batch=2, dtype=np.float64, sinks=False, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    keys = queries if keys is None else keys
    shapes = [(queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, v_dim), (queries, heads, v_dim)]
    arrays = [(rng.standard_normal((batch, *shape)) * scale).astype(dtype) for shape in shapes]
    return Problem(*arrays, rng.standard_normal(heads) if sinks else None)


def close(got, want, what="", *, base=None, floor=0.0, roundings=1, also=0.0):
    """Asserts that a result is as near to the reference as its dtype allows.

    ``floor`` is the size of the terms that cancel where the reference is zero but for rounding; ``roundings`` is 2 where
    the reference was rounded to the same half type itself; ``also`` is what else each number may err by.
    """
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}"
    finite = np.isfinite(want)
    wide = got.astype(np.longdouble)
    assert (wide[~finite] == want[~finite]).all(), f"{what}: not {want[~finite][:3]} where the reference is"
    if not finite.any():
        return 0.0
    name = got.dtype.name
    largest = max(np.abs(want[finite]).max(), floor)
    bound = (base or BASE[name]) * largest
    if name in EPS:
        row = (np.abs(np.where(finite, want, 0)) + also).max(axis=-1, keepdims=True)
        ulp = EPS[name] * 2.0 ** np.floor(np.log2(np.maximum(row.astype(float), np.finfo(np.float16).tiny)))
        bound = bound + 0.5 * roundings * np.broadcast_to(ulp, want.shape)[finite]
    error = np.abs(wide[finite] - want[finite]) - np.broadcast_to(also, want.shape)[finite]
    assert (error <= bound).all(), f"{what}: error {error.max():.2e}, largest {largest:.2e}, bound {np.max(bound):.2e}"
    return float(error.max() / max(largest, 1e-300))


def real(tokens):
    """q, k, v of the first tokens of a real text in layer 14 of SmolLM2-135M, and its dense causal lse and every 8th row of out."""
    data = {path.stem: np.load(path) for path in (Path(__file__).parent / "data").glob("*.npy")}
    return [data[name][:, :tokens] for name in "qkv"], data["lse_causal"][..., :tokens], data["out_causal_every8"][:, : -(-tokens // 8)]


# Each is a rule, alone and combined, over about 101 tokens: the borders and edges fall anywhere.
MASKS = {
    "full": "full",
    "causal": "causal",
    "narrow window": Mask(causal=True, window=(3, 0)),
    "window both sides": Mask(window=(5, 7)),
    "open window": Mask(window=(None, 4)),
    "documents": Mask(causal=True, documents=[0, 13, 14, 14, 70, 101]),
    "documents and window": Mask(documents=[0, 50, 101], window=(9, 2)),
    "lengths": Mask(causal=True, kv_range=[60, 0]),
    "left padding": Mask(kv_range=[[3, 80], [40, 101]]),
    "prefix": Mask(causal=True, prefix=20, documents=[0, 40, 101]),
    "kept keys": Mask(causal=True, window=(4, 0), keep_first=3),
    "kept keys, open": Mask(window=(6, 1), keep_first=11, documents=[0, 30, 101], kv_range=[[2, 90], [0, 101]]),
}
SCORES = {"plain": None, "scale": Score(scale=0.7), "all": Score(softcap=2.0, alibi=[0.5, 0.25, 0.1, 0.05])}
