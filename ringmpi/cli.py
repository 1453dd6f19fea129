"""The command line: what every command shares, and how it ends.

    ringmpi COMMAND ...        python -m ringmpi COMMAND ...        mpiexec -n 4 ringmpi COMMAND ...

A command is a module of ``ringmpi.commands`` with ``arguments(parser)`` and ``run(args) -> exit code``, and a line of
``COMMANDS``. It is imported only when it is called.

A command ends with 0; with 1 where what it looked at is wrong; and with 2 where it refused or was stopped, after one message
from one rank: rank 0 where all ranks agreed on an error, else the lowest that knows of it, which then ends the whole job.
"""
from __future__ import annotations

import argparse
import math
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from . import __version__, comm
from .api import Ring
from .comm import RingTimeout
from .profile import flight

COMMANDS = {
    "attend": "attention, and its gradients, of arrays in files",
    "check": "this installation, on the ranks it was started with, against dense attention",
    "info": "versions, the MPI, the ranks of every node, the tiles",
    "order": "where the ranks stand, the ring through them, and what its hops cost",
    "build": "compile the host tile ahead of time",
    "profile": "the links of this job, and a schedule with its messages and its tiles apart; who is slow",
    "plan": "what a ring will cost on a machine, which hops hide and what stalls (needs no MPI)",
}
# Seconds that a rank leaves another to say what is wrong.
MOMENT = 3.0
# More of anything than this is a slip of the finger.
MOST = 1 << 40
# What is said in a sentence. Everything else is a fault of the program, and shown with where it happened.
REFUSALS = (ValueError, TypeError, RuntimeError, OSError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    >>> main(["attend", "q.npy"])
    2
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        args = _parser(words).parse_args(words)
        return args.run(args)
    except REFUSALS as error:
        if comm.launched()[1] == 0:
            _say(words, error)
        elif not comm.agreed(error):
            # All ranks refuse, each for itself. A launcher may end all of them at the first that fails: rank 0 talks before.
            time.sleep(MOMENT)
        return 2


def whole(word: str) -> int:
    """A number of things on the command line: from 1 to 2^40.

    >>> whole("512")
    512
    """
    try:
        if 1 <= int(word) <= MOST:
            return int(word)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{word!r} is not an integer from 1 to {MOST}")


def positive(word: str) -> float:
    """A finite number above 0 on the command line: of seconds, or a factor.

    >>> positive("0.5")
    0.5
    """
    try:
        if 0 < float(word) < math.inf:
            return float(word)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{word!r} is not a finite number above 0")


def ring_arguments(parser: Any) -> None:
    """The options of every command that makes a ring."""
    orders = "auto, natural, measured, torus:4x6, mesh:4x6, FILE.json, or a list such as 0,2,1,3"
    parser.add_argument("--order", default="auto", help=f"ranks round the ring: {orders} (default: auto)")
    parser.add_argument("--timeout", type=positive, default=300.0, metavar="S", help="seconds to wait for another rank (default: 300)")


@contextmanager
def job(args: argparse.Namespace) -> Iterator[Ring]:
    """The ring of all ranks that were started. Collective.

    An error on which the ranks agreed is raised on all of them; any other ends the job at once, so that none waits for a
    rank that is gone. A time-out, or SIGUSR1, leaves the last hops of every rank in the working folder.
    """
    with flight.listening("."), _ring(args) as ring:
        yield ring


@contextmanager
def _ring(args: argparse.Namespace) -> Iterator[Ring]:
    world, ring = comm.world(), None
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        ring = Ring(world, order=_order(args.order), timeout=args.timeout)
        yield ring
    except BaseException as error:
        if isinstance(error, RingTimeout) or not isinstance(error, REFUSALS) or not (ring is None or ring.alive):
            _end(world, error)
        if ring is not None and ring.size > 1 and not comm.agreed(error):
            # Of this rank alone, or of all, each for itself: the others get a moment in which the lowest may end the job.
            _end(world, error, later=MOMENT * (ring.rank > 0))
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        if ring is not None:
            ring.close()


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong with the words: every rank reads them, and one tells."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        if comm.launched()[1] == 0:
            super()._print_message(message, file)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands, with the options of the one that is called."""
    parser = _Parser(prog="ringmpi", description="Exact attention over sequences that no single rank can hold.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose.capitalize() + ".")
        if name in words[:1]:
            module = import_module(f"ringmpi.commands.{name}")
            module.arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _order(words: str) -> Any:
    """An order as it is written on the command line: ranks, or a name."""
    if not words[:1].isdigit():
        return words
    try:
        return [int(rank) for rank in words.split(",")]
    except ValueError:
        raise ValueError(f"--order {words} is not a list of ranks such as 0,2,1,3") from None


def _say(words: Sequence[str], what: object) -> None:
    print(f"{' '.join(['ringmpi', *words[:1]])}: {what}", file=sys.stderr, flush=True)


def _end(world: Any, error: BaseException, later: float = 0.0) -> NoReturn:
    """Ends the job on all ranks, ``later`` seconds from now, after the lowest rank that knows why has said it."""
    rank, code = (0 if world is None else world.rank), 2
    # Everything is cleaned up: from here on a signal may end this rank as it likes.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    time.sleep(later)
    if isinstance(error, RingTimeout):
        # The lower ranks that answered in the roll call know it too; they say it and end this rank.
        if set(range(rank)) - set(error.silent):
            time.sleep(5)
        else:
            _say(sys.argv[1:], error)
    elif isinstance(error, (*REFUSALS, MemoryError)):
        _say(sys.argv[1:], f"rank {rank}: {type(error).__name__}: {error}")
    elif isinstance(error, (KeyboardInterrupt, SystemExit)):
        code = 130
    else:
        traceback.print_exception(error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if world is not None and world.size > 1:
        world.Abort(code)
    raise SystemExit(code)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM, by which schedulers end a job: leaves through every clean-up."""
    raise KeyboardInterrupt
