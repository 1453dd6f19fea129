"""Messages of device buffers for an MPI that takes none: by way of pinned host memory, in pieces.

    send       piece i + 1 is copied down while MPI sends piece i
    receive    piece i is copied up while MPI receives piece i + 1

Every buffer has a copy in pinned memory, as long as itself, and copies up and down have a stream each. A block that was
received is sent on from its copy, without another. Both ends cut a message alike; MPI matches what has one tag in the
order in which it was posted, so no piece of a message is posted before all of those before it.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Array = Any
# Bytes: long enough that a copy over PCI Express takes longer than its launch, short enough that the first is soon there.
PIECE = 4 << 20


class Pinned:
    """The copies of buffers in pinned memory, and which of them hold what their buffer does.

    Parameters
    ----------
    xp
        the module cupy.
    piece
        bytes of a piece of a message.
    """

    def __init__(self, xp: Any, piece: int = PIECE) -> None:
        self.xp, self.length = xp, piece
        self.down, self.up = (xp.cuda.Stream(non_blocking=True) for _ in range(2))
        self._copies: dict[int, np.ndarray] = {}
        # For a buffer whose copy is the same, or is being made so: the events of its pieces, None for those that came.
        self._same: dict[int, list[Any]] = {}

    def changed(self, buffer: Array) -> None:
        """The buffer is no longer what its copy is."""
        self._same.pop(buffer.data.ptr, None)

    def forget(self, pointer: int) -> None:
        """A buffer is gone, and so is its copy, once it has been copied: its memory may be another's at once."""
        if self._copies.get(pointer) is not None:
            self.up.synchronize()
            self.down.synchronize()
            del self._copies[pointer]
        self._same.pop(pointer, None)

    def pieces(self, buffer: Array) -> Iterator[tuple[Array, np.ndarray]]:
        """The buffer piece by piece, and its copy."""
        copy = self._copy(buffer)
        for start in range(0, len(buffer), self.length):
            yield buffer[start : start + self.length], copy[start : start + self.length]

    def lower(self, buffer: Array) -> Iterator[tuple[np.ndarray, Any]]:
        """Starts copying the buffer down, unless its copy is the same. The pieces of the copy, and their events or None."""
        pieces = list(self.pieces(buffer))
        if buffer.data.ptr not in self._same:
            self._same[buffer.data.ptr] = [self._started(*piece) for piece in pieces]
        return zip((host for _, host in pieces), self._same[buffer.data.ptr])

    def _started(self, device: Array, host: np.ndarray) -> Any:
        """Starts copying a piece down: its event."""
        device.get(stream=self.down, out=host, blocking=False)
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(self.down)
        return event

    def raised(self, buffer: Array) -> None:
        """Copies of all pieces of the buffer up to it have been started."""
        self._same[buffer.data.ptr] = [None] * -(-len(buffer) // self.length)

    def _copy(self, buffer: Array) -> np.ndarray:
        """A buffer's copy, made once and large enough for all uses of it."""
        import cupyx  # type: ignore[import-not-found, import-untyped, unused-ignore]

        held = self._copies.get(buffer.data.ptr)
        if held is None or len(held) < len(buffer):
            held = self._copies[buffer.data.ptr] = cupyx.empty_pinned(len(buffer), np.uint8)
        return held[: len(buffer)]


class Sent:
    """A message that leaves: the pieces that MPI has not been given yet, with their events, and the requests of the others."""

    def __init__(self, pieces: Iterator[tuple[np.ndarray, Any]]) -> None:
        self.pieces, self.requests = deque(pieces), {}  # type: ignore[var-annotated]

    @property
    def over(self) -> bool:
        """Whether all of it has been sent."""
        return not (self.pieces or self.requests)


class Received:
    """A message that comes: where each piece goes, and the requests of those that are not there yet, by the piece's number."""

    def __init__(self, buffer: Array, pieces: Sequence[tuple[Array, np.ndarray]], requests: Sequence[Any]) -> None:
        self.buffer, self.pieces, self.requests = buffer, pieces, dict(enumerate(requests))

    @property
    def over(self) -> bool:
        """Whether all of it has come."""
        return not self.requests


class Staged:
    """The messages of a lap whose buffers are a device's: what a communicator is to ``ring.Lap``.

    Parameters
    ----------
    seats
        what carries pieces: host memory.
    space
        the memory of the buffers, whose ``pinned`` are their copies.
    """

    def __init__(self, seats: Any, space: Any) -> None:
        self.seats, self.space, self.pinned = seats, space, space.pinned
        self.order, self.patience = seats.order, seats.patience
        self._leaving: dict[tuple[int, int], deque[Sent]] = {}

    def send(self, buffer: Array, seat: int, tag: int) -> Sent:
        """Starts sending a buffer of bytes."""
        message = Sent(self.pinned.lower(buffer))
        self._leaving.setdefault((seat, tag), deque()).append(message)
        self._post(seat, tag)
        return message

    def receive(self, buffer: Array, seat: int, tag: int) -> Received:
        """Starts receiving a buffer of bytes."""
        self.pinned.changed(buffer)
        pieces = list(self.pinned.pieces(buffer))
        return Received(buffer, pieces, [self.seats.receive(host, seat, tag) for _, host in pieces])

    def completed(self, messages: Sequence[Sent | Received]) -> list[int]:
        """Which of the messages are done. Gives MPI what has been copied down, and starts copying up what has come."""
        for seat, tag in list(self._leaving):
            self._post(seat, tag)
        under_way = [(message, number) for message in messages for number in message.requests]
        for i in self.seats.completed([message.requests[number] for message, number in under_way]):
            self._done(*under_way[i])
        return [i for i, message in enumerate(messages) if message.over]

    def _post(self, seat: int, tag: int) -> None:
        """Gives MPI the pieces whose copy is there, in order, up to the first whose copy is not."""
        messages = self._leaving[seat, tag]
        while messages:
            pieces = messages[0].pieces
            while pieces and (pieces[0][1] is None or pieces[0][1].done):
                messages[0].requests[len(pieces)] = self.seats.send(pieces.popleft()[0], seat, tag)
            if pieces:
                return
            messages.popleft()
        del self._leaving[seat, tag]

    def _done(self, message: Sent | Received, number: int) -> None:
        del message.requests[number]
        if isinstance(message, Received):
            device, host = message.pieces[number]
            device.set(host, stream=self.pinned.up)
            if message.over:
                self.pinned.raised(message.buffer)
                self.space.touched_on(self.pinned.up, message.buffer)
