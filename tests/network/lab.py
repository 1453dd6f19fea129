"""Hosts as network namespaces, joined by links of limited rate: a real network on one machine. Needs root.

    two_switches    odd hosts on one switch, even hosts on the other, one slow link between the switches
    ring_of_hosts   point-to-point links in a given order of hosts, each limited; what goes further is routed the shorter way
    pair            two hosts and one limited link

    with two_switches(4, "200mbit") as lab:
        done = lab.mpiexec(launchers()[0], ["n1", "n2", "n3", "n4"], "program.py", "argument")

Ranks are given to hosts in the order of the list, so neighbours by rank are on different switches: numbered badly, as
schedulers do. Rates are limited by token buckets, on both ends of a link, and nothing is ever dropped; TCP's windows open and stay
open, whatever this machine's congestion control is: BBR paces by what it believes of a link. Nothing outside is reached or touched; a lab's
namespaces have names of their own and are removed with it, with what still runs in them, on SIGTERM too. What a lab that
was killed has left is removed by the next, once nothing runs in it.
"""
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

from launch import LIBFABRIC, OPENMPI

NET = "10.77.0"
HEAD = 254
SHELL = Path(__file__).with_name("enter.sh")
NAMED, FOLDERS = "ringmpi-", Path("/etc/netns")
# MPICH otherwise goes round the network through shared memory. Open MPI takes enter.sh for ssh to start its daemons with; and
# the answers of its rendezvous would wait behind the data that goes the same way, in queues as deep as these.
MPICH = {**LIBFABRIC, "FI_TCP_IFACE": "lan"}
LAUNCHED = {
    "mpich": (("-launcher", "ssh", "-launcher-exec", str(SHELL), "-hosts"), MPICH),
    "openmpi": (("--map-by", "seq:oversubscribe", "--host"),
                {**OPENMPI, "OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_btl_tcp_if_include": "lan",
                 "OMPI_MCA_btl_tcp_eager_limit": str(4 << 20), "PRTE_MCA_prte_if_include": "lan", "PRTE_MCA_plm_ssh_agent": str(SHELL)}),
}  # fmt: skip


def why_not():
    """Why there can be no lab here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs ip and tc (iproute2)"
    tried = subprocess.run(["ip", "netns", "add", f"ringmpi-try-{os.getpid()}"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"needs network namespaces: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"ringmpi-try-{os.getpid()}"], check=True)
    return None


class Lab:
    """Namespaces, and how to run an MPI job in them."""

    def __init__(self, hosts):
        self.hosts, self.prefix = hosts, f"{NAMED}{os.getpid()}-"
        self.lines = []
        self.folder = tempfile.TemporaryDirectory(prefix=self.prefix)

    def name(self, host):
        return self.prefix + host

    def ip(self, host, *lines):
        """Runs lines of ``ip`` in a host."""
        subprocess.run(["ip", "-n", self.name(host), "-batch", "-"], input="\n".join(lines), text=True, check=True)

    def add(self, host):
        subprocess.run(["ip", "netns", "add", self.name(host)], check=True)
        self.ip(host, "link set lo up")
        self.set(host, "tcp_congestion_control", "reno")
        self.set(host, "tcp_slow_start_after_idle", 0)

    def set(self, host, name, value):
        """Gives a host's kernel another setting of its IPv4."""
        script = f"echo {value} > /proc/sys/net/ipv4/{name}"
        subprocess.run(["ip", "netns", "exec", self.name(host), "sh", "-c", script], check=True)

    def join(self, a, b, ends=("lan", "lan")):
        """A cable between two hosts: a device in each."""
        one, two = f"rm{os.getpid() % 100000}a", f"rm{os.getpid() % 100000}b"
        subprocess.run(["ip", "link", "add", one, "type", "veth", "peer", "name", two], check=True)
        for host, device, end in ((a, one, ends[0]), (b, two, ends[1])):
            subprocess.run(["ip", "link", "set", device, "netns", self.name(host), "name", end], check=True)
            self.ip(host, f"link set dev {end} up")

    def delay(self, a, b, milliseconds, ends):
        """A cable between two hosts on which everything takes that much longer, either way."""
        words = [sys.executable, Path(__file__).with_name("delay.py"), self.name(a), ends[0], self.name(b), ends[1], milliseconds]
        line = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True)
        self.lines.append(line)
        assert line.stdout.readline() == "ready\n", "the delay line did not start"

    def limit(self, host, device, rate, burst="128k"):
        """At most ``rate`` out of a device, with a queue deep enough that nothing is dropped: fabrics are lossless."""
        bucket = ["root", "tbf", "rate", rate, "burst", burst, "latency", "2s"]
        subprocess.run(["ip", "netns", "exec", self.name(host), "tc", "qdisc", "add", "dev", device, *bucket], check=True)

    def know_names(self):
        """Every host can find every other by name."""
        numbers = {"head": HEAD, **{host: int(host[1:]) for host in self.hosts}}
        text = "127.0.0.1 localhost\n" + "".join(f"{NET}.{number} {host}\n" for host, number in numbers.items())
        for host in numbers:
            folder = FOLDERS / self.name(host)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(text)

    def environment(self, host, **variables):
        """What a job's ranks on a host find in their environment."""
        lines = [f"export {name}='{value}'\n" for name, value in variables.items()]
        Path(self.folder.name, host).write_text("".join(lines))

    def run(self, words, timeout=60, env=None):
        """Runs a command on the host that jobs are started from."""
        settings = {**os.environ, "RINGMPI_LAB": self.prefix, "RINGMPI_LAB_ENV": self.folder.name, **(env or {})}
        command = [str(SHELL), "head", shlex.join(map(str, words))]
        return subprocess.run(command, env=settings, timeout=timeout, capture_output=True, text=True, check=False)

    @contextmanager
    def slurm(self, folder):
        """Slurm across the hosts, while it is up: what a job is started by, and the environment to run it in."""
        settings = {**os.environ, "RINGMPI_LAB": self.prefix, "RINGMPI_LAB_ENV": self.folder.name}
        here = Path(__file__).parent
        for host in self.hosts:
            # From here on Slurm alone tells where a host hangs.
            self.environment(host)
        try:
            up = [here / "slurm_up.sh", str(len(self.hosts)), folder]
            done = subprocess.run(up, env=settings, timeout=300, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"Slurm did not come up: {done.stderr}")
            n = len(self.hosts)
            yield ["srun", "--mpi=pmi2", "--kill-on-bad-exit=1", f"-N{n}", f"-n{n}"], {**MPICH, "SLURM_CONF": f"{folder}/slurm.conf"}
        finally:
            subprocess.run([here / "slurm_down.sh", folder], timeout=60, check=False)

    def mpiexec(self, mpi, hosts, *program, timeout=60, env=None):
        """``python PROGRAM`` under an MPI's launcher (``launch.Launcher``), rank i on ``hosts[i]``."""
        words, settings = LAUNCHED[mpi.name]
        command = [mpi.prefix / "bin" / "mpiexec", *words, ",".join(hosts), "-n", len(hosts), mpi.python, *program]
        return self.run(command, timeout, {**settings, **(env or {})})

    def remove(self):
        for line in self.lines:
            line.terminate()
            line.wait(5)
            line.stdout.close()
        for name in namespaces(self.prefix):
            for process in processes(name):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        for name in namespaces(self.prefix):
            delete(name)
        self.folder.cleanup()


def namespaces(prefix):
    """The names of namespaces that begin so."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(prefix)]


def processes(name):
    """The processes that live in a namespace."""
    return [int(pid) for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout.split()]


def delete(name):
    """Removes a namespace and the names that its host knew."""
    subprocess.run(["ip", "netns", "del", name], check=False)
    shutil.rmtree(FOLDERS / name, ignore_errors=True)


def sweep():
    """Removes what labs have left whose process is gone, unless something still runs in one of their hosts."""
    left = {}
    for name in namespaces(NAMED):
        left.setdefault(name.split("-")[1], []).append(name)
    for owner, names in left.items():
        if owner.isdecimal() and not Path("/proc", owner).exists() and not any(map(processes, names)):
            for name in names:
                delete(name)
            for folder in Path(tempfile.gettempdir()).glob(f"{NAMED}{owner}-*"):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ended_tidily():
    """SIGTERM leaves through every clean-up, as Ctrl-C does; while the lab is removed neither disturbs."""

    def leave(number, frame):
        raise SystemExit(128 + number)

    mine = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} if mine else {}
    if mine:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield lambda: [signal.signal(number, signal.SIG_IGN) for number in before]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _lab(hosts):
    sweep()
    with ended_tidily() as leaving:
        lab = Lab([f"n{i}" for i in range(1, hosts + 1)])
        try:
            yield lab
        finally:
            leaving()
            lab.remove()


@contextmanager
def two_switches(hosts, uplink, leaf=None):
    """Odd hosts on switch 0, even hosts on switch 1, one link of rate ``uplink`` between; ``leaf`` limits the hosts' own."""
    with _lab(hosts) as lab:
        for switch in ("s0", "s1"):
            lab.add(switch)
            lab.ip(switch, "link add bridge type bridge", "link set bridge up")
        lab.join("s0", "s1", ("uplink", "uplink"))
        for switch in ("s0", "s1"):
            lab.ip(switch, "link set dev uplink master bridge")
            lab.limit(switch, "uplink", uplink)
        for i, host in enumerate([*lab.hosts, "head"]):
            switch = f"s{i % 2 if host != 'head' else 0}"
            number = HEAD if host == "head" else i + 1
            lab.add(host)
            lab.join(host, switch, ("lan", host))
            lab.ip(switch, f"link set dev {host} master bridge")
            lab.ip(host, f"addr add {NET}.{number}/24 dev lan")
            if leaf and host != "head":
                lab.limit(host, "lan", leaf)
                lab.limit(switch, host, leaf)
            if host != "head":
                lab.environment(host, SLURM_TOPOLOGY_ADDR=f"spine.{switch}.{host}", SLURM_TOPOLOGY_ADDR_PATTERN="switch.switch.node")
        lab.know_names()
        yield lab


@contextmanager
def ring_of_hosts(order, rate, *, slow=None, late=None, burst="128k"):
    """Hosts ``n<i>`` for i of ``order`` in that physical ring, every direction of every link limited to ``rate`` (None: not).

    Link i is from the i-th host to the next: ``slow = (i, rate)`` gives one another rate, ``late = (i, milliseconds)`` a delay.
    """
    with _lab(len(order)) as lab:
        n = len(order)
        for host in [*lab.hosts, "head"]:
            lab.add(host)
            number = HEAD if host == "head" else int(host[1:])
            lab.ip(host, "link add lan type veth peer name inner", "link set dev lan up", "link set dev inner up",
                   f"addr add {NET}.{number}/32 dev lan")  # fmt: skip
            script = "echo 1 > /proc/sys/net/ipv4/ip_forward; for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done"
            subprocess.run(["ip", "netns", "exec", lab.name(host), "sh", "-c", script], check=True)
        for i in range(n):
            a, b = f"n{order[i]}", f"n{order[(i + 1) % n]}"
            if late and late[0] == i:
                lab.delay(a, b, late[1], ("right", "left"))
            else:
                lab.join(a, b, ("right", "left"))
            its = slow[1] if slow and slow[0] == i else rate
            for host, end in ((a, "right"), (b, "left")) if its else ():
                lab.limit(host, end, its, burst)
        lab.join(f"n{order[0]}", "head", ("door", "door"))
        for i in range(n):
            lab.ip(f"n{order[i]}", *_routes(order, i))
        lab.ip("head", *(f"route add {NET}.{k} dev door scope link src {NET}.{HEAD}" for k in order[:1]),
               *(f"route add {NET}.{k} via {NET}.{order[0]} dev door onlink src {NET}.{HEAD}" for k in order[1:]))  # fmt: skip
        lab.know_names()
        yield lab


def _routes(order, i):
    """The routes of the i-th host of a physical ring, the shorter way round; to the head by the first host."""
    n, src = len(order), f"src {NET}.{order[i]}"
    neighbours = {"right": order[(i + 1) % n], "left": order[i - 1]}
    for device, k in neighbours.items():
        yield f"route add {NET}.{k} dev {device} scope link {src}"
    for d in range(2, n - 1):
        device = "right" if 2 * d <= n else "left"
        yield f"route add {NET}.{order[(i + d) % n]} via {NET}.{neighbours[device]} dev {device} onlink {src}"
    if i == 0:
        yield f"route add {NET}.{HEAD} dev door scope link {src}"
    else:
        device = "left" if 2 * i <= n else "right"
        yield f"route add {NET}.{HEAD} via {NET}.{neighbours[device]} dev {device} onlink {src}"


@contextmanager
def pair(rate):
    """Two hosts, and one link of rate ``rate`` each way between them; the head beside the first."""
    with two_switches(2, rate) as lab:
        yield lab
