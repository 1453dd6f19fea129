"""The loaded library of the host tile, and how it is told of arrays: the twin of ``kernels/host/told.h``.

An array is told by the address of what NumPy itself says of it, a PyArrayInterface in a capsule ("C-struct access",
https://numpy.org/doc/stable/reference/arrays.interface.html): reading pointers and strides in Python took a tenth of a small pass.
"""
from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any

import numpy as np

from . import cores, native
from .cut import Part
from .native import Unavailable

# Arrays by their addresses, all else by value.
# q k v dout lse delta dq dk dv lo hi seen alibi, scale softcap, storage distance query_step key_step threads
REQUEST = struct.Struct("13P 2d 5q")
# o m l
PARTIAL = struct.Struct("3P")
# o m l, and the first batch entry, row and head
PLACE = struct.Struct("3P 3q")
PART = struct.Struct(f"{len(Part._fields)}q")

# By function: what it gives, and what it takes.
POINTER, INT, WIDE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
SIGNATURES = {
    "forward": (None, [POINTER] * 4), "backward": (None, [POINTER] * 3),
    "forward_space_of": (WIDE, [POINTER] * 2), "backward_space_of": (WIDE, [POINTER] * 2),
    "merge": (None, [POINTER] * 2 + [INT]), "finish": (None, [POINTER] * 2 + [INT]), "delta": (None, [POINTER] * 3 + [INT]),
    "strips": (WIDE, [WIDE]), "strip_row": (WIDE, [WIDE] * 2), "block_of_keys": (WIDE, [WIDE]),
    "constant": (WIDE, [WIDE]), "threaded": (WIDE, []), "isa": (ctypes.c_char_p, []),
}  # fmt: skip

_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


def described(*arrays: np.ndarray | None) -> tuple[list[Any], list[int]]:
    """What NumPy says of arrays, to be held as long as the library may read it, and the addresses of that; 0 for none."""
    held = [None if x is None else x.__array_struct__ for x in arrays]
    return held, [0 if x is None else _address(x, None) for x in held]


class Library:
    """A loaded library, for float32 or float64, and how it cuts rows and keys."""

    def __init__(self, real: str) -> None:
        threads()  # Before the library is there: where OMP_PROC_BIND says so, OpenMP binds the thread that loads it to one place.
        self.real, self.dtype, self.code = real, np.dtype(real), native.load(real)
        for name, signature in SIGNATURES.items():
            function = getattr(self.code, name)
            function.restype, function.argtypes = signature
        sizes = [self.code.constant(i) for i in range(7)]
        if sizes[:4] != [REQUEST.size, PART.size, PLACE.size, self.dtype.itemsize]:
            raise Unavailable(f"the library for {real} was compiled from other sources: its structures take {sizes[:4]} bytes")
        self.block_strips, self.gradient_keys, self.dots = sizes[4:]
        self.block_rows = self.strip_row(1 << 20, self.block_strips)
        self.threaded = bool(self.code.threaded())
        self.isa = self.code.isa().decode()

    def strips(self, rows: int) -> int:
        """How many strips rows are cut into."""
        return self.code.strips(rows)

    def strip_row(self, rows: int, strip: int) -> int:
        """The first row of a strip; of the one behind the last, where the last row's vector ends."""
        return self.code.strip_row(rows, strip)

    def block_of_keys(self, panel: int) -> int:
        """How many of so many keys a backward call takes at a time."""
        return self.code.block_of_keys(panel)

    def threads(self, numbers: int) -> int:
        """How many threads so many numbers are worth that are read once."""
        return threads() if self.threaded and numbers > 1 << 16 else 1


@cache
def summing(dtype: np.dtype) -> Library:
    """The library that sums in a dtype. Raises ``Unavailable``."""
    return Library(dtype.name)


@cache
def stored(dtype: np.dtype) -> int:
    """The library's number for how arrays of a dtype are stored: as its reals, or as halves of one kind or the other."""
    return {"float16": 1, "bfloat16": 2}.get(dtype.name, 0)


def threads() -> int:
    """How many threads a call uses."""
    return cores.threads()[0]
