"""Device arrays of other libraries, as Numba, PyTorch and JAX give them: their work is still to run when they are handed over.

``ByInterface`` names the stream of that work in its ``__cuda_array_interface__``; ``ByDlpack`` makes the consumer's stream wait for
it. The memory is garbage until the work has run, so who does not wait computes garbage, and the device tells of it.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from .device import Device, Event


class Foreign:
    """An array of another library on a device, made from host memory, in strides of its own: heads before tokens, rows padded."""

    def __init__(self, device: Device, data: np.ndarray, padded: bool = True) -> None:
        self.device, self.producer = device, device.another_stream()
        self.memory = memory = _padded(device, data.shape, data.dtype) if padded else device.empty(data.shape, data.dtype).memory
        self.shape, self.ndim = data.shape, data.ndim
        self.producer.start(lambda: np.copyto(memory, data), [], [memory])


class ByInterface(Foreign):
    """Numba's: read-only, with a stream."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        face = dict(self.memory.__array_interface__)
        return {**face, "data": (face["data"][0], True), "version": 3, "stream": self.producer.ptr}


class ByDlpack(Foreign):
    """PyTorch's and JAX's."""

    kind = 2

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int], copy: bool | None) -> np.ndarray:
        event, consumer = Event(self.device), next(one for one in self.device.streams if one.ptr == stream)
        event.record(self.producer)
        consumer.wait_event(event)
        return self.memory


def _padded(device: Device, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory of an array whose tokens and heads are exchanged, and whose rows are longer than their numbers."""
    if len(shape) < 4:
        return device.empty((*shape[:-1], shape[-1] + 3), dtype).memory[..., : shape[-1]]
    batch, tokens, heads, dim = shape
    return device.empty((batch, heads, tokens, dim + 3), dtype).memory[..., :dim].swapaxes(1, 2)
