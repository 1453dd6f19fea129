"""Whole rings under every MPI: the tests in rings/, on 1 to 5 ranks. Every rank must report success itself."""
import pytest
from launch import ROOT, launchers

RANKS = (1, 2, 3, 4, 5)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("mpi", launchers(), ids=lambda mpi: mpi.name)
def test_rings(mpi, n, tmp_path, pytestconfig):
    slow = ["--all"] if pytestconfig.getoption("--all") else []
    program = ["-m", "mpi4py", "-m", "pytest", "-q", "--with-mpi", ROOT / "tests" / "rings", *slow]
    done = mpi.run(n, *program, timeout=900, env={"RINGMPI_REPORTS": str(tmp_path)})
    reports = [path.read_text() for path in sorted(tmp_path.glob("report.*"))]
    stacks = [f"\nstack of {path.name}\n{path.read_text()}" for path in sorted(tmp_path.glob("stack.*")) if path.stat().st_size]
    evidence = done.stdout[-20_000:] + "".join(stacks)
    assert done.returncode == 0, f"{mpi.name} on {n} ranks: exit code {done.returncode}\n{evidence}"
    assert len(reports) == n and len(set(reports)) == 1, f"{mpi.name} on {n} ranks: reports {reports}\n{evidence}"
    assert "failed=0" in reports[0] and "passed=0" not in reports[0], f"{mpi.name} on {n} ranks: {reports[0]}\n{evidence}"
