"""Instructions that a whole warp or block executes at once: barriers, votes, shuffles, and those of the tensor cores.

Lane 4g + t of a warp holds of a matrix what the PTX ISA's figures give it (section "Matrix multiply-accumulate"): ``PLACES`` has the
rows and columns in the order of the registers, two 16-bit numbers a register, the first in the low half.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from .arithmetic import BLOCK, instruction
from .machine import WARP, Active, Machine
from .parse import Instruction

LANE = np.arange(WARP)[:, None]
G, T, NONE = LANE // 4, LANE % 4, 0 * LANE


def whole(machine: Machine, operand: Any) -> None:
    """A mask of lanes must be all of them."""
    if (machine.read(operand, "u32") != 0xFFFFFFFF).any():
        raise ValueError(f"{operand}: a part of a warp")


@instruction(r"(bar|barrier)\.sync", BLOCK)
def _(machine: Machine, i: Instruction, active: Active) -> None:
    """All threads are here by now."""
    if i.operands != ("0",):
        raise ValueError("a barrier of some threads")


@instruction(r"bar\.warp\.sync", WARP)
def _(machine: Machine, i: Instruction, active: Active) -> None:
    whole(machine, i.operands[0])


@instruction(r"bar\.red\.or\.pred", BLOCK)
def _(machine: Machine, i: Instruction, active: Active) -> None:
    to, barrier, mine = i.operands
    if barrier != "0":
        raise ValueError("a barrier of some threads")
    any_of = machine.read(mine, "pred").reshape(-1, machine.threads).any(axis=1)
    machine.write(to, np.repeat(any_of, machine.threads), active)


@instruction(r"vote\.sync\.(any|all)\.pred|vote\.sync\.ballot\.b32", WARP)
def _(machine: Machine, i: Instruction, active: Active) -> None:
    to, mine, mask = i.operands
    whole(machine, mask)
    votes = np.broadcast_to(machine.read(mine, "pred"), machine.count).reshape(-1, WARP)
    if "ballot" in i.opcode:
        result = (votes << np.arange(WARP, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
    else:
        result = votes.any(axis=1) if ".any" in i.opcode else votes.all(axis=1)
    machine.write(to, np.repeat(result, WARP), active)


@instruction(r"shfl\.sync\.(idx|bfly)\.b32", WARP)
def _(machine: Machine, i: Instruction, active: Active) -> None:
    """``to|inside, mine, which, clamp and segment, mask``: from another lane of the segment; from the own one if it lies outside."""
    to, mine, which, clamp, mask = i.operands
    whole(machine, mask)
    to, inside = to if isinstance(to, tuple) else (to, "")
    lane = np.arange(machine.count) % WARP
    b, c = (machine.read(operand, "u32").astype(np.int64) for operand in (which, clamp))
    segment = c >> 8 & 31
    most = lane & segment | c & 31 & ~segment
    source = lane ^ b & 31 if ".bfly" in i.opcode else lane & segment | b & 31 & ~segment
    good = source <= most
    value = np.broadcast_to(machine.read(mine, "b32"), machine.count)
    machine.write(to, value[np.arange(machine.count) - lane + np.where(good, source, lane)], active)
    if inside:
        machine.write(inside, good, active)


# ---------------------------------------------------------------------------------------------------------- tensor cores


def places(*columns: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns), each (lane, number)."""
    return tuple(np.hstack([column[axis] for column in columns]) for axis in (0, 1))  # type: ignore[return-value]


# mma.m16n8k16 of 16-bit numbers.
A16 = places(*((G + 8 * (r % 2), 2 * T + 8 * (r // 2) + h) for r in range(4) for h in range(2)))
B16 = places(*((2 * T + 8 * r + h, G) for r in range(2) for h in range(2)))
# What every shape with 16 rows gives, and what that with 8 rows does.
C16 = places((G, 2 * T), (G, 2 * T + 1), (G + 8, 2 * T), (G + 8, 2 * T + 1))
C8 = places((G, 2 * T), (G, 2 * T + 1))
# mma.m16n8k8 and mma.m8n8k4 of doubles.
A64 = places((G, T), (G + 8, T), (G, T + 4), (G + 8, T + 4))
B64 = places((T, G), (T + 4, G))
A64_SMALL, B64_SMALL = places((G, T)), places((T, G))


def held(machine: Machine, names: Any, kind: str) -> np.ndarray:
    """Registers of all warps as they are: (warp, lane, register)."""
    registers = [machine.read(name, kind) for name in names]
    return np.stack(registers, axis=1).reshape(-1, WARP, len(names))


def matrix(values: np.ndarray, where: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """(warp, lane, number) as a matrix a warp, in double."""
    made = np.full((len(values), where[0].max() + 1, where[1].max() + 1), np.nan)
    made[:, where[0], where[1]] = values
    return made


def give(machine: Machine, names: Any, product: np.ndarray, where: tuple[np.ndarray, np.ndarray], active: Active) -> None:
    """The lanes' numbers of a matrix to their registers."""
    for n, name in enumerate(names):
        machine.write(name, product[:, where[0][:, n], where[1][:, n]].ravel(), active)


def widened(pairs: np.ndarray, bfloat: bool) -> np.ndarray:
    """Registers of two 16-bit numbers as their numbers."""
    halves = np.ascontiguousarray(pairs).view(np.uint16)
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32) if bfloat else halves.view(np.float16)


def towards_zero(x: np.ndarray) -> np.ndarray:
    """Tensor cores cut a sum off rather than round it."""
    y = x.astype(np.float32)
    return np.where(np.abs(y.astype(float)) > np.abs(x), np.nextafter(y, np.float32(0)), y)


@instruction(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16\.bf16|f16\.f16)\.f32", WARP)
def _(machine: Machine, i: Instruction, active: Active) -> None:
    d, a, b, c = i.operands
    x, y = (matrix(widened(held(machine, names, "b32"), ".bf16" in i.opcode), where) for names, where in ((a, A16), (b, B16)))
    give(machine, d, towards_zero(matrix(held(machine, c, "f32"), C16) + x @ y), C16, active)


@instruction(r"mma\.sync\.aligned\.(m16n8k8|m8n8k4)\.row\.col\.f64\.f64\.f64\.f64", WARP)
def _(machine: Machine, i: Instruction, active: Active) -> None:
    d, a, b, c = i.operands
    at = (A64, B64, C16) if ".m16n8k8" in i.opcode else (A64_SMALL, B64_SMALL, C8)
    x, y, z = (matrix(held(machine, names, "f64"), where) for names, where in zip((a, b, c), at))
    give(machine, d, z + x @ y, at[2], active)


@instruction(r"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16", WARP)
def _(machine: Machine, i: Instruction, active: Active) -> None:
    """Lane 8i + r has the address of row r of matrix i; lane 4g + t gets numbers 2t, 2t + 1 of row g, or of column g transposed."""
    lanes = np.flatnonzero(active.mask)
    [(shared, at, _)] = machine.memory.shared_at(machine.address(i.operands[1])[lanes], 16, machine.block[lanes])
    rows = shared.view(np.uint16)[at[:, None] // 2 + np.arange(8)].reshape(-1, 4, 8, 8)
    if ".trans" in i.opcode:
        rows = rows.swapaxes(2, 3)
    for n, name in enumerate(i.operands[0]):
        pairs = np.ascontiguousarray(rows[:, n]).view(np.uint32)  # (warp, 8, 4): a pair of lane 4g + t at (g, t)
        machine.place(name, pairs.ravel(), active)
