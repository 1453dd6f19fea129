"""Files of which every rank holds some rows: whole when all have written, and none at all when one could not."""
import errno
import os
import shutil
import tempfile

import numpy as np
import pytest

from ringmpi import Run, io
from ringmpi.layout import LAYOUTS, positions

pytestmark = pytest.mark.mpi(min_size=1)
TOKENS = 23


@pytest.fixture
def folder(comm):
    """A directory that all ranks share."""
    made = comm.bcast(tempfile.mkdtemp(prefix="ringmpi_") if comm.rank == 0 else None)
    yield made
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(made)


def wanted(folder, kind, shape, dtype="f4"):
    names = {"npy": (f"{folder}/a.npy", f"{folder}/b.npy"), "hdf5": (f"{folder}/x.h5:/a", f"{folder}/x.h5:/deep/b")}[kind]
    return {key: io.Output(name, shape, np.dtype(dtype)) for key, name in zip("ab", names)}


@pytest.mark.parametrize("kind", ["npy", "hdf5"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_and_read_by_all(comm, ring, folder, kind, layout):
    if kind == "hdf5" and not all(comm.allgather(_has_h5py())):
        pytest.skip("no h5py")
    x = np.arange(2 * TOKENS * 3, dtype=np.float32).reshape(2, TOKENS, 3)
    runs = LAYOUTS[layout]().partition(TOKENS, comm.size)[comm.rank]
    arrays = wanted(folder, kind, x.shape)
    with io.outputs(ring, arrays) as write:
        for sign, key in enumerate("ab"):
            write(key, x.take(positions(runs), 1) + sign, runs, 1)
        assert comm.allreduce(any(os.path.exists(io.split(array.name)[0]) for array in arrays.values())) == 0
        comm.Barrier()
    for sign, key in enumerate("ab"):
        assert (io.stored(arrays[key].name).read((Run(0, TOKENS),), 1) == x + sign).all()


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_is_full_for_one(comm, ring, folder, monkeypatch, call, code):
    """Only the last rank sees it, in the second of two files: all raise the same, and neither file appears."""
    real, last = getattr(os, call), comm.rank == comm.size - 1

    def fails(file, *rest):
        if last and os.readlink(f"/proc/self/fd/{file}").startswith(f"{folder}/b.npy"):
            raise OSError(code, os.strerror(code))
        return real(file, *rest)

    runs = (Run(comm.rank, 1),)
    monkeypatch.setattr(os, call, fails)
    with pytest.raises(RuntimeError) as caught, io.outputs(ring, wanted(folder, "npy", (comm.size,))) as write:
        for key in "ab":
            write(key, np.ones(1), runs, 0)
    words = f"writing {folder}/b.npy, rank {comm.size - 1}: OSError: [Errno {code}] {os.strerror(code)}"
    assert comm.allgather(str(caught.value)) == [words] * comm.size
    comm.Barrier()
    assert os.listdir(folder) == []


def test_the_ring_goes_on_after_a_refusal(comm, ring, folder):
    missing = f"{folder}/none.npy" if comm.rank == comm.size - 1 else f"{folder}/x.npy"
    if comm.rank == 0:
        np.save(f"{folder}/x.npy", np.arange(3.0))
    comm.Barrier()
    with pytest.raises(RuntimeError, match=f"reading, rank {comm.size - 1}: FileNotFoundError"):
        io.together(ring, "reading", lambda: io.stored(missing))
    assert io.together(ring, "reading", lambda: io.stored(f"{folder}/x.npy")).shape == (3,)


def _has_h5py():
    try:
        import h5py  # noqa: F401
    except ImportError:
        return False
    return True
