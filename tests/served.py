"""The host tile on an emulated processor: serve_tile.c behind a pipe, in place of the loaded library."""
import ctypes
import struct
import subprocess

import numpy as np

from ringmpi.tiles import host, native

FUNCTIONS = ["forward", "backward", "merge", "finish", "delta", "forward_space_of", "backward_space_of", "strips", "strip_row",
             "block_of_keys", "constant"]  # fmt: skip
INTO = ("into.whole.o", "into.whole.m", "into.whole.l")
OUTPUTS = {"forward": INTO, "backward": ("dq", "dk", "dv"), "merge": INTO, "finish": ("total.o", "lse"), "delta": ("delta",)}


class Served:
    """What ctypes gives for a library, spoken to over a pipe."""

    def __init__(self, command):
        self.pipe = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for name in FUNCTIONS:
            setattr(self, name, Function(self, name))
        self.threaded = Constant(0)
        self.isa = Constant(b"emulated")

    def ask(self, name, given, pieces):
        """The function's result; pieces that come back are written where they came from."""
        send = self.pipe.stdin.write
        send(struct.pack("<2q", FUNCTIONS.index(name), len(given)) + given + struct.pack("<q", len(pieces)))
        for at, origin, memory, back in pieces:
            send(struct.pack("<4q", at, origin, len(memory), back))
            send(memory)
        self.pipe.stdin.flush()
        result = struct.unpack("<q", self.pipe.stdout.read(8))[0]
        for _, _, memory, back in pieces:
            if back:
                memory[:] = np.frombuffer(self.pipe.stdout.read(len(memory)), np.uint8)
        return result


class Constant:
    def __init__(self, value):
        self.value = value

    def __call__(self):
        return self.value


class Function:
    def __init__(self, served, name):
        self.served, self.name = served, name

    def __call__(self, *given):
        if hasattr(given[0], "_obj"):
            structure = given[0]._obj
            return self.served.ask(self.name, bytes(structure), list(self.pieces(structure)))
        return self.served.ask(self.name, b"".join(bytes(x) for x in given), [])

    def pieces(self, structure):
        """The memory that a structure points to."""
        if self.name.endswith("space_of"):
            return
        shapes = shapes_of(self.name, structure)
        for name, kind, value, at in leaves(structure):
            if name in shapes and value.data:
                shape, strides, size = shapes[name]
                steps = [(n - 1) * getattr(value, s) for n, s in zip(shape, strides)]
                origin = -sum(min(0, step) for step in steps)
                memory = view(value.data - origin, origin + sum(max(0, step) for step in steps) + size)
                yield at, origin, memory, name in OUTPUTS[self.name]
            elif kind is ctypes.c_void_p and value:
                yield at, 0, view(value, self.size(structure, name)), name == "workspace"

    def size(self, c, name):
        if name == "workspace":
            return getattr(self.served, f"{self.name}_space_of")(ctypes.byref(c))
        bounds = c.bounds_batch, c.rows, 4
        step, count, size = {"lo": bounds, "hi": bounds, "seen": (c.seen_batch, c.keys, 1), "alibi": (0, c.heads, 8)}[name]
        return (c.part.batch1 * step if step else count) * size


def leaves(structure, inside="", at=0):
    """The arrays and numbers in a structure and in those inside it: name, type, value, and where it lies."""
    for name, kind in structure._fields_:
        value, here = getattr(structure, name), at + getattr(type(structure), name).offset
        if isinstance(value, ctypes.Structure) and not isinstance(value, host._Array):
            yield from leaves(value, f"{inside}{name}.", here)
        else:
            yield inside + name, kind, value, here


def sums(batch, rows, heads, columns, real):
    """The shapes of o, m and l."""
    of_row = (batch, heads, rows), ("batch", "head", "token"), real
    return {"o": ((batch, rows, heads, columns), ("batch", "token", "head", "column"), real), "m": of_row, "l": of_row}


def place(p, batch, rows, heads, columns, real):
    """The shapes of o, m and l up to the rows of a place in them."""
    whole = sums(p.batch0 + batch, p.row0 + rows, p.head0 + heads, columns, real)
    return {f"into.whole.{x}": whole[x] for x in "oml"}


def shapes_of(which, c):
    """By field: the shape that strides go with, their names, and the bytes of a number."""
    real = c.real
    wide, rows = ("batch", "token", "head", "column"), ("batch", "head", "token")
    if which in ("merge", "finish", "delta"):
        size = c.of.batch, c.of.rows, c.of.heads, c.of.v_dim
        of = sums(*size, real)
        if which == "merge":
            return {**place(c.into, *size, real), **{f"other.{x}": of[x] for x in "oml"}}
        if which == "finish":
            return {**{f"total.{x}": of[x] for x in "oml"}, "lse": of["m"]}
        return {"dout": of["o"], "out": of["o"], "delta": of["m"]}
    stored, batches, group = 2 if c.storage else real, c.part.batch1, c.heads // c.kv_heads
    queries, keys = (batches, c.rows, c.heads), (batches, c.keys, c.kv_heads)
    shapes = {"q": ((*queries, c.head_dim), wide, stored)}
    shapes |= {name: ((*keys, dim), wide, stored) for name, dim in (("k", c.head_dim), ("v", c.v_dim))}
    if which == "backward":
        shapes["dout"] = ((*queries, c.v_dim), wide, stored)
        shapes["dq"] = ((*queries, c.head_dim), wide, real)
        shapes |= {name: ((*keys, dim), wide, real) for name, dim in (("dk", c.head_dim), ("dv", c.v_dim))}
        return shapes | {x: ((batches, c.heads, c.rows), rows, real) for x in ("lse", "delta")}
    library, p = c.library, c.part
    first, last = (min(c.rows, library.strip_row(c.rows, s)) for s in (p.strip0, p.strip1))
    heads = (p.kv1 - p.kv0 - 1) * group + p.group1 - p.group0
    return shapes | place(c.into, p.batch1 - p.batch0, last - first, heads, c.v_dim, real)


def view(address, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def install(emulator, folder):
    """Makes the host tile use programs in a folder, one for each real, run by an emulator."""
    served = {real: Served([*emulator, f"{folder}/{real}"]) for real in native.REALS}
    native.load = served.__getitem__
    enter = host._Job.__enter__

    # A structure does not say what numbers it is for.
    def told(self):
        self.call.real, self.call.library = self.library.dtype.itemsize, self.library
        return enter(self)

    def telling(plain):
        class Told(plain):
            def __init__(self, *fields):
                super().__init__(*fields)
                first = getattr(fields[0], "whole", fields[0])
                self.real = first.o.column or first.m.token if hasattr(first, "o") else first.column or fields[2].token

        return Told

    host._Job.__enter__ = told
    for name in ("_Merging", "_Finishing", "_Dotting"):
        setattr(host, name, telling(getattr(host, name)))
