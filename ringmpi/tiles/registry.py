"""The CUDA kernels that exist: one row an instantiation, for the launcher, the emulators and the compile check alike.

A pair of runs is computed by the first row of its kind and dtype whose dims are large enough: 64, 96 and 128 have rows of
their own, others are widened with zeros to the next. Nothing here needs a GPU or CuPy.
"""
from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# kernels/ stands beside the package in a checkout, and inside it when installed.
_ROOMS = Path(__file__).resolve().parents[1]
SOURCES = next((path for path in (_ROOMS / "kernels" / "cuda", _ROOMS.parent / "kernels" / "cuda") if path.is_dir()), _ROOMS)
TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double"}
SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# The numbers by which a row of shared memory is longer than its data: see fragments.cuh.
PADS = {"float16": 8, "bfloat16": 8, "float32": 4, "float64": 4}
ARCHITECTURES = (80, 90, 100)
# 128 threads of 255 registers are two blocks on a multiprocessor's 65,536.
REGISTERS = 255


class Kernel(NamedTuple):
    """One instantiation of forward.cu or backward.cu, whose template arguments these are.

    ``dim`` and ``v_dim`` are the largest head_dims it takes; a block has ``warps`` warps, of which ``split`` share
    16 ``m`` rows; ``passing`` rows of the other side are in shared memory at a time, in ``stages`` buffers. ``local`` is
    not a template argument: the bytes of local memory that a thread may use on any architecture.

    >>> row = find("forward", "bfloat16", 80, 64)
    >>> row.name, row.threads, row.owned, row.shared
    ('forward<__nv_bfloat16,96,96,4,2,32,1,2>', 128, 128, 54272)
    """

    kind: str
    dtype: str
    dim: int
    v_dim: int
    warps: int
    m: int
    passing: int
    split: int
    stages: int
    local: int = 0

    @property
    def name(self) -> str:
        """Its name as C++."""
        return f"{self.kind}<{TYPES[self.dtype]},{','.join(map(str, self[2:9]))}>"

    @property
    def symbol(self) -> str:
        """What its mangled name begins with."""
        types = {"float": "f", "double": "d"}
        of = TYPES[self.dtype]
        return f"_Z{len(self.kind)}{self.kind}I{types.get(of, f'{len(of)}{of}')}" + "".join(f"Li{n}E" for n in self[2:9]) + "E"

    @property
    def file(self) -> str:
        """The source it is in."""
        return "forward.cu" if self.kind == "forward" else "backward.cu"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def owned(self) -> int:
        """Rows that a block owns: queries, or keys for backward_dkdv."""
        return self.warps // self.split * 16 * self.m

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        size, of_sums = SIZES[self.dtype], 8 if self.dtype == "float64" else 4
        row = (self.dim + self.v_dim + 2 * PADS[self.dtype]) * size
        if self.kind == "forward":
            return self.owned * (self.dim + PADS[self.dtype]) * size + self.stages * self.passing * row + 8 * self.owned
        if self.kind == "backward_dq":
            return (self.owned + self.stages * self.passing) * row + 8 * self.owned
        return (self.owned + self.stages * self.passing) * row + self.stages * self.passing * (8 + 2 * of_sums)

    @property
    def instruction(self) -> str:
        """The instruction, as disassembled, that does its products."""
        return {"float32": "FFMA", "float64": "DMMA"}.get(self.dtype, "HMMA")


def _half(dtype: str) -> list[Kernel]:
    return [
        Kernel("forward", dtype, 64, 64, 4, 2, 64, 1, 2),
        Kernel("forward", dtype, 96, 96, 4, 2, 32, 1, 2, local=8),
        Kernel("forward", dtype, 128, 128, 4, 2, 32, 1, 2),
        Kernel("forward", dtype, 256, 256, 4, 1, 32, 1, 2),
        Kernel("backward_dq", dtype, 64, 64, 4, 2, 32, 1, 2),
        Kernel("backward_dq", dtype, 96, 96, 4, 1, 32, 1, 2),
        Kernel("backward_dq", dtype, 128, 128, 4, 1, 32, 1, 2),
        Kernel("backward_dq", dtype, 256, 256, 4, 1, 16, 1, 2),
        Kernel("backward_dkdv", dtype, 64, 64, 4, 1, 32, 1, 2),
        Kernel("backward_dkdv", dtype, 96, 96, 4, 1, 32, 1, 2),
        Kernel("backward_dkdv", dtype, 128, 128, 4, 1, 32, 1, 2),
        Kernel("backward_dkdv", dtype, 256, 256, 4, 1, 16, 2, 2),
    ]


KERNELS = (
    *_half("float16"),
    *_half("bfloat16"),
    Kernel("forward", "float32", 64, 64, 4, 2, 32, 1, 2),
    Kernel("forward", "float32", 128, 128, 4, 1, 32, 1, 2),
    Kernel("forward", "float32", 256, 256, 4, 1, 32, 2, 1),
    Kernel("backward_dq", "float32", 64, 64, 4, 1, 32, 1, 2),
    Kernel("backward_dq", "float32", 128, 128, 4, 1, 16, 1, 2),
    Kernel("backward_dq", "float32", 256, 256, 4, 1, 16, 2, 1),
    Kernel("backward_dkdv", "float32", 64, 64, 4, 1, 16, 1, 2),
    Kernel("backward_dkdv", "float32", 128, 128, 4, 1, 16, 2, 2),
    Kernel("backward_dkdv", "float32", 256, 256, 4, 1, 16, 4, 1),
    Kernel("forward", "float64", 64, 64, 4, 1, 32, 1, 2),
    Kernel("forward", "float64", 128, 128, 4, 1, 16, 1, 2),
    Kernel("forward", "float64", 256, 256, 4, 1, 16, 2, 1),
    Kernel("backward_dq", "float64", 64, 64, 4, 1, 16, 1, 2),
    Kernel("backward_dq", "float64", 128, 128, 4, 1, 16, 2, 2),
    Kernel("backward_dq", "float64", 256, 256, 4, 1, 16, 4, 1),
    Kernel("backward_dkdv", "float64", 64, 64, 4, 1, 16, 1, 2, local=64),
    Kernel("backward_dkdv", "float64", 128, 128, 4, 1, 16, 2, 2, local=64),
    Kernel("backward_dkdv", "float64", 256, 256, 4, 1, 16, 4, 1, local=64),
)

# The small kernels of rows.cu: name and dtypes. All take 128 threads, a warp a row, and no shared memory.
ROWS = {
    "clip": None,
    **{f"delta<{TYPES[dtype]}>": dtype for dtype in TYPES},
    **{f"finish<{TYPES[dtype]}>": dtype for dtype in TYPES},
    **{f"merge<{TYPES[dtype]}>": dtype for dtype in ("float32", "float64")},
}

# The parameters of the kernels, as tile.cuh and rows.cu have them.
Strides = ("batch", "token", "head")
TILE = np.dtype(
    [(name, [(axis, "<i8") for axis in Strides]) for name in ("q", "k", "v", "o", "dq", "dk", "dv")]
    + [(name, "<i8") for name in ("stats_batch", "stats_head", "bounds_batch", "spans_batch", "ahead", "query_step", "key_step")]
    + [("scale", "<f8"), ("softcap", "<f8")]
    + [(name, "<i4") for name in ("queries", "keys", "heads", "group", "dim", "v_dim", "resume", "aligned")]
)
ROW = np.dtype(
    [(name, [(axis, "<i8") for axis in Strides]) for name in ("a", "b")]
    + [(name, "<i8") for name in ("a_batch", "a_head", "b_batch", "b_head")]
    + [(name, "<i4") for name in ("tokens", "heads", "batches", "dim")]
)
RUN = np.dtype([("start", "<i8"), ("step", "<i8"), ("count", "<i4"), ("unused", "<i4")])
SPAN_ROWS = 32
ALIGNED = {"q": 1, "k": 2, "v": 4, "dout": 8}


def find(kind: str, dtype: Any, dim: int, v_dim: int) -> Kernel:
    """The row that computes a pair.

    Raises ValueError for a head_dim over 256.
    """
    for row in KERNELS:
        if (row.kind, row.dtype) == (kind, str(dtype)) and row.dim >= dim and row.v_dim >= v_dim:
            return row
    most = max(row.dim for row in KERNELS)
    raise ValueError(f"head_dim {dim} and v's {v_dim} with {dtype}: the CUDA kernels take up to {most}, of {', '.join(TYPES)}")


def digest() -> str:
    """A digest of all sources: it must be part of a compiled kernel's key, as an include's text is not by itself."""
    texts = [path.read_bytes() for path in sorted(SOURCES.glob("*.cu*"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
