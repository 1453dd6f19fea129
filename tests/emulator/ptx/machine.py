"""Blocks of threads as NumPy lanes: registers are arrays, and lanes that stand at the same instruction execute it together.

Of all lanes that can go on, those at the lowest instruction go first, up to where the next ones stand: so lanes that took
different branches meet again at the first instruction that they share. An instruction of a whole warp or block (``unit``
lanes) is executed when all of its lanes have come to it; lanes that will never come are a fault.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from .memory import Copies, Memory
from .parse import Address, Entry, Instruction

WARP = 32
NUMBERS = {kind + str(8 * size): np.dtype(f"{letter}{size}") for kind, letter in (("s", "i"), ("u", "u"), ("b", "u"), ("f", "f"))
           for size in (1, 2, 4, 8) if (letter, size) != ("f", 1)} | {"pred": np.dtype(bool)}  # fmt: skip
BITS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class PtxError(RuntimeError):
    """What a kernel did wrong, with the instruction."""


class Active:
    """The lanes that execute an instruction: ``mask``, their numbers, and where results are written."""

    def __init__(self, mask: np.ndarray, alone: bool) -> None:
        self.mask = mask
        # With nobody elsewhere, the registers of lanes that are done may be overwritten.
        self.where: Any = True if alone else mask

    @cached_property
    def lanes(self) -> Any:
        """An index of the lanes; a slice where it is all of them."""
        return slice(None) if self.mask.all() else np.flatnonzero(self.mask)

    def also(self, condition: np.ndarray) -> Active:
        """Those for which a condition holds too."""
        return Active(self.mask & condition, False)


class Machine:
    """Some blocks of one launch. ``steps`` has for every instruction what executes it, and how many lanes at once."""

    def __init__(self, entry: Entry, steps: list[Step], memory: Memory, blocks: np.ndarray, threads: int, parameters: bytes) -> None:
        self.entry, self.steps, self.memory, self.threads = entry, steps, memory, threads
        self.count = len(blocks) * threads
        self.parameters = np.frombuffer(parameters, np.uint8)
        self.block = np.repeat(np.arange(len(blocks)), threads)
        self.registers: dict[str, np.ndarray] = {}
        self.constants: dict[tuple[str, str], np.ndarray] = {}
        self.copies = Copies(self.count)
        thread = np.tile(np.arange(threads, dtype=np.uint32), len(blocks))
        self.special = {"%tid.x": thread, "%ntid.x": np.full(1, threads, np.uint32)}
        self.special["%ctaid.x"] = np.repeat(blocks, threads).astype(np.uint32)
        self.live = np.ones(self.count, bool)
        self.waiting: dict[int, np.ndarray] = {0: self.live.copy()}
        self.parked: dict[int, np.ndarray] = {}

    # -------------------------------------------------------------------------------------------------------- scheduling

    def run(self) -> None:
        """To the end of all threads."""
        while self.waiting:
            self._advance(at := min(self.waiting), self.waiting.pop(at))
        if self.parked:
            at, lanes = next(iter(self.parked.items()))
            raise PtxError(f"{self.entry.name}: {lanes.sum()} threads wait for others that never come, at: {self.entry.code[at].text}")
        if self.copies.pending:
            raise PtxError(f"{self.entry.name}: a cp.async was never waited for")

    def _advance(self, at: int, mask: np.ndarray) -> None:
        """Executes with some lanes until they part, end, wait for others, or reach where the next ones stand."""
        stop = min(self.waiting, default=-1)
        active = self._active(mask)
        while at != stop:
            instruction, (execute, unit) = self.entry.code[at], self.steps[at]
            self.entry.executed.add(at)
            mine = active if not instruction.guard else active.also(self.read(instruction.guard, "pred") ^ instruction.unless)
            if execute is branch:
                self._part(at, active.mask, mine.mask, self.entry.labels[instruction.operands[0]])
                return
            if execute is leave:
                self.live &= ~mine.mask
                self._wait(at + 1, active.mask & ~mine.mask)
                return
            if unit:
                active = mine = self._gathered(at, active.mask, unit)
                if not mine.mask.any():
                    return
            self._execute(execute, instruction, mine)
            at += 1
        self._wait(at, active.mask)

    def _active(self, mask: np.ndarray) -> Active:
        return Active(mask, np.array_equal(mask, self.live))

    def _execute(self, execute: Execute, instruction: Instruction, active: Active) -> None:
        try:
            execute(self, instruction, active)
        except Exception as error:
            raise PtxError(f"{self.entry.name}: {error}, at: {instruction.text}") from error

    def _wait(self, at: int, mask: np.ndarray) -> None:
        if mask.any():
            self.waiting[at] = self.waiting.get(at, False) | mask

    def _part(self, at: int, mask: np.ndarray, taken: np.ndarray, target: int) -> None:
        self._wait(target, taken)
        self._wait(at + 1, mask & ~taken)

    def _gathered(self, at: int, mask: np.ndarray, unit: int) -> Active:
        """Those whose whole warp or block is here; the others are parked until it is."""
        here = mask | self.parked.pop(at, False)
        whole = np.repeat(here.reshape(-1, unit or self.threads).all(axis=1), unit)
        if (here & ~whole).any():
            self.parked[at] = here & ~whole
        return self._active(here & whole)

    # --------------------------------------------------------------------------------------------------------- operands

    def read(self, operand: Any, kind: str) -> np.ndarray:
        """An operand as numbers of a type: a lane each, or one for all."""
        held = self.registers.get(operand)
        if held is None:
            held = self.special.get(operand)
        if held is None:
            return self._constant(operand, kind)
        number = NUMBERS[kind]
        if held.dtype.itemsize > number.itemsize:
            held = held.astype(BITS[number.itemsize])
        return held.view(number)

    def address(self, operand: Any) -> np.ndarray:
        """Where an address operand points, a lane each."""
        if not isinstance(operand, Address):
            raise PtxError(f"{operand} is no address")
        base = self.registers.get(operand.base)
        base = self._constant(operand.base, "u64") if base is None else base
        return np.broadcast_to(base.astype(np.int64) + operand.offset, self.count)

    def _constant(self, text: str, kind: str) -> np.ndarray:
        key = (text, kind)
        if key not in self.constants:
            self.constants[key] = self._made(text, NUMBERS[kind])
        return self.constants[key]

    def _made(self, text: str, number: np.dtype) -> np.ndarray:
        if text in self.entry.symbols:
            return np.array([self.entry.symbols[text]], number)
        if text[0] == "%":
            raise PtxError(f"{text} is read and was never written")
        if text[:2] in ("0f", "0d"):
            return np.array([int(text[2:], 16)], BITS[4 if text[1] == "f" else 8]).view(number)
        value = int(text, 0)
        if number.kind == "b":
            return np.array([value != 0])
        return np.array([value % (1 << 8 * number.itemsize)], BITS[number.itemsize]).view(number)

    def write(self, register: str, value: np.ndarray, active: Active) -> None:
        """A result of all lanes, or one for all, where they are active."""
        np.copyto(self._register(register), self._widened(register, value), where=active.where)

    def place(self, register: str, value: np.ndarray, active: Active) -> None:
        """A result of the active lanes only."""
        self._register(register)[active.lanes] = self._widened(register, value)

    def _register(self, name: str) -> np.ndarray:
        """A new register holds nonsense, NaN as a number."""
        if name not in self.registers:
            size = self.entry.bytes_of(name)
            self.registers[name] = np.zeros(self.count, bool) if size == 1 else np.full(self.count, -1, f"i{size}").view(BITS[size])
        return self.registers[name]

    def _widened(self, register: str, value: np.ndarray) -> np.ndarray:
        """Bits of a value in a register, which may be wider than it."""
        size = self.entry.bytes_of(register)
        if value.dtype == bool and size == 1:
            return value
        if value.dtype.itemsize < size and value.dtype.kind in "iu":
            value = value.astype(f"{value.dtype.kind}{size}")
        if value.dtype.itemsize != size:
            raise PtxError(f"{value.dtype} into {register} of {size} bytes")
        return value.view(BITS[size])


Execute = Callable[[Machine, Instruction, Active], None]
Step = tuple[Execute, int]


def branch(machine: Machine, instruction: Instruction, active: Active) -> None:
    """Marks a branch: the machine itself does it."""


def leave(machine: Machine, instruction: Instruction, active: Active) -> None:
    """Marks the end of a thread."""
