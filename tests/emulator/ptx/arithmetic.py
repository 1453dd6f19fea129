"""Instructions of one thread on its own registers: arithmetic, comparisons, conversions, moves.

``@instruction(pattern)`` registers what executes the opcodes that the pattern matches in full: an opcode with a modifier
that no pattern has is unknown.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .machine import NUMBERS, WARP, Active, Execute, Machine, Step, branch, leave
from .parse import Instruction, UnknownPtx

KNOWN: list[tuple[re.Pattern[str], Step]] = []
BLOCK = -1


def instruction(pattern: str, unit: int = 0) -> Callable[[Execute], Execute]:
    """Registers what executes opcodes; ``unit`` is 32 or BLOCK where a whole warp or block does it at once."""

    def register(execute: Execute) -> Execute:
        KNOWN.append((re.compile(pattern), (execute, unit)))
        return execute

    return register


@cache
def step(opcode: str) -> Step:
    """What executes an opcode."""
    for pattern, known in KNOWN:
        if pattern.fullmatch(opcode):
            return known
    raise UnknownPtx(opcode)


def computes(pattern: str, function: Callable[..., np.ndarray], result: str = "") -> None:
    """Registers opcodes that compute a result of their operands, all of the type that the opcode ends with."""

    def execute(machine: Machine, i: Instruction, active: Active) -> None:
        kind = i.opcode.rpartition(".")[2]
        x = function(*(flushed(machine.read(operand, kind), i) for operand in i.operands[1:]))
        machine.write(i.operands[0], flushed(x.astype(NUMBERS[result or kind], copy=False), i), active)

    instruction(pattern)(execute)


def flushed(x: np.ndarray, i: Instruction) -> np.ndarray:
    """``.ftz``: float32 below the smallest normal number is a zero of the same sign."""
    if x.dtype != np.float32 or ".ftz" not in i.opcode:
        return x
    bits = x.view(np.uint32)
    return np.where(bits & 0x7F800000, bits, bits & 0x80000000).view(np.float32)


# ------------------------------------------------------------------------------------------------------------ arithmetic

FLOAT, INTEGER, BITS, F32, F64 = r"(\.rn)?(\.ftz)?\.f(32|64)", r"\.[su](16|32|64)", r"\.b(16|32|64)", r"(\.ftz)?\.f32", r"\.f64"
for name, function in {"add": np.add, "sub": np.subtract}.items():
    computes(rf"{name}({FLOAT}|{INTEGER})", function)
computes(rf"mul({FLOAT}|\.lo{INTEGER})", np.multiply)
computes(rf"mad\.lo{INTEGER}", lambda a, b, c: a * b + c)
computes(rf"max({F32}|{F64}|{INTEGER})", np.fmax)
computes(rf"min({F32}|{F64}|{INTEGER})", np.fmin)
computes(rf"neg({F32}|{F64}|{INTEGER})", np.negative)
computes(rf"abs({F32}|{F64}|{INTEGER})", np.abs)
computes(r"copysign\.f(32|64)", lambda sign, x: np.copysign(x, sign))
computes(r"div\.rn(\.ftz)?\.f(32|64)", np.divide)
computes(r"rcp\.approx\.ftz\.f32", lambda x: (1 / x.astype(float)).astype(np.float32))
computes(r"ex2\.approx\.ftz\.f32", lambda x: np.exp2(x.astype(float)).astype(np.float32))
for name, function in {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items():
    computes(rf"{name}({BITS}|\.pred)", function)
computes(rf"not({BITS}|\.pred)", np.invert)


def high_half(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(float)


# Computed from the high half of its operand, and zero in the low half.
computes(r"rcp\.approx\.ftz\.f64", lambda x: high_half(1 / high_half(x)))


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero, as in C."""
    if a.dtype.kind == "u":
        return a // b
    q = a // b
    return q + ((q * b != a) & ((a < 0) != (b < 0)))


computes(r"div\.[su](32|64)", quotient)
computes(r"rem\.[su](32|64)", lambda a, b: a - quotient(a, b) * b)
computes(r"mul\.hi\.s32", lambda a, b: a.astype(np.int64) * b >> 32)
computes(r"mul\.wide\.s32", lambda a, b: a.astype(np.int64) * b, "s64")
computes(r"mul\.wide\.u32", lambda a, b: a.astype(np.uint64) * b, "u64")
computes(r"brev\.b32", lambda x: sum((x >> np.uint32(i) & np.uint32(1)) << np.uint32(31 - i) for i in range(32)))
# How far the highest one is from the top; all ones where there is none.
computes(r"bfind\.shiftamt\.u32", lambda x: np.where(x, 31 - np.log2(np.maximum(x, 1).astype(float)).astype(np.int64), -1))


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c, rounded once."""
    if a.dtype == np.float64:
        return fused_double(a, b, c)
    a, b, c = (x.astype(float) for x in (a, b, c))
    product = a * b
    total = product + c
    # Rounding to double and then to float errs only where the double lies half-way between two floats and is not exact.
    doubtful = total.view(np.uint64) & np.uint64(0x1FFFFFFF) == 0x10000000
    if doubtful.any():
        error = sum_error(product, c, total)
        total = np.where(doubtful & (error != 0), np.nextafter(total, np.copysign(np.inf, error)), total)
    return total.astype(np.float32)


def sum_error(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """a + b - total, exactly (Knuth)."""
    of_b = total - a
    return (a - (total - of_b)) + (b - of_b)


def fused_double(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """As the sum of the product's two halves (Dekker) and c: half a unit in the last place, and seldom a little more."""
    product = a * b
    a1, b1 = high_part(a), high_part(b)
    a2, b2 = a - a1, b - b1
    low = a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2)
    total = product + c
    exact = total + (low + sum_error(product, c, total))
    return np.where(np.isfinite(exact), exact, total)


def high_part(x: np.ndarray) -> np.ndarray:
    scaled = 134217729.0 * x
    return scaled - (scaled - x)


computes(r"fma\.rn((\.ftz)?\.f32|\.f64)", fused)


@instruction(r"sh[lr]\.[bsu](32|64)")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    """Shifts by more than there are bits leave nothing but the sign."""
    kind = i.opcode.rpartition(".")[2]
    x, by = machine.read(i.operands[1], kind), machine.read(i.operands[2], "u32")
    most = 8 * x.dtype.itemsize - 1
    by, beyond = np.minimum(by, most).astype(x.dtype), by > most
    y = x << by if i.opcode.startswith("shl") else x >> by
    machine.write(i.operands[0], np.where(beyond & (x.dtype.kind == "u"), x.dtype.type(0), y), active)


@instruction(r"bfi\.b32")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    """The lowest ``length`` bits of one in another from bit ``start`` on."""
    field, x, start, length = (machine.read(operand, "u32").astype(np.uint64) for operand in i.operands[1:])
    ones = ((np.uint64(1) << (length & np.uint64(255))) - np.uint64(1)) << (start & np.uint64(255))
    machine.write(i.operands[0], (x & ~ones | field << start & ones).astype(np.uint32), active)


# ----------------------------------------------------------------------------------------------------------- comparisons

ORDERS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


@instruction(r"setp\.(eq|ne|lt|le|gt|ge)(\.[bsu](16|32|64)|(\.ftz)?\.f(32|64))|setp\.((eq|ne|lt|le|gt|ge)u|num|nan)(\.ftz)?\.f(32|64)")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    """``ltu`` and its kin hold where an operand is NaN too; ``num`` where none is."""
    order, kind = i.opcode.split(".")[1], i.opcode.rpartition(".")[2]
    a, b = (flushed(machine.read(operand, kind), i) for operand in i.operands[1:])
    unordered = np.isnan(a) | np.isnan(b) if kind[0] == "f" else np.zeros(1, bool)
    if order in ("num", "nan"):
        holds = unordered ^ (order == "num")
    elif order[:2] == "ne" and len(order) == 2:
        holds = (a != b) & ~unordered
    else:
        holds = ORDERS[order[:2]](a, b) | (unordered & (len(order) == 3))
    machine.write(i.operands[0], holds, active)


@instruction(r"selp\.[bsuf](16|32|64)")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    kind = i.opcode.rpartition(".")[2]
    a, b, chosen = machine.read(i.operands[1], kind), machine.read(i.operands[2], kind), machine.read(i.operands[3], "pred")
    machine.write(i.operands[0], np.where(chosen, a, b), active)


# ----------------------------------------------------------------------------------------------------------- conversions


@instruction(r"cvt\.[su](8|16|32|64)\.[su](8|16|32|64)|cvt\.rn\.f(32|64)\.[su](32|64)|cvt(\.ftz)?\.f64\.f32|cvt\.rn(\.ftz)?\.f32\.f64|cvt\.f32\.f16")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    to, of = i.opcode.split(".")[-2:]
    x = flushed(machine.read(i.operands[1], of), i)
    machine.write(i.operands[0], flushed(x.astype(NUMBERS[to]), i), active)


@instruction(r"cvt\.rni(\.ftz)?\.f32\.f32")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    machine.write(i.operands[0], flushed(np.rint(flushed(machine.read(i.operands[1], "f32"), i)), i), active)


@instruction(r"cvt\.f32\.bf16")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    wide = machine.read(i.operands[1], "b16").astype(np.uint32) << np.uint32(16)
    machine.write(i.operands[0], wide.view(np.float32), active)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """To the nearest, ties to even; every NaN is the same one."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def half_bits(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(np.uint16)).astype(np.uint16)


@instruction(r"cvt\.rn\.b?f16(x2)?\.f32")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    """Of two the first goes to the high half."""
    rounded = bfloat16_bits if "bf16" in i.opcode else half_bits
    halves = [rounded(machine.read(operand, "f32")) for operand in i.operands[1:]]
    machine.write(i.operands[0], halves[0] if len(halves) == 1 else joined(halves[::-1], 2), active)


# ----------------------------------------------------------------------------------------------------------------- moves


def joined(parts: list[np.ndarray], size: int) -> np.ndarray:
    """Numbers of ``size`` bytes side by side in one, the first lowest."""
    wide = np.dtype(f"u{size * len(parts)}")
    total: Any = wide.type(0)
    for n, part in enumerate(parts):
        total = total | part.astype(wide) << wide.type(8 * size * n)
    return total


@instruction(r"mov\.([bsuf](16|32|64)|pred)")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    """From register to register, or between one register and the parts of it in braces."""
    to, of = i.operands
    kind = i.opcode.rpartition(".")[2]
    if isinstance(of, tuple):
        size = NUMBERS[kind].itemsize // len(of)
        machine.write(to, joined([machine.read(part, f"b{8 * size}") for part in of], size), active)
    elif isinstance(to, tuple):
        whole, size = machine.read(of, kind), NUMBERS[kind].itemsize // len(to)
        for n, part in enumerate(to):
            machine.write(part, (whole >> whole.dtype.type(8 * size * n)).astype(f"u{size}"), active)
    else:
        machine.write(to, machine.read(of, kind), active)


# Addresses of global memory are the same in both of its notations.
@instruction(r"cvta\.to\.global\.u64")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    machine.write(i.operands[0], machine.read(i.operands[1], "u64"), active)


instruction(r"bra(\.uni)?")(branch)
instruction(r"ret|exit")(leave)
__all__ = ["BLOCK", "WARP", "instruction", "step"]
