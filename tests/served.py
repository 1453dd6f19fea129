"""The host tile on an emulated processor: serve_tile.c behind a pipe, in place of the loaded library."""
import ctypes
import struct
import subprocess

import numpy as np

from ringmpi.tiles import host, native

FUNCTIONS = ["forward", "backward", "merge", "forward_space_of", "backward_space_of", "strips", "strip_row", "constant"]
OUTPUTS = {"forward": ("o", "m", "l"), "backward": ("dq", "dk", "dv"), "merge": ("into_o", "into_m", "into_l")}


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
        for name, kind in structure._fields_:
            field = getattr(type(structure), name)
            if name in shapes and getattr(structure, name).data:
                array, (shape, strides, size) = getattr(structure, name), shapes[name]
                steps = [(n - 1) * getattr(array, s) for n, s in zip(shape, strides)]
                origin = -sum(min(0, step) for step in steps)
                memory = view(array.data - origin, origin + sum(max(0, step) for step in steps) + size)
                yield field.offset, origin, memory, name in OUTPUTS[self.name]
            elif kind is ctypes.c_void_p and getattr(structure, name):
                yield field.offset, 0, view(getattr(structure, name), self.size(structure, name)), name == "workspace"

    def size(self, c, name):
        if name == "workspace":
            return getattr(self.served, f"{self.name}_space_of")(ctypes.byref(c))
        bounds = c.bounds_batch, c.rows, 4
        step, count, size = {"lo": bounds, "hi": bounds, "seen": (c.seen_batch, c.keys, 1), "alibi": (0, c.heads, 8)}[name]
        return (c.batch1 * step if step else count) * size


def shapes_of(which, c):
    """By field: the shape that strides go with, their names, and the bytes of a number."""
    real = c.real
    wide, rows = ("batch", "token", "head", "column"), ("batch", "head", "token")
    if which == "merge":
        o, ml = ((c.batch, c.rows, c.heads, c.v_dim), wide, real), ((c.batch, c.heads, c.rows), rows, real)
        return {f"{of}_{x}": o if x == "o" else ml for of in ("into", "other") for x in "oml"}
    stored, batches, group = 2 if c.storage else real, c.batch1, c.heads // c.kv_heads
    queries, keys = (batches, c.rows, c.heads), (batches, c.keys, c.kv_heads)
    shapes = {"q": ((*queries, c.head_dim), wide, stored)}
    shapes |= {name: ((*keys, dim), wide, stored) for name, dim in (("k", c.head_dim), ("v", c.v_dim))}
    if which == "backward":
        shapes["dout"] = ((*queries, c.v_dim), wide, stored)
        shapes["dq"] = ((*queries, c.head_dim), wide, real)
        shapes |= {name: ((*keys, dim), wide, real) for name, dim in (("dk", c.head_dim), ("dv", c.v_dim))}
        return shapes | {x: ((batches, c.heads, c.rows), rows, real) for x in ("lse", "delta")}
    library = c.library
    first, last = (min(c.rows, library.strip_row(c.rows, s)) for s in (c.strip0, c.strip1))
    heads = (c.kv1 - c.kv0 - 1) * group + c.group1 - c.group0
    part = (c.batch1 - c.batch0, last - first, heads)
    shapes["o"] = ((*part, c.v_dim), wide, real)
    return shapes | {x: ((part[0], heads, part[1]), rows, real) for x in ("m", "l")}


def view(address, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def install(emulator, folder):
    """Makes the host tile use programs in a folder, one for each real, run by an emulator."""
    served = {real: Served([emulator, f"{folder}/{real}"]) for real in native.REALS}
    native.load = served.__getitem__
    plain_run, plain_merging = host._Job.run, host._Merging

    # A structure does not say what numbers it is for.
    def run(self, *given):
        self.call.real, self.call.library = self.library.dtype.itemsize, self.library
        return plain_run(self, *given)

    class Merging(plain_merging):
        def __init__(self, *fields):
            super().__init__(*fields)
            self.real = fields[0].column

    host._Job.run, host._Merging = run, Merging
