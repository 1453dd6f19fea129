"""A trace as files: each rank's records as JSON lines, and one Chrome trace that opens in Perfetto (ui.perfetto.dev).

In the Chrome trace a rank is a process, in ring order: its steps, its tiles, its waits, and its messages, sent and received, on
as many lines as are under way at once. An arrow is a hop: from where it was posted to where it was seen. Times are the
ring's, in microseconds since the first lap began; an arrow can point back in time by the clocks' error, never more.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from . import Trace, links
from .records import ALL, HopRecord

STEPS, TILES, WAITS, SENDS, RECEIVES = 1, 2, 3, 10, 40
# So many hops of a rank, whole laps of them, are drawn: more is slow to look at.
DRAWN = 8192
# A slice ends this much after its arrow, in microseconds, so that the arrow ends on it.
NUDGE = 0.002


def save(trace: Trace, folder: str, worst: int = 16) -> None:
    """Writes the tables, and the records of the ranks that waited longest. Collective, after recording.

    ``folder`` gets ``tables.txt`` and ``links.json`` (every link and rank), ``rank-N.jsonl`` (a record a line) of ``worst`` ranks,
    each written by its own rank, and ``trace.json`` of the same ranks. Raises on all ranks where one cannot write there, and
    ValueError for a copy of a trace, or one that is still recording: what ranks do together they do with the ring's own.
    """
    seats = trace.seats
    if seats is None:
        raise ValueError("this trace is a copy, or recording has not ended: only the ring's own can be saved by all ranks together")
    seats.agree("save_trace", lambda: _writable(folder))
    first, began = zip(*seats.gather(_window(trace)))
    shown = sorted(sorted(trace.ranks, key=lambda row: -row.exposed)[:worst])
    ranks = [row.rank for row in shown]
    root = trace.rank == trace.order[0]
    if trace.rank in ranks:
        Path(folder, f"rank-{trace.rank}.jsonl").write_text("".join(line + "\n" for line in lines(trace)))
    drawn = list(events(trace, ranks, max(first), min(began))) if trace.rank in ranks else []
    mine = ",\n".join(map(json.dumps, drawn))
    peers = [seats.order.index(rank) for rank in ranks if rank != trace.order[0]]
    came = links.exchange(seats, {} if root or trace.rank not in ranks else {0: mine.encode()}, peers if root else [])
    if root:
        parts = [part for part in (mine, *(text.decode() for text in came.values())) if part]
        Path(folder, "trace.json").write_text('{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(parts) + "\n]}\n")
        Path(folder, "tables.txt").write_text(f"{trace}\n")
        Path(folder, "links.json").write_text(json.dumps(tables(trace), indent=1) + "\n")


def _writable(folder: str) -> dict[str, Any]:
    """Makes a folder; raises OSError where nothing can be written there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder):
        return {}


def tables(trace: Trace) -> dict[str, Any]:
    """The rows of links, steps and ranks as plain data."""
    return {name: [row._asdict() for row in rows] for name, rows in
            (("links", trace.links), ("steps", trace.table), ("ranks", trace.ranks))}  # fmt: skip


def lines(trace: Trace) -> Iterator[str]:
    """The records of a rank, one JSON object a line; times in the ring's time, in seconds."""
    read = trace.clock.read
    yield json.dumps({"record": "rank", "rank": trace.rank, "clock_error": trace.clock.error, "clock_drift": trace.clock.drift})
    timed = ("began", "ended", "posted", "seen")
    for name, records in (("lap", trace.laps), ("step", trace.steps), ("hop", trace.hops), ("tile", trace.tiles), ("wait", trace.waits)):
        for record in records:
            facts = record._asdict() if hasattr(record, "_asdict") else asdict(record)  # type: ignore[call-overload]
            yield json.dumps({"record": name, **{key: read(value) if key in timed else value for key, value in facts.items()}})


def events(trace: Trace, ranks: Sequence[int], lap: int, began: float) -> Iterator[dict[str, Any]]:
    """The Chrome trace events of this rank from a lap on, with arrows to and from ``ranks``; ``began`` is time zero."""
    when = lambda time: round(1e6 * (trace.clock.read(time) - began), 3)  # noqa: E731

    def piece(line: int, name: str, start: float, stop: float, **facts: Any) -> dict[str, Any]:
        ts = when(start)
        return {"ph": "X", "pid": trace.rank, "tid": line, "name": name, "ts": ts, "dur": round(when(stop) - ts, 3), "args": facts}

    yield from _names(trace)
    ends = {record.lap: record.ended for record in trace.laps}
    steps = [step for step in trace.steps if step.lap >= lap]
    for step, after in zip(steps, [*steps[1:], None]):
        stop = after.began if after and after.lap == step.lap else ends[step.lap]
        yield piece(STEPS, f"{_way(step)} step {step.step}", step.began, max(stop, step.began), lap=step.lap)
    for tile in (tile for tile in trace.tiles if tile.lap >= lap):
        yield piece(TILES, f"tile of rank {tile.owner}", tile.began, tile.ended, step=tile.step, query=tile.query, key=tile.key,
                    strips=tile.strips, busy_us=round(1e6 * tile.busy, 3))  # fmt: skip
    for wait in (wait for wait in trace.waits if wait.lap >= lap):
        yield piece(WAITS, "wait", wait.began, wait.ended, step=wait.step, polls=wait.polls)
    for line, hop in _on_lines([hop for hop in trace.hops if hop.lap >= lap], trace.rank):
        to = f"{hop.kind} of rank {hop.owner} {'to' if hop.src == trace.rank else 'from'} {_named(_other(hop, trace.rank))}"
        part = piece(line, to, hop.posted, hop.seen, step=hop.step, walk=hop.walk, part=hop.part, bytes=hop.nbytes, polls=hop.polls,
                     exposed_us=round(1e6 * hop.exposed, 3))  # fmt: skip
        part["dur"] = round(part["dur"] + NUDGE, 3)
        yield part
        if _other(hop, trace.rank) in ranks:
            yield _arrow(hop, trace.rank, line, part["ts"] if hop.src == trace.rank else when(hop.seen))


def _arrow(hop: HopRecord, rank: int, line: int, ts: float) -> dict[str, Any]:
    """One end of a hop's arrow: where it was posted, or where it was seen."""
    ends = {"ph": "s"} if hop.src == rank else {"ph": "f", "bp": "e"}
    return {**ends, "pid": rank, "tid": line, "ts": ts, "name": "hop", "cat": "hop", "id": "-".join(map(str, hop.key))}


def _names(trace: Trace) -> Iterator[dict[str, Any]]:
    """What the rows are called, and their order: the ring's."""
    seat = trace.order.index(trace.rank)
    process = {"ph": "M", "pid": trace.rank, "tid": 0}
    yield {**process, "name": "process_name", "args": {"name": f"rank {trace.rank}, seat {seat}"}}
    yield {**process, "name": "process_sort_index", "args": {"sort_index": seat}}
    used = {SENDS: "sent", RECEIVES: "received"}
    for line, name in {STEPS: "steps", TILES: "tiles", WAITS: "waits", **used}.items():
        yield {**process, "tid": line, "name": "thread_name", "args": {"name": name}}


def _on_lines(hops: Iterable[HopRecord], rank: int) -> Iterator[tuple[int, HopRecord]]:
    """Each hop with the first line on which nothing else is under way."""
    free: dict[int, float] = {}
    for hop in sorted(hops, key=lambda hop: hop.posted):
        line = SENDS if hop.src == rank else RECEIVES
        while free.get(line, 0.0) > hop.posted:
            line += 1
        free[line] = hop.seen + 1e-6 * 2 * NUDGE
        yield line, hop


def _window(trace: Trace) -> tuple[int, float]:
    """The first lap of which every hop is kept and drawn, and when recording began in the ring's time."""
    hops = list(trace.hops)[-DRAWN:]
    whole = len(hops) == len(trace.hops) and len(hops) < (trace.hops.maxlen or 0)
    first = 0 if whole or not hops else hops[0].lap + 1
    return first, trace.clock.read(trace.laps[0].began) if trace.laps else float("inf")


def _other(hop: HopRecord, rank: int) -> int:
    return hop.dst if hop.src == rank else hop.src


def _named(rank: int) -> str:
    return "all" if rank == ALL else f"rank {rank}"


def _way(record: Any) -> str:
    return "backward" if record.backward else "forward"
