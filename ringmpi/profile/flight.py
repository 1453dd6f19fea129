"""A flight recorder: the last hops of every rank, written down when a wait was too long.

The library writes nothing unasked: it records when the environment names a folder, ``RINGMPI_FLIGHT=DIR``, or under the
command line, which also listens to SIGUSR1 (``listening``). Each rank writes ``flight-RANK.jsonl``: why, where it stood, its
newest messages, and those that are still under way; and the same again for every other ``RingAttention`` it has, the one that was
in a lap last first. Ages are seconds before that moment.
"""
from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import WeakSet

from . import Trace
from .records import HopRecord

FOLDER = "RINGMPI_FLIGHT"
LAST = 64
_default = ""
_recorders: WeakSet[Trace] = WeakSet()


def recorder(rank: int, order: tuple[int, ...]) -> Trace | None:
    """A recorder that remembers the last hops, or None where none is asked for."""
    if not (os.environ.get(FOLDER) or _default):
        return None
    made = Trace(rank, order, LAST)
    _recorders.add(made)
    return made


def both(first: Callable[..., None] | None, second: Callable[..., None]) -> Callable[..., None]:
    """A recorder that hands every event to two; the second alone where there is no first."""
    if first is None:
        return second

    def take(name: str, **facts: Any) -> None:
        first(name, **facts)
        second(name, **facts)

    return take


def write(why: str) -> None:
    """Writes what the recorders of this process remember, the one that was in a lap last before others. Without a folder, nothing."""
    folder = os.environ.get(FOLDER) or _default
    if not folder:
        return
    told: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for trace in sorted((trace for trace in list(_recorders) if trace.laps), key=lambda trace: -trace.laps[-1].began):
        told[trace.rank] += _lines(trace, why)
    for rank, lines in told.items():
        Path(folder).mkdir(parents=True, exist_ok=True)
        # A signal or another thread may write it too: the file appears whole, under a name of this writer's own first.
        path = Path(folder, f"flight-{rank}.jsonl")
        part = path.with_suffix(f".{os.getpid()}-{get_ident()}.part")
        part.write_text("".join(json.dumps(line) + "\n" for line in lines))
        part.replace(path)


@contextmanager
def listening(folder: str) -> Iterator[None]:
    """Records what is made inside, and writes on SIGUSR1 too. For programs: it installs a signal handler meanwhile."""
    global _default
    _default, before = folder, signal.signal(signal.SIGUSR1, lambda number, frame: write("SIGUSR1"))
    try:
        yield
    finally:
        _default = ""
        signal.signal(signal.SIGUSR1, before)


def _lines(trace: Trace, why: str) -> Iterator[dict[str, Any]]:
    now, step = perf_counter(), trace.steps[-1] if trace.steps else None
    where = {"lap": step.lap, "backward": step.backward, "step": step.step, "age": now - step.began} if step else {}
    yield {"record": "flight", "rank": trace.rank, "why": why, **where}
    for state, hops in (("done", list(trace.hops)), ("under way", trace.flying())):
        for hop in hops:
            yield {"record": "hop", "state": state, **_facts(hop, now, trace.rank)}


def _facts(hop: HopRecord, now: float, rank: int) -> dict[str, Any]:
    ages = {"posted_age": now - hop.posted, **({"seen_age": now - hop.seen} if hop.seen else {})}
    names = ("lap", "backward", "step", "kind", "walk", "part", "owner", "src", "dst", "nbytes")
    return {"way": "sent" if hop.src == rank else "received", **{name: getattr(hop, name) for name in names}, **ages}
