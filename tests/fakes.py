"""A ring of threads in one process, as hostile as MPI is allowed to be.

A message moves at some random poll after both ends were posted, straight from the sender's buffer to the receiver's: a
buffer that is written too early, read too early or freed too early gives wrong numbers. Messages match in the order
they were posted, per pair of seats and tag, and must be of equal length. Collectives match in the order each seat
posts them, whatever they are, and move when all have.
"""
import random
import threading
import time
from contextlib import contextmanager

import numpy as np

import ringmpi.api
from ringmpi.comm import _odd
from ringmpi.topology import Route
from ringmpi.topology.place import Place


class Request:
    def __init__(self, buffer, wire):
        self.buffer, self.wire, self.done = buffer, wire, False

    def Test(self):
        self.wire.move()
        return self.done


class Events:
    """A recorder that keeps every event as it is."""

    def __init__(self):
        self.events = []

    def __call__(self, name, **facts):
        self.events.append((name, facts))

    def of(self, name):
        return [facts for event, facts in self.events if event == name]


class Wire:
    """What all seats of a fake ring share."""

    def __init__(self, size, seed=0, delay=0.5):
        self.size, self.delay, self.random = size, delay, random.Random(seed)
        self.lock, self.posted, self.table = threading.RLock(), {}, {}
        self.barrier = threading.Barrier(size, timeout=20)
        self.bytes = [0] * size
        self.collectives, self.joined = [], [0] * size

    def post(self, key, sent, buffer):
        """Queues one end of a message."""
        with self.lock:
            request = Request(buffer, self)
            self.posted.setdefault(key, ([], []))[sent].append(request)
            return request

    def move(self):
        """Moves some of the messages whose two ends are posted."""
        with self.lock:
            for receives, sends in self.posted.values():
                while receives and sends and self.random.random() > self.delay:
                    into, out = receives.pop(0), sends.pop(0)
                    assert len(into.buffer) == len(out.buffer), "the two ends of a message differ in length"
                    into.buffer[:] = out.buffer
                    into.done = out.done = True

    def join(self, seat, what, act, buffer):
        """Takes part in this seat's next collective, which is ``what`` on all seats; ``act(buffers)`` is what it does."""
        with self.lock:
            number, self.joined[seat] = self.joined[seat], self.joined[seat] + 1
            if number == len(self.collectives):
                self.collectives.append((what, act, {}))
            assert self.collectives[number][0] == what, f"seat {seat} is at {what}, another at {self.collectives[number][0]}"
            self.collectives[number][2][seat] = request = Request(buffer, self)
            return request

    def move_all(self):
        """Does some of the collectives that all seats have joined."""
        with self.lock:
            for _, act, requests in self.collectives:
                waiting = len(requests) == self.size and not requests[0].done
                if waiting and self.random.random() > self.delay:
                    act([requests[seat].buffer for seat in range(self.size)])
                    for request in requests.values():
                        request.done = True

    def exchange(self, seat, value):
        """The values of all seats."""
        self.table[seat] = value
        self.barrier.wait()
        values = [self.table[s] for s in range(self.size)]
        self.barrier.wait()
        return values


class FakeSeats:
    """What ``comm.Seats`` is to a ring, over a wire."""

    def __init__(self, wire, rank, order=None, nodes=None):
        self.wire, self.rank, self.size = wire, rank, wire.size
        self.order = tuple(order or range(wire.size))
        self.nodes = nodes or (wire.size,)
        self.seat, self.alive = self.order.index(rank), True
        self.route, self.places = Route(self.order), [Place(0)] * wire.size

    def send(self, buffer, seat, tag):
        self.wire.bytes[self.seat] += len(buffer)
        return self.wire.post((self.seat, seat, tag), True, buffer)

    def receive(self, buffer, seat, tag):
        buffer[:] = 0xFF  # MPI may write at any time from here on
        return self.wire.post((seat, self.seat, tag), False, buffer)

    def broadcast(self, buffer, seat):
        if seat != self.seat:
            buffer[:] = 0xFF

        def act(buffers):
            for into in buffers[:seat] + buffers[seat + 1 :]:
                assert len(into) == len(buffers[seat]), "a broadcast whose seats give different lengths"
                into[:] = buffers[seat]

        return self.wire.join(self.seat, ("broadcast", seat), act, buffer)

    def reduce(self, numbers, seat):
        def act(buffers):
            buffers[seat][:] = sum(buffers)

        return self.wire.join(self.seat, ("reduce", seat), act, numbers)

    def gather_blocks(self, shelf, nbytes):
        for seat in set(range(self.size)) - {self.seat}:
            shelf[seat][:] = 0xFF

        def act(shelves):
            for into in shelves:
                for seat, n in enumerate(nbytes):
                    if into is not shelves[seat]:
                        into[seat][:n] = shelves[seat][seat][:n]

        return self.wire.join(self.seat, ("gather", tuple(nbytes)), act, shelf)

    def completed(self, requests):
        self.wire.move()
        self.wire.move_all()
        return [i for i, request in enumerate(requests) if request.done]

    def patience(self, why):
        deadline = time.monotonic() + 20

        def turn():
            time.sleep(1e-5)
            if time.monotonic() > deadline or self.wire.barrier.broken:
                raise TimeoutError(why())

        return turn

    def agree(self, what, facts):
        try:
            found = None, {"call": what, **facts()}
        except Exception as error:
            found = (type(error).__name__, str(error)), {"call": what}
        answers = self.wire.exchange(self.rank, found)
        if any(error for error, _ in answers) or len({repr(sorted(facts.items())) for _, facts in answers}) > 1:
            raise _odd(what, answers)
        return found[1]

    def gather(self, value):
        return self.wire.exchange(self.rank, value)

    def gather_rows(self, rows, counts):
        return np.concatenate(self.wire.exchange(self.rank, rows))

    def meet(self, asleep=0.0):
        self.wire.barrier.wait()

    def abandon(self, *held):
        self.alive = False

    def close(self):
        self.alive = False


def ring_of_threads(size, body, *, seed=0, delay=0.5, **seating):
    """``body(ring)`` on every rank of a fake ring, in threads; their results in order of rank, or the first error."""
    wire, results, errors = Wire(size, seed, delay), [None] * size, []

    def rank_main(rank):
        try:
            with _seated(FakeSeats(wire, rank, **seating)) as ring:
                results[rank] = body(ring)
        except BaseException as error:
            errors.append((rank, error))
            wire.barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise next((e for _, e in errors if not isinstance(e, (threading.BrokenBarrierError, TimeoutError))), errors[0][1])
    assert not any(thread.is_alive() for thread in threads), "a rank of the fake ring hangs"
    return results


@contextmanager
def _seated(seats):
    """A Ring on given seats."""
    ring = ringmpi.api.Ring.__new__(ringmpi.api.Ring)
    ring._take(seats)
    yield ring
