"""What a machine can do, as data: tiles, links, nodes. Measured on a job, or read off datasheets; each figure with its source."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "machines"


def _check(it: Any, least: dict[str, float]) -> None:
    """Raises ValueError for a field that is no number, or not above -1 (0 and more) or 0, as ``least`` has it."""
    for name, bound in least.items():
        value = getattr(it, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > bound or (bound < 0 and value < 0):
            raise ValueError(f"{name} is {value!r}; it must be a number {'>' if bound == 0 else '>='} 0")


@dataclass(frozen=True)
class Link:
    """A kind of link: ``latency`` seconds, ``bandwidth`` bytes a second each way.

    ``busy``: seconds that a byte, sent or received, takes from the tiles of a core (copies, packets, interrupts); 0 where others move it.

    A bandwidth of 0 is one that is not known.
    ``ports``: "one", what a rank sends to all its peers goes through one port (a switch); "each", a port for every peer (a wire).
    """

    latency: float
    bandwidth: float
    busy: float = 0.0
    ports: str = "one"
    source: str = ""

    def __post_init__(self) -> None:
        _check(self, {"latency": -1, "bandwidth": -1, "busy": -1})
        if self.ports not in ("one", "each"):
            raise ValueError(f"ports is {self.ports!r}; it must be 'one' or 'each'")

    def time(self, nbytes: float) -> float:
        """Seconds from posting to arrival of a message that meets no other."""
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0


@dataclass(frozen=True)
class Tile:
    """A tile in one dtype: useful FLOP a second forward and backward, and the seconds that a pair of runs takes besides.

    ``row``: the seconds that a row of one head takes once a lap, whatever the tiles: packing, delta, rounding.
    """

    forward: float
    backward: float
    overhead: float = 0.0
    overhead_backward: float = 0.0
    row: float = 0.0
    row_backward: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        _check(self, {"forward": 0, "backward": 0, **dict.fromkeys(("overhead", "overhead_backward", "row", "row_backward"), -1)})

    def of(self, backward: bool) -> tuple[float, float]:
        """FLOP a second and overhead of one direction."""
        return (self.backward, self.overhead_backward) if backward else (self.forward, self.overhead)

    def besides(self, backward: bool) -> float:
        """Seconds that a row of one head takes once a lap of one direction."""
        return self.row_backward if backward else self.row


@dataclass(frozen=True)
class Machine:
    """Nodes of ``ranks_per_node`` ranks, links ``inside`` and ``between`` them, and a tile for every dtype.

    ``node_bandwidth`` is what all ranks of a node together can send to other nodes, bytes a second; ``memory`` is a rank's, in bytes.
    """

    name: str
    ranks_per_node: int
    inside: Link
    between: Link
    node_bandwidth: float
    memory: float
    tiles: dict[str, Tile] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self, {"ranks_per_node": 0, "node_bandwidth": -1, "memory": -1})

    def connects(self, nodes: tuple[int, ...]) -> None:
        """Raises ValueError where it says nothing of the links that rings over so many ranks of nodes need."""
        needs = {"inside": max(nodes) > 1 and self.inside.bandwidth == 0,
                 "between": len(nodes) > 1 and 0 in (self.between.bandwidth, self.node_bandwidth)}  # fmt: skip
        for name, unknown in needs.items():
            if unknown:
                raise ValueError(f"the machine {self.name!r} says nothing of links {name} nodes: the job that was measured had none")

    def tile(self, dtype: str) -> Tile:
        """The tile of a dtype."""
        if dtype not in self.tiles:
            raise ValueError(f"the machine {self.name!r} says nothing of {dtype}; it knows {', '.join(self.tiles)}")
        return self.tiles[dtype]

    def whole_nodes(self, ranks: int) -> bool:
        """Whether so many ranks are several nodes, all of them full: what the double ring needs."""
        return ranks > self.ranks_per_node and ranks % self.ranks_per_node == 0

    def slowed(self, latency: float = 0.0, bandwidth: float = 1.0) -> Machine:
        """The same machine whose links take ``latency`` seconds more and have ``bandwidth`` times as much of it."""
        inside, between = (replace(link, latency=link.latency + latency, bandwidth=link.bandwidth * bandwidth)
                           for link in (self.inside, self.between))  # fmt: skip
        return replace(self, inside=inside, between=between, node_bandwidth=self.node_bandwidth * bandwidth)

    def save(self, path: str) -> None:
        """Writes it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")


def shipped() -> list[str]:
    """The names of the machines that come with the library.

    >>> "h100" in shipped()
    True
    """
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def machine(which: str | Machine) -> Machine:
    """A machine by the name of a shipped one or the path of a saved one, or the machine itself.

    >>> machine("h100").ranks_per_node
    8
    """
    if isinstance(which, Machine):
        return which
    path = Path(which) if which.endswith(".json") else SHIPPED / f"{which}.json"
    if not path.exists():
        raise ValueError(f"no machine {which!r}; shipped are {', '.join(shipped())}, others are paths of .json files")
    return _read(path, which)


def _read(path: Path, which: str) -> Machine:
    try:
        data = json.loads(path.read_text())
        parts: dict[str, Any] = {name: Link(**data.pop(name)) for name in ("inside", "between")}
        parts["tiles"] = {dtype: Tile(**tile) for dtype, tile in data.pop("tiles").items()}
        return Machine(**parts, **data)
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        raise ValueError(f"{which} is not a machine: {error}") from error
