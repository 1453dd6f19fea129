"""Every instruction that the kernels use, against what it is defined to do: on the emulator, or on a GPU (``RINGMPI_GPU=1``)."""
import zlib
from pathlib import Path

import numpy as np
import pytest
from emulator.cases import DTYPES
from emulator.device import at_hand

from ringmpi.tiles import registry


@pytest.mark.parametrize("dtype", DTYPES)
def test_instructions(monkeypatch, dtype):
    probe(at_hand(monkeypatch), dtype)


def compiled(xp, dtype):
    """The kernel of probe.cu, whose text is among the options, for CuPy's key of compiled kernels leaves includes out."""
    name, folder = f"probe<{registry.TYPES[dtype]}>", Path(__file__).resolve().parent / "emulator"
    text = zlib.crc32((folder / "probe.cu").read_bytes())
    options = ("-std=c++17", f"-I{registry.SOURCES}", f"-I{folder}", f"-DRINGMPI_SOURCES=0x{registry.digest()}", f"-DPROBE={text}")
    return xp.RawModule(code='#include "probe.cu"\n', options=options, name_expressions=[name]).get_function(name)


def probe(xp, dtype):
    """Runs probe.cu by the module cupy that is given."""
    kind, dim = DTYPES[dtype], 48
    random = np.random.default_rng(1)
    a, b, v = (random.integers(-3, 4, (rows, dim)).astype(kind) for rows in (16, 32, 32))
    sums = np.dtype(np.float64 if dtype == "float64" else np.float32)
    s, o, y = xp.zeros((16, 32), sums), xp.zeros((16, 64), sums), xp.zeros(32, np.float32)
    x = np.array([-np.inf, -200, 0, 1, np.inf, np.nan, *random.uniform(-30, 30, 26)], np.float32)
    given = [xp.asarray(array) for array in (a, b, v)]
    compiled(xp, dtype)((1,), (32,), (*given, s, o, xp.asarray(x), y, np.int32(dim)), shared_mem=80 * 68 * 8)
    b[5] = 0
    want = a.astype(float) @ b.astype(float).T
    assert np.array_equal(s.get(), want)
    assert np.array_equal(o.get()[:, :dim], want.astype(kind).astype(float) @ v.astype(float))
    assert not o.get()[:, dim:].any()
    with np.errstate(invalid="ignore", over="ignore"):
        assert np.allclose(y.get(), np.exp2(x.astype(float)), rtol=3e-7, atol=1.2e-38, equal_nan=True)
