"""The ring: executes one seat's column of walks.

It is given a communicator, a space (the memory of a tile) and a column, and knows nothing of attention. Each step:

    1. send       what arrived goes on to where its walk leads
    2. start      the tiles of this step's visits: a device launches them, the host returns its strips
       share      the collectives of the step, if blocks come by those
    3. hand on    gradients of the step before: what arrived is added to what the tile filled, and follows its block
    4. receive    into buffers as they come free
    5. compute    the host's strips, with a poll after each: large messages move only inside MPI calls
    6. settle     wait for the blocks that the next step needs

Every wait is for something that another seat posts in an earlier step, or in an earlier line of this one, so no order
of arrival can deadlock. No buffer is given to MPI before the work on it is done, nor used again before its message is.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

from .schedule import ALL, Column, Hop, Step, Visit

KINDS = ("block", "gradient", "home")


class Message(NamedTuple):
    """A message under way: sent or received, a "block", a "gradient" or one on its last hop "home"."""

    sent: bool
    kind: str
    hop: Hop

    @property
    def tag(self) -> int:
        """Constant and small: messages of a kind and walk between two seats are posted in the same order on both."""
        return len(KINDS) * self.hop.walk + KINDS.index(self.kind)

    @property
    def buffer(self) -> tuple[bool, int]:
        """Which buffer it uses: one of blocks or of gradients, and its number."""
        return self.kind == "block", self.hop.slot


class Shelf:
    """Buffers side by side in one piece of memory, every one ``stride`` bytes long: what blocks are gathered into."""

    def __init__(self, whole: Any, stride: int) -> None:
        self.whole, self.stride = whole, stride

    def __getitem__(self, number: int) -> Any:
        return self.whole[number * self.stride : (number + 1) * self.stride]


class Lap:
    """One lap of all blocks round the ring, as one seat sees it.

    Parameters
    ----------
    comm
        ``send(buffer, seat, tag)`` and ``receive(buffer, seat, tag)`` return requests, and so do ``broadcast(buffer, seat)``,
        ``gather(whole, stride, nbytes)`` and ``reduce(numbers, seat)``, which all seats call in the same order;
        ``completed(requests)`` gives the indices of those that are done; ``patience(why)`` is called at every turn of a wait
        and raises when it is over.
    space
        the memory of the tile: see ``tiles.numpy.Space``.
    column
        this seat's program.
    blocks, gradients
        as many buffers as the column asks for, blocks on a ``Shelf`` if they are gathered; no gradients, no gradients travel.
    size
        ``size(owner, part)``: bytes of that part of a block, and of its gradient. Messages of no bytes are not sent.
    sums
        the dtype of gradients.
    record
        called with the name and facts of every event, or None, which costs nothing: "lap" (backward), "step" (index),
        "post" and "done" (message, nbytes, polls, polling), "tile" (visit, pair, began, ended), "wait" (messages, began, ended,
        polls), "end" (polls, polling): polls of the lap so far, and the seconds in them.
    """

    def __init__(self, comm: Any, space: Any, column: Column, blocks: list[Any] | Shelf, gradients: list[Any],
                 size: Callable[[int, int], tuple[int, int]], sums: Any, record: Callable[..., None] | None = None) -> None:  # fmt: skip
        self.comm, self.space, self.column, self.record = comm, space, column, record
        self.buffers = {True: blocks, False: gradients}
        self.size, self.sums = size, sums
        self.due: list[Message] = []
        self.flying: dict[Message, Any] = {}
        self.polls, self.polling = 0, 0.0

    def run(self, compute: Callable[[Visit], Iterator[Any]], absorb: Callable[[Visit, Any], None] | None = None) -> None:
        """One lap. ``compute(visit)`` gives a visit's strips; ``absorb(visit, buffer)`` takes a gradient that came home.

        Without ``absorb`` no gradients travel.
        """
        before = Step(-1)
        if self.record:
            self.record("lap", backward=bool(absorb))
        for step in self.column.steps:
            if self.record:
                self.record("step", index=step.index)
            for hop in step.sends:
                self._post(Message(True, "block", hop))
            work = [(visit, self._start(visit, compute, bool(absorb))) for visit in step.visits if visit.slot is not None]
            for hop in step.shared:
                self._post(Message(hop.slot in self.column.home and self.column.together == "broadcast", "block", hop))
            self.due += [Message(False, "block", hop) for hop in step.receives]
            if absorb:
                for visit in before.visits:
                    self._hand_on(visit, absorb)
                for visit in step.visits:
                    self._expect(visit)
            for visit, strips in work:
                self._compute(visit, strips)
            self._settle(lambda m, t=step.index + 1: not m.sent and m.kind == "block" and m.hop.need <= t)  # type: ignore[misc]
            before = step
        self._settle(lambda message: True)
        if self.record:
            self.record("end", polls=self.polls, polling=self.polling)

    def block(self, visit: Visit) -> Any:
        """The bytes of the block that a visit computes on."""
        return self._bytes((True, visit.slot), visit)

    def gradient(self, visit: Visit) -> Any:
        """The bytes that a visit's tile fills with the block's gradient; None at home."""
        return None if visit.filling is None else self._bytes((False, visit.filling), visit)

    # -------------------------------------------------------------------------------------------- the lines of a step

    def _start(self, visit: Visit, compute: Callable[[Visit], Iterator[Any]], backward: bool) -> Iterator[Any]:
        """Starts a visit's tiles, on a gradient buffer filled with zeros."""
        into = self.gradient(visit) if backward else None
        if into is not None:
            self._settle(lambda message: message.buffer == (False, visit.filling))
            self.space.clear(into)
        strips = self.space.start(compute(visit))
        for buffer in (self.block(visit), into):
            if buffer is not None:
                self.space.touched(buffer)
        return self._timed(visit, strips) if self.record else strips

    def _hand_on(self, visit: Visit, absorb: Callable[[Visit, Any], None]) -> None:
        """Adds the gradient that arrived for a visit to what its tile filled, and sends the sum after its block."""
        total = self.gradient(visit)
        if visit.source is not None:
            arrival = _arrival(visit)
            self._settle(lambda message: message == arrival)
            came = self._bytes(arrival.buffer, visit)
            if total is None:
                absorb(visit, came)
            else:
                self.space.add(total, came, self.sums)
                self.space.touched(total)
            self.space.touched(came)
        if visit.target is not None and visit.filling is not None:
            kind = "home" if visit.target in (visit.owner, ALL) else "gradient"
            self._post(Message(True, kind, _hop(visit, visit.target, visit.filling)))

    def _expect(self, visit: Visit) -> None:
        """Awaits the gradient collected so far. Where all seats' are added up for their owner, it adds zeros itself."""
        if visit.source is None:
            return
        arrival = _arrival(visit)
        if visit.source != ALL:
            self.due.append(arrival)
            return
        self._settle(lambda message: message.buffer == arrival.buffer)
        self.space.clear(self._bytes(arrival.buffer, visit))
        self._post(arrival)

    def _compute(self, visit: Visit, strips: Iterator[Any]) -> None:
        for _ in strips:
            self.poll()

    def _settle(self, which: Callable[[Message], bool]) -> None:
        """Returns when no message is due or under way that ``which`` holds for."""
        first = waiting = self._waiting(which)
        if not first:
            return
        patience = self.comm.patience(lambda: self._waits_for(waiting[0]))
        began, polls = perf_counter(), 0
        while waiting:
            patience()
            waiting, polls = self._waiting(which), polls + 1
        if self.record:
            self.record("wait", messages=first, began=began, ended=perf_counter(), polls=polls)

    def _waiting(self, which: Callable[[Message], bool]) -> list[Message]:
        """The messages that are due or under way after a poll, of those that ``which`` holds for."""
        self.poll()
        return [message for message in (*self.due, *self.flying) if which(message)]

    # ---------------------------------------------------------------------------------------------------- messages

    def poll(self) -> None:
        """Lets MPI move messages, notes what has come, and posts the receives whose buffers have come free."""
        if not (self.flying or self.due):
            return
        began = perf_counter() if self.record else 0.0
        messages = list(self.flying)
        for i in self.comm.completed([self.flying[message] for message in messages]):
            self._done(messages[i])
        while self.due and self._free(self.due[0]):
            self._post(self.due.pop(0))
        if self.record:
            self.polls, self.polling = self.polls + 1, self.polling + perf_counter() - began

    def _free(self, due: Message) -> bool:
        """Whether no message and no work still uses the buffer of one that is due."""
        return all(message.buffer != due.buffer for message in self.flying) and not self.space.busy(self._bytes(due.buffer, due.hop))

    def _post(self, message: Message) -> None:
        """Hands a buffer to MPI, once the work on it is done."""
        buffer = self._bytes(message.buffer, message.hop)
        if not len(buffer) and self.column.together != "gather":
            return
        self.space.ready(buffer)
        # Noted before MPI has it: a neighbour may see what was sent before this rank runs on.
        if self.record:
            self.record("post", message=message, nbytes=len(buffer), polls=self.polls, polling=self.polling)
        if message.hop.peer == ALL:
            request = self._collective(message, buffer)
        elif message.sent:
            request = self.comm.send(buffer, message.hop.peer, message.tag)
        else:
            request = self.comm.receive(buffer, message.hop.peer, message.tag)
        self.flying[message] = request

    def _collective(self, message: Message, buffer: Any) -> Any:
        """All seats get blocks, or add up a gradient. Every seat comes here for the same ones in the same order."""
        owner = message.hop.owner
        if message.kind != "block":
            return self.comm.reduce(buffer.view(self.sums), owner)
        if self.column.together == "broadcast":
            return self.comm.broadcast(buffer, owner)
        return self.comm.gather_blocks(self.buffers[True], [self.size(seat, 0)[0] for seat in range(self.column.slots)])

    def _done(self, message: Message) -> None:
        del self.flying[message]
        if self.record:
            nbytes = len(self._bytes(message.buffer, message.hop))
            self.record("done", message=message, nbytes=nbytes, polls=self.polls, polling=self.polling)

    def _bytes(self, buffer: tuple[bool, int | None], what: Visit | Hop) -> Any:
        """The bytes of a buffer that a part of a block, or its gradient, takes up."""
        of_blocks, number = buffer
        nbytes = self.size(what.owner, what.part)[0 if of_blocks else 1]
        return self.buffers[of_blocks][number][:nbytes]  # type: ignore[index]

    def _timed(self, visit: Visit, strips: Iterator[Any]) -> Iterator[Any]:
        """The same strips, each recorded."""
        began = perf_counter()
        for pair in strips:
            self.record("tile", visit=visit, pair=pair, began=began, ended=perf_counter())  # type: ignore[misc]
            yield pair
            began = perf_counter()

    def _waits_for(self, message: Message) -> str:
        rank = self.comm.order
        if message.hop.peer == ALL:
            what = "all blocks" if self.column.together == "gather" and message.kind == "block" else f"rank {rank[message.hop.owner]}"
            return f"step {message.hop.step}: the {message.kind} of {what}, which all ranks take part in"
        way = "to go to" if message.sent else "from"
        hop = message.hop
        return f"step {hop.step}: the {message.kind} of rank {rank[hop.owner]} {way} its neighbour rank {rank[hop.peer]}"


def _hop(visit: Visit, peer: int, buffer: int) -> Hop:
    return Hop(visit.step, visit.walk, visit.part, visit.owner, peer, buffer, visit.step)


def _arrival(visit: Visit) -> Message:
    """The message that brings a visit the gradient collected so far."""
    assert visit.source is not None and visit.arriving is not None
    kind = "gradient" if visit.slot is not None else "home"
    return Message(False, kind, _hop(visit, visit.source, visit.arriving))
