"""Memory as kernels see it: the arrays of a launch at their addresses, a shared memory for each block, and copies on their way."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

SEAM = 16


class Region(NamedTuple):
    """An array's memory: addresses start .. stop - 1; ``memory`` begins at ``base``, a multiple of 16."""

    start: int
    stop: int
    base: int
    memory: np.ndarray
    writable: bool


class Memory:
    """Global and shared memory of some blocks. Shared memory begins as 0xff: NaN, in every type."""

    def __init__(self, arrays: Sequence[tuple[np.ndarray, bool]], shared: int, blocks: int) -> None:
        self.regions = [_region(array, writable) for array, writable in arrays if array.size]
        self.room, self.size = -(-shared // SEAM) * SEAM, shared
        self.shared = np.full(self.room * blocks + SEAM, 0xFF, np.uint8)

    def global_at(self, address: np.ndarray, size: int, writes: bool) -> list[tuple[np.ndarray, np.ndarray, Any]]:
        """The memory that addresses point to: (bytes, offsets in them, which of the addresses), once for each array met."""
        if (address % size).any():
            raise ValueError(f"misaligned: {size} bytes at {int(address[address % size != 0][0]):#x}")
        found, left = [], np.ones(address.shape, bool)
        for region in self.regions:
            inside = (address >= region.start) & (address <= region.stop - size)
            if not inside.any():
                continue
            if writes and not region.writable:
                raise ValueError("a write to const")
            if inside.all():
                return [(region.memory, address - region.base, slice(None))]
            found.append((region.memory, address[inside] - region.base, inside))
            left &= ~inside
        if left.any():
            raise ValueError(f"out of bounds: {int(left.sum())} threads, one at {int(address[left][0]):#x}")
        return found

    def shared_at(self, offset: np.ndarray, size: int, block: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, Any]]:
        """The same of offsets in the shared memory of blocks."""
        if (offset % size).any():
            raise ValueError(f"misaligned: {size} bytes at {int(offset[offset % size != 0][0])} of shared memory")
        if (offset < 0).any() or (offset + size > self.size).any():
            raise ValueError(f"out of bounds: {offset.min()} to {offset.max()} + {size} of {self.size} bytes of shared memory")
        return [(self.shared, offset + block * self.room, slice(None))]


def _region(array: np.ndarray, writable: bool) -> Region:
    start, stop = np.lib.array_utils.byte_bounds(array)
    base = start // SEAM * SEAM
    room = (ctypes.c_uint8 * (-(-(stop - base) // SEAM) * SEAM)).from_address(base)
    return Region(start, stop, base, np.frombuffer(room, np.uint8), writable)


class Started(NamedTuple):
    """Copies of 16 bytes that one cp.async started: of which lanes, in which of their groups, from and to where."""

    lanes: np.ndarray
    group: np.ndarray
    to: np.ndarray
    data: np.ndarray


class Copies:
    """What cp.async has started: it lands when its thread waits for it, not before, and is nonsense until then."""

    def __init__(self, lanes: int) -> None:
        self.committed = np.zeros(lanes, int)
        self.pending: list[Started] = []

    def start(self, shared: np.ndarray, lanes: np.ndarray, to: np.ndarray, data: np.ndarray) -> None:
        shared.reshape(-1, SEAM)[to // SEAM] = 0xFF
        self.pending.append(Started(lanes, self.committed[lanes], to, data))

    def commit(self, mask: np.ndarray) -> None:
        self.committed[mask] += 1

    def wait(self, shared: np.ndarray, mask: np.ndarray, but: int) -> None:
        """Lands all committed groups of the lanes but the last few."""
        left = []
        for lanes, group, to, data in self.pending:
            done = mask[lanes] & (group < self.committed[lanes] - but)
            shared.reshape(-1, SEAM)[to[done] // SEAM] = data[done]
            if not done.all():
                left.append(Started(*(x[~done] for x in (lanes, group, to, data))))
        self.pending = left
