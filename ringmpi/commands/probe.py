"""The process that ``gpu.probe`` starts: sends device bytes to itself by MPI and says what arrived. Not a word of the command line.

    python -m ringmpi.commands.probe DEVICE
"""
from __future__ import annotations

import sys

from .. import comm, gpu
from ..tiles import cuda

if __name__ == "__main__":
    print(gpu.ARRIVED if cuda.arrives(comm.echo, int(sys.argv[1])) else gpu.MANGLED)
