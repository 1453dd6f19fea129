"""attend: attention, and its gradients, of arrays in files.

Arrays are (batch, tokens, heads, head_dim), or without a batch (tokens, heads, head_dim), or of one head (tokens,
head_dim); lse is (batch, heads, tokens) without the same axes. Every rank reads and writes its own rows.
"""
from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from .. import io, tiles
from ..api import RingAttention
from ..cli import job, ring_arguments
from ..io import Output, Write, together
from ..layout import LAYOUTS, Run, Runs
from ..mask import Mask
from ..partial import accumulator
from ..profile import Trace, chrome, recording
from ..schedule import SCHEDULES
from ..score import Score, slopes
from .meter import Meter

OF_KEYS = ("k", "v", "dk", "dv")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    files = parser.add_argument_group("files", "a .npy file, or file.h5:/dataset")
    files.add_argument("q", help="queries: (batch, tokens, heads, head_dim), or without the batch, or without heads too")
    files.add_argument("k", help="keys: as queries, of as many tokens and heads as there are (heads: a divisor of q's)")
    files.add_argument("v", help="values: as keys, of any head_dim")
    files.add_argument("-o", "--out", required=True, metavar="FILE", help="where the output is written")
    files.add_argument("--lse", metavar="FILE", help="write the log-sum-exp of every row too: (batch, heads, tokens)")
    files.add_argument("--backward", metavar="FILE", help="compute the gradients too, from this gradient of the output")
    files.add_argument("--grads", metavar="DIR", help="where dq.npy, dk.npy and dv.npy are written")
    files.add_argument("--dtype", help="compute in this type; bfloat16: what |V2 and uint16 in the files are")
    files.add_argument("--check-finite", action="store_true", help="refuse inputs that hold NaN or Inf")
    _mask_arguments(parser.add_argument_group("mask and score"))
    ring = parser.add_argument_group("ring")
    ring.add_argument("--layout", default="zigzag", help=f"who holds which tokens: {', '.join(LAYOUTS)} (default: zigzag)")
    ring.add_argument("--schedule", default="ring", help=f"how blocks travel: auto, {', '.join(SCHEDULES)} (default: ring)")
    ring.add_argument("--tile", default="auto", help=f"what computes: auto, {', '.join(tiles.TILES)} (default: auto)")
    ring.add_argument("--trace", metavar="DIR", help="record every hop and tile: tables, records and a Chrome trace in DIR")
    ring.add_argument("--progress", action=argparse.BooleanOptionalAction, help="a bar (default: where rank 0 sees a terminal)")
    ring_arguments(ring)


def run(args: argparse.Namespace) -> int:
    """Reads, attends, writes and prints a table."""
    with job(args) as ring:
        call = together(ring, "attend", lambda: Call.of(args))
        attn = RingAttention(ring, call.lengths, mask=call.mask, score=call.score, layout=args.layout,
                             schedule=args.schedule, tile=args.tile)  # fmt: skip
        with io.outputs(ring, call.outputs) as write:
            meter = Meter(attn, args.progress)
            with recording(ring._seats) if args.trace else nullcontext() as meter.also:
                found = _compute(attn, meter, {name: _read(attn, call, name, args) for name in call.inputs})
            for name in call.outputs:
                _write(attn, call, name, found.pop(name), write)
        if isinstance(meter.also, Trace):
            chrome.save(meter.also, args.trace)
        meter.report()
    return 0


class Call(NamedTuple):
    """What is asked for: the arrays read and written, all with as many dimensions as q has, and the rules."""

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Output]
    mask: Mask
    score: Score

    @classmethod
    def of(cls, args: argparse.Namespace) -> Call:
        """Opens the inputs; raises where they cannot be read, or do not fit each other."""
        if bool(args.backward) != bool(args.grads):
            raise ValueError("--backward FILE and --grads DIR go together")
        if args.trace:
            os.makedirs(args.trace, exist_ok=True)
        names = {"q": args.q, "k": args.k, "v": args.v, **({"dout": args.backward} if args.backward else {})}
        inputs = {name: io.stored(file) for name, file in names.items()}
        dtypes = {name: io.convert(np.empty(0, array.dtype), args.dtype, names[name]).dtype for name, array in inputs.items()}
        _check(names, {name: array.shape for name, array in inputs.items()}, dtypes)
        heads = inputs["q"].shape[-2] if len(inputs["q"].shape) > 2 else 1
        score = Score(args.scale, args.softcap, slopes(heads) if args.alibi else None)
        return cls(inputs, _outputs(args, inputs, dtypes["q"]), _mask(args), score)

    @property
    def axis(self) -> int:
        """The axis of tokens."""
        return 1 if len(self.inputs["q"].shape) == 4 else 0

    @property
    def lengths(self) -> tuple[int, int]:
        """How many queries and keys there are."""
        return self.inputs["q"].shape[self.axis], self.inputs["k"].shape[self.axis]


def _mask_arguments(group: Any) -> None:
    group.add_argument("--causal", action="store_true", help="no query sees a key beyond its diagonal")
    group.add_argument("--window", nargs=2, type=int, metavar=("L", "R"), help="keys seen before and after it; -1: no limit")
    group.add_argument("--documents", metavar="FILE", help="borders 0 .. tokens of packed sequences, or (2, n): of queries and keys")
    group.add_argument("--kv-range", metavar="FILE", help="the real keys: (batch,) lengths or (batch, 2) ranges")
    group.add_argument("--prefix", type=int, metavar="N", help="with --causal: the first N keys are seen by all")
    group.add_argument("--keep-first", type=int, default=0, metavar="N", help="with --window: the first N keys stay in sight")
    group.add_argument("--scale", type=float, help="of the scores (default: 1 / sqrt(head_dim))")
    group.add_argument("--softcap", type=float, help="cap the scores at +- this")
    group.add_argument("--alibi", action="store_true", help="ALiBi, with the slopes of its paper")


def _mask(args: argparse.Namespace) -> Mask:
    documents, kv_range = (file and _whole(file) for file in (args.documents, args.kv_range))
    return Mask(args.causal, args.window, documents, kv_range, args.prefix, args.keep_first)


def _whole(file: str) -> np.ndarray:
    """A small array of integers, which every rank reads whole."""
    array = io.stored(file)
    if array.dtype.kind not in "iu" or len(array.shape) not in (1, 2):
        raise ValueError(f"{file} has shape {array.shape}, {array.dtype}; it must be one or two dimensions of integers")
    return array.read((Run(0, array.shape[0]),), 0)


def _check(names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype]) -> None:
    """Raises where the inputs do not fit each other."""
    q, k, v = (shapes[name] for name in "qkv")
    if not len(q) == len(k) == len(v) or len(q) not in (2, 3, 4):
        raise ValueError(f"q, k, v have shapes {q}, {k}, {v}; all must have the same 2, 3 or 4 dimensions")
    fitting = {"k": (*q[:-3], *k[-3:-1], q[-1]), "v": (*k[:-1], v[-1]), "dout": (*q[:-1], v[-1])}
    for name, file in names.items():
        if name in fitting and shapes[name] != fitting[name]:
            raise ValueError(f"{file} has shape {shapes[name]}; beside q {q}, k {k} and v {v} it must have {fitting[name]}")
        if dtypes[name] != dtypes["q"]:
            raise TypeError(f"{file} is {dtypes[name]}, {names['q']} {dtypes['q']}; all must be of one type, or --dtype says which")


def _outputs(args: argparse.Namespace, inputs: Mapping[str, Any], dtype: np.dtype) -> dict[str, Output]:
    """What is written, by name."""
    shapes = {name: array.shape for name, array in inputs.items()}
    q = shapes["q"]
    made = {"out": Output(args.out, (*q[:-1], shapes["v"][-1]), dtype)}
    if args.lse:
        batch, tokens, heads, _ = _four(q)
        made["lse"] = Output(args.lse, (batch, heads, tokens)[4 - len(q) :], accumulator(dtype))
    if args.grads:
        os.makedirs(args.grads, exist_ok=True)
        made |= {f"d{name}": Output(os.path.join(args.grads, f"d{name}.npy"), shapes[name], dtype) for name in "qkv"}
    return made


def _four(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with a batch and heads.

    >>> _four((7, 2, 4)), _four((7, 4))
    ((1, 7, 2, 4), (1, 7, 1, 4))
    """
    return {2: (1, *shape[:1], 1, *shape[1:]), 3: (1, *shape), 4: shape}[len(shape)]


def _runs(attn: RingAttention, name: str) -> Runs:
    """The runs of an array's tokens that this rank holds."""
    return (attn.work.keys if name in OF_KEYS else attn.work.queries)[attn.ring.rank]


def _read(attn: RingAttention, call: Call, name: str, args: argparse.Namespace) -> np.ndarray:
    """This rank's rows of an input. Collective."""
    array = call.inputs[name]

    def read() -> np.ndarray:
        rows = io.convert(array.read(_runs(attn, name), call.axis), args.dtype, name)
        if args.check_finite and not (fine := np.isfinite(rows)).all():
            token = np.argmin(np.moveaxis(fine, call.axis, 0).reshape(rows.shape[call.axis], -1).all(axis=1))
            position = (attn.kv_positions if name in OF_KEYS else attn.positions)[token]
            raise ValueError(f"{name} holds NaN or Inf at token {position}")
        return rows.reshape(_four(rows.shape))

    return together(attn.ring, f"reading {array.path}", read)


def _compute(attn: RingAttention, meter: Meter, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """out and lse, and the gradients if dout is given. Collective."""
    dout = given.pop("dout", None)
    with meter.over("forward", **given):
        out, lse = attn.forward(**given)
    if dout is None:
        return {"out": out, "lse": lse}
    with meter.over("backward", **given):
        dq, dk, dv = attn.backward(dout, **given, out=out, lse=lse)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _write(attn: RingAttention, call: Call, name: str, found: np.ndarray, write: Write) -> None:
    """Writes this rank's rows of an output. Collective."""
    axis = len(call.outputs[name].shape) - 1 if name == "lse" else call.axis
    shape = [*call.outputs[name].shape]
    shape[axis] = found.shape[2 if name == "lse" else 1]
    write(name, found.reshape(shape), _runs(attn, name), axis)
