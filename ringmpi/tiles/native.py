"""Compiled libraries of the host tile: found in the cache, or compiled on first use by however many ranks start at once.

A library is named by what it is made of: the sources, the flags, and the processor that ``-march=native`` means. It is
compiled under a name of its own and then linked into place, which is atomic and never replaces a file that a process has
loaded: no locks, on a shared file system too. A login node can do it ahead: ``ringmpi build``.

Environment:

    CC               the compiler; else cc, gcc or clang
    RINGMPI_CACHE    where libraries are kept; else $XDG_CACHE_HOME/ringmpi or ~/.cache/ringmpi
    RINGMPI_MARCH    what to compile for instead of "native"; set it for a build on another processor and for its runs
    RINGMPI_CFLAGS   more flags
"""
from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

REALS = {"float32": "float", "float64": "double"}
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi", "-fPIC", "-shared"]


class Unavailable(RuntimeError):
    """There is no compiled library, and none can be made here; says why."""


def sources() -> Path:
    """The folder of the C sources: in the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "kernels" / "host", package.parent / "kernels" / "host"):
        if (folder / "tile.c").exists():
            return folder
    raise Unavailable(f"the C sources of the host tile (kernels/host) are not beside {package}")


def compiler() -> list[str]:
    """The C compiler as a command."""
    given = shlex.split(os.environ.get("CC", ""))
    for command in ([given] if given else [["cc"], ["gcc"], ["clang"]]):
        if shutil.which(command[0]):
            return command
    looked = f"CC={' '.join(given)} is not there" if given else "neither cc, gcc nor clang is there"
    raise Unavailable(f"no C compiler ({looked}); install gcc or clang, or run `ringmpi build` where there is one and share RINGMPI_CACHE")


def processor() -> str:
    """What ``-march=native`` means on this machine: the model and features of its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return platform.machine() + "".join(sorted(line for line in lines if line.startswith(wanted)))


def cache_folders() -> list[Path]:
    """Where libraries are looked for and kept, the first that can be written: the user's cache, or a private temporary folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    asked = os.environ.get("RINGMPI_CACHE") or os.path.join(home, "ringmpi")
    return [Path(asked), Path(tempfile.gettempdir()) / f"ringmpi-{os.getuid()}"]


def architecture() -> list[str]:
    """The flag that names the processor; none where RINGMPI_MARCH is empty."""
    march = os.environ.get("RINGMPI_MARCH", "native")
    return [f"-march={march}"] if march else []


def name(real: str) -> str:
    """The file name of the library for float32 or float64: a digest of all it is made of."""
    digest = hashlib.sha256()
    for source in sorted(sources().glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    made_of = [*FLAGS, *architecture(), os.environ.get("RINGMPI_CFLAGS", ""), processor() if "-march=native" in architecture() else ""]
    digest.update("\0".join(made_of).encode())
    return f"host-{real}-{digest.hexdigest()[:20]}.so"


def library(real: str) -> Path:
    """The compiled library for "float32" or "float64", compiled now if no cache holds it. Raises ``Unavailable``."""
    for folder in filter(_is_ours, cache_folders()):
        if _is_whole(folder / name(real)):
            return folder / name(real)
    command, problems = compiler(), []
    for folder in cache_folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_ours(folder):
                return _compile(command, real, folder / name(real))
        except OSError as problem:
            problems.append(str(problem))
    raise Unavailable(f"no folder to keep the compiled library in: {'; '.join(problems)}; set RINGMPI_CACHE")


@cache
def load(real: str) -> ctypes.CDLL:
    """The loaded library. Raises ``Unavailable``."""
    path = library(real)
    try:
        return ctypes.CDLL(str(path))
    except OSError as problem:
        raise Unavailable(f"the compiled library {path} does not load: {problem}") from problem


def _is_whole(path: Path) -> bool:
    """Whether a library is there and ends with its own digest. A damaged one, which would kill its loader, is removed."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    if hashlib.sha256(content[:-32]).digest() == content[-32:]:
        return True
    path.unlink(missing_ok=True)
    return False


def _is_ours(folder: Path) -> bool:
    """Whether nobody else may put a library into the folder: code is only loaded from what this user or root owns."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid in (os.getuid(), 0) and not (found.st_mode & 0o002)


def _compile(command: list[str], real: str, path: Path) -> Path:
    """Compiles to a name of its own, then links it into place; whoever comes second keeps what is there."""
    handle, made = tempfile.mkstemp(suffix=".tmp", prefix=path.stem, dir=path.parent)
    os.close(handle)
    try:
        _run_compiler(command, real, made)
        with open(made, "ab") as library:
            library.write(hashlib.sha256(Path(made).read_bytes()).digest())
            library.flush()
            os.fsync(library.fileno())
        os.chmod(made, 0o644)
        try:
            os.link(made, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)
    return path


def _run_compiler(command: list[str], real: str, out: str) -> None:
    """Compiles for this processor with OpenMP; without the one or the other where the compiler does not know it."""
    extra = shlex.split(os.environ.get("RINGMPI_CFLAGS", ""))
    source = str(sources() / "tile.c")
    for choice in ([*architecture(), "-fopenmp"], architecture(), ["-fopenmp"], []):
        line = [*command, *FLAGS, *choice, *extra, f"-DREAL={REALS[real]}", source, "-o", out, "-lm"]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode == 0:
            return
    raise Unavailable(f"{shlex.join(line)} failed:\n{done.stderr[-2000:]}")
