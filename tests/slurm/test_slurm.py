"""jobs/cpu.sbatch under a real Slurm: munge, slurmctld and four slurmd on this machine, started for these tests."""
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from launch import LIBFABRIC, ROOT, launchers

HERE, DATA = Path(__file__).parent, ROOT / "tests" / "data"
PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge"
# Its MPI starts under Slurm by pmi2. Open MPI's needs PMIx, which several nodes of one host name are too close together for.
MPICH = next((mpi for mpi in launchers() if mpi.name == "mpich"), None)
# By UCX its addresses, whose unused bytes are whatever was in memory, may make a line that is too long for Slurm's end of pmi2: jobs
# then hang while they start. Hence LIBFABRIC.
FINAL = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")


def install():
    """Installs Slurm where it is not; says why it cannot be had, or nothing."""
    if os.geteuid() != 0:
        return "slurmd must be started by root"
    if MPICH is None:
        return "only MPICH is started by Slurm here"
    if all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))):
        return ""
    if shutil.which("apt-get") is None:
        return "there is no Slurm, and no apt-get to install it"
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in ("update -qq", f"install -y -qq --no-install-recommends {PACKAGES}"):
        done = subprocess.run(["apt-get", *words.split()], env=quiet, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"apt-get {words}: {done.stderr[-300:]}"
    return ""


class Job(NamedTuple):
    """A job that was submitted: its number, its output, and how to ask for it."""

    number: str
    output: Path
    environment: dict

    def facts(self):
        """What Slurm knows of it."""
        command = ["scontrol", "show", "job", "-o", self.number]
        said = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def wait_for(self, found, seconds, what):
        """Returns what ``found(facts)`` gives once it gives something."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if value := found(self.facts()):
                return value
            time.sleep(0.1)
        pytest.fail(f"job {self.number}: no {what} in {seconds} s: {self.facts()}\n{self.text()}")

    def ended(self, seconds=60):
        """Its state, exit code and signal, once it has ended."""
        facts = self.wait_for(lambda facts: facts["JobState"] in FINAL and facts, seconds, "end")
        return facts["JobState"], *map(int, facts["ExitCode"].split(":"))

    def computing(self, seconds=60):
        """The processes of its ranks, by rank, once they are past the agreements: their output stands under another name."""
        self.wait_for(lambda facts: list(self.output.parent.glob("out.npy.*.part")), seconds, "output under way")
        return self._processes()

    def text(self):
        return self.output.read_text() if self.output.exists() else "(no output)"

    def _processes(self):
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = dict(word.split("=", 1) for word in (process / "environ").read_text().split("\0") if "=" in word)
                if words.get("SLURM_JOB_ID") == self.number and b"ringmpi" in (process / "cmdline").read_bytes().split(b"\0"):
                    found[int(words["SLURM_PROCID"])] = int(process.name)
            except (OSError, UnicodeError, KeyError):
                continue
        return found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Slurm, up; gives the environment in which its commands find it."""
    if why := install():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("slurm")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
    ports = [str(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    try:
        done = subprocess.run([HERE / "up.sh", folder, *ports], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        yield {**os.environ, **LIBFABRIC, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT), "PYTHON": MPICH.python}
    finally:
        subprocess.run([HERE / "down.sh", folder], timeout=60, check=False)


@pytest.fixture
def submit(slurm, tmp_path):
    """Submits jobs/cpu.sbatch as it stands, eight ranks on four nodes unless told otherwise."""

    def do(*words, options=(), **environment):
        output, found = tmp_path / "job.out", {**slurm, **environment}
        shape = ("--nodes=4", "--ntasks-per-node=2", "--cpus-per-task=1", *options)
        command = ["sbatch", "--parsable", f"--chdir={ROOT}", f"--output={output}", *shape, ROOT / "jobs" / "cpu.sbatch", *map(str, words)]
        done = subprocess.run(command, env=found, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        jobs.append(Job(done.stdout.strip(), output, slurm))
        return jobs[-1]

    jobs = []
    yield do
    for job in jobs:
        subprocess.run(["scancel", job.number], env=slurm, check=False)


@pytest.fixture
def long(tmp_path):
    """The words of a command that computes for minutes."""
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", np.ones((300_000, 16), np.float32))
    return ("attend", *(tmp_path / f"{name}.npy" for name in "qkv"), "-o", tmp_path / "out.npy", "--tile", "numpy")


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir() if path.name not in ("q.npy", "k.npy", "v.npy", "job.out"))


def test_attention_of_files(submit, tmp_path):
    job = submit("attend", *(DATA / f"{name}.npy" for name in "qkv"), "--causal", "--dtype", "float32",
                 "-o", tmp_path / "out.npy", "--lse", tmp_path / "lse.npy")  # fmt: skip
    assert job.ended() == ("COMPLETED", 0, 0), job.text()
    assert np.abs(np.load(tmp_path / "out.npy")[:, ::8] - np.load(DATA / "out_causal_every8.npy")).max() < 2e-5
    assert np.abs(np.load(tmp_path / "lse.npy") - np.load(DATA / "lse_causal.npy")).max() < 2e-5
    assert "2,048" in job.text() and "exposed" in job.text()


def test_a_program_of_ones_own_and_where_its_ranks_are(submit):
    job = submit(HERE / "where.py", "a", "b c")
    assert job.ended() == ("COMPLETED", 0, 0), job.text()
    found = json.loads(job.text().splitlines()[-1])
    assert found["words"] == ["a", "b c"]
    assert [seen["rank"] for seen in found["ranks"]] == list(range(8))
    assert [seen["node"] for seen in found["ranks"]] == ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"]
    leaf = {"n1": "leaf0", "n2": "leaf1", "n3": "leaf0", "n4": "leaf1"}
    assert all(seen["address"] == f"spine.{leaf[seen['node']]}.{seen['node']}" for seen in found["ranks"])
    assert all(len(seen["cores"]) == 1 and seen["threads"] == "1" for seen in found["ranks"])
    assert [len({tuple(seen["cores"]) for seen in found["ranks"][i : i + 2]}) for i in range(0, 8, 2)] == [2] * 4
    assert found["nodes"] == [2, 2, 2, 2]
    # The ring goes through one leaf switch and then the other: n1, n3, n2, n4.
    assert found["order"] == [0, 1, 4, 5, 2, 3, 6, 7]


def test_the_order_says_where_it_comes_from(submit):
    job = submit("order")
    assert job.ended() == ("COMPLETED", 0, 0), job.text()
    assert "0 1 4 5 2 3 6 7" in job.text() and "SLURM_TOPOLOGY_ADDR: switches" in job.text()


def test_what_is_refused_is_said_once_with_exit_code_2(submit, tmp_path):
    job = submit("attend", tmp_path / "nothing.npy", DATA / "k.npy", DATA / "v.npy", "-o", tmp_path / "out.npy")
    assert job.ended()[:2] == ("FAILED", 2), job.text()
    assert job.text().count("nothing.npy") == 1 and "Traceback" not in job.text()
    assert leftovers(tmp_path) == []


def test_the_wrong_pmi_is_refused(submit, tmp_path):
    words = (DATA / f"{name}.npy" for name in "qkv")
    job = submit("attend", *words, "-o", tmp_path / "out.npy", PMI="none")
    # 143 where the others were ended by the first to leave, which is the one that says why.
    assert job.ended()[:2] in (("FAILED", 2), ("FAILED", 143)), job.text()
    assert job.text().count("each of them is alone") == 1 and leftovers(tmp_path) == []


def test_an_exception_on_one_rank_ends_a_program(submit, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 3:\n    1 / 0\nMPI.COMM_WORLD.Barrier()\n")
    job = submit(program)
    state, code, _ = job.ended(30)
    assert state == "FAILED" and code != 0 and "ZeroDivisionError" in job.text()


def test_the_death_of_a_rank_ends_the_job_at_once(submit, long, tmp_path):
    job = submit(*long)
    ranks = job.computing()
    os.kill(ranks[5], signal.SIGKILL)
    began = time.monotonic()
    state, code, _ = job.ended(30)
    assert state == "FAILED" and code != 0 and time.monotonic() - began < 15
    assert "task 5: Killed" in job.text(), job.text()
    assert "out.npy" not in leftovers(tmp_path)


def test_the_time_limit_ends_the_job_with_a_word_and_no_output(submit, long, tmp_path):
    job = submit(*long)
    job.computing()
    # Slurm's limits are minutes, and are looked at twice a minute; the end of a job may be set to the second.
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 1))
    subprocess.run(["scontrol", "update", f"JobId={job.number}", f"EndTime={soon}"], env=job.environment, check=True)
    assert job.ended(60)[0] == "TIMEOUT", job.text()
    assert "DUE TO TIME LIMIT" in job.text()
    assert leftovers(tmp_path) == []
