"""The real CuPy has every name and takes every argument that the library asks of it, and the pretended one takes no more. No GPU.

Needs CuPy, which the other tests do without: ``bash tests/cupy.sh`` makes an environment with it and runs these. Without a GPU a call
of CuPy fails when it reaches the driver; it was then understood. Arrays that lie in host memory can be made, looked at and cut.
"""
import ast
import ctypes
import inspect
import re
import sys
import types
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from emulator import device as pretended
from test_cuda_compile import instructions, nvdisasm
from test_cuda_probe import compiled

import ringmpi
from ringmpi import tiles
from ringmpi.partial import namespace
from ringmpi.tiles import cuda, registry

cupy = pytest.importorskip("cupy", reason="CuPy is not installed: bash tests/cupy.sh")
cupyx = pytest.importorskip("cupyx")
ROOM = Path(ringmpi.__file__).parent
# Where CuPy's module is spoken to: as `xp`, `self.xp`, `_cupy()` or by its own name.
ROOMS = ("api.py", "attention.py", "decode.py", "partial.py", "tiles/cuda.py", "tiles/staging.py")
ROOTS = {"xp": "cupy", "self.xp": "cupy", "_cupy()": "cupy", "cupyx": "cupyx", "cupy": "cupy"}


# ----------------------------------------------------------------------------------------- what the library asks of CuPy


def asked():
    """(a dotted name, the keywords of a call or None, where): everything that the rooms ask of the module."""
    for room in ROOMS:
        tree = ast.parse((ROOM / room).read_text())
        roots = dict(ROOTS)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and dotted(node.value, roots):
                roots[node.targets[0].id] = dotted(node.value, roots)
        calls = {id(node.func): [keyword.arg for keyword in node.keywords] for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            name = isinstance(node, ast.Attribute) and dotted(node, roots)
            if name and name.rpartition(".")[0]:
                yield name, calls.get(id(node)), f"{room}:{node.lineno}"


def dotted(node, roots):
    """The name in CuPy of an expression, or None."""
    text = ast.unparse(node)
    if text in roots:
        return roots[text]
    whole = dotted(node.value, roots) if isinstance(node, ast.Attribute) else None
    return whole and f"{whole}.{node.attr}"


def real(name):
    """What a dotted name is in the real CuPy."""
    found, *rest = name.split(".")
    found = sys.modules[found]
    for word in rest:
        found = getattr(found, word)
    return found


def parameters(of):
    """The names of the parameters of a function or class, also of compiled ones, whose docstrings begin with them."""
    for one in (of, getattr(of, "__init__", None)):
        line = re.match(r"[\w.]+\((.*?)\)(?: ->.*)?(\n|$)", getattr(one, "__doc__", None) or "")
        if line:
            return {re.split(r"[=:]", word)[0].split()[-1].lstrip("*") for word in line.group(1).split(",") if word.strip(" */")}
    return set(inspect.signature(of).parameters)


ASKED = sorted({(name, tuple(keywords or ())) for name, keywords, _ in asked()})


@pytest.mark.parametrize(("name", "keywords"), ASKED, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_what_the_library_asks_is_there(name, keywords):
    found = real(name)
    if keywords and not isinstance(found, cupy.ufunc):
        assert set(keywords) <= parameters(found)


def test_the_library_asks_for_more_than_a_few_things():
    names = {name for name, _ in ASKED}
    assert len(names) > 25 and {"cupy.cuda.Event", "cupyx.empty_pinned", "cupy.RawModule", "cupy.cuda.runtime.memoryTypeManaged"} <= names


# --------------------------------------------------------------------------------------------- what the pretended one takes


def public(kind):
    return [name for name, x in vars(kind).items() if callable(x) and (not name.startswith("_") or name in ("__enter__", "__exit__"))]


# The pretended classes, the real ones, and what only the pretended have.
CLASSES = {
    pretended.Array: (cupy.ndarray, ()),
    pretended.Stream: (cupy.cuda.Stream, ("start", "run")),
    pretended.Event: (cupy.cuda.Event, ()),
    pretended.Number: (cupy.cuda.Device, ()),
}
METHODS = [(kind, name) for kind, (_, own) in CLASSES.items() for name in public(kind) if name not in own]


@pytest.mark.parametrize(("kind", "name"), METHODS, ids=lambda x: getattr(x, "__name__", x))
def test_pretended_methods_take_no_more(kind, name):
    found = getattr(CLASSES[kind][0], name)
    if name.startswith("__"):
        return
    mine = [p for p in inspect.signature(getattr(kind, name)).parameters.values() if p.name != "self" and p.kind is not p.VAR_POSITIONAL]
    assert {p.name for p in mine if p.default is not p.empty or p.kind is p.KEYWORD_ONLY} <= parameters(found)


FUNCTIONS = (*pretended.FUNCTIONS, "empty", "zeros", "full", "asarray", "from_dlpack", "ascontiguousarray", "broadcast_to", "take",
             "RawModule")  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pretended_functions_are_real(name):
    found = real(f"cupy.{name}")
    if name not in pretended.FUNCTIONS:
        mine = inspect.signature(getattr(pretended.Device(), name)).parameters.values()
        assert {p.name for p in mine if p.default is not p.empty} <= parameters(found)


@pytest.mark.parametrize("name", ["Device", "get_current_stream", "Event", "Stream", "is_available"])
def test_pretended_parts_are_real(name):
    mine = inspect.signature(getattr(pretended.Device().cuda, name)).parameters
    assert {parameter for parameter in mine if parameter != "number"} <= parameters(real(f"cupy.cuda.{name}"))


def test_pretended_attributes_are_real():
    properties = [name for name, x in vars(pretended.Array).items() if isinstance(x, property)]
    assert all(hasattr(cupy.ndarray, name) for name in properties)
    assert all(hasattr(cupy.RawKernel, name) for name in ("max_dynamic_shared_size_bytes", "__call__"))
    assert hasattr(cupy.cuda.Event, "done") and hasattr(cupy.cuda.MemoryPointer, "device_id") and hasattr(cupy.cuda.MemoryAsync, "ptr")
    assert {"type"} <= set(dir(cupy.cuda.runtime.PointerAttributes))


# ------------------------------------------------------------------------------------------------- what a call is understood as


def on_host(shape, dtype=np.float32, strides=None):
    """An array of CuPy whose memory is the host's."""
    raw = np.zeros(1 << 14, np.uint8)
    memory = cupy.cuda.UnownedMemory(raw.ctypes.data, raw.nbytes, raw, 0)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def understood(call):
    """Does the call, or as much as can be without a driver."""
    try:
        call()
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError):
        assert not cupy.cuda.is_available()


X, HALF = on_host((2, 3)), on_host((2, 3), ml_dtypes.bfloat16)
UNDERSTOOD = {
    "rounded as it is divided": lambda: cupy.divide(X, X, out=HALF, casting="unsafe"),
    "a copy down": lambda: X.get(stream=None, out=np.empty((2, 3), np.float32), blocking=False),
    "a copy up": lambda: X.set(np.empty((2, 3), np.float32), stream=None),
    "cast or not": lambda: X.astype(ml_dtypes.bfloat16, copy=False),
    "sums over axes": lambda: X.sum(axis=(0, 1)),
    "rows taken": lambda: cupy.take(X, np.arange(2), axis=1),
    "a number where": lambda: cupy.where(cupy.isneginf(X), 0, X),
    "side by side": lambda: cupy.concatenate([X, X], axis=-1),
    "minus infinity": lambda: cupy.full((2, 3), -np.inf, X.dtype),
    "of a type": lambda: cupy.asarray(np.zeros(3, np.float32), X.dtype),
    "halves": lambda: HALF.__setitem__(slice(None), HALF),
    "rounded to halves": lambda: HALF.__setitem__(slice(None), X),
    "pinned": lambda: cupyx.empty_pinned(10, np.uint8),
    "a stream": lambda: cupy.cuda.Stream(non_blocking=True),
    "an event": lambda: cupy.cuda.Event(disable_timing=True),
    "properties": lambda: cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
}


@pytest.mark.parametrize("what", UNDERSTOOD)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_calls_are_understood(what):
    understood(UNDERSTOOD[what])


REFUSED = {
    "an unknown argument": (lambda: cupy.divide(X, X, unknown=1), TypeError),
    "a host array for numbers": (lambda: X.__setitem__(slice(None), np.zeros((2, 3), np.float32)), ValueError),
    "a device array as NumPy's": (lambda: np.asarray(X), TypeError),
    "a copy of another type": (lambda: X.set(np.zeros((2, 3))), TypeError),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_is_refused_by_the_pretended_too(what, monkeypatch):
    call, error = REFUSED[what]
    with pytest.raises(error):
        call()
    device = pretended.pretend(monkeypatch)
    monkeypatch.setitem(globals(), "X", device.zeros((2, 3), np.float32))
    monkeypatch.setitem(globals(), "cupy", device)
    with pytest.raises(error):
        call()


# ------------------------------------------------------------------------------------------------- arrays, as the launcher sees them


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 5, 3, 16), None), ((2, 5, 3, 16), (4000, 48, 240, 2)), ((1, 5, 3, 10), (6, 64, 320, 2))]
)
def test_what_is_passed_of_an_array(monkeypatch, shape, strides):
    mine, its = on_host(shape, np.float16, strides), np.zeros(1 << 14, np.uint8)[: 2 * 8000].view(np.float16)
    its = np.lib.stride_tricks.as_strided(its, shape, mine.strides)
    assert cuda._strides(mine) == cuda._strides(its) and cuda._last_contiguous(mine) is mine
    assert cuda._is_aligned(mine) == (mine.data.ptr % 16 == 0 and not any(n % 16 for n in (*mine.strides[:3], 2 * shape[3])))
    assert namespace(mine) is cupy and tiles.own(mine) is mine and mine.data.device_id == 0


def test_a_buffer_is_cut_viewed_and_forgotten():
    buffer, gone = on_host((1 << 12,), np.uint8), []
    weakref.finalize(buffer, gone.append, buffer.data.ptr)
    block = attention_block()
    k, v = block.split(buffer[: block.nbytes(7, np.dtype(np.float16))], 7, np.dtype(ml_dtypes.bfloat16))
    assert k.shape == (1, 7, 2, 16) and v.shape == (1, 7, 2, 8) and k.dtype == ml_dtypes.bfloat16
    assert v.data.ptr - buffer.data.ptr == k.nbytes and len(buffer[5:100]) == 95
    del buffer, k, v
    assert gone


def attention_block():
    from ringmpi.attention import Block

    return Block(1, 2, 16, 8)


class Tensor(ctypes.Structure):
    """DLPack's DLTensor, in a managed one (dlpack.h, before 1.0)."""

    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("number", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p)]  # fmt: skip


def capsule(device, code, bits, shape, strides):
    raw = np.zeros(1 << 10, np.uint8)
    numbers = ctypes.c_int64 * len(shape)
    tensor = Tensor(raw.ctypes.data, device, 0, len(shape), code, bits, 1, numbers(*shape), numbers(*strides), 0, None, None)
    KEPT.append((raw, tensor))
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(ctypes.addressof(tensor), b"dltensor", None)


KEPT = []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_dtype_comes_by_dlpack(dtype):
    # DLPack's number of bfloat16 is 4, of other floating types 2.
    bits, code, dtype = 8 * np.dtype(dtype).itemsize, 4 if dtype == "bfloat16" else 2, np.dtype(dtype)
    taken = cupy.from_dlpack(capsule(2, code, bits, (1, 4, 2, 3), (24, 3, 12, 1)))
    size = bits // 8
    assert taken.dtype == dtype and taken.shape == (1, 4, 2, 3) and taken.strides == (24 * size, 3 * size, 12 * size, size)


@pytest.mark.parametrize("kind", sorted(set(range(1, 15)) - set(tiles._CUDA)))
def test_other_memory_does_not_come_by_dlpack(kind):
    with pytest.raises((TypeError, RuntimeError)):
        cupy.from_dlpack(capsule(kind, 2, 32, (2, 3), (3, 1)))


# ---------------------------------------------------------------------------------------------------------------- compilation


class Compiler(types.SimpleNamespace):
    """The module cupy as ``_compiled`` sees it: a RawModule is compiled as CuPy does, for a device that is not there."""

    def __init__(self, monkeypatch, arch):
        from cupy._core import core
        from cupy.cuda import compiler

        class Loaded:
            """What would be loaded into the device."""

            def load(self, cubin):
                self.cubin = cubin

            def _set_mapping(self, mapping):
                self.mapping = mapping

        monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
        monkeypatch.setattr(compiler, "_get_arch", lambda: arch)
        monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda arch: (f"-arch=sm_{arch}", "cubin"))
        monkeypatch.setattr(compiler, "function", types.SimpleNamespace(Module=Loaded))

        def raw_module(code, options, name_expressions):
            cupy.RawModule(code=code, options=options, name_expressions=name_expressions)
            every = core.assemble_cupy_compiler_options(options)
            made = compiler._compile_module_with_cache(code, every, name_expressions=name_expressions)
            return types.SimpleNamespace(get_function=lambda name: types.SimpleNamespace(symbol=made.mapping[name], cubin=made.cubin))

        super().__init__(RawModule=raw_module)


ROWS = [*((row.file, row.name, row.shared) for row in registry.KERNELS), *(("rows.cu", name, 0) for name in registry.ROWS)]
CAREFUL = [pytest.param(str(arch), marks=() if arch == 90 else pytest.mark.slow) for arch in registry.ARCHITECTURES]


@pytest.mark.parametrize("dtype", registry.TYPES)
def test_the_probe_compiles_by_cupy(monkeypatch, dtype):
    assert compiled(Compiler(monkeypatch, "90"), dtype).symbol.startswith("_Z5probe")


@pytest.mark.parametrize("arch", CAREFUL)
@pytest.mark.parametrize(("file", "name", "shared"), ROWS, ids=lambda x: x if isinstance(x, str) else "")
def test_rows_compile_by_cupy(monkeypatch, tmp_path, arch, file, name, shared):
    """By the launcher's own options, as far as loading: what CuPy makes of them for a device, by the NVRTC that it comes with."""
    compiler = Compiler(monkeypatch, arch)
    monkeypatch.setattr(cuda, "_cupy", lambda: compiler)
    cuda.forget()
    function, cubin = cuda._compiled(0, file, name, shared), tmp_path / "row.cubin"
    cuda.forget()
    assert getattr(function, "max_dynamic_shared_size_bytes", 48 << 10) >= shared
    # CuPy leaves out the last byte, a zero, which the driver finds behind it.
    cubin.write_bytes(function.cubin + b"\0")
    if not nvdisasm():
        pytest.skip("compiled; its instructions were not looked at: nvdisasm is not installed")
    if file != "rows.cu":
        row = next(row for row in registry.KERNELS if row.name == name)
        found = instructions(cubin, function.symbol)
        assert row.instruction in found and ({"LDL", "STL"}.isdisjoint(found) or row.local)
