"""io: rows read and written at their place, every layout and order; what cannot be read; files that appear whole or not at all."""
import errno
import os

import numpy as np
import pytest

from ringmpi import Ring, Run, io
from ringmpi.layout import LAYOUTS, Custom, positions

SIZE, TOKENS = 3, 23
ARRAYS = {"two": (TOKENS, 5), "three": (TOKENS, 2, 5), "four": (2, TOKENS, 3, 5), "lse": (2, 3, TOKENS)}
TOKEN_AXES = {"two": 0, "three": 0, "four": 1, "lse": 2}
OWN = Custom([[(3, 4, 5)], [], [(0, 3), (4, 4), (9, 4), (14, 4), (19, 4)]])
LAYOUT = {**{name: kind() for name, kind in LAYOUTS.items()}, "custom": OWN}


def numbers(shape, dtype=np.float32):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def ranks(layout, shape, axis):
    return LAYOUT[layout].partition(shape[axis], SIZE)


@pytest.fixture
def save(tmp_path):
    """Saves an array under a name of a kind of file."""

    def save(kind, x):
        if kind == "npy":
            np.save(tmp_path / "x.npy", x)
            return str(tmp_path / "x.npy")
        h5py = pytest.importorskip("h5py")
        with h5py.File(tmp_path / "x.h5", "w") as file:
            settings = {"chunks": tuple(max(1, n // 2) for n in x.shape), "compression": "gzip"} if kind == "chunks" else {}
            file.create_dataset("a/x", data=x, **settings)
        return f"{tmp_path / 'x.h5'}:/a/x"

    return save


@pytest.mark.parametrize("kind", ["npy", "hdf5", "chunks"])
@pytest.mark.parametrize("layout", LAYOUT)
@pytest.mark.parametrize("name", ARRAYS)
def test_read(save, kind, layout, name):
    x, axis = numbers(ARRAYS[name]), TOKEN_AXES[name]
    for order in "CF":
        array = io.stored(save(kind, np.asarray(x, order=order)))
        for runs in ranks(layout, x.shape, axis):
            assert (array.read(runs, axis) == x.take(positions(runs), axis)).all()


@pytest.mark.parametrize("kind", ["npy", "hdf5"])
@pytest.mark.parametrize("layout", LAYOUT)
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_written_by_ranks(tmp_path, kind, layout, name, dtype):
    """Rows of all ranks, in any order, are the whole array, and another program reads it."""
    if kind == "hdf5":
        pytest.importorskip("h5py")
    x, axis = numbers(ARRAYS[name], io.named(dtype)), TOKEN_AXES[name]
    file = str(tmp_path / ("x.npy" if kind == "npy" else "x.h5")) + ("" if kind == "npy" else ":/deep/x")
    with io.outputs(Ring(), {"x": io.Output(file, x.shape, x.dtype)}) as write:
        for runs in reversed(ranks(layout, x.shape, axis)):
            write("x", x.take(positions(runs), axis), runs, axis)
    array = io.stored(file)
    whole = io.convert(array.read((Run(0, TOKENS),), axis), dtype, file)
    assert whole.dtype == x.dtype and (whole == x).all()
    if kind == "npy":
        assert np.load(file).dtype.itemsize == x.dtype.itemsize
    assert len(os.listdir(tmp_path)) == 1


def test_two_datasets_in_a_file(tmp_path):
    pytest.importorskip("h5py")
    wanted = {key: io.Output(f"{tmp_path}/x.h5:/{key}", (TOKENS,), np.dtype("f4")) for key in "ab"}
    with io.outputs(Ring(), wanted) as write:
        for number, key in enumerate("ab"):
            write(key, numbers(TOKENS) + number, (Run(0, TOKENS),), 0)
    for number, key in enumerate("ab"):
        assert (io.stored(wanted[key].name).read((Run(0, TOKENS),), 0) == numbers(TOKENS) + number).all()
    with pytest.raises(ValueError, match="is there already"), io.outputs(Ring(), wanted):
        pass


def test_big_pieces(tmp_path, monkeypatch):
    """The system may move less than it was asked to: over 2 GiB it always does."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, piece, at: pwrite(file, piece[:7], at))
    monkeypatch.setattr(os, "preadv", lambda file, pieces, at: preadv(file, [pieces[0][:5]], at))
    x = numbers((2, TOKENS, 3))
    with io.outputs(Ring(), {"x": io.Output(str(tmp_path / "x.npy"), x.shape, x.dtype)}) as write:
        write("x", x, (Run(0, TOKENS),), 1)
    assert (np.load(tmp_path / "x.npy") == x).all()
    assert (io.stored(str(tmp_path / "x.npy")).read((Run(0, TOKENS),), 1) == x).all()


# ------------------------------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize("shape", ["(3,-4)", "(True, )"])
def test_a_shape_that_is_none(tmp_path, shape):
    np.save(tmp_path / "x.npy", np.ones((3, 4)))
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole.replace(b"(3, 4)", shape.encode().ljust(6), 1))
    with pytest.raises(ValueError, match=r"x\.npy is not a \.npy file: its shape is"):
        io.stored(str(tmp_path / "x.npy"))


@pytest.mark.parametrize("name", ["pipe.npy", "pipe.h5:/x", "folder"])
def test_what_is_no_file_is_not_opened(tmp_path, name):
    """Opening a pipe waits for its writer: all ranks would wait, for ever."""
    os.mkdir(tmp_path / "folder")
    for pipe in ("pipe.npy", "pipe.h5"):
        os.mkfifo(tmp_path / pipe)
    with pytest.raises(ValueError, match="is no file: a folder, a pipe or a device"):
        io.stored(str(tmp_path / name))


def test_conversions():
    half = np.arange(3).astype(io.named("bfloat16"))
    assert io.convert(half.view("V2"), "bfloat16", "q").dtype == half.dtype
    assert (io.convert(half.view("u2"), "bfloat16", "q") == half).all()
    assert io.convert(half.view("u2").astype(">u2"), "bfloat16", "q").tolist() == half.tolist()
    assert io.convert(np.arange(3, dtype=">f8"), None, "q").dtype.isnative
    assert io.convert(np.ones(3, "f2"), "float32", "q").dtype == np.float32
    for wrong, dtype, error in ((half.view("V2"), None, "if it is bfloat16, say so"), (np.ones(2, "i4"), None, "floating"),
                                (np.ones(2, "c8"), "float32", "not numbers"), (np.ones(2, bool), None, "not numbers")):  # fmt: skip
        with pytest.raises(TypeError, match=error):
            io.convert(wrong, dtype, "q")
    with pytest.raises(ValueError, match="dtype is 'float17'; it must be one of float16"):
        io.convert(np.ones(2), "float17", "q")


def test_unreadable(tmp_path):
    x = tmp_path / "x.npy"
    with pytest.raises(FileNotFoundError):
        io.stored(str(x))
    x.write_bytes(b"no array at all")
    with pytest.raises(ValueError, match=r"is not a \.npy file"):
        io.stored(str(x))
    np.save(x, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        io.stored(str(x))
    np.save(x, numbers((TOKENS, 4)))
    os.truncate(x, 200)
    with pytest.raises(ValueError, match=r"cut short: it has 200 bytes; \(23, 4\) of float32 take 496"):
        io.stored(str(x))


def test_cut_short_while_reading(tmp_path):
    np.save(tmp_path / "x.npy", numbers((TOKENS, 4)))
    array = io.stored(str(tmp_path / "x.npy"))
    os.truncate(tmp_path / "x.npy", 200)
    assert array.read((Run(0, 4),), 0).shape == (4, 4)
    with pytest.raises(ValueError, match="ends at byte 200"):
        array.read((Run(0, 5),), 0)


def test_hdf5_names(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["group/x"] = numbers(3)
    for name in ("/y", "/group"):
        with pytest.raises(ValueError, match=f"has no dataset {name}; it has group"):
            io.stored(f"{tmp_path}/x.h5:{name}")


# ---------------------------------------------------------------------------------------- whole files or none at all


def attempt(file, fail=lambda: None):
    with io.outputs(Ring(), {"x": io.Output(str(file), (TOKENS,), np.dtype("f4"))}) as write:
        write("x", numbers(TOKENS), (Run(0, TOKENS),), 0)
        fail()


def test_the_old_file_stays(tmp_path):
    file = tmp_path / "x.npy"
    np.save(file, numbers(4))
    before = file.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        attempt(file, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert file.read_bytes() == before and os.listdir(tmp_path) == ["x.npy"]
    attempt(file)
    assert len(np.load(file)) == TOKENS


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link.npy").symlink_to(tmp_path / "x.npy")
    attempt(tmp_path / "link.npy")
    assert (tmp_path / "link.npy").is_symlink() and len(np.load(tmp_path / "x.npy")) == TOKENS


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_fails(tmp_path, monkeypatch, call, code):
    def fails(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match=os.strerror(code)):
        attempt(tmp_path / "x.npy")
    assert os.listdir(tmp_path) == []


def test_places_that_are_none(tmp_path):
    x = io.Output(str(tmp_path / "x.npy"), (9,), np.dtype("f4"))
    with pytest.raises(FileNotFoundError):
        attempt(tmp_path / "none" / "x.npy")
    for place in (tmp_path, "/dev/null"):
        with pytest.raises(ValueError, match="is there, and is no file that could be replaced"):
            attempt(place)
    with pytest.raises(ValueError, match="is named for 2 outputs"), io.outputs(Ring(), {"a": x, "b": x}):
        pass
    with pytest.raises(OSError, match="bytes are needed"), io.outputs(Ring(), {"x": x._replace(shape=(1 << 60,))}):
        pass
    with pytest.raises(ValueError, match=r"rows have shape \(4,\); their place has \(3,\)"), io.outputs(Ring(), {"x": x}) as write:
        write("x", numbers(4), (Run(0, 3),), 0)
    assert os.listdir(tmp_path) == []
