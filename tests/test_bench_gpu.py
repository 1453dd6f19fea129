"""``bench/gpu.sh`` where there is no GPU: what it refuses, what it writes, and that one part's failure is not the end of the others."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringmpi.tiles import cuda

ROOT = Path(__file__).resolve().parents[1]
PARTS = ["versions", "compile", "probe", "tile", "libraries", "ring-1", "ring-2", "ring-4", "speed"]


def gpu_sh(*words, python=sys.executable, path=None, timeout=60):
    environ = {**os.environ, "PYTHON": str(python), "PATH": f"{path or Path(sys.executable).parent}:{os.environ['PATH']}"}
    environ.pop("RINGMPI_GPU", None)
    command = ["bash", "bench/gpu.sh", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=timeout)


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def written(folder):
    """The texts of the one result, by name of part."""
    [result] = folder.iterdir()
    return {path.stem: path.read_text() for path in result.iterdir()}


@pytest.mark.skipif(cuda.device() is not None, reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    done = gpu_sh(tmp_path / "results")
    assert done.returncode == 3 and "no GPU that CuPy can use, so nothing was run and nothing written: " in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("words", [("--dry-run",), ("--unknown",), ("a", "b"), ("--dry-run", "a", "b")])
def test_other_words_are_refused(tmp_path, words):
    done = gpu_sh(*words)
    assert done.returncode == 2 and "bash bench/gpu.sh --dry-run RESULTS" in done.stderr


def test_every_part_is_run_and_written_whole(tmp_path):
    """With a Python that does nothing."""
    program(tmp_path / "mpiexec", 'shift 2; exec "$@"')
    done = gpu_sh("--dry-run", tmp_path / "results", python=program(tmp_path / "python", 'echo "asked $*"'), path=tmp_path)
    files = written(tmp_path / "results")
    assert done.returncode == 0 and sorted(files) == sorted([*PARTS, "summary"])
    assert all("asked " in files[part] and files[part].endswith("\npassed\n") for part in PARTS)
    assert [line.split()[0] for line in files["summary"].splitlines()] == [*PARTS, "memcheck", "racecheck"]
    assert "no GPU was used, and no figure above means anything" in done.stdout


def test_a_part_that_fails_is_told_of_and_the_others_run(tmp_path):
    python = program(tmp_path / "python", 'case "$*" in *test_cuda_tile*) echo "it broke"; exit 4 ;; *mpi4py*) exit 1 ;; esac')
    done = gpu_sh("--dry-run", tmp_path / "results", python=python, path=tmp_path)
    files = written(tmp_path / "results")
    assert done.returncode == 1 and "it broke" in done.stdout and files["tile"] == "it broke\nfailed\n"
    assert files["speed"] == "passed\n" and "ring        left out: no mpiexec" in files["summary"] and "ring-1" not in files


@pytest.mark.slow
def test_a_dry_run_passes(tmp_path):
    done = gpu_sh("--dry-run", tmp_path / "results", timeout=600)
    assert done.returncode == 0, done.stdout
    assert "bfloat16          64          40      causal" in written(tmp_path / "results")["speed"]
