"""The command line: results, and everything it refuses: exit code 2, one message, no traceback, no output, nobody left behind."""
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
from launch import OPENMPI, QUIET, ROOT, launchers, run
from oracle import close, problem

from ringmpi import Mask, cli, comm, io

FAULTY = ROOT / "tests" / "faulty.py"
TOKENS = 61
HERE = pytest.mark.parametrize("mpi", launchers(), ids=lambda mpi: mpi.name)


@pytest.fixture
def files(tmp_path):
    """q, k, v and dout in files, and the problem they are of."""
    given = problem(TOKENS, batch=1, dtype=np.float32)
    for name in ("q", "k", "v", "dout"):
        np.save(tmp_path / f"{name}.npy", getattr(given, name))
    return tmp_path, given


def words(folder, *more, out="out.npy"):
    return ["attend", *(str(folder / f"{name}.npy") for name in "qkv"), "-o", str(folder / out), *map(str, more)]


def everything(folder):
    return [*words(folder), "--lse", str(folder / "lse.npy"), "--backward", str(folder / "dout.npy"), "--grads", str(folder / "g")]


def outputs(folder):
    names = ("out.npy", "lse.npy", "g/dq.npy", "g/dk.npy", "g/dv.npy")
    return [np.load(folder / name) for name in names]


def left(folder):
    """The files that are there beside the inputs."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.stem not in ("q", "k", "v", "dout")]
    return sorted(str(path.relative_to(folder)) for path in found)


def alone(monkeypatch, capsys, words):
    """Runs the command line in this process, without MPI: its exit code, and what it said on standard error."""
    monkeypatch.setattr(comm, "world", lambda: None)
    code = cli.main([str(word) for word in words])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.err


# ------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize(
    "options, mask",
    [
        ([], Mask()),
        (["--causal", "--layout", "striped", "--schedule", "bidirectional"], Mask(causal=True)),
        (["--causal", "--window", 3, -1, "--keep-first", 2, "--layout", "contiguous"], Mask(causal=True, window=(3, None), keep_first=2)),
        (["--causal", "--documents", "documents.npy", "--prefix", 4], Mask(causal=True, documents=(0, 9, 40, TOKENS), prefix=4)),
        (["--kv-range", "kv.npy"], Mask(kv_range=[33])),
    ],
)
def test_attend_alone(monkeypatch, capsys, files, options, mask):
    folder, given = files
    np.save(folder / "documents.npy", [0, 9, 40, TOKENS])
    np.save(folder / "kv.npy", [33])
    options = [folder / word if str(word).endswith(".npy") else word for word in options]
    assert alone(monkeypatch, capsys, [*everything(folder), *options]) == (0, "")
    for found, right in zip(outputs(folder), given.solve(mask)):
        close(found, right)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_fewer_dimensions(monkeypatch, capsys, tmp_path, dimensions):
    given = problem(TOKENS, heads=1 if dimensions == 2 else 4, kv_heads=1 if dimensions == 2 else 2, batch=1)
    cut = {2: lambda x: x[0, :, 0], 3: lambda x: x[0]}[dimensions]
    for name in ("q", "k", "v", "dout"):
        np.save(tmp_path / f"{name}.npy", cut(getattr(given, name)))
    assert alone(monkeypatch, capsys, everything(tmp_path))[0] == 0
    out, lse, *gradients = given.solve()
    want = [cut(out), lse[0, 0] if dimensions == 2 else lse[0], *map(cut, gradients)]
    for found, right in zip(outputs(tmp_path), want):
        close(found, right)


@HERE
def test_attend_on_ranks(mpi, files):
    folder, given = files
    done = mpi.run(3, "-m", "ringmpi", *everything(folder), "--causal")
    assert done.returncode == 0, done.stdout
    for found, right in zip(outputs(folder), given.solve("causal")):
        close(found, right)
    assert f"{TOKENS} queries, {TOKENS} keys, 3 ranks" in done.stdout
    # Forward, every rank hands a block on twice; of k and v, of 2 heads of 8 and 6, in float32.
    sent = 2 * TOKENS * 2 * (8 + 6) * 4 / 1e6
    assert re.search(rf"forward .* GFLOP/s +{sent:.2f} MB", done.stdout), done.stdout


@HERE
def test_half_types_and_hdf5(mpi, tmp_path):
    h5py = pytest.importorskip("h5py")
    if mpi.run(1, "-c", "import h5py").returncode:
        pytest.skip(f"{mpi.name} has no h5py")
    given = problem(TOKENS, batch=1, dtype=io.named("bfloat16"))
    with h5py.File(tmp_path / "in.h5", "w") as file:
        for name in "qkv":
            file[name] = getattr(given, name).view("u2")
    names = [f"{tmp_path}/in.h5:/{name}" for name in "qkv"]
    out = [f"{tmp_path}/res.h5:/deep/out", "--lse", f"{tmp_path}/res.h5:/lse"]
    done = mpi.run(3, "-m", "ringmpi", "attend", *names, "--dtype", "bfloat16", "-o", *out)
    assert done.returncode == 0, done.stdout
    with h5py.File(tmp_path / "res.h5") as file:
        found = file["deep/out"][:].view(io.named("bfloat16")), file["lse"][:]
    for x, right in zip(found, given.solve()):
        close(x, right)


# ------------------------------------------------------------------------------------------------------- refusals

REFUSED = {
    "no such file": (["K", "none.npy"], "none.npy"),
    "cut short": (["K", "short.npy"], "is cut short"),
    "no array": (["K", "text.npy"], "is not a .npy file"),
    "integers": (["V", "integers.npy"], "int64; attention is of floating-point numbers"),
    "another dtype": (["V", "double.npy"], "double.npy is float64"),
    "a bfloat16 nobody named": (["V", "two.npy"], "if it is bfloat16, say so"),
    "another length": (["V", "long.npy"], "long.npy has shape (1, 62, 2, 6)"),
    "another head_dim": (["K", "wide.npy"], "wide.npy has shape (1, 61, 2, 9)"),
    "other dimensions": (["K", "three.npy"], "all must have the same 2, 3 or 4 dimensions"),
    "heads that do not divide": (["KV", "heads.npy"], "k's must divide q's"),
    "not finite": (["V", "nan.npy", "--check-finite"], "holds NaN or Inf at token 7"),
    "gradients of nothing": (["--grads", "g"], "go together"),
    "another gradient": (["--backward", "long.npy", "--grads", "g"], "long.npy has shape"),
    "borders": (["--documents", "borders.npy"], "the documents end at 60; there are 61 queries"),
    "borders of numbers": (["--documents", "double.npy"], "one or two dimensions of integers"),
    "layout": (["--layout", "spiral"], "no layout is called 'spiral'"),
    "schedule": (["--schedule", "walk"], "no schedule is called 'walk'"),
    "tile": (["--tile", "slate"], "no tile is called 'slate'"),
    "dtype": (["--dtype", "float17"], "dtype is 'float17'; it must be one of"),
    "a dtype of no attention": (["--dtype", "int8"], "dtype is 'int8'; it must be one of"),
    "an order that is none": (["--order", "0,a"], "--order 0,a is not a list of ranks"),
    "a file above the output": (["-o", "text.npy/out.npy"], "Not a directory"),
    "a trace in a file": (["--trace", "text.npy"], "File exists"),
    "order": (["--order", "0,1"], "an order of 1 ranks"),
    "window": (["--window", "-5", "3"], "window=(-5, 3)"),
    "word": (["--causal", "maybe"], "unrecognized arguments: maybe"),
    "number": (["--timeout", "soon"], "'soon' is not a finite number above 0"),
    "no folder": (["-o", "none/out.npy"], "No such file or directory"),
    "a folder": (["-o", "folder"], "is no file that could be replaced"),
    "twice the same": (["--lse", "out.npy"], "is named for 2 outputs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(monkeypatch, capsys, files, case):
    folder, given = files
    bad = folder / "bad"
    bad.mkdir()
    (bad / "folder").mkdir()
    nan = given.v.copy()
    nan[0, 7, 1, 2] = np.nan
    arrays = {"integers": np.ones(given.v.shape, int), "double": given.v.astype(float), "two": given.v.astype("f2").view("V2"), "nan": nan,
              "long": np.ones((1, 62, 2, 6), "f4"), "wide": np.ones((1, TOKENS, 2, 9), "f4"), "three": given.k[0],
              "heads": np.ones((1, TOKENS, 3, 8), "f4"), "borders": np.array([0, 9, 60]), "short": given.k}  # fmt: skip
    for name, x in arrays.items():
        np.save(bad / f"{name}.npy", x)
    os.truncate(bad / "short.npy", 1000)
    (bad / "text.npy").write_text("no array at all")
    (change, *more), said = REFUSED[case]
    call = words(folder, out="bad/out.npy")
    if change in ("K", "V", "KV"):
        for name in change:
            call["qkv".index(name.lower()) + 1] = str(bad / more[0])
        more = more[1:]
    else:
        more = [change, *more]
    before = left(folder)
    code, message = alone(monkeypatch, capsys, [*call, *(bad / word if re.search(r"npy|^g$|folder", word) else word for word in more)])
    assert code == 2 and message.startswith("ringmpi attend: ") and said in message and message.count("\n") == 1, message
    assert left(folder) == before


ODD = {"plan": {"--heads": "0", "--kv-heads": "0", "--tokens": str(10**23), "--ranks": "-1", "--slow": "nan"},
       "profile": {"--tokens": "0", "--seconds": "-1", "--sizes": "8,0", "--head-dim": "2.5", "--timeout": "inf"},
       "order": {"--bytes": "0", "--seconds": "nan"}}  # fmt: skip


@pytest.mark.parametrize(("command", "option"), [(command, option) for command, options in ODD.items() for option in options])
def test_a_number_that_means_nothing_is_refused_by_its_option(monkeypatch, capsys, command, option):
    code, message = alone(monkeypatch, capsys, [command, option, ODD[command][option]])
    assert code == 2 and f"argument {option}: " in message and message.count("\n") == 1, message


@HERE
def test_refused_once_on_ranks(mpi, files):
    folder, _ = files
    np.save(folder / "v.npy", np.ones((1, 62, 2, 6), "f4"))
    for call, said in ((words(folder), "v.npy has shape"), (["attend", "--causal"], "required: q, k, v"), (["walk"], "invalid choice")):
        done = mpi.run(3, "-m", "ringmpi", *call)
        assert done.returncode == 2 and done.stdout.count("ringmpi") == done.stdout.count(said) + done.stdout.count("--help"), done.stdout
        assert done.stdout.count(said) == 1 and "Traceback" not in done.stdout, done.stdout
    assert left(folder) == []


# --------------------------------------------------------------------------------------------- faults of one rank


@HERE
@pytest.mark.parametrize("fault", ["full", "memory"])
def test_one_rank_alone_sees_it(mpi, tmp_path, fault):
    """A full disk, or no memory: the ranks agree, nothing is left, one message names the rank."""
    given = problem(301, batch=1, dim=32, v_dim=32, dtype=np.float32)
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", getattr(given, name))
    done = mpi.run(3, FAULTY, fault, 1, *words(tmp_path))
    expected = {"full": "ringmpi attend: writing .*out.npy, rank 1: OSError: .*File too large", "memory": "rank 1: MemoryError: planted"}
    assert done.returncode == 2 and len(re.findall(expected[fault], done.stdout)) == 1, done.stdout
    assert "Traceback" not in done.stdout and left(tmp_path) == []


@HERE
def test_one_rank_alone_sees_it_outside_of_any_agreement(mpi, files):
    """Nobody waits for the rank that is gone, and what was whole before stays."""
    folder, _ = files
    began = time.monotonic()
    done = mpi.run(3, FAULTY, "trace", 1, *words(folder, "--trace", folder / "trace"))
    assert time.monotonic() - began < 30 and done.returncode == 2, done.stdout
    assert done.stdout.count("ringmpi attend: rank 1: OSError: [Errno 28] No space left on device") == 1, done.stdout
    assert "Traceback" not in done.stdout and "out.npy" in left(folder)


@HERE
def test_all_ranks_see_it_each_for_itself(mpi, files):
    """The lowest says it, once."""
    folder, _ = files
    done = mpi.run(3, FAULTY, "trace", -1, *words(folder, "--trace", folder / "trace"))
    assert done.returncode == 2 and done.stdout.count("No space left on device") == 1, done.stdout
    assert "ringmpi attend: rank 0: OSError" in done.stdout and "Traceback" not in done.stdout, done.stdout


@HERE
def test_stuck_rank(mpi, files, tmp_path_factory):
    """Nobody waits longer than the time-out: the lowest rank that is alive says it, and the job ends."""
    folder, _ = files
    began = time.monotonic()
    done = mpi.run(3, FAULTY, "stuck", 0, *words(folder), "--timeout", "2", cwd=tmp_path_factory.mktemp("flights"))
    assert time.monotonic() - began < 30
    assert done.returncode not in (0, 124), done.stdout
    assert len(re.findall("ringmpi attend: rank 1: .*silent in the roll call: rank 0", done.stdout)) == 1, done.stdout
    assert "Traceback" not in done.stdout and left(folder) == []


@HERE
def test_program_fault(mpi, files):
    """What is no refusal shows where it happened, and still ends all ranks and leaves nothing."""
    folder, _ = files
    began = time.monotonic()
    done = mpi.run(3, FAULTY, "bug", 1, *words(folder))
    assert time.monotonic() - began < 30 and done.returncode not in (0, 124), done.stdout
    assert done.stdout.count("KeyError: 'planted'") == 1, done.stdout
    assert left(folder) == []


def killed(mpi, call, folder, moment):
    """Runs a call in which a rank is killed: (rank, seconds after all have started), or None; the exit code and the seconds it took."""
    pids = folder / "pids"
    shutil.rmtree(pids, ignore_errors=True)
    pids.mkdir()
    settings = {**os.environ, **QUIET, **(OPENMPI if mpi.name == "openmpi" else {}), "PYTHONPATH": str(ROOT), "PIDS": str(pids)}
    process = subprocess.Popen(call, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while len([path for path in pids.iterdir() if path.stat().st_size]) < 3:
        time.sleep(0.01)
    began = time.monotonic()
    if moment:
        time.sleep(moment[1])
        with suppress(ProcessLookupError):
            os.kill(int((pids / str(moment[0])).read_text()), signal.SIGKILL)
    try:
        return process.wait(30), time.monotonic() - began
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"the job went on for 30 s after {moment}")


@HERE
def test_killed_at_any_moment(mpi, tmp_path, pytestconfig):
    """SIGKILL of any rank at any moment: no file under the final name that is not whole."""
    given = problem(1501, heads=2, kv_heads=1, dim=32, v_dim=32, batch=1, dtype=np.float32)
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", getattr(given, name))
    random, unfinished = np.random.default_rng(1), 0
    call = mpi.command(3, FAULTY, "slow", -1, *words(tmp_path))
    code, duration = killed(mpi, call, tmp_path, None)
    right = np.load(tmp_path / "out.npy")
    assert code == 0
    for _ in range(20 if pytestconfig.getoption("--all") else 5):
        (tmp_path / "out.npy").unlink(missing_ok=True)
        code, _ = killed(mpi, call, tmp_path, (int(random.integers(3)), random.uniform(0, 1) * duration))
        for part in tmp_path.glob("out.npy.*.part"):
            part.unlink()
        if (tmp_path / "out.npy").exists():
            assert (np.load(tmp_path / "out.npy") == right).all()
        else:
            assert code != 0
            unfinished += 1
    assert unfinished >= 3, f"only {unfinished} were killed before the end"


def test_terminated(tmp_path):
    """SIGTERM, as schedulers send it, leaves nothing behind."""
    given = problem(1501, heads=2, kv_heads=1, dim=32, v_dim=32, batch=1, dtype=np.float32)
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", getattr(given, name))
    call = [sys.executable, FAULTY, "slow", "-1", *words(tmp_path)]
    process = subprocess.Popen(call, env={**os.environ, "PYTHONPATH": str(ROOT), "PIDS": str(tmp_path)})
    while not list(tmp_path.glob("out.npy.*.part")):
        time.sleep(0.01)
    process.terminate()
    assert process.wait(30) == 130 and left(tmp_path) == ["0"]


@pytest.mark.slow
def test_memory_is_the_shards(tmp_path):
    """A million tokens on 5 ranks: a rank's memory is its shards and two slots, less than the files that it has rows of."""
    tokens, dim = 1_000_000, 64
    for seed, name in enumerate("qkv"):
        rows = np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float16, (1, tokens, 1, dim))
        rows[:] = np.random.default_rng(seed).standard_normal((1, tokens, 1, dim), np.float32)
    mpi = launchers()[0]

    def peak(*more):
        done = mpi.run(5, "-m", "ringmpi", *words(tmp_path), "--causal", "--window", 31, 0, *more, timeout=120)
        assert done.returncode == 0, done.stdout
        return 2**20 * int(re.search(r"peak memory of a rank: (\d+) MiB", done.stdout)[1])

    whole = peak()
    for name in "qkv":
        np.save(tmp_path / f"{name}.npy", np.load(tmp_path / f"{name}.npy", mmap_mode="r")[:, :500].copy())
    shard = tokens // 5 * dim * 2
    # q, k, v and out in float16, the accumulator in float32, two slots of k and v.
    held = (3 + 1 + 2 + 2 * 2) * shard
    bounds = 4 * 8 * tokens // 5
    assert whole - peak() < 1.1 * held + bounds
    assert whole < 3 * 5 * shard


# ------------------------------------------------------------------------------------------------ the other commands


def test_launched_by_another_mpi(tmp_path):
    """Each process is alone although several were started: refused, by the first of them only."""
    for rank in range(2):
        settings = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_NTASKS": "3", "SLURM_PROCID": str(rank)}
        for command, code in (("attend q k v -o out", 2), ("info", 2), ("check", 2)):
            done = run([sys.executable, "-m", "ringmpi", *command.split()], 60, settings, tmp_path)
            assert done.returncode == code
            assert done.stdout.count("3 processes were started, but each of them is alone") == (rank == 0), done.stdout
            assert rank == 0 or done.stdout == ""


@pytest.mark.skipif({mpi.name for mpi in launchers()} != {"mpich", "openmpi"}, reason="needs two MPIs: RINGMPI_MPIS names them")
def test_the_wrong_mpiexec(tmp_path):
    mpis = {mpi.name: mpi for mpi in launchers()}
    call = mpis["mpich"].command(2, "-m", "ringmpi", *words(tmp_path))
    call[3] = mpis["openmpi"].python
    done = run(call, 60, {**os.environ, **QUIET, **OPENMPI, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and done.stdout.count("2 processes were started, but each of them is alone") == 1, done.stdout


@HERE
def test_check(mpi):
    done = mpi.run(3, "-m", "ringmpi", "check", timeout=240)
    assert done.returncode == 0 and done.stdout.endswith("all right\n"), done.stdout
    assert len(re.findall(r"numpy +(b?float\d\d) +\w+(?: +\d\S*){5}", done.stdout)) >= 12, done.stdout


def test_check_of_nothing(monkeypatch, capsys):
    monkeypatch.setattr(comm, "world", lambda: None)
    assert cli.main(["check", "--tile", "slate"]) == 1
    said = capsys.readouterr().out
    assert "not here: no tile is called 'slate'" in said and said.endswith("nothing could be checked\n")


def test_check_finds_a_wrong_tile():
    done = run([sys.executable, FAULTY, "wrong", "0", "check"], 120, {**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and re.search(r"float32 +ring .* WRONG: out with the \w+ mask, \w+, dq with", done.stdout), done.stdout


@HERE
def test_info(mpi):
    done = mpi.run(3, "-m", "ringmpi", "info")
    assert done.returncode == 0, done.stdout
    for line in ("numpy  ", "MPI  ", "MPI threads ", r"node .*: ranks \(cores\) 0 \(\d+\), 1 \(\d+\), 2", "tile numpy +NumPy",
                 "device memory  MPI (takes|gets) .*, for ", "  evidence +user: says nothing, RINGMPI_GPU_AWARE is not set",
                 "  evidence +memory kinds: ", "  evidence +library: no, MPIX_Query_cuda_support", "  evidence +environment: "):
        assert len(re.findall(f"^{line}", done.stdout, re.M)) == 1, (line, done.stdout)


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    listed = re.findall(r"^    (\w+)  ", capsys.readouterr().out, re.M)
    assert listed == list(cli.COMMANDS)
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0 and f"usage: ringmpi {name}" in capsys.readouterr().out


def test_bar(monkeypatch, capsys, files):
    folder, _ = files
    code, said = alone(monkeypatch, capsys, [*words(folder), "--progress"])
    assert code == 0 and said.endswith("\r\x1b[K")
    code, said = alone(monkeypatch, capsys, words(folder))
    assert code == 0 and said == ""
