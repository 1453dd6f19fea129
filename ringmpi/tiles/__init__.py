"""Tiles: one contract, computed in NumPy, in compiled C, or on a GPU; and the choice between them.

A tile module has

    forward(q, k, v, pair)                                      yields (batch, rows, heads) slices and their Partial
    backward(q, k, v, dout, lse, delta, pair, dq, dk, dv)       adds the pair's gradients, yielding between blocks
    empty(shape, dtype)    merge(into, where, partial)    finish(total, dtype)    delta(dout, out)    Space()
    status()                                                    a line: what computes here, or why it cannot

Arrays are the rows of one pair, ``(batch, tokens, heads, head_dim)``, in any strides. A partial that was yielded is merged
before the next is asked for: it may be computed only then, straight into the accumulator. What was finished is used up.
"""
from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

TILES = ("numpy", "host")
# Those that compute on arrays of a device.
ON_DEVICES = ("cuda",)


def tile(which: str, array: Any) -> ModuleType:
    """The tile for an array: by name, or for "auto" by the array's own type, the compiled one where it can be had.

    >>> tile("numpy", np.zeros(3)).__name__
    'ringmpi.tiles.numpy'
    """
    from . import host
    from . import numpy as readable

    check(which)
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array has values that no tile would leave out: say by a Mask what is not to be seen, or fill them")
    if _of_cupy(array) and which in ("auto", *ON_DEVICES):
        from . import cuda

        cuda.check_place(array)
        return cuda
    if not isinstance(array, np.ndarray) or which in ON_DEVICES:
        raise TypeError(f"a {type(array).__module__}.{type(array).__name__} is not an array that the {which} tile computes on")
    if which == "numpy":
        return readable
    why = host.available(array.dtype)
    if why and which == "host":
        raise RuntimeError(f"the host tile cannot be had: {why}")
    if why:
        _warn_once(why)
    return readable if why else host


def check(which: str) -> None:
    """Raises ValueError where no tile has this name."""
    if which not in ("auto", *TILES, *ON_DEVICES):
        raise ValueError(f"no tile is called {which!r}; there are auto, {', '.join((*TILES, *ON_DEVICES))}")


# DLPack's numbers of memory that is a CUDA device's: its own, and managed. CuPy takes no other.
_CUDA = (2, 13)


def own(array: Any) -> Any:
    """The array as one that a tile computes on: device arrays of others (Numba, JAX, PyTorch) as CuPy's, without a copy.

    What is then computed waits for the work on them that their library has started: DLPack hands it CuPy's current stream, and the
    stream that a ``__cuda_array_interface__`` names is waited for here.

    >>> own(None), own(np.ones(2))
    (None, array([1., 1.]))
    """
    if array is None or isinstance(array, np.ndarray) or _of_cupy(array):
        return array
    # What speaks DLPack says itself where its memory is; PyTorch's and JAX's host arrays have the other attribute too.
    by_dlpack = hasattr(array, "__dlpack_device__")
    if not (array.__dlpack_device__()[0] in _CUDA if by_dlpack else hasattr(array, "__cuda_array_interface__")):
        return array
    from . import cuda

    return cuda.taken(array, by_dlpack)


def _of_cupy(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "cupy"


@cache
def _warn_once(why: str) -> None:
    warnings.warn(f"attention is computed by NumPy, more slowly than compiled code would: {why}", RuntimeWarning, stacklevel=3)
