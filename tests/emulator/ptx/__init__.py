"""A PTX interpreter: runs what nvcc makes of the kernels on NumPy arrays, all threads of a launch as lanes of arrays.

    module = Module("kernels/cuda/rows.cu", ["delta<float>"])
    module.get_function("delta<float>")((blocks,), (threads,), arguments, shared_mem=0)

The C++ emulator beside it runs the same sources but has functions of its own in place of every PTX instruction; this runs
the instructions themselves, with their operands in their order, and what a compiler made of the rest. It has the same face.

It knows what the kernels here use, and refuses a kernel that has any other instruction. Faults: addresses that are misaligned or outside
all arrays, writes to const, warps and blocks of which not all come to a barrier, copies never waited for; what was never written is
NaN. Races are not seen, for lanes run in step; nor is anything that ptxas or hardware does.
"""
from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .. import CACHE, EmulatorError, _address, _by_value
from .. import Kernel as Emulated
from . import access, warp  # noqa: F401 (they register their instructions)
from .arithmetic import BLOCK, step
from .machine import Machine, PtxError, Step
from .memory import Memory
from .parse import Entry, UnknownPtx, entries

NVCC = shutil.which("nvcc")
ARCHITECTURE = 80
# As CuPy compiles.
FLAGS = ["-std=c++17", "-ftz=true", "-ptx"]
MOST_LANES = 4096
__all__ = ["NVCC", "EmulatorError", "Kernel", "Module", "PtxError", "UnknownPtx", "compiled", "entries"]


class Module:
    """Some instantiations of the kernels of a file, for an architecture. The face of ``cupy.RawModule``.

    ``edit`` changes the PTX before it is read.
    """

    def __init__(self, path: str | Path, names: Sequence[str], options: Sequence[str] = (), checked: bool = False, *,
                 arch: int = ARCHITECTURE, edit: Any = None) -> None:  # fmt: skip
        text = compiled(path, tuple(names), tuple(options), arch)
        found = read(edit(text) if edit else text)
        self.kernels = {_plain(demangled(entry.name)): entry for entry in found}

    def get_function(self, name: str) -> Kernel:
        """A kernel by the name it was asked for."""
        return Kernel(name, self.kernels[_plain(name)])


class Kernel(Emulated):
    """A kernel, called as CuPy's: (grid, block, arguments, shared_mem)."""

    def __init__(self, name: str, entry: Entry) -> None:
        self.name, self.entry, self.max_dynamic_shared_size_bytes = name, entry, 48 << 10
        self.signature = list(signature(entry))

    def __call__(self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any], shared_mem: int = 0, *,
                 seed: int = 0, unwritten: Sequence[int] = ()) -> None:  # fmt: skip
        """Runs it: some blocks at a time, all of their threads in step."""
        self.check(grid, block, arguments, shared_mem)
        values, arrays = bytearray(), []
        for (offset, _, _), argument, (kind, size) in zip(self.entry.parameters, arguments, self.signature):
            values += bytes(offset - len(values))
            if kind in ("in", "out"):
                values += _address(argument).to_bytes(8, "little")
                arrays += [(argument, kind == "out")] if isinstance(argument, np.ndarray) else []
            else:
                values += bytes(_by_value(f"an argument of {self.name}", argument, kind, size))
        steps = [_sized(step(instruction.opcode), block[0]) for instruction in self.entry.code]
        some = max(1, MOST_LANES // block[0])
        for first in range(0, grid[0], some):
            blocks = np.arange(first, min(first + some, grid[0]))
            with np.errstate(all="ignore"):
                Machine(self.entry, steps, Memory(arrays, shared_mem, len(blocks)), blocks, block[0], bytes(values)).run()


def _sized(known: Step, threads: int) -> Step:
    execute, unit = known
    return execute, threads if unit == BLOCK else unit


# ------------------------------------------------------------------------------------------------------------ compiling


@lru_cache(maxsize=8)
def read(text: str) -> list[Entry]:
    """The kernels of a PTX file, all of whose instructions are known."""
    found = list(entries(text))
    unknown = {i.text for entry in found for i in entry.code if not known(i.opcode)}
    if unknown:
        raise UnknownPtx("; ".join(sorted(unknown)))
    return found


def known(opcode: str) -> bool:
    """Whether something executes an opcode."""
    try:
        return bool(step(opcode))
    except UnknownPtx:
        return False


def compiled(path: str | Path, names: Sequence[str], options: Sequence[str] = (), arch: int = ARCHITECTURE) -> str:
    """The PTX of instantiations, from the cache where its sources and flags are the same."""
    if not NVCC:
        raise EmulatorError("nvcc is not on the path")
    # Taking its address instantiates a kernel, whatever its parameters.
    text = f'#include "{path}"\n' + "".join(f"auto* kernel_{n} = &{name};\n" for n, name in enumerate(names))
    flags = [*FLAGS, f"-arch=sm_{arch}", *(option for option in options if not option.startswith("-std"))]
    folders = [Path(path).parent, *(Path(option[2:]) for option in options if option.startswith("-I"))]
    sources = [path, *(source for folder in folders for source in sorted(folder.glob("*.*h")))]
    key = [text, version(), *flags, *(Path(source).read_text() for source in sources)]
    made = CACHE / f"{hashlib.sha256(chr(0).join(key).encode()).hexdigest()[:20]}.ptx"
    if not made.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        source, own = (made.with_suffix(f".{os.getpid()}.{kind}") for kind in ("cu", "ptx"))
        source.write_text(text)
        done = subprocess.run([NVCC, *flags, str(source), "-o", str(own)], capture_output=True, text=True)
        source.unlink()
        if done.returncode:
            raise EmulatorError(f"nvcc {' '.join(flags)}\n{done.stderr[:4000]}")
        os.replace(own, made)
    return made.read_text()


@cache
def version() -> str:
    """What nvcc says it is."""
    return subprocess.run([NVCC or "nvcc", "--version"], capture_output=True, text=True, check=True).stdout


@cache
def demangled(symbol: str) -> str:
    """A kernel as C++ has it: ``void f<float>(float const*, int)``."""
    return subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=True).stdout.strip()


def _plain(name: str) -> str:
    return re.sub(r"^void |\(.*| ", "", name)


def signature(entry: Entry) -> Iterator[tuple[str, int]]:
    """What each parameter is, as C++ said it: PTX does not know const."""
    plain = re.search(r"\((.*)\)$", demangled(entry.name))
    # A name of C says nothing: there every pointer may be written through.
    kinds = plain.group(1).split(", ") if plain else ["*" if size == 8 else "" for _, size, _ in entry.parameters]
    for kind, (_, size, number) in zip(kinds, entry.parameters, strict=True):
        if kind.endswith("*"):
            yield ("in" if kind.endswith("const*") else "out"), size
        else:
            yield ("struct" if number == "struct" else "floating" if number[0] == "f" else "integer"), size
