"""check: this installation, on the ranks it was started with, against dense attention.

Every layout under every mask, with every schedule, dtype and tile, forward and backward, of a short sequence whose length
divides by nothing; the layouts are shared out among the dtypes.
An error is measured in steps of the dtype: its epsilon at the largest value of the array (of lse: of its own dtype).
"""
from __future__ import annotations

import argparse
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from .. import io, tiles
from .. import schedule as schedules
from ..api import Ring, RingAttention
from ..cli import job, ring_arguments
from ..layout import LAYOUTS
from ..mask import Mask
from ..partial import DTYPES, accumulator
from ..reference import attention_reference, attention_reference_backward

TOKENS, HEADS, KV_HEADS, HEAD_DIM, V_DIM = 37, 4, 2, 16, 12
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=(5, 0)),
    "documents": Mask(causal=True, documents=(0, 9, 9, 25, TOKENS)),
}
NAMES = ("out", "lse", "dq", "dk", "dv")
# Half types are rounded once, at the end, which is half a step; where the sums are of the dtype itself, their errors add up.
ROUNDED, SUMMED = 1.0, 16.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    parser.add_argument("--tile", action="append", help=f"one of {', '.join(tiles.TILES)} (default: all)")
    ring_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a row for every tile, dtype and schedule; returns 1 where an error is above the limit, or nothing was checked."""
    checked = bad = 0
    with job(args) as ring:
        _say(ring, f"worst errors on {ring.size} ranks, {len(ring.nodes)} nodes, in steps of the dtype")
        _say(ring, "".join(f"{name:>14}" for name in ("tile", "dtype", "schedule")) + "".join(f"{name:>9}" for name in (*NAMES, "limit")))
        for tile, dtype, schedule in product(args.tile or tiles.TILES, DTYPES, schedules.SCHEDULES):
            head = "".join(f"{word:>14}" for word in (tile, dtype, schedule))
            if reason := next(filter(None, ring.gather(_cannot(ring, tile, dtype, schedule))), ""):
                _say(ring, f"{head}  not here: {reason}")
                continue
            ranks = ring.gather(_worst(ring, tile, dtype, schedule))
            worst = {name: max(rank[name] for rank in ranks) for name in NAMES}
            wrong = [f"{name} with {at}" for name, (error, at) in worst.items() if not error <= _limit(name, dtype)]
            row = "".join(f"{error:9.3g}" for error, _ in worst.values()) + f"{_limit('out', dtype):9g}"
            _say(ring, head + row + ("  WRONG: " + ", ".join(wrong) if wrong else ""))
            checked, bad = checked + 1, bad + len(wrong)
        _say(ring, f"{bad} WRONG" if bad else "all right" if checked else "nothing could be checked")
    return 0 if checked and not bad else 1


class Case(NamedTuple):
    """The inputs of a case, and what dense attention makes of them in more digits than any tile has."""

    given: tuple[np.ndarray, ...]
    dout: np.ndarray
    right: dict[str, np.ndarray]

    @classmethod
    @cache
    def of(cls, mask: Mask, dtype: np.dtype) -> Case:
        """The case of a mask and a dtype, the same on every rank."""
        random = np.random.default_rng(0)
        shapes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, V_DIM), (HEADS, V_DIM))
        q, k, v, dout = (random.standard_normal((2, TOKENS, *shape)).astype(dtype) for shape in shapes)
        out, lse = attention_reference(q, k, v, mask=mask, dtype=np.longdouble)
        gradients = attention_reference_backward(dout, q, k, v, out, lse, mask=mask, dtype=np.longdouble)
        return cls((q, k, v), dout, dict(zip(NAMES, (out, lse, *gradients))))


def _worst(ring: Ring, tile: str, dtype: str, schedule: str) -> dict[str, tuple[float, str]]:
    """The worst error of this rank's rows of every array over all masks, each in a layout, and where it was. Collective.

    Another dtype puts another layout under each mask, so that a schedule meets every layout under every mask.
    """
    worst = dict.fromkeys(NAMES, (0.0, ""))
    turn = DTYPES.index(dtype)
    for number, (name, mask) in enumerate(MASKS.items()):
        layout = [*LAYOUTS][(number + turn) % len(LAYOUTS)]
        case = Case.of(mask, io.named(dtype))
        attn = RingAttention(ring, TOKENS, mask=mask, layout=layout, schedule=schedule, tile=tile)
        q, k, v, dout = (attn.shard(x) for x in (*case.given, case.dout))
        out, lse = attn.forward(q, k, v)
        for key, x in zip(NAMES, (out, lse, *attn.backward(dout, q, k, v, out, lse))):
            worst[key] = max(worst[key], (_steps(attn, key, x, case.right[key], q.dtype), f"the {name} mask, {layout}"))
    return worst


def _steps(attn: RingAttention, name: str, x: Any, right: np.ndarray, dtype: np.dtype) -> float:
    """The worst error of this rank's rows, in steps of their dtype; infinite where one is not a number."""
    mine = attn.shard(right, 2 if name == "lse" else 1)
    if not x.size:
        return 0.0
    step = epsilon(accumulator(dtype) if name == "lse" else dtype) * float(np.abs(right).max())
    error = float(np.abs(np.asarray(x, np.float64) - mine).max()) / step
    return error if np.isfinite(error) else np.inf


def _limit(name: str, dtype: str) -> float:
    """How many steps an array may be off."""
    return ROUNDED if dtype in ("float16", "bfloat16") and name != "lse" else SUMMED


def epsilon(dtype: np.dtype) -> float:
    """From 1 to the next number of a dtype.

    >>> epsilon(np.dtype("f2")) == 2**-10
    True
    """
    one = np.ones((), dtype)
    return float(np.nextafter(one, dtype.type(2)) - one)


def _cannot(ring: Ring, tile: str, dtype: str, schedule: str) -> str:
    """Why a tile, a dtype or a schedule cannot be had on this rank; empty where all can."""
    try:
        tiles.tile(tile, np.empty(0, io.named(dtype)))
        schedules.schedule(schedule, ring.nodes)
    except (ValueError, TypeError, RuntimeError) as reason:
        return str(reason)
    return ""


def _say(ring: Ring, line: str) -> None:
    if ring.rank == 0:
        print(line, flush=True)
