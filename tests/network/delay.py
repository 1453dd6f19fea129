"""A delay line between two network namespaces: what comes in at one end goes out at the other some milliseconds later.

    delay.py NAMESPACE_A DEVICE_A NAMESPACE_B DEVICE_B MILLISECONDS

It makes both devices (TAP), prints "ready" when they are up, and ends on SIGTERM or with the process that started it. For
kernels without sch_netem. Root.
"""
import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress

CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
BATCH, FRAME = 64, 65_600


def enter(path):
    """Moves this thread to another network namespace."""
    with open(path) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")


def tap(namespace, device):
    """A TAP device in a namespace."""
    enter(f"/run/netns/{namespace}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", "dev", device, "up", "txqueuelen", "10000"], check=True)
    return end


def frames(end):
    """The frames that wait at an end."""
    for _ in range(BATCH):
        try:
            yield os.read(end, FRAME)
        except BlockingIOError:
            return


def main(first, second, seconds):
    """Forwards for ever."""
    other, line, poll = {first: second, second: first}, deque(), select.poll()
    for end in other:
        poll.register(end, select.POLLIN)
    print("ready", flush=True)
    while True:
        left = 1e3 * (line[0][0] - time.monotonic()) if line else None
        for end, _ in poll.poll(left if left is None else max(0.0, left) if left > 0.05 else 0):
            line.extend((time.monotonic() + seconds, other[end], frame) for frame in frames(end))
        while line and line[0][0] <= time.monotonic():
            _, end, frame = line.popleft()
            with suppress(OSError):  # the far end is full: a network drops it too
                os.write(end, frame)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    here, names = f"/proc/{os.getpid()}/ns/net", sys.argv[1:5]
    with open(here) as home:
        ends = [tap(*names[i : i + 2]) for i in (0, 2)]
        ctypes.CDLL(None, use_errno=True).setns(home.fileno(), CLONE_NEWNET)
    main(*ends, float(sys.argv[5]) / 1e3)
