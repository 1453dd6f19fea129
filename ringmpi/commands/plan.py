"""plan: what a ring will cost on a machine, which hops hide and what stalls. Needs no MPI."""
from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

from ..cli import positive, whole
from ..plan import Hide, Job, Price, hides, price
from ..plan.machine import Machine, machine, shipped
from ..profile import columns
from .profile import mask, problem

SCHEDULES = ("ring", "bidirectional", "double", "broadcast", "gather")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    problem(parser, tokens=1 << 20)
    parser.set_defaults(dtype="bfloat16", heads=32, head_dim=128)
    parser.add_argument("--ranks", type=whole, default=64)
    parser.add_argument("--machine", default="h100", help=f"{', '.join(shipped())}, or a file of ringmpi profile --save (default: h100)")
    parser.add_argument("--schedule", action="append", help=f"may be given again (default: {' '.join(SCHEDULES)})")
    parser.add_argument("--slow", type=positive, default=1.5, metavar="F", help="what a rank, or a link, slower by F costs (default: 1.5)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    parser.add_argument("--plot", metavar="FILE", help="draw time by block size (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Prices and prints."""
    job = Job(args.tokens, args.ranks, args.heads, args.head_dim, args.kv_heads, dtype=args.dtype, mask=mask(args), layout=args.layout)
    its = machine(args.machine)
    names = args.schedule or [name for name in SCHEDULES if name != "double" or its.whole_nodes(job.ranks)]
    prices = [price(job, its, name, backward) for name in names for backward in (False, True)]
    what_if = {"nothing": prices[0], **_slower(job, its, names[0], args.slow)}
    hide = [hides(job, its, backward) for backward in (False, True)]
    if args.json:
        print(json.dumps({"machine": asdict(its), "prices": [p._asdict() for p in prices], "hides": [h._asdict() for h in hide],
                          "what_if": {text: p.seconds for text, p in what_if.items()}}))  # fmt: skip
    else:
        print("\n\n".join(_tables(job, its, prices, what_if, hide)))
    if args.plot:
        from ..survey import plot

        print(plot.plan(job, its, args.plot))
    return 0


def _slower(job: Job, its: Machine, schedule: str, factor: float) -> dict[str, Price]:
    """The price with one slow rank, and with one slow link: the first between nodes, if there is one."""
    link = min(its.ranks_per_node, job.ranks - 1)
    return {f"one rank {factor:g}x slower": price(job, its, schedule, slow={0: factor}),
            f"one link {factor:g}x slower": price(job, its, schedule, lame={link: factor})}  # fmt: skip


def _tables(job: Job, its: Machine, prices: list[Price], what_if: dict[str, Price], hide: list[Hide]) -> Iterator[str]:
    yield f"{its.name}: {job.ranks} ranks, {job.tokens:,} tokens, {job.heads} heads of {job.head_dim}, {job.dtype}, {job.layout}"
    head = ("schedule", "lap", "ms", "tiles ms", "exposed ms", "sent GB", "memory GB", "", "step 1: tiles ms", "hop ms", "wait ms")
    yield columns(head, [(p.schedule, "backward" if p.backward else "forward", *_ms(p.seconds, p.compute, p.exposed),
                          f"{p.nbytes / 1e9:.3f}", f"{p.memory / 1e9:.3f}", "too much" if p.memory > its.memory > 0 else "",
                          *_ms(*p.steps[min(1, len(p.steps) - 1)])) for p in prices])  # fmt: skip
    yield "\n".join(map(_hiding, hide))
    yield columns(("if", "forward ms"), [(text, *_ms(p.seconds)) for text, p in what_if.items()])
    sources = {"inside": its.inside.source, "between": its.between.source, "tile": its.tile(job.dtype).source, **its.sources}
    yield "\n".join(f"{name}: {source}" for name, source in sources.items())


def _hiding(hide: Hide) -> str:
    way = "backward" if hide.backward else "forward"
    cost = f" The core's work for hops then takes at most {hide.core:.0%} of a step." if hide.core else ""
    if hide.rows <= 1:
        return f"No hop of the {way} ring is waited for.{cost}"
    return f"A hop of the {way} ring hides from {hide.rows:,} tokens a rank on: a sequence of {hide.tokens:,}.{cost}"


def _ms(*seconds: float) -> list[str]:
    return [f"{1e3 * s:.4f}" for s in seconds]
