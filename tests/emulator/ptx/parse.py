"""PTX as text to kernels: their parameters, and instructions with labels resolved and names of inner scopes made unique."""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Union

BYTES = {"pred": 1, **{kind + bits: int(bits) // 8 for kind in "busf" for bits in ("8", "16", "32", "64")}}


class Address(NamedTuple):
    """``[base + offset]``; the base is a register or a symbol."""

    base: str
    offset: int


# A register, symbol or number as written; several in braces; or an address.
Operand = Union[str, tuple[str, ...], Address]


class Instruction(NamedTuple):
    """One instruction: ``@!%p1 opcode operands``."""

    text: str
    guard: str
    unless: bool
    opcode: str
    operands: tuple[Operand, ...]


@dataclass
class Entry:
    """A kernel. ``parameters`` are (offset, bytes, type); ``registers`` give the bytes of a register by its name without digits;
    ``executed`` are the instructions that were."""

    name: str
    parameters: list[tuple[int, int, str]]
    symbols: dict[str, int]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)
    executed: set[int] = field(default_factory=set)

    @property
    def opcodes(self) -> set[str]:
        """Every opcode in it."""
        return {instruction.opcode for instruction in self.code}

    def bytes_of(self, register: str) -> int:
        """How many bytes a register has."""
        return self.registers.get(register) or self.registers[register.rstrip("0123456789")]


class UnknownPtx(ValueError):
    """Something in the text that nobody here knows."""


def entries(text: str) -> Iterator[Entry]:
    """The kernels of a PTX file."""
    text = re.sub(r'//[^\n]*|\.pragma\s+"[^"]*"\s*;', "", text)
    shared = re.findall(r"^\s*\.(?:extern\s+)?\.?shared\s+.*?(\w+)\[(\d*)\]", text, re.M)
    if len(shared) > 1 or any(size for _, size in shared):
        raise UnknownPtx(f"shared memory of a fixed size: {shared}")
    symbols = {name: 0 for name, _ in shared}
    for found in re.finditer(r"\.entry\s+(\w+)\s*\((.*?)\)[^{]*\{", text, re.S):
        entry = Entry(found.group(1), [], dict(symbols))
        _parameters(entry, found.group(2))
        _Body(entry).read(text, found.end())
        yield entry


PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+.*?)?(\w+)(?:\[(\d+)\])?\s*(?:,|$)")


def _parameters(entry: Entry, text: str) -> None:
    """Parameters in order, each at the next multiple of its alignment."""
    offset = 0
    for align, kind, name, count in PARAMETER.findall(text):
        size = BYTES[kind] * int(count or 1)
        align = int(align or size)
        offset = -(-offset // align) * align
        entry.parameters.append((offset, size, kind if not count else "struct"))
        entry.symbols[name] = offset
        offset += size


# At the start of a statement a brace is a scope; within one it belongs to an operand.
PIECE = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[$\w]+):|(?P<statement>[^;]+);)")
PARTS = re.compile(r"(?:@(?P<unless>!?)(?P<guard>%\w+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)")
OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


class _Body:
    """Reads the statements between an entry's braces."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.scopes: list[dict[str, str]] = [{}]
        self.opened = 0

    def read(self, text: str, at: int) -> None:
        while self.scopes:
            piece = PIECE.match(text, at)
            if not piece:
                raise UnknownPtx(f"{self.entry.name}: {text[at : at + 80]!r}")
            at = piece.end()
            if piece["brace"] == "{":
                self.scopes.append({})
                self.opened += 1
            elif piece["brace"]:
                self.scopes.pop()
            elif piece["label"]:
                self.entry.labels[piece["label"]] = len(self.entry.code)
            else:
                self._statement(" ".join(piece["statement"].split()))

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self._declare(text)
            return
        parts = PARTS.fullmatch(text)
        if not parts:
            raise UnknownPtx(f"{self.entry.name}: {text}")
        operands = tuple(self._operand(operand) for operand in OPERANDS.findall(parts["operands"]))
        guard = self._named(parts["guard"]) if parts["guard"] else ""
        self.entry.code.append(Instruction(text, guard, parts["unless"] == "!", parts["opcode"], operands))

    def _declare(self, text: str) -> None:
        """``.reg .b32 %r<7>`` is seven registers; a single name in an inner scope hides what has it outside."""
        found = re.fullmatch(r"\.reg \.(\w+) (%\w+)(<\d+>)?", text)
        if not found:
            raise UnknownPtx(f"{self.entry.name}: {text}")
        kind, name, count = found.groups()
        own = name if count or len(self.scopes) == 1 else f"{name}.{self.opened}"
        self.scopes[-1][name] = own
        self.entry.registers[own] = BYTES[kind]

    def _named(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def _operand(self, text: str) -> Operand:
        if text[0] == "[":
            base, _, offset = text[1:-1].replace(" ", "").partition("+")
            return Address(self._named(base), int(offset or "0", 0))
        if text[0] == "{" or "|" in text:
            return tuple(self._named(name.strip()) for name in re.split(r"[,|]", text.strip("{}")))
        return self._named(text)
