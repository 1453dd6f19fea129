"""Messages by way of pinned host memory: pieces, in order, while others are copied; on a device that does its work late."""
import types

import numpy as np
import pytest
from emulator.device import TooEarly, pretend

from ringmpi.tiles import cuda
from ringmpi.tiles.staging import Staged

LENGTH = 1000


class Seats:
    """What carries pieces, noting each. A send is over, and a receive has come, when the test says so."""

    order, patience = (0, 1), None

    def __init__(self, device):
        self.device, self.sent, self.received, self.over = device, [], [], set()

    def send(self, host, seat, tag):
        self.device.check_idle(host, False)
        self.sent.append(types.SimpleNamespace(data=host.copy(), host=host, to=(seat, tag), loan=self.device.lend(host, False)))
        return self.sent[-1]

    def receive(self, host, seat, tag):
        self.received.append(types.SimpleNamespace(host=host, of=(seat, tag), loan=self.device.lend(host, True)))
        return self.received[-1]

    def finish(self, request, data=None):
        if data is not None:
            request.host[:] = data
        self.over.add(id(request))

    def completed(self, requests):
        done = [i for i, request in enumerate(requests) if id(request) in self.over]
        for i in done:
            self.device.give_back(requests[i].loan)
        return done


@pytest.fixture
def device(monkeypatch):
    return pretend(monkeypatch)


@pytest.fixture
def seats(device):
    return Seats(device)


@pytest.fixture
def staged(seats):
    return Staged(seats, cuda.Space(False, LENGTH))


def filled(staged, device, nbytes, seed=0):
    """A buffer of the device, whose bytes are written when they are waited for; and the bytes."""
    data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    buffer = staged.space.empty(nbytes)
    buffer[:] = device.asarray(data)
    staged.space.filled(buffer)
    staged.space.ready(buffer)
    return buffer, data


def sizes(pieces):
    return [len(piece.host) for piece in pieces]


@pytest.mark.parametrize(("nbytes", "lengths"), [(3500, [1000, 1000, 1000, 500]), (2000, [1000, 1000]), (1, [1]), (999, [999]), (0, [])])
def test_a_message_goes_and_comes_in_pieces(device, seats, staged, nbytes, lengths):
    buffer, data = filled(staged, device, nbytes)
    message = staged.send(buffer, 1, 4)
    while len(seats.sent) < len(lengths):
        assert staged.completed([message]) == []
    for piece in seats.sent:
        seats.finish(piece)
    assert staged.completed([message]) == [0] and sizes(seats.sent) == lengths
    assert {piece.to for piece in seats.sent} <= {(1, 4)}
    assert np.array_equal(np.concatenate([np.empty(0, np.uint8), *(piece.data for piece in seats.sent)]), data)

    into = staged.space.empty(nbytes)
    coming = staged.receive(into, 1, 4)
    assert sizes(seats.received) == lengths
    for i, piece in reversed(list(enumerate(seats.received))):
        seats.finish(piece, data[i * LENGTH : (i + 1) * LENGTH])
        assert staged.completed([coming]) == ([0] if i == 0 else [])
    assert np.array_equal(into.get(), data)


def test_a_piece_is_sent_while_the_next_is_copied_down(device, seats, staged):
    buffer, _ = filled(staged, device, 3 * LENGTH)
    message = staged.send(buffer, 1, 0)
    most = 0
    while message.pieces:
        most = max(most, len(seats.sent) * (len(staged.pinned.down.work) > 0))
        staged.completed([message])
    assert most == 2, "the third was still to be copied when two had been sent"


def test_a_piece_is_copied_up_while_the_next_is_received(device, seats, staged):
    buffer = staged.space.empty(3 * LENGTH)
    message = staged.receive(buffer, 1, 0)
    for i, piece in enumerate(seats.received):
        seats.finish(piece, i)
        staged.completed([message])
        assert staged.pinned.up.begun == i + 1 and message.over == (i == 2)


def test_messages_with_one_tag_do_not_mix(device, seats, staged):
    first, of_first = filled(staged, device, 2 * LENGTH, seed=1)
    second, of_second = filled(staged, device, 2 * LENGTH, seed=2)
    messages = [staged.send(first, 1, 0), staged.send(second, 1, 0), staged.send(second, 1, 3)]
    staged.pinned.down.synchronize()
    # The events of the second are there, but it must not go before the first.
    for _ in range(8):
        staged.completed(messages)
    went = np.concatenate([piece.data for piece in seats.sent if piece.to == (1, 0)])
    assert np.array_equal(went, np.concatenate([of_first, of_second]))
    assert np.array_equal(np.concatenate([piece.data for piece in seats.sent if piece.to == (1, 3)]), of_second)


def test_what_was_received_is_sent_on_without_a_copy(device, seats, staged):
    buffer = staged.space.empty(2 * LENGTH)
    message = staged.receive(buffer, 1, 0)
    for piece in seats.received:
        seats.finish(piece, 7)
    assert staged.completed([message]) == [0]
    onward = staged.send(buffer, 1, 0)
    assert staged.pinned.down.begun == 0 and len(seats.sent) == 2 and not onward.pieces
    for piece in seats.sent:
        seats.finish(piece)
    assert staged.completed([onward]) == [0]
    buffer.fill(9)
    staged.space.filled(buffer)
    staged.space.ready(buffer)
    staged.send(buffer, 1, 0)
    assert staged.pinned.down.begun == 2, "it is another block now"


def test_a_copy_that_is_not_done_is_waited_for_by_every_send_of_it(device, seats, staged):
    buffer, data = filled(staged, device, LENGTH)
    messages = [staged.send(buffer, seat, 0) for seat in (0, 1)]
    assert len(seats.sent) < 2 and staged.pinned.down.begun == 1
    while any(message.pieces for message in messages):
        staged.completed(messages)
    assert len(seats.sent) == 2 and all(np.array_equal(piece.data, data) for piece in seats.sent)


def test_a_copy_goes_with_its_buffer_but_not_before_it_was_copied(device, seats, staged):
    buffer = staged.space.empty(LENGTH)
    into = buffer.memory
    message = staged.receive(buffer, 1, 0)
    seats.finish(seats.received[0], 3)
    assert staged.completed([message]) == [0] and staged.pinned._copies and not (into == 3).any()
    del buffer, message
    assert (into == 3).all() and not staged.pinned._copies and not staged.space._events


def test_later_work_waits_for_the_last_copy_up(device, seats, staged):
    buffer = staged.space.empty(2 * LENGTH)
    message = staged.receive(buffer, 1, 0)
    for piece in seats.received:
        seats.finish(piece, 5)
    staged.completed([message])
    total = buffer + 1
    device.stream.synchronize()
    assert (total.memory == 6).all()


def test_work_on_what_mpi_still_has_is_told_of(device, seats, staged):
    """What these tests rest on."""
    buffer, _ = filled(staged, device, LENGTH)
    message = staged.send(buffer, 1, 0)
    while message.pieces:
        staged.completed([message])
    with pytest.raises(TooEarly, match="work is started on a buffer that MPI still has"):
        buffer.get(stream=staged.pinned.down, out=seats.sent[0].host, blocking=False)
    with pytest.raises(TooEarly, match="MPI is given a buffer that it still has"):
        device.lend(seats.sent[0].host, True)


def test_work_that_overtakes_another_stream_is_told_of(device):
    buffer, other = device.zeros((8,), np.uint8), device.another_stream()
    buffer.set(np.ones(8, np.uint8), stream=other)
    _ = buffer + 1
    with pytest.raises(TooEarly, match="work has run before that of another stream"):
        device.stream.synchronize()
