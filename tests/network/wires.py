"""Hosts that are network namespaces of this machine, joined in a ring by wires with a rate and perhaps a delay. Root.

    with Lab(4, rate="400mbit", slow=(1, "100mbit"), late=(2, 5.0)) as lab:
        lab.run("program.py")          # a rank on every host, MPICH over TCP

Wire k joins hosts k and k + 1. ``slow`` gives a wire another rate, ``late`` a delay in milliseconds (by ``delay.py``).
"""
import os
import subprocess
import sys
import time
from pathlib import Path

from launch import MPICH_TCP, QUIET, ROOT, run

PREFIX = f"rmpi{os.getpid() % 10_000}"


def sh(words, check=True):
    return subprocess.run(words.split(), capture_output=True, text=True, check=check)


def missing():
    """Why a lab cannot be had here, or None."""
    if os.geteuid():
        return "needs root"
    probe = f"{PREFIX}probe"
    made = sh(f"ip netns add {probe}", check=False)
    sh(f"ip netns del {probe}", check=False)
    return f"no network namespaces: {made.stderr.strip()}" if made.returncode else None


class Lab:
    """See the module."""

    def __init__(self, hosts, rate=None, slow=None, late=None):
        self.hosts, self.rate, self.slow, self.late = hosts, rate, slow, late
        self.lines = []

    def __enter__(self):
        try:
            for host in range(self.hosts):
                self.host(host)
            for wire in range(self.hosts if self.hosts > 2 else 1):
                self.wire(wire)
            self.routes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        for line in self.lines:
            line.terminate()
            line.wait(5)
        for host in range(self.hosts):
            sh(f"ip netns del {self.name(host)}", check=False)

    def name(self, host):
        return f"{PREFIX}n{host % self.hosts}"

    def address(self, host):
        return f"10.79.0.{host % self.hosts + 1}"

    def host(self, host):
        name = self.name(host)
        sh(f"ip netns add {name}")
        own = f"addr add {self.address(host)}/32 dev d0"
        for words in ("link set lo up", "link add d0 type veth peer name d1", "link set d1 up", "link set d0 up", own):
            sh(f"ip -n {name} {words}")
        settings = "".join(f"echo {value} > /proc/sys/net/ipv4/{key};" for key, value in
                           (("ip_forward", 1), ("conf/all/rp_filter", 0), ("conf/default/rp_filter", 0)))  # fmt: skip
        subprocess.run(["ip", "netns", "exec", name, "sh", "-c", settings], check=True)

    def wire(self, wire):
        """Host ``wire`` has its end as "r", the next as "l"."""
        ends = ((self.name(wire), "r"), (self.name(wire + 1), "l"))
        if self.late and self.late[0] == wire:
            words = [sys.executable, str(Path(__file__).with_name("delay.py")), *ends[0], *ends[1], str(self.late[1])]
            line = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            self.lines.append(line)
            assert line.stdout.readline() == "ready\n", "the delay line did not start"
        else:
            sh(f"ip link add {PREFIX}a type veth peer name {PREFIX}b")
            for end, (name, device) in zip("ab", ends):
                sh(f"ip link set {PREFIX}{end} netns {name} name {device}")
        rate = self.slow[1] if self.slow and self.slow[0] == wire else self.rate
        for name, device in ends:
            sh(f"ip -n {name} link set dev {device} up")
            if rate:
                sh(f"tc -n {name} qdisc add dev {device} root tbf rate {rate} burst 64k latency 200ms")

    def routes(self):
        """To every other host, the shorter way round: first to the neighbours, then on through them."""
        ways = [(host, far, *self.way(host, far)) for host in range(self.hosts) for far in range(1, self.hosts)]
        for host, far, device, via in sorted(ways, key=lambda way: (way[0] + way[1] - way[3]) % self.hosts):
            on = f"via {self.address(via)} dev {device} onlink" if (host + far - via) % self.hosts else f"dev {device} scope link"
            sh(f"ip -n {self.name(host)} route add {self.address(host + far)} {on} src {self.address(host)}")

    def way(self, host, far):
        """By which device and neighbour ``host`` reaches the host ``far`` beyond it."""
        right = host == 0 if self.hosts == 2 else 2 * far <= self.hosts
        return ("r", host + 1) if right else ("l", host - 1)

    def run(self, *program, timeout=120, env=None):
        """``python PROGRAM`` with a rank on every host. A CompletedProcess."""
        inside = f'exec ip netns exec {PREFIX}n$PMI_RANK "$@"'
        mpiexec = Path(sys.prefix) / "bin" / "mpiexec"
        command = [str(mpiexec), "-n", str(self.hosts), "sh", "-c", inside, "sh", sys.executable, *map(str, program)]
        return run(command, timeout, {**os.environ, **QUIET, **MPICH_TCP, "PYTHONPATH": str(ROOT), **(env or {})})


if __name__ == "__main__":
    with Lab(int(sys.argv[1]), *sys.argv[2:3]) as lab:
        print(lab.name(0), flush=True)
        time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 3600)
