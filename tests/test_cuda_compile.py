"""Every row of the registry compiles for real devices: registers, local memory, shared memory, and the right instructions.

Needs nvcc; for the instructions also nvdisasm (the package nvidia-cuda-nvdisasm, in the extra `test`). No GPU.
"""
import re
import shutil
import site
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from ringmpi.tiles import registry

NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not on the path")
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
SMALL = {"delta": ("const T*", "const T*", "S*", "Rows"), "finish": ("const S*", "const S*", "const S*", "T*", "S*", "Rows"),
         "merge": ("T*", "T*", "T*", "const T*", "const T*", "const T*", "Rows")}  # fmt: skip
BOUNDS = ("const int2*", "const Span*", "const S*")
LARGE = {"forward": ("const T*",) * 3 + (*BOUNDS, "S*", "S*", "S*", "Tile"),
         "backward_dq": ("const T*",) * 4 + ("const S*", "const S*", *BOUNDS, "S*", "Tile"),
         "backward_dkdv": ("const T*",) * 4 + ("const S*", "const S*", *BOUNDS, "S*", "S*", "Tile")}  # fmt: skip


def nvdisasm():
    inside = [Path(where) / "nvidia" / "cu13" / "bin" / "nvdisasm" for where in site.getsitepackages()]
    return shutil.which("nvdisasm") or next((str(path) for path in inside if path.exists()), None)


def instantiation(name, parameters):
    """An explicit instantiation; T is the first template argument and S the type of its sums."""
    of = re.search(r"<(\w+)", name).group(1)
    types = ", ".join(re.sub(r"\bT\b", of, re.sub(r"\bS\b", f"SumOf<{of}>", parameter)) for parameter in parameters)
    return f"template __global__ void {name}({types});\n"


def compiled(folder, file, text, arch):
    """What ptxas says of every kernel: symbol -> (registers, bytes of local memory); and the path of the cubin."""
    source, cubin = folder / "all.cu", folder / "all.cubin"
    source.write_text(f'#include "{registry.SOURCES / file}"\n{text}')
    command = [NVCC, "-std=c++17", "-O3", "-ftz=true", "-cubin", f"-arch=sm_{arch}", "-Xptxas", "-v", str(source), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "warning" not in done.stderr, done.stderr[-4000:]
    found = re.findall(r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers", done.stderr, re.S)
    return {symbol: (int(registers), int(local)) for symbol, local, registers in found}, cubin


@cache
def disassembled(cubin):
    return subprocess.run([nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


def instructions(cubin, symbol):
    """The opcodes of a kernel as disassembled."""
    section = re.search(rf"\.section\s+\.text\.{symbol}\w*,.*?(?=\.section\s+\.text\.|\Z)", disassembled(cubin), re.S).group(0)
    return set(re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]+)", section))


def beyond(row, arch, used, cubin):
    """What a compiled row takes beyond its budgets, and what it lacks."""
    registers, local = next(use for symbol, use in used.items() if symbol.startswith(row.symbol))
    limits = {"registers": (registers, registry.REGISTERS), "local": (local, row.local), "shared": (row.shared, SHARED[arch])}
    yield from (f"{row.name} on sm_{arch}: {name} {took} > {limit}" for name, (took, limit) in limits.items() if took > limit)
    if nvdisasm():
        wanted = {row.instruction, "LDGSTS"} | ({"LDSM"} if registry.SIZES[row.dtype] == 2 else set())
        yield from (f"{row.name} on sm_{arch}: no {opcode}" for opcode in sorted(wanted - instructions(cubin, row.symbol)))


# nvcc takes some twenty seconds for each of these: the ordinary run compiles one architecture of what differs most.
ORDINARY = {("forward.cu", "bfloat16", 90), ("backward.cu", "bfloat16", 90), ("forward.cu", "float64", 90), ("forward.cu", "float32", 90)}
COMPILED = [(file, dtype, arch) for file in ("forward.cu", "backward.cu") for dtype in registry.TYPES for arch in registry.ARCHITECTURES]


@pytest.mark.parametrize(
    ("file", "dtype", "arch"), [pytest.param(*row, marks=() if row in ORDINARY else pytest.mark.slow) for row in COMPILED]
)
def test_rows_compile_within_their_budgets(tmp_path, file, dtype, arch):
    rows = [row for row in registry.KERNELS if (row.file, row.dtype) == (file, dtype)]

    def check(half):
        folder = tmp_path / str(half)
        folder.mkdir()
        mine = rows[half::2]
        made = compiled(folder, file, "".join(instantiation(row.name, LARGE[row.kind]) for row in mine), arch)
        return [words for row in mine for words in beyond(row, arch, *made)]

    with ThreadPoolExecutor(2) as pool:
        assert not [words for found in pool.map(check, (0, 1)) for words in found]
    if not nvdisasm():
        pytest.skip("within their budgets; their instructions were not looked at: nvdisasm is not installed")


@pytest.mark.parametrize("arch", registry.ARCHITECTURES)
def test_small_kernels_compile(tmp_path, arch):
    names = [name for name in registry.ROWS if "<" in name]
    used, cubin = compiled(tmp_path, "rows.cu", "".join(instantiation(name, SMALL[name.split("<")[0]]) for name in names), arch)
    assert len(used) == len(registry.ROWS)
    assert all(local == 0 for _, local in used.values()), used
    if nvdisasm():
        found = instructions(cubin, "_Z4clip")
        assert {"LDG", "STG", "SHFL"} <= found and not {"HMMA", "DMMA", "LDSM", "LDGSTS"} & found
