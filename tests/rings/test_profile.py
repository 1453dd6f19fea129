"""Recording on real ranks: what is written down is what the schedule does, on clocks that agree."""
import json
import os
import signal
import time

import chrometrace
import numpy as np
import pytest

import ringmpi
from ringmpi import profile, survey
from ringmpi.comm import Seats
from ringmpi.partial import Partial
from ringmpi.plan.machine import Tile
from ringmpi.profile import chrome, flight, links
from ringmpi.survey import calibrate
from ringmpi.tiles import numpy as numpy_tile

TOKENS = 301


def comm():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def recorded(ring, laps=2, **rules):
    """A trace of some laps forward and backward, and the plan they ran."""
    attn = ringmpi.RingAttention(ring, TOKENS, **rules)
    n = len(attn.positions)
    q, k, v = np.random.default_rng(ring.rank).standard_normal((3, 1, n, 2, 8))
    with attn.record() as trace:
        for _ in range(laps):
            out, lse = attn.forward(q, k, v)
            attn.backward(out, q, k, v, out, lse)
    return attn, trace


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("schedule", ["ring", "bidirectional"])
@pytest.mark.parametrize("mask", ["full", "causal", ringmpi.Mask(causal=True, window=(20, 0))])
def test_every_hop_of_the_column_is_recorded_once_a_lap(schedule, mask):
    with ringmpi.Ring(comm()) as ring:
        attn, trace = recorded(ring, schedule=schedule, mask=mask)
        order = ring.order
        blocks = sorted((step.index, hop.walk, order[hop.owner], order[hop.peer])
                        for step in attn.column.steps for hop in step.receives)  # fmt: skip
        homes = sum(visit.source is not None for step in attn.column.steps for visit in step.visits)
        for lap in trace.laps:
            mine = [hop for hop in trace.hops if hop.lap == lap.lap and hop.dst == ring.rank]
            assert sorted((hop.step, hop.walk, hop.owner, hop.src) for hop in mine if hop.kind == "block") == blocks
            assert sum(hop.kind != "block" for hop in mine) == homes * lap.backward
        visited = {(visit.step, visit.walk, order[visit.owner]) for step in attn.column.steps for visit in step.visits
                   if visit.slot is not None and list(attn.work.pairs(attn.strips, attn.work.score, order[visit.owner], visit.part,
                                                                      attn.schedule.parts))}  # fmt: skip
        assert {(tile.step, tile.walk, tile.owner) for tile in trace.tiles} == visited


@pytest.mark.mpi(min_size=2)
def test_both_ends_of_a_hop_meet():
    with ringmpi.Ring(comm()) as ring:
        _, trace = recorded(ring)
        came = [hop for hop in trace.hops if hop.dst == ring.rank]
        assert came
        worst = max(row.clock_error for row in trace.ranks)
        for hop in came:
            assert -2 * worst <= hop.flight <= hop.seen - hop.posted + 2 * worst
            assert 0 <= hop.exposed <= hop.seen - trace.laps[0].began
        assert all(np.isnan(hop.flight) for hop in trace.hops if hop.src == ring.rank)


@pytest.mark.mpi(min_size=2)
def test_the_rows_are_the_same_on_all_ranks_and_add_up():
    with ringmpi.Ring(comm()) as ring:
        _, trace = recorded(ring, mask="full")
        rows = comm().allgather((trace.links, trace.table, trace.ranks))
        assert all(row == rows[0] for row in rows)
        sent = comm().allreduce(sum(hop.nbytes for hop in trace.hops if hop.src == ring.rank))
        assert sum(row.nbytes for row in trace.links) == sum(row.nbytes for row in trace.table) == sent
        assert len(trace.links) == ring.size if ring.size > 2 else 2
        mine = trace.ranks[ring.rank]
        assert mine.laps == 4
        assert mine.busy == pytest.approx(sum(tile.busy for tile in trace.tiles))
        assert mine.exposed == pytest.approx(sum(wait.ended - wait.began for wait in trace.waits))
        assert mine.busy + mine.exposed <= mine.total


@pytest.mark.mpi(min_size=2)
def test_recording_changes_no_bit():
    with ringmpi.Ring(comm()) as ring:
        attn = ringmpi.RingAttention(ring, TOKENS, mask="causal")
        q, k, v = np.random.default_rng(ring.rank).standard_normal((3, 1, len(attn.positions), 2, 8))
        plain = attn.forward(q, k, v)
        with attn.record():
            watched = attn.forward(q, k, v)
        assert all(np.array_equal(a, b) for a, b in zip(plain, watched))


@pytest.mark.mpi(min_size=2)
def test_clocks_that_start_anywhere_and_drift_are_aligned(monkeypatch):
    rank = comm().rank
    theirs = lambda: time.perf_counter() * (1 + 1e-3 * rank) + 1000.0 * rank  # noqa: E731
    monkeypatch.setattr(links, "perf_counter", theirs)
    with ringmpi.Ring(comm()) as ring:
        began = links.mark(ring._seats)
        time.sleep(0.2)
        clock = links.Clock(began, links.mark(ring._seats))
        shared = comm().bcast(time.perf_counter(), root=ring.order[0])
        own = shared * (1 + 1e-3 * rank) + 1000.0 * rank
        root = shared * (1 + 1e-3 * ring.order[0]) + 1000.0 * ring.order[0]
        extrapolated = abs(root - clock.read(own)) * 0.2 / max(0.2, own - began.at)
        assert extrapolated <= 2 * clock.error + 1e-9
        assert clock.error < 0.1
        assert clock.drift == pytest.approx((1 + 1e-3 * ring.order[0]) / (1 + 1e-3 * rank) - 1, abs=2 * clock.error / 0.2 + 1e-9)


@pytest.mark.mpi(min_size=1)
def test_memory_is_bounded_but_sums_are_whole(monkeypatch):
    monkeypatch.setattr(profile.Trace.__init__, "__defaults__", (0, (0,), 6))
    with ringmpi.Ring(comm()) as ring:
        _, trace = recorded(ring, laps=5)
        assert max(map(len, (trace.laps, trace.hops, trace.tiles, trace.waits, trace.steps))) <= 6
        assert trace.ranks[ring.rank].laps == 10
        visits = ring.size - 1
        assert sum(row.count for row in trace.links) == ring.size * 5 * (visits + visits + visits)
        assert len(trace.worst) <= profile.WORST * 2


@pytest.mark.mpi(min_size=2)
def test_exchange_brings_every_byte_even_none():
    with ringmpi.Ring(comm()) as ring:
        seats, n = ring._seats, ring.size
        given = {seat: bytes([seats.seat]) * (1000 * seat) for seat in range(n) if seat != seats.seat}
        came = links.exchange(seats, given, [seat for seat in range(n) if seat != seats.seat])
        assert came == {seat: bytes([seat]) * (1000 * seats.seat) for seat in range(n) if seat != seats.seat}


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("worst", [16, 1])
def test_the_chrome_trace_is_whole(tmp_path_factory, worst):
    folder = comm().bcast(str(tmp_path_factory.mktemp("trace")))
    with ringmpi.Ring(comm()) as ring:
        _, trace = recorded(ring, schedule="bidirectional")
        chrome.save(trace, folder, worst=worst)
        comm().Barrier()
        if ring.rank == ring.order[0]:
            chrometrace.check(folder, min(worst, ring.size), 2 * max(row.clock_error for row in trace.ranks))


@pytest.mark.mpi(min_size=2)
def test_a_time_out_leaves_the_last_hops_of_every_rank(tmp_path_factory, monkeypatch):
    """The last rank stops in the middle of a lap: the others write where they stood."""
    folder = comm().bcast(str(tmp_path_factory.mktemp("flight")))
    monkeypatch.setenv(flight.FOLDER, folder)
    ring = ringmpi.Ring(comm(), timeout=1.0)
    attn = ringmpi.RingAttention(ring, TOKENS)
    q, k, v = np.ones((3, 1, len(attn.positions), 2, 8))
    if ring.rank == ring.size - 1:
        monkeypatch.setattr(attn.work, "pairs", lambda *_: 1 / 0)
    with pytest.raises((ringmpi.RingTimeout, ZeroDivisionError)):
        attn.forward(q, k, v)
    comm().Barrier()
    if ring.rank != ring.size - 1:
        with open(f"{folder}/flight-{ring.rank}.jsonl") as file:
            head, *hops = map(json.loads, file)
        assert "given up" in head["why"] or "nothing came" in head["why"]
        assert head["rank"] == ring.rank and not head["backward"]
        assert {hop["state"] for hop in hops} >= {"under way"}
    ring.close()


@pytest.mark.mpi(min_size=2)
def test_a_signal_in_the_midst_of_a_lap_disturbs_nothing(tmp_path_factory, monkeypatch):
    """SIGUSR1 at every event of every rank: each time it writes where it stands, and the results are the same to the bit."""
    monkeypatch.delenv(flight.FOLDER, raising=False)
    folder = comm().bcast(str(tmp_path_factory.mktemp("flight")))
    heads = []

    def interrupt(name, **facts):
        os.kill(os.getpid(), signal.SIGUSR1)
        with open(f"{folder}/flight-{ring.rank}.jsonl") as file:
            heads.append(json.loads(next(file)))

    with ringmpi.Ring(comm()) as ring, flight.listening(folder):
        attn = ringmpi.RingAttention(ring, TOKENS, schedule="bidirectional", mask="causal")
        q, k, v, dout = np.random.default_rng(ring.rank).standard_normal((4, 1, len(attn.positions), 2, 8))
        quiet, disturbed = [], []
        for found, into in ((quiet, lambda name, **facts: None), (disturbed, interrupt)):
            with attn.record(into):
                out, lse = attn.forward(q, k, v)
                found += [out, lse, *attn.backward(dout, q, k, v, out, lse)]
    assert all(np.array_equal(a, b) for a, b in zip(quiet, disturbed))
    assert {head["why"] for head in heads} == {"SIGUSR1"} and len({head.get("step") for head in heads}) > 1
    assert {head["backward"] for head in heads} == {False, True}


@pytest.mark.mpi(min_size=2)
def test_a_profile_checks_its_bytes_and_keeps_its_time():
    with ringmpi.Ring(comm()) as ring:
        attn = ringmpi.RingAttention(ring, TOKENS, schedule="bidirectional", mask="causal")
        q, k, v = np.random.default_rng(ring.rank).standard_normal((3, 1, len(attn.positions), 2, 8))
        report = survey.profile(attn, (q, k, v), sizes=[8, 1000], seconds=1.0)
        block = comm().allreduce(k.nbytes + v.nbytes, op=MPI_MAX())
        assert {row.nbytes for row in report.timings if not row.together} == {8, 1000, block}
        assert {(row.src, row.dst) for row in report.timings} == {(r, ring.order[(i + 1) % ring.size]) for i, r in enumerate(ring.order)}
        assert all(row.wrong == 0 and row.count >= 3 and row.low <= row.p50 <= row.p90 <= row.most for row in report.timings)
        assert all(row.both > 0 and row.tiles > 0 and row.messages > 0 and row.laps >= 3 for row in report.laps)
        assert report.seconds < 15
        everyone = comm().allgather((report.timings, report.laps, report.hops, report.paces, report.verdicts))
        assert all(repr(rank) == repr(everyone[0]) for rank in everyone)
        its = survey.machine(report, "this job")
        assert its.inside.bandwidth > 0 and its.tile("float64").forward > 0


@pytest.mark.mpi(min_size=2)
def test_ranks_whose_clocks_differ_run_the_same_number_of_laps():
    """The last rank believes that it has no time, the first that it has plenty: nobody is left waiting for a lap."""
    with ringmpi.Ring(comm()) as ring:
        attn = ringmpi.RingAttention(ring, TOKENS)
        arrays = np.ones((3, 1, len(attn.positions), 2, 8))
        seconds = 0.2 * (ring.size - 1 - ring.rank)
        count = survey.Laps(attn, arrays).run(seconds)
        assert set(comm().allgather(count)) == {3}
        calibrate._lone(attn, list(arrays), seconds)
        comm().Barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stolen", [0.0, 4e-7])
def test_what_hops_take_from_a_core_is_measured(monkeypatch, stolen):
    """Tiles that sleep for their time, and longer by so much for every byte that moves: that much is found, and nothing in hops alone."""
    with ringmpi.Ring(comm()) as ring:
        attn = ringmpi.RingAttention(ring, 256 * ring.size, tile="numpy")
        arrays = np.ones((3, 1, 256, 1, 8), np.float32)
        hop, moved = arrays[1:].nbytes, []

        def strips(q, k, v, pair):
            time.sleep(4e-3 + stolen * sum(moved))
            moved.clear()
            yield (slice(0),) * 3, Partial.empty((0, 0, 0, 8), q.dtype)

        def counted(move):
            return lambda seats, buffer, seat, tag: (moved.append(len(buffer) * (len(buffer) == hop)), move(seats, buffer, seat, tag))[1]

        monkeypatch.setattr(numpy_tile, "forward", strips)
        for name in ("send", "receive"):
            monkeypatch.setattr(Seats, name, counted(getattr(Seats, name)))
        timing = links.Timing(0, 1, False, hop, True, 3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 0)
        timings = [timing, timing._replace(together=False, nbytes=8, p50=1e-6)]
        found = calibrate.core(attn, arrays, timings, Tile(2 * 256**2 * 16 / 4e-3, 1.0), 0.5)
        assert comm().allgather(found) == [found] * ring.size
        assert found == pytest.approx(stolen, abs=1e-7)


@pytest.mark.mpi(min_size=2)
def test_bytes_that_arrive_wrong_are_counted(monkeypatch):
    sent = links.pattern
    with ringmpi.Ring(comm()) as ring:
        report = survey.Report(ring.size, ring.nodes, False, 0.0, {})
        if ring._seats.seat == 0:
            monkeypatch.setattr(links, "pattern", lambda n, seed: sent(n, seed) + (np.arange(n) == 3) * np.uint8(seed == 0))
        rows = survey.alone(ring._seats, report, [64], 0.1)
        assert {row.src: row.wrong for row in rows} == {rank: int(rank == ring.order[0]) for rank in ring.order}


def MPI_MAX():
    from mpi4py import MPI

    return MPI.MAX
