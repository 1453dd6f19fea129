"""What a pass took: its time, rate, bytes, waits and memory; and a bar that shows how far it is."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

from ..api import RingAttention

# Products of length head_dim and v_dim for every pair of a query and a key: s and p.v; backward s, dq, dk and dp, dv.
PRODUCTS = {"forward": (1, 1), "backward": (3, 2)}


class Meter:
    """Measures the passes of a ``RingAttention``, as this rank sees them.

    Parameters
    ----------
    attn
        whose passes are measured. Set ``also`` to a recorder to have it see every event too.
    bar
        whether rank 0 draws a bar on standard error; None: if that is a terminal.
    """

    def __init__(self, attn: RingAttention, bar: bool | None = None) -> None:
        self.attn = attn
        self.passes: dict[str, dict[str, float]] = {}
        self.also: Callable[..., None] | None = None
        self.bar = attn.ring.rank == 0 and (sys.stderr.isatty() if bar is None else bar)

    @contextmanager
    def over(self, name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Iterator[None]:
        """Measures what is called inside: the pass ``name`` of these arrays."""
        of_head, of_value = PRODUCTS[name]
        flop = 2.0 * (of_head * q.shape[3] + of_value * v.shape[3]) * q.shape[2] * visible(self.attn, q.shape[0])
        self.now = {"flop": flop, "sent": 0.0, "wait": 0.0}
        self.pair, self.done, self.all = None, 0, _area(self.attn) if self.bar else 1
        self.began = self.drawn = perf_counter()
        with self.attn.record(self._take):
            yield
        self.passes[name] = {**self.now, "time": perf_counter() - self.began}
        if self.bar:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def report(self) -> None:
        """Prints a table of all ranks on rank 0. Collective."""
        ranks = self.attn.ring.gather({"passes": self.passes, "memory": peak_memory()})
        if self.attn.ring.rank:
            return
        queries, keys = self.attn.work.lengths
        print(f"{queries:,} queries, {keys:,} keys, {len(ranks)} ranks, schedule {self.attn.schedule.name}")
        print(f"{'':10}{'time':>12}{'rate':>16}{'sent':>14}{'exposed wait: mean':>22}{'worst':>12}")
        for name in self.passes:
            of = {fact: [rank["passes"][name][fact] for rank in ranks] for fact in self.now}
            seconds = max(rank["passes"][name]["time"] for rank in ranks)
            print(f"{name:10}{seconds:10.3f} s{sum(of['flop']) / seconds / 1e9:9.2f} GFLOP/s{sum(of['sent']) / 1e6:11.2f} MB"
                  f"{np.mean(of['wait']):20.4f} s{max(of['wait']):10.4f} s")  # fmt: skip
        print(f"peak memory of a rank: {max(rank['memory'] for rank in ranks) / 2**20:.0f} MiB")

    def _take(self, name: str, **facts: Any) -> None:
        """Takes an event of the lap."""
        if self.also is not None:
            self.also(name, **facts)
        if name == "post" and facts["message"].sent:
            self.now["sent"] += facts["nbytes"]
        elif name == "wait":
            self.now["wait"] += facts["ended"] - facts["began"]
        elif name == "tile" and self.bar:
            self._draw(facts["pair"], facts["ended"])

    def _draw(self, pair: Any, now: float) -> None:
        if pair is not self.pair:
            self.done += 0 if self.pair is None else self.pair.query.count * self.pair.key.count
            self.pair = pair
        if now > self.drawn + 0.1:
            self.drawn, share = now, self.done / max(self.all, 1)
            print(f"\r[{'#' * int(40 * share):40}] {share:4.0%} {now - self.began:7.1f} s", end="", file=sys.stderr, flush=True)


def visible(attn: RingAttention, batch: int) -> float:
    """How many keys the queries of this rank see, all together, in a batch."""
    seen = [np.clip(hi - lo, 0, None) for *_, (lo, hi), _, _ in attn.strips]
    return float(sum(rows.sum() * (batch / len(rows)) for rows in seen))


def peak_memory() -> int:
    """The most bytes of memory that this process has held; 0 where the system does not say."""
    try:
        with open("/proc/self/status") as status:
            return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0


def _area(attn: RingAttention) -> int:
    """The pairs of a query and a key in all pairs of runs of this rank."""
    work, plan, order = attn.work, attn.schedule, attn.ring.order
    visits = [visit for step in attn.column.steps for visit in step.visits if visit.slot is not None]
    pairs = (pair for visit in visits for pair in work.pairs(attn.strips, work.score, order[visit.owner], visit.part, plan.parts))
    return sum(pair.query.count * pair.key.count for pair in pairs)
