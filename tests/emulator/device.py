"""CuPy's face on host memory, as lazy as a device may be: what is launched on a stream runs only when somebody waits for it.

``pretend(monkeypatch)`` makes ``import cupy`` give this module's ``Device``, whose arrays are NumPy arrays that wear
``__cuda_array_interface__`` and whose kernels run on the emulator. Whoever uses memory too early gets what was there
before; and where the memory goes to MPI, which looks at that interface, the device says so: work on it is still to run.

    loan = device.lend(array, written=True)      MPI has it: until give_back(loan), work on it must not be started

The module takes what CuPy takes and no more, which ``test_cupy.py`` holds against the real one: no array of the host beside one
of the device, no other names, no other arguments.

That holds for host memory too, from which and to which a stream copies. Work that runs before work of another stream, which
was started before it on the same memory, is told of as well: nobody made the one stream wait for the other.
"""
from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import Module

# What else the library and the tests ask of the module; NumPy says what it means.
FUNCTIONS = ("concatenate", "divide", "exp", "isinf", "isneginf", "log", "maximum", "ones", "where")


class TooEarly(AssertionError):
    """Memory was given to MPI, or worked on while MPI had it, without waiting."""


class Work(NamedTuple):
    """A piece of it, what it reads and writes, and its number among all that was started."""

    does: Callable[[], Any]
    reads: Sequence[np.ndarray]
    writes: Sequence[np.ndarray]
    number: int

    def before(self, later: Work) -> bool:
        """Whether a later piece must wait for this one: one of them writes what the other uses."""
        return self.number < later.number and (_overlap(self.writes, [*later.reads, *later.writes]) or _overlap(self.reads, later.writes))


class Stream:
    """Work in the order in which it was started. ``run(until)`` does it up to a number."""

    def __init__(self, device: Device) -> None:
        self.device, self.work, self.begun, self.ran = device, [], 0, 0  # type: ignore[var-annotated]
        self.ptr = id(self)

    def start(self, does: Callable[[], Any], reads: Sequence[np.ndarray], writes: Sequence[np.ndarray]) -> None:
        self.device.check_loans(reads, writes)
        self.begun += 1
        self.device.started += 1
        self.work.append(Work(does, reads, writes, self.device.started))

    def run(self, until: int) -> None:
        while self.ran < until:
            work = self.work.pop(0)
            self.ran += 1
            work.does()
            self.device.check_order(self, work)

    def synchronize(self) -> None:
        self.run(self.begun)

    def wait_event(self, event: Event) -> None:
        stream, until = event.recorded
        self.start(lambda: stream.run(until), [], [])

    def __enter__(self) -> Stream:
        self.device.current.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.device.current.pop()


class Event:
    """A place in a stream."""

    def __init__(self, device: Device) -> None:
        self.device, self.recorded = device, (device.stream, 0)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.device.stream
        self.recorded = (stream, stream.begun)

    def synchronize(self) -> None:
        stream, until = self.recorded
        stream.run(until)

    @property
    def done(self) -> bool:
        """Whether the work up to it has run. Every third look at any event lets one more piece run: time passes."""
        stream, until = self.recorded
        self.device.looks += 1
        stream.run(min(until, stream.ran + (self.device.looks % 3 == 0)))
        return stream.ran >= until


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of the device. Its shape is known at once, its numbers when they have been waited for."""

    __module__ = "cupy"

    def __init__(self, device: Device, memory: np.ndarray, place: int | None = None) -> None:
        self.device, self.memory, self.place = device, memory, device.number if place is None else place

    shape = property(lambda self: self.memory.shape)
    strides = property(lambda self: self.memory.strides)
    dtype = property(lambda self: self.memory.dtype)
    itemsize = property(lambda self: self.memory.itemsize)
    size = property(lambda self: self.memory.size)
    ndim = property(lambda self: self.memory.ndim)
    nbytes = property(lambda self: self.memory.nbytes)

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.memory.ctypes.data, mem=type(self.device.allocator, (), {})(), device_id=self.place)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self.device.check_idle(self.memory)
        face = dict(self.memory.__array_interface__)
        return {**face, "version": 3, "stream": None}

    def __len__(self) -> int:
        return len(self.memory)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly.")

    def _like(self, memory: np.ndarray) -> Array:
        return Array(self.device, memory, self.place)

    def __getitem__(self, key: Any) -> Array:
        return self._like(self.memory[key])

    def view(self, dtype: Any) -> Array:
        return self._like(self.memory.view(dtype))

    def reshape(self, *shape: Any) -> Array:
        made = self.memory.reshape(*shape)
        assert made.base is not None, "a reshape that would copy"
        return self._like(made)

    def ravel(self) -> Array:
        return self.reshape(-1)

    def swapaxes(self, a: int, b: int) -> Array:
        return self._like(self.memory.swapaxes(a, b))

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        into, value = self.memory[key], _memory(value)
        self.device.stream.start(lambda: np.copyto(into, value, casting="unsafe"), _arrays(value), [into])

    def astype(self, dtype: Any, copy: bool = True) -> Array:
        if self.dtype == dtype and not copy:
            return self
        return self.device.compute(lambda x: x.astype(dtype), self)

    def sum(self, axis: Any = None) -> Array:
        return self.device.compute(lambda x: x.sum(axis=axis), self)

    def fill(self, value: Any) -> None:
        self[...] = value

    def set(self, arr: np.ndarray, stream: Stream | None = None) -> None:
        host = _fits(arr, self.memory)
        (stream or self.device.stream).start(lambda: np.copyto(self.memory, host), [host], [self.memory])

    def get(self, stream: Stream | None = None, out: np.ndarray | None = None, blocking: bool = True) -> np.ndarray:
        stream, out = stream or self.device.stream, np.empty_like(self.memory) if out is None else _fits(out, self.memory)
        stream.start(lambda: np.copyto(out, self.memory), [self.memory], [out])
        if blocking:
            stream.synchronize()
        return out

    def tolist(self) -> list[Any]:
        return self.get().tolist()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None) -> Any:
        if out:
            return self.device.compute(lambda *x: ufunc(*x[1:], out=x[0]), out[0], *inputs, into=out[0])
        return self.device.compute(ufunc, *inputs)


class Function:
    """A kernel, launched on the current stream."""

    def __init__(self, device: Device, kernel: Any) -> None:
        self.device, self.kernel, self.max_dynamic_shared_size_bytes = device, kernel, 48 << 10

    def __call__(self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any], shared_mem: int = 0) -> None:
        self.kernel.max_dynamic_shared_size_bytes = self.max_dynamic_shared_size_bytes
        given = [x.memory if isinstance(x, Array) else x for x in arguments]
        self.kernel.check(grid, block, given, shared_mem)
        pointers = [(x.memory, kind) for x, (kind, _) in zip(arguments, self.kernel.signature) if isinstance(x, Array)]
        self.device.launches.append(self.kernel.name)
        seed = len(self.device.launches)
        self.device.stream.start(
            lambda: self.kernel(grid, block, given, shared_mem, seed=seed),
            [x for x, kind in pointers if kind == "in"], [x for x, kind in pointers if kind == "out"],
        )  # fmt: skip


class Number:
    """A device by its number: the current one unless given."""

    def __init__(self, device: Device, number: int | None) -> None:
        self.device, self.id = device, device.number if number is None else number

    def use(self) -> None:
        self.device.number = self.id

    def __enter__(self) -> Number:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass


class Device:
    """One GPU and the module ``cupy`` for it."""

    def __init__(self, checked: bool = False, options: Sequence[str] = (), module: Any = Module) -> None:
        self.checked, self.options, self.module = checked, list(options), module
        self.streams, self.loans, self.launches = [Stream(self)], [], []  # type: ignore[var-annotated]
        self.current = [self.streams[0]]
        self.ndarray, self.started = Array, 0
        # The class of CuPy's memory, and CUDA's type of it: 2 is a device's, 3 managed.
        self.allocator, self.memory_type = "PooledMemory", 2
        self.devices, self.number, self.looks = 1, 0, 0
        as_strided = np.lib.stride_tricks.as_strided
        tricks = types.SimpleNamespace(as_strided=lambda x, shape, strides: Array(self, as_strided(x.memory, shape, strides)))
        self.lib = types.SimpleNamespace(stride_tricks=tricks)
        self.cuda = types.SimpleNamespace(
            Device=lambda number=None: Number(self, number), get_current_stream=lambda: self.stream,
            Event=lambda *, disable_timing=False: Event(self), Stream=lambda *, non_blocking=False: self.another_stream(),
            is_available=lambda: True,
            runtime=types.SimpleNamespace(
                pointerGetAttributes=lambda pointer: types.SimpleNamespace(type=self.memory_type), memoryTypeManaged=3,
                getDeviceCount=lambda: self.devices,
            ),
        )  # fmt: skip

    @property
    def stream(self) -> Stream:
        return self.current[-1]

    def another_stream(self) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    # ------------------------------------------------------------------------------------------------ cupy's functions

    def empty(self, shape: Any, dtype: Any = float) -> Array:
        raw = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize + 64, 0xFF, np.uint8)
        skip = -raw.ctypes.data % 64
        return Array(self, raw[skip : len(raw) - 64 + skip].view(dtype).reshape(shape))

    def zeros(self, shape: Any, dtype: Any = float) -> Array:
        return self.full(shape, 0, dtype)

    def full(self, shape: Any, value: Any, dtype: Any) -> Array:
        made = self.empty(shape, dtype)
        made.fill(value)
        return made

    def asarray(self, x: Any, dtype: Any = None) -> Array:
        if isinstance(x, Array):
            return x if dtype is None else x.astype(dtype, copy=False)
        if hasattr(x, "__cuda_array_interface__"):
            face = x.__cuda_array_interface__
            if face.get("mask") is not None:
                raise ValueError("CuPy currently does not support masked arrays.")
            for stream in self.streams:
                if stream.ptr == face.get("stream"):
                    stream.synchronize()
            return Array(self, np.asarray(types.SimpleNamespace(__array_interface__={**face, "version": 3}, owner=x)))
        x = np.asarray(x, dtype)
        made = self.empty(x.shape, x.dtype)
        made.memory[...] = x
        return made

    def from_dlpack(self, array: Any) -> Array:
        """A capsule is here the producer's memory. Its type of device: 2 is CUDA, 13 managed."""
        if array.__dlpack_device__()[0] not in (2, 13):
            raise TypeError(f"Unsupported array type: {array.__dlpack_device__()[0]}")
        return Array(self, array.__dlpack__(stream=self.stream.ptr, max_version=(1, 0), copy=None), array.__dlpack_device__()[1])

    def ascontiguousarray(self, a: Array) -> Array:
        x = a
        return x if x.memory.flags.c_contiguous else self.compute(np.array, x)

    def take(self, a: Array, indices: Any, axis: int) -> Array:
        return self.compute(lambda x: np.take(x, indices, axis), a)

    def broadcast_to(self, x: Array, shape: tuple[int, ...]) -> Array:
        return Array(self, np.broadcast_to(x.memory, shape))

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise AttributeError(name)

        def launch(*inputs: Any, out: Array | None = None, casting: str = "same_kind", **options: Any) -> Array:
            return self.compute(lambda *x: getattr(np, name)(*x, **options), *inputs, into=out)

        return launch

    def compute(self, function: Callable[..., Any], *inputs: Any, into: Array | None = None) -> Array:
        """Starts what NumPy would do. It is done once at once, on what happens to be there, to learn the shape."""
        if any(isinstance(x, np.ndarray) and x.ndim for x in inputs):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        given = [_memory(x) for x in inputs]
        if into is None:
            with np.errstate(all="ignore"):
                like = np.asarray(function(*given))
            into = self.empty(like.shape, like.dtype)
        memory = into.memory

        def does() -> None:
            with np.errstate(all="ignore"):
                memory[...] = function(*given)

        self.stream.start(does, [array for x in given for array in _arrays(x)], [memory])
        return into

    def RawModule(self, code: str, options: Sequence[str], name_expressions: Sequence[str]) -> Any:
        folders = [Path(option[2:]).resolve() for option in options if option.startswith("-I")]
        path = next(path for path in (folder / code.split('"')[1] for folder in folders) if path.exists())
        module = self.module(path, name_expressions, [*(f"-I{folder}" for folder in folders), *self.options], self.checked)
        return types.SimpleNamespace(get_function=lambda name: Function(self, module.get_function(name)))

    # ------------------------------------------------------------------------------------------------- what MPI may see

    def check_idle(self, memory: np.ndarray, written: bool = True) -> None:
        """Raises if work on the memory is still to run; if it is only to be read, work that writes it."""
        for stream in self.streams:
            for i, work in enumerate(stream.work):
                if _overlap([memory], [*(work.reads if written else ()), *work.writes]):
                    raise TooEarly(f"MPI is given a buffer on which work {stream.ran + i + 1} of {stream.begun} of its stream has not run")

    def check_loans(self, reads: Sequence[np.ndarray], writes: Sequence[np.ndarray]) -> None:
        """Raises if work is started on memory that MPI writes, or writes memory that MPI has."""
        for memory, written in self.loans:
            for used in (*writes, *(reads if written else ())):
                if np.may_share_memory(memory, used):
                    raise TooEarly("work is started on a buffer that MPI still has")

    def check_order(self, stream: Stream, work: Work) -> None:
        """Raises if work has run before what was started earlier, on another stream, on the same memory."""
        for other in self.streams:
            if other is not stream and any(earlier.before(work) for earlier in other.work):
                raise TooEarly("work has run before that of another stream, which was started before it on the same memory")

    def lend(self, array: Any, written: bool) -> Any:
        """MPI has been given an array, of the device or of the host, to read or to write."""
        self.check_idle(_memory(array), written)
        for memory, other in self.loans:
            if (written or other) and np.may_share_memory(memory, _memory(array)):
                raise TooEarly("MPI is given a buffer that it still has")
        loan = (_memory(array), written)
        self.loans.append(loan)
        return loan

    def give_back(self, loan: Any) -> None:
        self.loans = [other for other in self.loans if other is not loan]


def at_hand(monkeypatch: Any) -> Any:
    """The module ``cupy``: the real one where the environment says that there is a GPU, else a pretended one."""
    if os.environ.get("RINGMPI_GPU") == "1":
        import cupy

        from ringmpi.tiles import cuda

        # What an earlier test's pretended device has compiled is none of the real one's.
        cuda.forget()
        return cupy
    return pretend(monkeypatch)


def pretend(monkeypatch: Any, **options: Any) -> Device:
    """A device that ``import cupy`` gives, until the test is over."""
    device = Device(**options)
    for name, module in modules(device).items():
        monkeypatch.setitem(sys.modules, name, module)
    return device


def modules(device: Device) -> dict[str, Any]:
    """What stands in for CuPy's modules, by name. What was compiled for another device is forgotten."""
    from ringmpi.tiles import cuda

    cuda.forget()
    return {"cupy": device, "cupyx": types.SimpleNamespace(empty_pinned=_pinned)}


def _pinned(shape: Any, dtype: Any) -> np.ndarray:
    return np.full(shape, 0xEE, dtype)


def _memory(x: Any) -> Any:
    """The memory of an array, or of each in a list."""
    return [_memory(one) for one in x] if isinstance(x, list) else x.memory if isinstance(x, Array) else x


def _fits(host: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Host memory to copy to or from, if CuPy would."""
    assert isinstance(host, np.ndarray) and host.flags.c_contiguous, "a copy of what is not contiguous on the host"
    if (host.dtype, host.shape) != (memory.dtype, memory.shape):
        raise TypeError(f"{host.dtype} {host.shape} cannot be set to {memory.dtype} {memory.shape}")
    return host


def _overlap(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return any(np.may_share_memory(one, other) for one in some for other in others)


def _arrays(x: Any) -> list[np.ndarray]:
    return x if isinstance(x, list) else [x] if isinstance(x, np.ndarray) else []
