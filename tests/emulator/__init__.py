"""An emulator of CUDA C++ on the CPU: runs the kernels' own sources, unchanged, on NumPy arrays.

    module = Module("kernels/cuda/rows.cu", ["delta<float>"], checked=True)
    module.get_function("delta<float>")((blocks,), (threads,), arguments, shared_mem=0)

A file is compiled with g++, ``emulated.h`` standing for the language, and every CUDA thread is a fiber. Two modes:

    fast      -O2. Numbers, deadlocks, divergent barriers and warps, cp.async never waited for.
    checked   also every access to memory: out of bounds, misaligned, never written, to const; races of threads and
              blocks; reads of what a cp.async still writes; signed overflow. Reported with file and line.

It knows what the kernels here use: one-dimensional launches of whole warps on x86-64, dynamic shared memory, barriers,
full-warp votes and shuffles, ldmatrix, mma.sync, cp.async. Limits: a write is seen by all at once (no weak memory
model), ``approx`` functions err by a rule of its own, tensor cores sum exactly and cut off once, g++ is not nvcc.
"""
from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("RINGMPI_EMULATOR_CACHE", Path(tempfile.gettempdir()) / f"ringmpi-emulator-{os.getuid()}"))
COMMON = ["-std=c++17", "-fPIC", "-gdwarf-4", "-fvisibility=hidden", "-Wno-unknown-pragmas", f"-I{HERE}"]
CHECKS = [
    "-O1", "-fsanitize=thread", "-fsanitize=signed-integer-overflow,shift,bounds,integer-divide-by-zero",
    "-ftrivial-auto-var-init=pattern", "-fno-omit-frame-pointer",
]  # fmt: skip
FAST = ["-O2"]
MOST_SHARED = 227 << 10


class EmulatorError(RuntimeError):
    """What a kernel did wrong."""


class Module:
    """Some instantiations of the kernels of a file. The face of ``cupy.RawModule``."""

    def __init__(self, path: str | Path, names: Sequence[str], options: Sequence[str] = (), checked: bool = False) -> None:
        self.names, self.checked = list(names), checked
        text = f'#include "{path}"\n' + "".join(_entry(i, name) for i, name in enumerate(names))
        folders = [Path(path).parent, *(Path(option[2:]) for option in options if option.startswith("-I")), HERE]
        sources = [path, *(source for folder in folders for source in sorted(folder.glob("*.*h")))]
        kernel = _object(text, [*COMMON, *(CHECKS if checked else FAST), "-DRINGMPI_EMULATED", *options], sources)
        runtime = [_object(f'#include "{HERE / part}.cpp"\n', [*COMMON, "-O2"], [HERE / f"{part}.cpp", *HERE.glob("*.h")])
                   for part in ("fibers", "memory", "tensor")]  # fmt: skip
        self.library = _linked([kernel, *runtime])
        self._functions = ctypes.CDLL(str(self.library))

    def get_function(self, name: str) -> Kernel:
        """A kernel by the name it was asked for."""
        return Kernel(self, self._functions, self.names.index(name), name)


class Kernel:
    """A compiled kernel, called as CuPy's: (grid, block, arguments, shared_mem)."""

    def __init__(self, module: Module, functions: ctypes.CDLL, index: int, name: str) -> None:
        self.module, self.functions, self.name = module, functions, name
        self.max_dynamic_shared_size_bytes = 48 << 10
        kinds, sizes = (ctypes.c_char_p * 32)(), (ctypes.c_int * 32)()
        count = functions[f"signature_{index}"](kinds, sizes)
        self.signature = [(kinds[i].decode(), sizes[i]) for i in range(count)]
        self._entry = ctypes.cast(functions[f"entry_{index}"], ctypes.c_void_p)

    def __call__(self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any], shared_mem: int = 0, *,
                 seed: int = 0, unwritten: Sequence[int] = ()) -> None:  # fmt: skip
        """Runs it. ``seed`` draws the order of threads and blocks; ``unwritten`` are arguments it must write before it reads."""
        self.check(grid, block, arguments, shared_mem)
        values, ranges = [], []
        for i, (argument, (kind, size)) in enumerate(zip(arguments, self.signature)):
            if kind in ("in", "out"):
                values.append(ctypes.c_void_p(_address(argument)))
                if values[-1].value:
                    begin, end = np.lib.array_utils.byte_bounds(argument)
                    ranges.append(_Range(begin, end, kind == "out", i in unwritten, f"argument {i}".encode()))
            else:
                values.append(_by_value(f"argument {i} of {self.name}", argument, kind, size))
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        launch = _Launch(self._entry, ctypes.cast(pointers, ctypes.c_void_p), grid[0], block[0], shared_mem, seed, self.module.checked,
                         len(ranges), (_Range * max(1, len(ranges)))(*ranges))  # fmt: skip
        message = ctypes.create_string_buffer(2048)
        if self.functions.emulator_launch(ctypes.byref(launch), message, ctypes.c_size_t(2048)):
            raise EmulatorError(f"{self.name}: {self._placed(message.value.decode())}")

    def check(self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any], shared_mem: int) -> None:
        """What a driver would refuse."""
        if len(arguments) != len(self.signature):
            raise EmulatorError(f"{self.name} takes {len(self.signature)} arguments, not {len(arguments)}")
        if len(grid) != 1 or len(block) != 1 or not 1 <= grid[0] < 1 << 31 or not (32 <= block[0] <= 1024 and block[0] % 32 == 0):
            raise EmulatorError(f"{self.name}: a grid of {grid} of {block} threads")
        if shared_mem > min(self.max_dynamic_shared_size_bytes, MOST_SHARED):
            raise EmulatorError(f"{self.name}: {shared_mem} bytes of shared memory, {self.max_dynamic_shared_size_bytes} allowed")

    def _placed(self, message: str) -> str:
        """The message with its program counter as file and line."""
        found = re.search(r"pc=(0x[0-9a-f]+)", message)
        if not found:
            return re.sub(r" pc=\(nil\)", "", message)
        with open("/proc/self/maps") as maps:
            base = next(int(line.split("-")[0], 16) for line in maps if str(self.module.library) in line)
        where = subprocess.run(["addr2line", "-e", str(self.module.library), hex(int(found.group(1), 16) - 1 - base)],
                               capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
        return message.replace(found.group(0), f"at {os.path.basename(where)}")


class _Range(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("writable", ctypes.c_bool), ("uninitialised", ctypes.c_bool),
                ("name", ctypes.c_char * 32)]  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = [("entry", ctypes.c_void_p), ("arguments", ctypes.c_void_p), ("grid", ctypes.c_uint), ("block", ctypes.c_uint),
                ("shared", ctypes.c_size_t), ("seed", ctypes.c_uint64), ("checked", ctypes.c_int), ("arrays", ctypes.c_int),
                ("ranges", ctypes.POINTER(_Range))]  # fmt: skip


def _entry(i: int, name: str) -> str:
    export = 'extern "C" __attribute__((visibility("default")))'
    return (
        f"{export} void entry_{i}(void** a) {{ emulator::invoke(&{name}, a); }}\n"
        f"{export} int signature_{i}(const char** kinds, int* sizes) {{\n"
        f"  return emulator::signature(&{name}, kinds, sizes);\n}}\n"
    )


def _object(text: str, flags: list[str], sources: Sequence[str | Path]) -> Path:
    """A compiled translation unit, from the cache where its sources and flags are the same."""
    key = hashlib.sha256("\0".join([text, *flags, *(Path(source).read_text() for source in sources)]).encode()).hexdigest()[:20]
    made = CACHE / f"{key}.o"
    if not made.exists():
        _run(["g++", "-x", "c++", "-", "-c", *flags], made, text)
    return made


def _linked(objects: Sequence[Path]) -> Path:
    key = hashlib.sha256("".join(path.name for path in objects).encode()).hexdigest()[:20]
    made = CACHE / f"{key}.so"
    if not made.exists():
        _run(["g++", "-shared", "-Wl,-Bsymbolic", *map(str, objects)], made, "")
    return made


def _run(command: list[str], made: Path, text: str) -> None:
    """Compiles to a name of its own first: other processes may be making the same file."""
    CACHE.mkdir(parents=True, exist_ok=True)
    own = made.with_suffix(f".{os.getpid()}{made.suffix}")
    done = subprocess.run([*command, "-o", str(own)], input=text, capture_output=True, text=True)
    if done.returncode:
        raise EmulatorError(f"{' '.join(command)}\n{done.stderr[:4000]}")
    os.replace(own, made)


def _address(argument: Any) -> int:
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data
    if argument is None or argument == 0:
        return 0
    raise EmulatorError(f"a {type(argument).__name__} was given for a pointer")


def _by_value(what: str, argument: Any, kind: str, size: int) -> Any:
    """A scalar or struct in the kernel's own type: CuPy passes a Python int as int64 and a float as double, unseen."""
    value = np.asarray(argument)
    given = {"i": "integer", "u": "integer", "f": "floating", "V": "struct"}.get(value.dtype.kind, value.dtype.kind)
    if (given, value.dtype.itemsize) != (kind, size):
        raise EmulatorError(f"{what} is a {kind} of {size} bytes; it was given a {given} of {value.dtype.itemsize}")
    return (ctypes.c_char * size).from_buffer_copy(value.tobytes())
