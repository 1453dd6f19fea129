"""Loads and stores, and copies from global to shared memory that go on while the thread does."""
from __future__ import annotations

from typing import Any

import numpy as np

from .arithmetic import instruction
from .machine import NUMBERS, Active, Machine
from .parse import Instruction


def shape(i: Instruction) -> tuple[np.dtype, int]:
    """The type of each number and how many there are: ``.v2.f32``."""
    parts = i.opcode.split(".")
    return NUMBERS[parts[-1]], int(parts[-2][1:]) if parts[-2] in ("v2", "v4") else 1


def names(operand: Any) -> tuple[str, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


def places(machine: Machine, i: Instruction, active: Active, address: np.ndarray, size: int, writes: bool) -> Any:
    """The memory behind the addresses of the active lanes."""
    if ".shared" in i.opcode:
        return machine.memory.shared_at(address[active.lanes], size, machine.block[active.lanes])
    return machine.memory.global_at(address[active.lanes], size, writes)


@instruction(r"ld\.(global(\.nc)?|shared)(\.v[24])?\.[busf](8|16|32|64)")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    number, count = shape(i)
    if not active.mask.any():
        return
    address = machine.address(i.operands[1])
    got = np.empty((len(address[active.lanes]), count), number)
    for memory, at, which in places(machine, i, active, address, count * number.itemsize, False):
        got[which] = memory.view(number)[at[:, None] // number.itemsize + np.arange(count)]
    for n, name in enumerate(names(i.operands[0])):
        machine.place(name, np.ascontiguousarray(got[:, n]), active)


@instruction(r"st\.(global|shared)(\.v[24])?\.[busf](8|16|32|64)")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    number, count = shape(i)
    if not active.mask.any():
        return
    address, kind = machine.address(i.operands[0]), i.opcode.rpartition(".")[2]
    values = [np.broadcast_to(machine.read(name, kind), machine.count)[active.lanes] for name in names(i.operands[1])]
    given = np.stack(values, axis=1)
    for memory, at, which in places(machine, i, active, address, count * number.itemsize, True):
        memory.view(number)[at[:, None] // number.itemsize + np.arange(count)] = given[which]


@instruction(r"ld\.param(\.v[24])?\.[busf](8|16|32|64)")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    """Parameters are the same for all lanes."""
    number, _ = shape(i)
    at = machine.address(i.operands[1])
    for n, name in enumerate(names(i.operands[0])):
        first = at[:, None] + n * number.itemsize + np.arange(number.itemsize)
        machine.write(name, machine.parameters[first % len(machine.parameters)].view(number)[:, 0], active)


@instruction(r"cp\.async\.cg\.shared\.global")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    """``[to], [from], 16, size``: beyond ``size`` bytes come zeros, and nothing is read where it is 0."""
    to, of, whole, size = i.operands
    lanes = np.flatnonzero(active.mask)
    if whole != "16" or not len(lanes):
        if len(lanes):
            raise ValueError(f"a copy of {whole} bytes")
        return
    sizes = np.broadcast_to(machine.read(size, "u32"), machine.count)[lanes]
    if not np.isin(sizes, (0, 16)).all():
        raise ValueError(f"copies of {set(sizes.tolist())} bytes")
    data = np.zeros((len(lanes), 16), np.uint8)
    real = np.flatnonzero(sizes)
    if len(real):
        for memory, at, which in machine.memory.global_at(machine.address(of)[lanes[real]], 16, False):
            data[real[which]] = memory.reshape(-1, 16)[at // 16]
    [(shared, at, _)] = machine.memory.shared_at(machine.address(to)[lanes], 16, machine.block[lanes])
    machine.copies.start(shared, lanes, at, data)


@instruction(r"cp\.async\.commit_group")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    machine.copies.commit(active.mask)


@instruction(r"cp\.async\.wait_group")
def _(machine: Machine, i: Instruction, active: Active) -> None:
    machine.copies.wait(machine.memory.shared, active.mask, int(i.operands[0]))
