"""Whole rings: pytest-mpi tests, started under mpiexec by tests/test_rings.py.

A rank whose test fails says so and ends the job, for the others would wait for it. A test that hangs is ended after
``LIMIT`` seconds with the stacks of all ranks. Every rank leaves a report of its own: an exit code alone proves nothing.
"""
import faulthandler
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from mpi4py import MPI

import ringmpi

LIMIT = float(os.environ.get("RINGMPI_LIMIT", "30"))
REPORTS = Path(os.environ.get("RINGMPI_REPORTS") or tempfile.mkdtemp())
RANK = MPI.COMM_WORLD.rank
counts = {"passed": 0, "skipped": 0, "failed": 0}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    limit = LIMIT * (10 if item.get_closest_marker("slow") else 1)
    with open(REPORTS / f"stack.{RANK}", "w") as stack:
        faulthandler.dump_traceback_later(limit, exit=False, file=stack)
        end = threading.Timer(limit + 1, lambda: os._exit(124))
        end.daemon = True
        end.start()
        try:
            return (yield)
        finally:
            end.cancel()
            faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        counts[report.outcome] += 1
    if report.failed:
        sys.__stderr__.write(f"[rank {RANK}] FAILED {report.nodeid} ({report.when})\n{report.longreprtext}\n")
        sys.__stderr__.flush()
        time.sleep(0.5)
        MPI.COMM_WORLD.Abort(1)


def pytest_sessionfinish():
    words = " ".join(f"{outcome}={n}" for outcome, n in counts.items())
    (REPORTS / f"report.{RANK}").write_text(words)


@pytest.fixture
def comm():
    """All ranks, on a communicator of this test's own."""
    own = MPI.COMM_WORLD.Dup()
    yield own
    own.Free()


@pytest.fixture
def ring(comm):
    with ringmpi.Ring(comm, timeout=10) as made:
        yield made
