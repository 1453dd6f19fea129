"""profile: the links of this job, a schedule with its messages and tiles apart, and who is slow."""
from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import io, survey
from ..api import RingAttention
from ..cli import job, positive, ring_arguments, whole
from ..mask import Mask
from ..profile import by_link, chrome, columns
from ..survey import Report


def arguments(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    problem(parser)
    parser.add_argument("--schedule", default="ring", help="schedule of the laps (default: ring)")
    parser.add_argument("--tile", default="auto", help="tile of the laps (default: auto)")
    parser.add_argument("--sizes", type=_sizes, default=[], metavar="B,B,...", help="message sizes in bytes (default: 8, and on by 16)")
    parser.add_argument("--seconds", type=positive, default=60.0, help="how long it may take, whatever the job's size (default: 60)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    parser.add_argument("--table", action="store_true", help="print tables (the default)")
    parser.add_argument("--plot", metavar="DIR", help="draw the waits and the ring into DIR (needs matplotlib)")
    parser.add_argument("--trace", metavar="DIR", help="write the laps' records and a Chrome trace into DIR")
    parser.add_argument("--save", metavar="FILE", help="write the machine, for ringmpi plan --machine FILE")
    ring_arguments(parser)


def problem(parser: argparse.ArgumentParser, tokens: int | None = None) -> None:
    """The options that say what is computed."""
    parser.add_argument("--tokens", type=whole, default=tokens, help=f"of the whole sequence (default: {tokens or '1024 a rank'})")
    parser.add_argument("--heads", type=whole, default=8)
    parser.add_argument("--kv-heads", type=whole, help="(default: as many as heads)")
    parser.add_argument("--head-dim", type=whole, default=64)
    parser.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    parser.add_argument("--mask", default="causal", choices=["full", "causal"])
    parser.add_argument("--window", type=int, nargs=2, metavar=("L", "R"), help="keys before and after; -1 is no limit")
    parser.add_argument("--layout", default="zigzag", help="contiguous, zigzag or striped (default: zigzag)")


def mask(args: argparse.Namespace) -> Any:
    """The mask that the options ask for."""
    return Mask(causal=args.mask == "causal", window=args.window)


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Exit code 1 if bytes arrived wrong."""
    with job(args) as ring:
        tokens = 1024 * ring.size if args.tokens is None else args.tokens
        attn = RingAttention(ring, tokens, mask=mask(args), layout=args.layout, schedule=args.schedule, tile=args.tile)
        report = survey.profile(attn, random(attn, args), args.sizes, args.seconds)
        if args.trace:
            chrome.save(report.trace, args.trace)
        if ring.rank == 0:
            print(as_json(report) if args.json else "\n\n".join(tables(report)))
            if args.save:
                survey.machine(report, f"{report.ranks} ranks on {len(report.nodes)} nodes, measured").save(args.save)
            if args.plot:
                from ..survey import plot

                print(*plot.profile(report, args.plot), sep="\n")
        return int(any(row.wrong for row in report.timings))


def random(attn: RingAttention, args: argparse.Namespace) -> tuple[np.ndarray, ...]:
    """q, k, v of this rank's rows."""
    draw, rows = np.random.default_rng(attn.ring.rank), len(attn.positions)
    kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    heads = (args.heads, kv_heads, kv_heads)
    return tuple(draw.standard_normal((1, rows, n, args.head_dim), np.float32).astype(io.named(args.dtype)) for n in heads)


def tables(report: Report) -> Iterator[str]:
    """The report in words."""
    job = report.job
    yield (f"{report.ranks} ranks on {len(report.nodes)} nodes; {job['tokens']:,} tokens, {job['heads']} heads of {job['head_dim']}, "
           f"{job['dtype']}, {job['schedule']}; blocks of {job['block']:,} bytes; {report.seconds:.1f} s")  # fmt: skip
    if report.timings:
        head = ("size B", "link", "nodes", "tested", "count", "first us", "time us", "p90 us", "max us", "algbw", "busbw GB/s", "#wrong")
        yield columns(head, [(t.nbytes, f"{t.src}>{t.dst}", "two" if t.between else "one", "together" if t.together else "alone", t.count,
                              *(f"{1e6 * x:.1f}" for x in (t.first, t.p50, t.p90, t.most)), *[f"{t.bandwidth / 1e9:.3f}"] * 2, t.wrong)
                             for t in report.timings])  # fmt: skip
    yield columns(("lap", "laps", "first ms", "ms", "tiles alone ms", "messages alone ms", "share hidden"),
                  [(_way(r.backward), r.laps, *(f"{1e3 * x:.2f}" for x in (r.first, r.both, r.tiles, r.messages)), f"{r.hidden:.2f}")
                   for r in report.laps])  # fmt: skip
    if report.hops:
        yield columns(("hop", "step", "link", "bytes", "ms", "tiles alone ms", "messages alone ms", "share hidden"),
                      [(_way(r.backward), r.step, f"{r.src}>{r.dst}", r.nbytes, *(f"{1e3 * x:.2f}" for x in (r.both, r.tiles, r.messages)),
                        f"{r.hidden:.2f}") for r in report.hops[:256]])  # fmt: skip
        yield by_link(report.trace.links)
    yield "\n".join([v.sentence for v in report.verdicts] or ["No rank and no link stands out."])


def as_json(report: Report) -> str:
    """The report as data: keys ranks, nodes, seconds, job, timings, laps, hops, paces, verdicts, links, steps, waits."""
    rows = {name: [row._asdict() for row in getattr(report, name)] for name in ("timings", "laps", "hops", "paces", "verdicts")}
    return json.dumps({"ranks": report.ranks, "nodes": report.nodes, "seconds": report.seconds, "job": report.job, **rows,
                       **chrome.tables(report.trace)})  # fmt: skip


def _way(backward: bool) -> str:
    return "backward" if backward else "forward"


def _sizes(words: str) -> list[int]:
    return [whole(word) for word in words.split(",")]
