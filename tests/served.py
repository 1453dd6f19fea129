"""The host tile on an emulated processor: serve_tile.c behind a pipe, in place of the loaded library."""
import ctypes
import struct
import subprocess

import numpy as np

from ringmpi.tiles import native

# What the functions take, in the order of serve_tile.c; what they write to comes back.
FUNCTIONS = {
    "forward": "request workspace part place", "backward": "request workspace part", "merge": "place partial number",
    "finish": "partial array number", "delta": "array array array number", "forward_space_of": "request part",
    "backward_space_of": "request part", "strips": "number", "strip_row": "number number", "block_of_keys": "number", "constant": "number",
}  # fmt: skip
BACK = {"forward": ("place",), "backward": ("request",), "merge": ("place",), "finish": ("partial", "array"), "delta": ("array",)}
# How many descriptions of arrays each begins with.
ARRAYS = {"request": 13, "place": 3, "partial": 3, "part": 0}
GRADIENTS = 6  # of a request: those before are only read


class Description(ctypes.Structure):
    """PyArrayInterface of NumPy."""

    _fields_ = [("two", ctypes.c_int), ("axes", ctypes.c_int), ("kind", ctypes.c_char), ("number_bytes", ctypes.c_int),
                ("flags", ctypes.c_int), ("shape", ctypes.POINTER(ctypes.c_ssize_t)), ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
                ("data", ctypes.c_void_p), ("names", ctypes.c_void_p)]  # fmt: skip


class Served:
    """What ctypes gives for a library, spoken to over a pipe."""

    def __init__(self, command):
        self.pipe = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for name in FUNCTIONS:
            setattr(self, name, Function(self, name))
        self.threaded, self.isa = Constant(0), Constant(b"emulated")

    def number(self, *numbers):
        self.pipe.stdin.write(struct.pack(f"<{len(numbers)}q", *numbers))

    def array(self, address, back):
        """Sends an array by the address of its description, and the memory from its first byte to its last."""
        if not address:
            return self.number(-1)
        x = Description.from_address(address)
        shape, strides = x.shape[: x.axes], x.strides[: x.axes]
        steps = [(n - 1) * stride for n, stride in zip(shape, strides)]
        origin = -sum(min(0, step) for step in steps)
        nbytes = origin + sum(max(0, step) for step in steps) + x.number_bytes if all(shape) else 0
        self.number(x.axes, *shape, *strides, origin)
        self.memory(view(x.data - origin, nbytes), back)

    def memory(self, memory, back):
        self.number(len(memory), back)
        self.pipe.stdin.write(memory)
        if back:
            self.expected.append(memory)

    def ask(self, name, given):
        """The function's result; what it wrote is written here."""
        self.expected = []
        size = getattr(self, f"{name}_space_of")(given[0], given[2]) if "workspace" in FUNCTIONS[name] else 0
        self.number([*FUNCTIONS].index(name))
        for kind, value in zip(FUNCTIONS[name].split(), given):
            back = kind in BACK.get(name, ())
            if kind == "number":
                self.number(value)
            elif kind == "array":
                self.array(value, back)
            elif kind == "workspace":
                self.memory(view(value, size), True)
            else:
                self.number(len(value))
                self.pipe.stdin.write(value)
                for i, address in enumerate(struct.unpack_from(f"{ARRAYS[kind]}P", value)):
                    self.array(address, back and (kind != "request" or i >= GRADIENTS))
        self.pipe.stdin.flush()
        result = struct.unpack("<q", self.pipe.stdout.read(8))[0]
        for memory in self.expected:
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
        return self.served.ask(self.name, given)


def view(address, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else np.empty(0, np.uint8)


def install(emulator, folder):
    """Makes the host tile use programs in a folder, one for each real, run by an emulator."""
    served = {real: Served([*emulator, f"{folder}/{real}"]) for real in native.REALS}
    native.load = served.__getitem__
