"""Everything that is MPI: the one room that imports mpi4py, and only when a communicator is given.

``Seats`` is a ring's own communicator: neighbours are its neighbouring ranks. It gives the ring messages, polls and
patience, and the library agreement: a call is checked on every rank before the first block leaves, and what one rank
finds wrong is raised on all. A wait that lasts longer than the time-out starts a roll call and raises, naming what was
waited for and who was silent. ``Alone`` is the same for one rank without MPI.
"""
from __future__ import annotations

import hashlib
import math
import os
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any

import numpy as np

from . import gpu, topology
from .gpu import Awareness
from .topology import Measured, Route, measure
from .topology.place import Place, believed, here

ROLL_CALL = 32767
LINE = 64
WAITING, FAILED = 1, 2
# What launchers tell their processes: how many they are, and which one this is. The innermost launcher first.
LAUNCHERS = (
    ("PMI_SIZE", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
)
# Seconds in which all ranks come to make a ring, where one of them was given a time-out that is none.
PATIENCE = 300.0
# How many lengths of messages are remembered: lengths that change from call to call must not add up.
TYPES = 256
# What a dead ring leaves under way: MPI may still write into these buffers, so they are never freed.
_abandoned: list[Any] = []


class RingTimeout(TimeoutError):
    """A wait for other ranks was too long. ``silent`` are the ranks that did not answer the roll call."""

    def __init__(self, message: str, silent: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.silent = tuple(silent)


class Fact:
    """Something all ranks must share. Ranks compare its digest (its repr), and read its words only where they differ."""

    def __init__(self, value: Any) -> None:
        self.words = str(value)
        self.digest = hashlib.sha256(self.words.encode()).hexdigest()

    def __str__(self) -> str:
        return self.words

    def __repr__(self) -> str:
        return self.digest


class Alone:
    """A ring of one rank, without MPI."""

    rank, seat, size, order, nodes, alive = 0, 0, 1, (0,), (1,), True
    alarm: Callable[[str], None]

    def __init__(self, order: Any = "auto") -> None:
        self.places = [here(0)]
        self.route = topology.route(order, self.places)

    def agree(self, what: str, facts: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What ``facts`` says: there is nobody to disagree with."""
        return facts()

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank."""
        return [value]

    def gather_rows(self, rows: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        """The rows of every rank, in order of rank."""
        return rows

    def reduce_all(self, op: str, given: Any, total: Any) -> None:
        """Its own is all there is."""
        total[...] = given

    def meet(self, asleep: float = 0.0) -> None:
        """There is nobody to meet."""

    def completed(self, requests: list[Any]) -> list[int]:
        """There are never any."""
        return []

    def patience(self, why: Callable[[], str]) -> Callable[[], None]:
        """Never waits."""
        raise AssertionError(f"a ring of one rank waits for {why()}")

    def device_memory(self, device: int) -> Awareness:
        """It sends nothing."""
        return Awareness(False, "for one rank without MPI sends nothing")

    def abandon(self, *held: Any) -> None:
        """Nobody waits for it."""

    def close(self) -> None:
        """Nothing to free."""
        self.alive = False


class Seats:
    """A ring's own communicator, made from the caller's. Making one is collective.

    The caller's communicator sees one Ibarrier, polled under the time-out, and one Split.

    Parameters
    ----------
    comm
        an mpi4py intracommunicator.
    order
        see ``topology.route``.
    timeout
        seconds after which a wait for other ranks is an error.
    """

    def __init__(self, comm: Any, order: Any, timeout: float) -> None:
        from mpi4py import MPI

        self.mpi, self.timeout, self.alive = MPI, timeout if _seconds(timeout) else PATIENCE, True
        self.alarm: Callable[[str], None] = lambda why: None
        self.rank, self.size, self.order = comm.rank, comm.size, tuple(range(comm.size))
        self.seat = self.rank
        self._types: dict[int, Any] = {}
        self._comm: Any = None
        self._finish(comm.Ibarrier(), lambda: f"making a ring: not all of {comm.size} ranks came")
        self._comm = _unfatal(comm.Split(0, comm.rank))
        self.places = self._places()
        try:
            found = self.agree("Ring", lambda: {"timeout": _positive(timeout), **self._route(order)})
            self.route: Route = found["route"]
            if isinstance(found["order"], Measured):
                self.route = measure.measured(self, self.route, found["order"])
        except (ValueError, TypeError, RuntimeError):
            self.close()
            raise
        seats = self.route.order
        self.seat = seats.index(self.rank)
        self._take_seats()
        self.order, self.nodes = seats, topology.node_sizes(seats, self.places)

    def _route(self, order: Any) -> dict[str, Any]:
        """What the ranks must agree on of an order: how to measure it, if it is to be, and what is known before."""
        how = topology.spelled(order)
        known = topology.route(how, self.places)
        return {"order": how if isinstance(how, Measured) else known.order, "route": known}

    def _places(self) -> list[Place]:
        """Where every rank stands; its node is called by the lowest rank that shares memory with it."""
        shared = self._comm.Split_type(self.mpi.COMM_TYPE_SHARED)
        node = shared.bcast(self.rank)
        shared.Free()
        return believed(self.gather(here(node)), self.rank)

    def _take_seats(self) -> None:
        """Exchanges the communicator for a cartesian one whose ranks are seats."""
        seated = self._comm.Split(0, self.seat)
        ring = _unfatal(seated.Create_cart([self.size], periods=[True], reorder=False))
        for done in (seated, self._comm):
            done.Free()
        self._comm = ring

    # ----------------------------------------------------------------------------------------------------- messages

    def send(self, buffer: Any, seat: int, tag: int) -> Any:
        """Starts sending a buffer of bytes; returns the request."""
        return self._comm.Isend([buffer, 1, self._type(len(buffer))], dest=seat, tag=tag)

    def receive(self, buffer: Any, seat: int, tag: int) -> Any:
        """Starts receiving a buffer of bytes; returns the request."""
        return self._comm.Irecv([buffer, 1, self._type(len(buffer))], source=seat, tag=tag)

    def broadcast(self, buffer: Any, seat: int) -> Any:
        """Starts bringing a seat's buffer of bytes to all; returns the request."""
        return self._comm.Ibcast([buffer, 1, self._type(len(buffer))], root=seat)

    def reduce(self, numbers: Any, seat: int) -> Any:
        """Starts adding up all seats' numbers at one; returns the request."""
        if seat == self.seat:
            return self._comm.Ireduce(self.mpi.IN_PLACE, numbers, op=self.mpi.SUM, root=seat)
        return self._comm.Ireduce(numbers, None, op=self.mpi.SUM, root=seat)

    def gather_blocks(self, shelf: Any, nbytes: Sequence[int]) -> Any:
        """Starts bringing every seat's buffer on a shelf to all seats; returns the request.

        ``nbytes`` of each are wanted; whole lines of ``LINE`` bytes travel, so that counts stay small.
        """
        counts = [-(-n // LINE) for n in nbytes]
        starts = [seat * shelf.stride // LINE for seat in range(self.size)]
        return self._comm.Iallgatherv(self.mpi.IN_PLACE, [shelf.whole, counts, starts, self._type(LINE)])

    def completed(self, requests: list[Any]) -> list[int]:
        """Which of the requests are done. Moves messages that are under way."""
        return self.mpi.Request.Testsome(requests) or [] if requests else []

    def patience(self, why: Callable[[], str]) -> Callable[[], None]:
        """A callable for every turn of a waiting loop: yields the core, and raises RingTimeout when it has been too long.

        From a second on it listens: when another rank calls the roll, this one joins.
        """
        deadline, listen = monotonic() + self.timeout, monotonic() + 1

        def turn() -> None:
            nonlocal listen
            os.sched_yield()
            now = monotonic()
            if now > deadline:
                raise self._roll_call(f"nothing came for {self.timeout:g} s", why())
            if now > listen and self._comm is not None:
                listen = now + 0.05
                if any(self._comm.Iprobe(source=seat, tag=ROLL_CALL) for seat in range(self.size)):
                    raise self._roll_call("other ranks have given up", why())

        return turn

    def _type(self, nbytes: int) -> Any:
        """One element that is a whole message: any length, over 2 GiB too, and any dtype."""
        if nbytes not in self._types:
            # A type may be freed while messages of it are under way.
            if len(self._types) == TYPES:
                self._types.pop(next(iter(self._types))).Free()
            self._types[nbytes] = self.mpi.BYTE.Create_contiguous(nbytes).Commit()
        return self._types[nbytes]

    def _finish(self, request: Any, why: Callable[[], str]) -> None:
        patience = self.patience(why)
        while not request.Test():
            patience()

    # ------------------------------------------------------------------------------------------------- when it fails

    def _roll_call(self, reason: str, why: str) -> RingTimeout:
        """Asks everyone for a sign of life, for a second, and says who gave none. The ring is dead."""
        self.alive = False
        if self._comm is None:
            return RingTimeout(f"rank {self.rank}: {reason}, {why}")
        others = [seat for seat in range(self.size) if seat != self.seat]
        marks = self._mark(WAITING)
        answers = {seat: np.zeros(1, np.uint8) for seat in others}
        requests = [self._comm.Irecv(answers[seat], source=seat, tag=ROLL_CALL) for seat in others]
        until = monotonic() + 1
        while monotonic() < until and not all(answers[seat][0] for seat in others):
            self.completed(requests)
            os.sched_yield()
        _abandoned.append((marks, answers, requests))
        silent, failed = (sorted(self.order[seat] for seat in others if answers[seat][0] == sign) for sign in (0, FAILED))
        text = f"rank {self.rank}: {reason} at {why}; silent in the roll call: {_ranks(silent)}"
        text += f"; stopped by an error of its own: {_ranks(failed)}" if failed else ""
        self.alarm(text)
        return RingTimeout(text, silent)

    def _mark(self, sign: int) -> list[Any]:
        byte = np.full(1, sign, np.uint8)
        others = (seat for seat in range(self.size) if seat != self.seat)
        return [byte, *(self._comm.Isend(byte, dest=seat, tag=ROLL_CALL) for seat in others)]

    def abandon(self, *held: Any) -> None:
        """Gives the ring up after an error on this rank alone: tells the others, and keeps what MPI may still use."""
        if self.alive and self.size > 1:
            held = (*held, self._mark(FAILED))
        self.alive = False
        _abandoned.append(held)

    def close(self) -> None:
        """Frees the communicator, collectively; nothing if it is dead, closed before, or MPI is finalised."""
        if self._comm is None or self.mpi.Is_finalized():
            return
        for datatype in self._types.values():
            datatype.Free()
        self._types.clear()
        if self.alive:
            self._comm.Free()
        self._comm, self.alive = None, False

    # ----------------------------------------------------------------------------------------------------- agreement

    def agree(self, what: str, facts: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Runs ``facts`` on every rank; returns them if all ranks found the same, else raises the same error on all.

        One small Iallreduce; only when something is odd is it gathered. ``what`` is a fact too, the "call". Collective.
        """
        mine: dict[str, Any] = {"call": what}
        error: Exception | None = None
        try:
            mine.update(facts())
        except Exception as caught:
            error = caught
        digest = _digest(mine)
        given, most = np.array([error is not None, digest, -digest]), np.empty(3, np.int64)
        why = lambda: self._before(what)  # noqa: E731
        self._finish(self._comm.Iallreduce(given, most, op=self.mpi.MAX), why)
        if not most[0] and most[1] == -most[2]:
            return mine
        found = _odd(what, self.gather((error and (type(error).__name__, str(error)), mine), why))
        vars(found)["agreed"] = True
        raise found from error

    def gather(self, value: Any, why: Callable[[], str] = lambda: "a gather") -> list[Any]:
        """The value of every rank, in order of rank. Collective."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self._finish(self._comm.Iallgather(np.array([len(data)]), sizes), why)
        everything = np.empty(sizes.sum(), np.uint8)
        self._finish(self._comm.Iallgatherv(data, [everything, sizes]), why)
        by_seat = np.split(everything, np.cumsum(sizes)[:-1])
        return [pickle.loads(by_seat[self.order.index(rank)].tobytes()) for rank in range(self.size)]

    def gather_rows(self, rows: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        """The rows (tokens, ...) of every rank, ``counts[rank]`` of them, in order of rank. Collective."""
        flat = np.ascontiguousarray(rows).reshape(len(rows), math.prod(rows.shape[1:]))
        width = flat.shape[1] * flat.itemsize
        by_seat = np.empty((sum(counts), flat.shape[1]), flat.dtype)
        sizes = [counts[rank] for rank in self.order]
        if width and sum(counts):
            give, take = (x.reshape(-1).view(np.uint8) for x in (flat, by_seat))
            one = self._type(width)
            starts = np.cumsum([0, *sizes[:-1]]).tolist()
            self._finish(self._comm.Iallgatherv([give, len(rows), one], [take, sizes, starts, one]), lambda: "unshard")
        pieces = np.split(by_seat, np.cumsum(sizes)[:-1])
        ordered = np.concatenate([pieces[self.order.index(rank)] for rank in range(self.size)])
        return ordered.reshape(sum(counts), *rows.shape[1:])

    def reduce_all(self, op: str, given: Any, total: Any) -> None:
        """Fills ``total`` on every rank with the "max" or "sum" of all ranks' ``given``, element by element. Collective."""
        request = self._comm.Iallreduce(given, total, op={"max": self.mpi.MAX, "sum": self.mpi.SUM}[op])
        self._finish(request, lambda: f"the {op} over all ranks")

    def meet(self, asleep: float = 0.0) -> None:
        """Returns when all ranks have come. ``asleep`` seconds at a time, so that ranks that are being timed have the cores."""
        request, patience = self._comm.Ibarrier(), self.patience(lambda: "a meeting of all ranks")
        while not request.Test():
            patience()
            sleep(asleep)

    def device_memory(self, device: int) -> Awareness:
        """Whether MPI takes device memory: the same on all ranks, and yes only if it does on each. Collective.

        One rank a node probes, with its device, and only if nothing else tells. Raises ValueError, on all ranks, for an
        override that is none, or differs.
        """
        self.agree("whether MPI takes device memory", lambda: {gpu.OVERRIDE: gpu.told()})
        found = gpu.evidence(memory_kinds(self._comm, self.mpi.COMM_WORLD))
        probes = self.size > 1 and self.places[self.rank].node == self.rank
        return gpu.agreed(self.gather, found, lambda: gpu.probed(device) if probes else None)[0]

    def _before(self, what: str) -> str:
        right = self.order[(self.order.index(self.rank) + 1) % self.size]
        return f"the agreement before step 0 of {what}: the block of rank {self.rank} has not left for its neighbour rank {right}"


def launched(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """How many processes a launcher says it started, and which of them this is. Does not touch MPI.

    >>> launched({"SLURM_NTASKS": "8", "PMI_SIZE": "4", "PMI_RANK": "2"})
    (4, 2)
    """
    found = ((environment[size], environment.get(rank, "0")) for size, rank in LAUNCHERS if size in environment)
    size, rank = next(found, ("1", "0"))
    return int(size), int(rank)


def world() -> Any:
    """The communicator of all ranks of this job. Initialises MPI. None for one process without an MPI.

    Raises RuntimeError where several processes were started and each of them is alone, or has no MPI at all.
    """
    started, _ = launched()
    try:
        # Its doubts about the launcher are raised below, once and in words.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mpi4py import MPI
    except (ImportError, RuntimeError) as missing:
        if started > 1:
            raise RuntimeError(f"{started} processes were started, but there is no MPI: {missing}") from missing
        return None
    if started > 1 == MPI.COMM_WORLD.size:
        name, *version = MPI.get_vendor()
        library = f"{name} {'.'.join(map(str, version[0]))}"
        raise RuntimeError(f"{started} processes were started, but each of them is alone: their launcher is not one of this MPI, "
                           f"{library}; use its own mpiexec, or srun with an --mpi= that it knows")  # fmt: skip
    return MPI.COMM_WORLD


def about() -> dict[str, str]:
    """The MPI that ``world`` found: its library, standard and thread level, by name."""
    from mpi4py import MPI

    levels = {getattr(MPI, f"THREAD_{level}"): level.lower() for level in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    return {
        "MPI": " ".join(MPI.Get_library_version().split("\n")[0].rstrip("\0").split()),
        "MPI standard": ".".join(map(str, MPI.Get_version())),
        "MPI threads": levels[MPI.Query_thread()],
    }


def agreed(error: BaseException) -> bool:
    """Whether an error was raised on all ranks of a ring together, by their agreement."""
    return vars(error).get("agreed", False)


def device_memory(world: Any, device: int | None) -> tuple[Awareness, list[gpu.Evidence]]:
    """Whether MPI takes device memory on all ranks, and what rank 0 knows: by a probe too, if it has a device. Collective."""
    if world is None:
        return gpu.agreed(lambda mine: [mine], gpu.evidence(), lambda: None)
    probes = world.rank == 0 and device is not None
    return gpu.agreed(world.allgather, gpu.evidence(memory_kinds(world)), lambda: gpu.probed(device) if probes else None)


def memory_kinds(*comms: Any) -> list[str]:
    """What communicators say of the kinds of memory that MPI takes (MPI 4.1); nothing from an older MPI."""
    infos = [comm.Get_info() for comm in comms]
    found = [info.get("mpi_memory_alloc_kinds") for info in infos]
    for info in infos:
        info.Free()
    return [kinds for kinds in found if kinds]


def echo(give: Any, take: Any) -> None:
    """Sends a buffer to this process itself."""
    from mpi4py import MPI

    MPI.COMM_SELF.Sendrecv(give, 0, recvbuf=take, source=0)


def seats(comm: Any, order: Any, timeout: float) -> Alone | Seats:
    """A ring's own communicator from the caller's, or of one rank without MPI for None. Collective."""
    # A null communicator is false, and answers no question.
    if hasattr(comm, "Ibarrier") and not comm:
        raise TypeError("comm is COMM_NULL: this rank is not among those that make the ring, and must not call it")
    if not (comm is None or hasattr(comm, "Ibarrier")) or getattr(comm, "is_inter", False):
        raise TypeError(f"comm is {comm!r}; it must be an mpi4py intracommunicator, or None for one rank without MPI")
    if comm is None:
        return Alone(order)
    return Seats(comm, order, timeout)


def _seconds(timeout: Any) -> bool:
    return isinstance(timeout, (int, float)) and timeout > 0


def _positive(timeout: Any) -> Any:
    if not _seconds(timeout):
        raise ValueError(f"timeout is {timeout!r}; it must be a number of seconds > 0")
    return timeout


def _unfatal(comm: Any) -> Any:
    """Errors of a communicator raise, whatever its parent's did."""
    from mpi4py import MPI

    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def _digest(facts: dict[str, Any]) -> int:
    """63 bits that are the same where the facts are written the same."""
    return int.from_bytes(hashlib.sha256(repr(sorted(facts.items())).encode()).digest()[:8], "little") >> 1


def _odd(what: str, found: list[tuple[Any, dict[str, Any]]]) -> Exception:
    """The error for what the ranks found: the first rank's own error, else the first fact that differs."""
    for rank, (error, facts) in enumerate(found):
        if error:
            what = facts["call"]
            kind = {"TypeError": TypeError, "ValueError": ValueError}.get(error[0], RuntimeError)
            return kind(f"{what}, rank {rank}: {error[1]}" if kind is not RuntimeError else f"{what}, rank {rank}: {error[0]}: {error[1]}")
    for fact in dict.fromkeys(name for _, facts in found for name in facts):
        values = [str(facts.get(fact)) for _, facts in found]
        if len(set(values)) > 1:
            usual = Counter(values).most_common(1)[0][0]
            rank = next(r for r, value in enumerate(values) if value != usual)
            other = values.index(usual)
            if fact == "call":
                return ValueError(f"rank {rank} called {values[rank]}, rank {other} {usual}")
            kind = TypeError if fact == "dtype" else ValueError
            return kind(f"{what}: rank {rank} was given {fact} {values[rank]:.200}, rank {other} {usual:.200}")
    return RuntimeError(f"{what}: the ranks differ, but not in what they were given")


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks)) if ranks else "nobody"
