"""Tiles: one contract, computed in NumPy, in compiled C, or on a GPU; and the choice between them.

A tile module has

    forward(q, k, v, pair)                                      yields (batch, rows, heads) slices and their Partial
    backward(q, k, v, dout, lse, delta, pair, dq, dk, dv)       adds the pair's gradients, yielding between blocks
    merge(into, partial)    finish(total, dtype)    delta(dout, out)    Space()
    status()                                                    a line: what computes here, or why it cannot

Arrays are the rows of one pair, ``(batch, tokens, heads, head_dim)``, in any strides.
"""
from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

TILES = ("numpy",)
# Those that compute on arrays of a device.
ON_DEVICES = ("cuda",)


def tile(which: str, array: Any) -> ModuleType:
    """The tile for an array: by name, or for "auto" by the array's own type.

    >>> tile("auto", np.zeros(3)).__name__
    'ringmpi.tiles.numpy'
    """
    from . import numpy as readable

    if which not in ("auto", *TILES, *ON_DEVICES):
        raise ValueError(f"no tile is called {which!r}; there are auto, {', '.join((*TILES, *ON_DEVICES))}")
    if type(array).__module__.partition(".")[0] == "cupy" and which in ("auto", *ON_DEVICES):
        from . import cuda

        return cuda
    if not isinstance(array, np.ndarray) or which in ON_DEVICES:
        raise TypeError(f"a {type(array).__module__}.{type(array).__name__} is not an array that the {which} tile computes on")
    return readable


# DLPack's numbers of memory that a CUDA device reads: its own, pinned, managed.
_CUDA = (2, 3, 13)


def own(array: Any) -> Any:
    """The array as one that a tile computes on: device arrays of others (Numba, JAX, PyTorch) as CuPy's, without a copy.

    >>> own(None), own(np.ones(2))
    (None, array([1., 1.]))
    """
    if array is None or isinstance(array, np.ndarray) or type(array).__module__.partition(".")[0] == "cupy":
        return array
    if hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] in _CUDA:
        import cupy  # type: ignore[import-not-found, import-untyped, unused-ignore]

        return cupy.from_dlpack(array)
    if hasattr(type(array), "__cuda_array_interface__"):
        import cupy  # type: ignore[import-not-found, import-untyped, unused-ignore]

        return cupy.asarray(array)
    return array
