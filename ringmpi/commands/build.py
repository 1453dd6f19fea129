"""build: compile the host tile ahead of time, for machines whose compute nodes have no compiler."""
from __future__ import annotations

import argparse
from importlib import import_module

from .. import comm


def arguments(parser: argparse.ArgumentParser) -> None:
    """The words of the command: none."""


def run(args: argparse.Namespace) -> int:
    """Compiles, and prints where the library was put."""
    try:
        host = import_module("ringmpi.tiles.host")
    except ImportError as missing:
        raise RuntimeError(f"there is no host tile to compile: {missing}") from missing
    where = host.build()
    if comm.launched()[1] == 0:
        print(where)
    return 0
