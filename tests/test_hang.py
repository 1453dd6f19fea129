"""The tests of whole rings cannot hang, nor pass by accident: a deadlock ends in seconds with every rank's stack."""
import shutil
import time

import pytest
from launch import ROOT, launchers

BAD = '''
import os, signal, time
import numpy as np
import pytest

@pytest.mark.mpi(min_size=3)
def test_deadlock(comm):
    comm.Recv(np.empty(1), source=(comm.rank + 1) % comm.size)

@pytest.mark.mpi(min_size=3)
def test_one_rank_fails(comm):
    assert comm.rank != 1, "rank 1 fails"
    comm.Barrier()

@pytest.mark.mpi(min_size=3)
def test_killed(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Barrier()

@pytest.mark.mpi(min_size=3)
def test_one_rank_leaves_in_silence(comm):
    if comm.rank == 1:
        os._exit(0)
    comm.Barrier()
'''


@pytest.mark.parametrize("mpi", launchers(), ids=lambda mpi: mpi.name)
@pytest.mark.parametrize(
    ("test", "words"),
    [("deadlock", None), ("one_rank_fails", "rank 1 fails"), ("killed", None), ("one_rank_leaves_in_silence", None)],
)
def test_a_bad_test_ends_in_seconds(mpi, test, words, tmp_path):
    (tmp_path / "test_bad.py").write_text(BAD)
    shutil.copy(ROOT / "tests" / "rings" / "conftest.py", tmp_path)
    reports = tmp_path / "reports"
    reports.mkdir()
    began = time.monotonic()
    program = ["-m", "mpi4py", "-m", "pytest", "-q", "--with-mpi", "-p", "no:cacheprovider", tmp_path / "test_bad.py", "-k", test]
    done = mpi.run(3, *program, timeout=40, env={"RINGMPI_REPORTS": str(reports), "RINGMPI_LIMIT": "3"}, cwd=tmp_path)
    assert time.monotonic() - began < 30
    said = [path.read_text() for path in reports.glob("report.*")]
    assert done.returncode != 0 or len(said) < 3, "a bad test passed"
    if words:
        assert words in done.stdout
    if test == "deadlock":
        stacks = [(reports / f"stack.{rank}").read_text() for rank in range(3)]
        assert all("test_deadlock" in stack for stack in stacks)
