"""Traces: what they cost, what they keep, and a Chrome trace of eight ranks. On rings of threads, whose messages come late."""
import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
from time import perf_counter

import chrometrace
import numpy as np
import pytest
from fakes import ring_of_threads
from launch import ROOT

from ringmpi import Ring, RingAttention
from ringmpi.layout import Run
from ringmpi.pairs import Pair
from ringmpi.profile import NOTED, Trace, by_link, chrome, flight, share_hidden
from ringmpi.profile.records import LinkRow
from ringmpi.ring import Message
from ringmpi.schedule import Hop, Visit
from ringmpi.score import Score


def lapped(ring, **rules):
    attn = RingAttention(ring, 131, **rules)
    q, k, v = np.random.default_rng(ring.rank).standard_normal((3, 1, len(attn.positions), 2, 4))
    with attn.record() as trace:
        out, lse = attn.forward(q, k, v)
        attn.backward(out, q, k, v, out, lse)
    return trace


@pytest.mark.parametrize("schedule", ["ring", "bidirectional"])
def test_a_chrome_trace_of_eight_ranks(tmp_path, schedule):
    def body(ring):
        trace = lapped(ring, schedule=schedule, layout="zigzag", mask="causal")
        chrome.save(trace, str(tmp_path))
        return trace

    traces = ring_of_threads(8, body, order=(3, 1, 4, 0, 5, 2, 6, 7))
    arrows = chrometrace.check(str(tmp_path), 8, 2 * max(row.clock_error for row in traces[0].ranks))
    assert len(arrows) == sum(hop.dst == trace.rank for trace in traces for hop in trace.hops)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    seats = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert [rank for rank, _ in sorted(seats.items(), key=lambda at: at[1])] == [3, 1, 4, 0, 5, 2, 6, 7]


def test_files_of_a_trace(tmp_path):
    ring_of_threads(4, lambda ring: chrome.save(lapped(ring), str(tmp_path), worst=2))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len([name for name in names if name.startswith("rank-")]) == 2
    assert {"links.json", "tables.txt", "trace.json"} <= {*names}
    rows = json.loads((tmp_path / "links.json").read_text())
    assert len(rows["links"]) == 4 and len(rows["ranks"]) == 4
    for name in (name for name in names if name.startswith("rank-")):
        records = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert {record["record"] for record in records} >= {"rank", "lap", "step", "hop", "tile"}
        assert all(record["seen"] >= record["posted"] for record in records if record["record"] == "hop")
    assert "exposed" in (tmp_path / "tables.txt").read_text()


def test_waits_add_up_and_are_laid_to_the_hops_waited_for():
    for trace in ring_of_threads(3, lapped):
        assert sum(lap.exposed for lap in trace.laps) == pytest.approx(sum(wait.ended - wait.began for wait in trace.waits))
        for wait in trace.waits:
            seen = [hop.seen for hop in trace.hops if hop.lap == wait.lap and hop.exposed > 0]
            assert not seen or min(seen) <= wait.ended or wait is not trace.waits[-1]
        assert sum(hop.exposed > 0 for hop in trace.hops) > 0
        assert trace.worst[0].exposed == max(hop.exposed for hop in trace.hops if hop.dst == trace.rank)


def test_recording_costs_less_than_a_hundredth_of_tiles_of_a_millisecond():
    """A tile of 1 ms is an event: it may take 10 us, added up, on this interpreter and machine."""
    trace = Trace()
    trace("lap", backward=False)
    trace("step", index=0)
    pair = Pair(slice(0, 8), slice(0, 8), Run(0, 8), Run(0, 8), None, Score())
    visit, best = Visit(0, 0, 0, 0, 0), np.inf
    for _ in range(20):
        began = perf_counter()
        for _ in range(200):
            trace("tile", visit=visit, pair=pair, began=0.0, ended=0.0)
        assert trace.tiles
        best = min(best, (perf_counter() - began) / 200)
    assert best < 10e-6


def test_strips_of_a_pair_are_one_record():
    trace, visit = Trace(), Visit(0, 0, 0, 0, 0)
    pairs = [Pair(slice(0, 8), slice(0, 8), Run(0, 8), Run(8 * i, 8), None, Score()) for i in range(2)]
    trace("lap", backward=False)
    trace("step", index=0)
    for pair, strips in zip(pairs, (NOTED + 5, 3)):
        for i in range(strips):
            trace("tile", visit=visit, pair=pair, began=2.0 * i, ended=2.0 * i + 1)
    trace("end", polls=0, polling=0.0)
    assert [(tile.strips, tile.busy, tile.ended) for tile in trace.tiles] == [(NOTED + 5, NOTED + 5, 2 * NOTED + 9), (3, 3, 5)]
    assert trace.laps[-1].busy == NOTED + 8


def test_a_lap_with_no_messages_polls_nothing():
    with RingAttention(None, 40) as attn, attn.record() as trace:
        attn.forward(*np.ones((3, 1, 40, 1, 4)))
    assert trace.laps[-1].polls == 0 and len(trace.tiles) == 1


def test_not_recording_calls_nothing():
    def body(ring):
        attn = RingAttention(ring, 40)
        assert attn._trace is None
        with attn.record() as trace:
            pass
        assert attn._trace is None
        q = np.ones((1, len(attn.positions), 1, 4))
        attn.forward(q, q, q)
        return len(trace.laps)

    assert ring_of_threads(2, body) == [0, 0]


def test_two_recorders_at_once():
    def body(ring):
        attn, events = RingAttention(ring, 40), []
        q = np.ones((1, len(attn.positions), 1, 4))
        with attn.record() as trace, attn.record(lambda name, **facts: events.append(name)):
            attn.forward(q, q, q)
        return len(trace.laps), events.count("lap")

    assert ring_of_threads(2, body) == [(1, 1), (1, 1)]


def test_the_flight_recorder_writes_only_where_it_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv(flight.FOLDER, raising=False)
    assert flight.recorder(0, (0,)) is None
    monkeypatch.setenv(flight.FOLDER, str(tmp_path))

    def body(ring):
        attn = RingAttention(ring, 40)
        q = np.ones((1, len(attn.positions), 1, 4))
        attn.forward(q, q, q)
        ring.gather("all are done: ranks that are threads write each other's files too")
        ring._seats.alarm(f"rank {ring.rank} has had enough")
        return attn

    kept = ring_of_threads(2, body)
    assert len(kept) == 2
    for rank in range(2):
        head, *hops = [json.loads(line) for line in (tmp_path / f"flight-{rank}.jsonl").read_text().splitlines()]
        assert head["rank"] == rank and "enough" in head["why"]
        assert [(hop["way"], hop["src"], hop["dst"]) for hop in hops].count(("sent", rank, 1 - rank)) == 1
        assert all(hop["posted_age"] >= hop["seen_age"] >= 0 for hop in hops)


def test_a_program_may_listen_for_a_signal(tmp_path, monkeypatch):
    monkeypatch.delenv(flight.FOLDER, raising=False)
    before = signal.getsignal(signal.SIGUSR1)
    with flight.listening(str(tmp_path)), RingAttention(None, 9) as attn:
        attn.forward(*np.ones((3, 1, 9, 1, 4)))
        os.kill(os.getpid(), signal.SIGUSR1)
        head = json.loads((tmp_path / "flight-0.jsonl").read_text().splitlines()[0])
    assert head["why"] == "SIGUSR1" and head["lap"] == 0
    assert flight.recorder(0, (0,)) is None and signal.getsignal(signal.SIGUSR1) == before


def test_attend_writes_a_trace(tmp_path):
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", np.random.default_rng(0).standard_normal((50, 2, 8)))
    done = subprocess.run([sys.executable, "-m", "ringmpi", "attend", *(str(tmp_path / f"{name}.npy") for name in "qkv"), "--causal",
                           "-o", str(tmp_path / "out.npy"), "--trace", str(tmp_path / "trace")],
                          capture_output=True, text=True, check=False, cwd=ROOT)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert chrometrace.check(str(tmp_path / "trace"), 1, 0.0) == {}


def test_a_trace_travels_as_data(tmp_path):
    """Pickled and copied it says the same, without the ring that it came from."""
    def body(ring):
        trace = lapped(ring, schedule="bidirectional")
        return trace, pickle.loads(pickle.dumps(trace)), copy.deepcopy(trace)

    for trace, *copies in ring_of_threads(3, body):
        for its in copies:
            assert its.seats is None and trace.seats is not None and str(its) == str(trace)
            assert repr((its.hops, its.tiles, its.waits, its.laps, its.links, its.worst, its.clock)) == repr(
                (trace.hops, trace.tiles, trace.waits, trace.laps, trace.links, trace.worst, trace.clock))  # fmt: skip
            its("lap", backward=False)
            assert len(its.laps) == len(trace.laps) + 1
            with pytest.raises(ValueError, match="copy"):
                chrome.save(its, str(tmp_path))


def test_a_trace_may_be_pickled_in_the_middle_of_a_lap():
    trace = Trace()
    with RingAttention(None, 9) as attn, attn.record(lambda name, **facts: (trace(name, **facts), pickle.loads(pickle.dumps(trace)))):
        attn.forward(*np.ones((3, 1, 9, 1, 4)))
    assert len(trace.tiles) == 1


def test_of_several_flight_recorders_the_last_in_a_lap_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv(flight.FOLDER, str(tmp_path))
    gc.collect()  # what other tests left behind
    attns = [RingAttention(None, 9 + i) for i in range(5)]
    for i in (3, 1, 4):
        for _ in range(i):
            attns[i].forward(*np.ones((3, 1, 9 + i, 1, 4)))
        flight.write("asked")
        heads = [json.loads(line) for line in (tmp_path / "flight-0.jsonl").read_text().splitlines()]
        assert heads[0]["lap"] == i - 1
    assert [head["lap"] for head in heads] == [3, 0, 2]


def test_a_signal_in_the_midst_of_adding_up_finds_the_trace_whole(tmp_path, monkeypatch):
    """It writes what was added up before; nothing is added twice, left out or out of order."""
    monkeypatch.delenv(flight.FOLDER, raising=False)

    def recorded(trace):
        for lap in range(3):
            trace("lap", backward=bool(lap % 2))
            for step in range(5):
                trace("step", index=step)
                message = Message(False, "block", Hop(step, 0, 0, 0, 0, 0, 0))
                trace("post", message=message, nbytes=8, polls=0, polling=0.0)
                trace("tile", visit=Visit(0, 0, 0, 0, 0), pair=Pair(slice(0, 8), slice(0, 8), Run(0, 8), Run(0, 8), None, Score()),
                      began=0.0, ended=1.0)
                trace("done", message=message, nbytes=8, polls=0, polling=0.0)
                trace("wait", messages=[message], began=0.0, ended=0.5, polls=1)
            trace("end", polls=5, polling=0.5)
        return ([lap.busy for lap in trace.laps], [step.step for step in trace.steps], [hop.step for hop in trace.hops],
                [tile.strips for tile in trace.tiles], [wait.step for wait in trace.waits])  # fmt: skip

    expected, heads = recorded(Trace()), []
    with flight.listening(str(tmp_path)):
        trace = flight.recorder(0, (0,))

        def interrupted(name, take):
            def on(*now, **facts):
                os.kill(os.getpid(), signal.SIGUSR1)
                take(*now, **facts)
                os.kill(os.getpid(), signal.SIGUSR1)
                heads.append(json.loads((tmp_path / "flight-0.jsonl").read_text().splitlines()[0]))

            return on

        trace._take = {name: interrupted(name, take) for name, take in trace._take.items()}
        assert recorded(trace) == expected
    assert len(heads) == 3 * (2 + 5 * 5) and all(head["why"] == "SIGUSR1" for head in heads)


def test_what_was_recorded_before_a_failure_can_be_read(tmp_path, monkeypatch):
    def body(ring):
        attn = RingAttention(ring, 40)
        q, pairs = np.ones((1, len(attn.positions), 1, 4)), attn.work.pairs
        attn.work.pairs = lambda *what: pairs(*what) if what[2] == ring.rank else 1 / 0
        with pytest.raises(ZeroDivisionError), attn.record() as trace:
            attn.forward(q, q, q)
        assert [tile.owner for tile in trace.tiles] == [ring.rank] and trace.laps[-1].ended == 0.0 and trace.links == []
        with pytest.raises(ValueError, match="has not ended"):
            chrome.save(trace, str(tmp_path))
        return len(trace.flying()) + len(trace.hops), json.loads(next(chrome.lines(trace)))["rank"]

    assert ring_of_threads(2, body) == [(2, 0), (2, 1)]


@pytest.mark.parametrize("made", [Ring, lambda: RingAttention(None, 9)])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_rings_are_not_copied(made, copied):
    with made() as ring, pytest.raises(TypeError, match="one owner"):
        copied(ring)


@pytest.mark.parametrize("words", [["--ranks", "16", "--tokens", "65536"], ["--machine", "a100", "--json", "--window", "4096", "0"]])
def test_plan_needs_no_mpi(words):
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "ringmpi", "plan", *words], capture_output=True, text=True,
                          check=False, cwd=ROOT)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "mpi4py" not in done.stderr and ("hides from" in done.stdout or json.loads(done.stdout)["prices"])


def test_share_hidden_is_of_what_three_laps_took():
    assert share_hidden(both=2.0, compute=1.0, messages=1.0) == 0
    assert share_hidden(both=1.0, compute=1.0, messages=1.0) == 1
    assert share_hidden(both=2.5, compute=1.0, messages=1.0) == -0.5
    assert np.isnan(share_hidden(both=1.0, compute=1.0, messages=0.01))


def test_a_table_of_links():
    row = LinkRow(0, 1, 3, 3000, 1e-3, 2e-3, 3e-3, 4e-3, 1e6, 5e-3)
    head, line = by_link([row]).splitlines()
    assert head.split() == ["link", "count", "bytes", "p50", "us", "p90", "us", "p99", "us", "max", "us", "GB/s", "exposed", "ms"]
    assert line.split() == ["0>1", "3", "3000", "1000.0", "2000.0", "3000.0", "4000.0", "0.001", "5.000"]
