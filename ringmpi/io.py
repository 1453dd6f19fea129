"""Arrays in files, of which every rank reads and writes only its own rows.

A name is a .npy file, or ``file.h5:/dataset`` where h5py is installed. Rows are read and written at their place with
``pread`` and ``pwrite``, not through a memory map: a file that ends early, or a full disk, is then an error that can be
raised (through a map it is a signal that kills the rank), and no rank's memory ever holds pages of another's rows.

    read     HDF5 datasets of any storage by h5py, which every rank opens for itself; .npy by ``pread``
    written  to a temporary name beside the final one, by all ranks at once. A dataset is made contiguous and allocated
             whole, so its rows have a place in the file as those of a .npy file do, and need no parallel HDF5

Files get their names only when all ranks have written, flushed and said so. NumPy has no name for bfloat16 in a file and
writes two bytes without a meaning (``|V2``): such arrays, and uint16, are read as bfloat16 where that is asked for.
"""
from __future__ import annotations

import errno
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .layout import Runs, count, slices
from .partial import DTYPES

Found = TypeVar("Found")


def together(ring: Any, what: str, work: Callable[[], Found]) -> Found:
    """What ``work`` returns, on every rank, or the error of the first rank that has one, on all. Collective.

    >>> from ringmpi import Ring
    >>> together(Ring(), "counting", lambda: 3)
    3
    """
    found: list[Found] = []

    def facts() -> dict[str, Any]:
        found.append(work())
        return {}

    ring.agree(what, facts)
    return found[0]


# --------------------------------------------------------------------------------------------- an array in a file


@dataclass(frozen=True)
class Stored:
    """An array that lies in one piece in a file: from byte ``offset`` on, in C order, or in Fortran order.

    Rows are those along an axis, and are named by the runs of their positions.
    """

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, runs: Runs, axis: int) -> np.ndarray:
        """The rows of ``runs`` along ``axis``, in their order. Raises ValueError where the file ends before them."""
        shape = [*self.shape]
        shape[axis] = count(runs)
        rows = np.empty(shape, self.dtype, order="F" if self.fortran else "C")
        self._move(os.O_RDONLY, lambda file, piece, at: os.preadv(file, [piece], at), rows, runs, axis)
        return rows

    def write(self, rows: np.ndarray, runs: Runs, axis: int) -> None:
        """Puts rows at their place, and returns when they are on the disk. Raises OSError where they cannot be."""
        fits = (*self.shape[:axis], count(runs), *self.shape[axis + 1 :])
        if rows.shape != fits:
            raise ValueError(f"{self.path}: the rows have shape {rows.shape}; their place has {fits}")
        whole = np.ascontiguousarray(rows, self.dtype)
        self._move(os.O_WRONLY, os.pwrite, whole, runs, axis)

    def _move(self, mode: int, call: Callable[[int, Any, int], int], rows: np.ndarray, runs: Runs, axis: int) -> None:
        file = os.open(self.path, mode)
        try:
            for at, piece in self._pieces(rows, runs, axis):
                while len(piece):
                    done = call(file, piece, at)
                    if not done:
                        raise ValueError(f"{self.path} ends at byte {at}, in the middle of its array")
                    at, piece = at + done, piece[done:]
            if mode == os.O_WRONLY:
                os.fsync(file)
        finally:
            os.close(file)

    def _pieces(self, rows: np.ndarray, runs: Runs, axis: int) -> Iterator[tuple[int, np.ndarray]]:
        """Every piece that is contiguous in the file: where it lies there, and its bytes among ``rows``."""
        shape = self.shape
        if self.fortran:
            rows, shape, axis = rows.T, shape[::-1], len(shape) - 1 - axis
        data, held, length = rows.reshape(-1).view(np.uint8), rows.shape[axis], shape[axis]
        row = math.prod(shape[axis + 1 :]) * self.dtype.itemsize
        for outer in range(math.prod(shape[:axis])):
            for run, at in zip(runs, slices(runs)):
                number, size = (1, run.count) if run.step == 1 else (run.count, 1)
                for i in range(number):
                    first = outer * held + at.start + i
                    yield self.offset + (outer * length + run.start + i * run.step) * row, data[first * row : (first + size) * row]


@dataclass(frozen=True)
class Dataset:
    """An HDF5 dataset of any storage, read through h5py."""

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, runs: Runs, axis: int) -> np.ndarray:
        """The rows of ``runs`` along ``axis``, in their order."""
        shape = [*self.shape]
        shape[axis] = count(runs)
        rows = np.empty(shape, self.dtype)
        with _h5py().File(self.path, "r") as file:
            for run, at in zip(runs, slices(runs)):
                if run.count:
                    before = (slice(None),) * axis
                    rows[(*before, at)] = file[self.name][(*before, slice(run.start, run.last + 1, run.step))]
        return rows


def stored(name: str) -> Stored | Dataset:
    """The array of a name, of which nothing but its description is read yet.

    Raises OSError where there is no such file, ValueError where it is not an array or not all of it is there.
    """
    path, dataset = split(name)
    # Opening a pipe would wait for somebody to write into it, and its rows cannot be read at their place.
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is no file: a folder, a pipe or a device")
    if dataset is None:
        return _npy(path)
    with _h5py().File(path, "r") as file:
        if not isinstance(found := file.get(dataset), _h5py().Dataset):
            raise ValueError(f"{path} has no dataset {dataset}; it has {', '.join(file) or 'nothing'}")
        return Dataset(path, dataset, found.shape, found.dtype)


def split(name: str) -> tuple[str, str | None]:
    """The file of a name and, for HDF5, its dataset.

    >>> split("a.npy"), split("a.h5:/b/c")
    (('a.npy', None), ('a.h5', '/b/c'))
    """
    match = re.fullmatch(r"(.+\.(?:h5|hdf5?)):(/.+)", name)
    return (match[1], match[2]) if match else (name, None)


def convert(rows: np.ndarray, dtype: str | None, name: str) -> np.ndarray:
    """Rows as they are computed on: in ``dtype``, or their own, in this machine's byte order.

    Raises TypeError for what holds no numbers, for bfloat16 that is not asked for, and ValueError where there is no such dtype.

    >>> convert(np.array([1, 2], ">f4"), None, "q").dtype.str[1:]
    'f4'
    """
    own = rows.dtype
    if dtype == "bfloat16" and own.str[1:] in ("V2", "u2"):
        return rows.astype(own.newbyteorder("=")).view(named(dtype))
    if own.kind not in "fiu" and own.name != "bfloat16":
        hint = "; if it is bfloat16, say so" if own.str[1:] == "V2" else ""
        raise TypeError(f"{name} is {own.str}, not numbers{hint}")
    if dtype is None and own.kind in "iu":
        raise TypeError(f"{name} is {own}; attention is of floating-point numbers")
    return rows.astype(named(dtype) if dtype else own.newbyteorder("="), copy=False)


def named(dtype: str) -> np.dtype:
    """The dtype of a name. Raises ValueError where attention is not computed in it, or its package is not installed.

    >>> named("bfloat16").itemsize
    2
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    return np.dtype(_package("ml_dtypes", "bfloat16").bfloat16 if dtype == "bfloat16" else dtype)


def _npy(path: str) -> Stored:
    """A .npy file by its header: NumPy's format, versions 1 to 3."""
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a .npy file: {error}") from error
        if any(isinstance(length, bool) or length < 0 for length in shape):
            raise ValueError(f"{path} is not a .npy file: its shape is {shape}")
        if dtype.hasobject:
            raise ValueError(f"{path} holds Python objects, not numbers")
        array = Stored(path, file.tell(), shape, dtype, fortran)
        size = os.fstat(file.fileno()).st_size
    if size < array.offset + array.nbytes:
        raise ValueError(f"{path} is cut short: it has {size} bytes; {shape} of {dtype} take {array.offset + array.nbytes}")
    return array


# ------------------------------------------------------------------------------------------------- files to write


class Output(NamedTuple):
    """An array to be written: under which name, of what shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


Write = Callable[[str, np.ndarray, Runs, int], None]


@contextmanager
def outputs(ring: Any, arrays: Mapping[str, Output]) -> Iterator[Write]:
    """Files that appear under their names when this is left, if every rank has written; else none does. Collective.

    Gives ``write(key, rows, runs, axis)``, which all ranks call together, each with its own rows. They are written to
    temporary names in the same directories (``name.xxxxxxxx.part``), which is what a killed job leaves there.

    Raises
    ------
    ValueError, RuntimeError
        on all ranks, for what any of them finds: no such directory, no room, an HDF5 file that is already there.

    >>> import tempfile
    >>> from ringmpi import Ring, Run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     a = Output(f"{folder}/a.npy", (2, 3), np.dtype("f4"))
    ...     with outputs(Ring(), {"a": a}) as write:
    ...         write("a", np.ones((2, 3)), (Run(0, 3),), 1)
    ...     np.load(a.name).sum()
    np.float32(6.0)
    """
    token = ring.gather(secrets.token_hex(4))[0]
    files: dict[str, list[Output]] = {}
    for array in arrays.values():
        files.setdefault(_target(array), []).append(array)
    parts = {path: f"{path}.{token}.part" for path in files}

    def first(what: str, act: Callable[[str], None]) -> None:
        """Rank 0 acts on every file, and all hear of it."""
        for path in files:
            together(ring, f"{what} {path}", partial(act, path) if ring.rank == 0 else lambda: None)

    try:
        first("making", lambda path: _make(path, parts[path], files[path]))
        places = together(ring, "opening the outputs", lambda: {key: _place(array, parts) for key, array in arrays.items()})
        yield lambda key, rows, runs, axis: together(
            ring, f"writing {arrays[key].name}", lambda: places[key].write(rows, runs, axis)
        )
        first("naming", lambda path: os.replace(parts[path], path))
    finally:
        for part in parts.values():
            _remove(part)


def _make(path: str, part: str, arrays: list[Output]) -> None:
    """Makes a file with room for its arrays, under a temporary name."""
    names = [split(array.name)[1] for array in arrays]
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is there, and is no file that could be replaced")
    if len(set(names)) < len(names):
        raise ValueError(f"{path} is named for {len(names)} outputs, which need a place each")
    if names[0] is not None and os.path.exists(path):
        raise ValueError(f"{path} is there already; an HDF5 output is a new file")
    _check_room(path, sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays))
    if names[0] is None:
        _make_npy(part, arrays[0])
    else:
        _make_hdf5(part, arrays)


def _check_room(path: str, nbytes: int) -> None:
    """Raises early, before hours of work, where the file system says that there is no room."""
    system = os.statvfs(os.path.dirname(path))
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and free < nbytes:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {nbytes:,} bytes are needed, {free:,} are free")


def _make_npy(part: str, array: Output) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
    with open(part, "xb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + math.prod(array.shape) * array.dtype.itemsize)


def _make_hdf5(part: str, arrays: list[Output]) -> None:
    h5py = _h5py()
    with h5py.File(part, "x") as file:
        for array in arrays:
            plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            file.create_dataset(split(array.name)[1], array.shape, _in_hdf5(array.dtype), dcpl=plan)


def _place(array: Output, parts: Mapping[str, str]) -> Stored:
    """Where an output lies in its file, as any rank finds it there."""
    part, dataset = parts[_target(array)], split(array.name)[1]
    if dataset is None:
        return Stored(part, _npy(part).offset, array.shape, array.dtype)
    with _h5py().File(part, "r") as file:
        offset = file[dataset].id.get_offset()
    return Stored(part, offset or 0, array.shape, array.dtype)


def _target(array: Output) -> str:
    """The file that an output goes to: what a link points at, not the link."""
    return os.path.realpath(split(array.name)[0])


def _in_hdf5(dtype: np.dtype) -> np.dtype:
    """HDF5 has no bfloat16 either: two bytes without a meaning, as in a .npy file."""
    return np.dtype("V2") if dtype.name == "bfloat16" else dtype


def _remove(path: str) -> None:
    """Removes what is left of an output. Where that cannot be, it was not made, and why is already being said."""
    with suppress(OSError):
        os.unlink(path)


def _h5py() -> Any:
    return _package("h5py", "HDF5")


def _package(name: str, what: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ValueError(f"{what} needs the package {name}, which is not installed here") from None
