"""Ring orders as integers: trees, tori, tours; what is wrong is refused; nothing is ever worse than natural order."""
from __future__ import annotations

import itertools
import json
import math
import random
import time

import numpy as np
import pytest

from ringmpi import Torus, topology
from ringmpi.topology import cycles, place, tour
from ringmpi.topology.place import Place


def on_nodes(nodes: list[int], **more) -> list[Place]:
    return [Place(nodes.index(node), f"host{node}", **more) for node in nodes]


def entries(order, groups) -> int:
    """How often a closed ring goes from one group to another."""
    return sum(groups[a] != groups[b] for a, b in zip(order, (*order[1:], order[0])))


# ------------------------------------------------------------------------------------------------------------- trees


@pytest.mark.parametrize("nodes", [[0, 1] * 3, [0, 1, 2, 3] * 2, [2, 0, 1, 1, 0, 2, 2], [0] * 5, [0, 1, 0]])
def test_every_node_is_entered_once(nodes):
    found = topology.route("auto", on_nodes(nodes))
    different = len(set(nodes))
    assert sorted(found.order) == list(range(len(nodes)))
    assert entries(found.order, nodes) == (different if different > 1 else 0)
    assert topology.links_between_nodes(found.order, on_nodes(nodes)) == entries(found.order, nodes)
    assert len(topology.node_sizes(found.order, on_nodes(nodes))) == different


def test_six_ranks_dealt_to_two_nodes():
    found = topology.route("auto", on_nodes([0, 1, 0, 1, 0, 1]))
    assert found.order == (0, 2, 4, 1, 3, 5)
    assert (found.worst_hop, found.natural_worst_hop) == (2, 2)
    assert found.mean_hop < found.natural_mean_hop == 2


def test_numa_domains_and_gpus_stand_together_within_a_node():
    places = [Place(0, numa=rank % 2, gpu=7 - rank) for rank in range(8)]
    assert topology.route("auto", places).order == (6, 4, 2, 0, 7, 5, 3, 1)


def test_switches_depth_first():
    """Racks of switches of nodes, ranks dealt badly: every switch at every level is entered once and left once."""
    chance = random.Random(0)
    leaves = [(f"rack{r}", f"leaf{r}{s}", f"n{r}{s}{n}") for r in range(2) for s in range(3) for n in range(2)]
    hosts = leaves * 2
    chance.shuffle(hosts)
    first = {host: hosts.index(host) for host in hosts}
    places = [Place(first[host], host[2], switches=host[:2]) for host in hosts]
    found = topology.route("auto", places)
    for level, number in ((1, 2), (2, 6), (3, 12)):
        assert entries(found.order, [host[:level] for host in hosts]) == number
    assert found.source.startswith("SLURM_TOPOLOGY_ADDR")
    assert found.mean_hop < found.natural_mean_hop


@pytest.mark.parametrize(("text", "pattern", "switches", "grid"), [
    ("spine.leaf0.n1", "switch.switch.node", ("spine", "leaf0"), ()),
    ("s[0-3].leaf0.n1.cluster.org", "switch.switch.node", ("s[0-3]", "leaf0"), ()),
    (".leaf0.n1", "switch.switch.node", ("", "leaf0"), ()),
    ("b3.n1", "block.node", ("b3",), ()),
    ("r8:2.tux1", "ring:position.node", ("r8",), (2,)),
    ("pod1:1:0:2.node07", "torus:x:y:z.node", ("pod1",), (1, 0, 2)),
    ("n1.cluster.org", "node", (), ()),
    ("n1", "switch.node", (), ()),
    ("r8.tux1", "ring:position.node", (), ()),
    ("r8:x.tux1", "ring:position.node", (), ()),
    ("", "", (), ()),
])  # fmt: skip
def test_slurm_addresses(text, pattern, switches, grid):
    assert place.address(text, pattern)[:2] == (switches, grid)
    found = place.here(3, {"SLURM_TOPOLOGY_ADDR": text, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern})
    assert (found.node, found.switches, found.grid) == (3, switches, grid)


def test_one_visible_gpu_is_known(tmp_path):
    assert place.here(0, {"CUDA_VISIBLE_DEVICES": "3"}).gpu == 3
    assert place.here(0, {"CUDA_VISIBLE_DEVICES": "0,1,2"}).gpu == place.UNKNOWN
    assert place.numa_domain(str(tmp_path)) == place.UNKNOWN


def test_numa_domain_is_the_one_that_holds_all_cores(tmp_path):
    for number, cpus in ((0, "5000"), (1, "0-4999")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus + "\n")
    assert place.numa_domain(str(tmp_path)) == 1


# -------------------------------------------------------------------------------------------------------------- tori


def boxes():
    for dimensions, most in ((1, 6), (2, 6), (3, 4), (4, 3)):
        for dims in itertools.product(range(1, most + 1), repeat=dimensions):
            for wrap in itertools.product((False, True), repeat=dimensions):
                yield dims, wrap


def single_links_are_possible(dims, wrap) -> bool:
    long = [(dim, closes) for dim, closes in zip(dims, wrap) if dim > 1]
    if len(long) == 1:
        return long[0][0] == 2 or long[0][1]
    return math.prod(dims) % 2 == 0 or not long or any(closes for _, closes in long)


def test_single_links_wherever_they_exist_else_the_least_bottleneck():
    for dims, wrap in boxes():
        cycle = cycles.box_cycle(dims, wrap)
        hops = [cycles.links(a, b, dims, wrap) for a, b in zip(cycle, cycle[1:] + cycle[:1])]
        assert sorted(cycle) == sorted(itertools.product(*map(range, dims))), (dims, wrap)
        assert max(hops) <= (1 if single_links_are_possible(dims, wrap) else 2), (dims, wrap)


def test_no_cycle_of_single_links_where_none_was_claimed():
    for dims, wrap in ((d, w) for d, w in boxes() if 1 < math.prod(d) <= 9 and not single_links_are_possible(d, w)):
        points = list(itertools.product(*map(range, dims)))
        cost = np.array([[cycles.links(a, b, dims, wrap) for b in points] for a in points], float)
        assert tour.score(tour.solve(cost), cost)[0] == 2, (dims, wrap)


def test_torus_cycles_use_every_directed_link_once():
    """Every size to 12 x 13 and some large ones of all parities, either way round."""
    sizes = [*itertools.product(range(3, 13), range(3, 14)), (30, 40), (31, 41), (30, 41), (41, 30), (3, 200), (200, 3), (64, 64)]
    for dims in sizes:
        found = cycles.torus_cycles(*dims)
        used = [(a, b) for cycle in found for a, b in zip(cycle, cycle[1:] + cycle[:1])]
        assert [len(set(cycle)) for cycle in found] == [math.prod(dims)] * 4, dims
        assert all(cycles.links(a, b, dims, (True, True)) == 1 for a, b in used), dims
        assert len(set(used)) == len(used) == 4 * math.prod(dims), dims


def test_torus_cycles_of_thousands_of_nodes_take_no_time():
    began = time.perf_counter()
    cycles.torus_cycles(64, 65)
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize("dims", [(12, 13), (16, 16), (13, 1, 9)])
def test_large_tori_have_four_link_cycles(dims):
    points = list(itertools.product(*map(range, dims)))
    found = topology.route(Torus(dims), on_nodes(list(range(len(points)))))
    ways = found.link_cycles()
    used = [(points[found.order[a]], points[found.order[b]]) for way in ways for a, b in zip(way, way[1:] + way[:1])]
    assert all(sorted(way) == list(range(len(points))) for way in ways)
    assert len(set(used)) == len(used) == 4 * len(points)
    assert all(cycles.links(a, b, dims, [True] * len(dims)) == 1 for a, b in used)


@pytest.mark.parametrize("per_node", [1, 3])
def test_torus_with_several_ranks_a_node_numbered_badly(per_node):
    points = list(itertools.product(range(4), range(3))) * per_node
    random.Random(per_node).shuffle(points)
    places = [Place(points.index(point)) for point in points]
    found = topology.route(Torus((4, 3), coords=points), places)
    assert (found.worst_hop, found.unit, found.source) == (1, "links", "torus 4x3")
    assert found.mean_hop == 1 / per_node
    assert entries(found.order, points) == 12
    ways = found.link_cycles()
    assert len(ways) == 4
    on_links = [(points[found.order[a]], points[found.order[b]]) for way in ways for a, b in zip(way, way[1:] + way[:1])]
    between = [link for link in on_links if link[0] != link[1]]
    assert len(set(between)) == len(between) == 4 * 12


def test_torus_without_coordinates_is_filled_by_nodes_or_by_ranks():
    assert topology.route(Torus((2, 3)), on_nodes([0, 1, 2, 3, 4, 5])).worst_hop == 1
    dealt = topology.route(Torus((2, 3)), on_nodes([0, 1, 2, 3, 4, 5] * 2))
    assert dealt.worst_hop == 1 and dealt.mean_hop == 0.5
    assert topology.route(Torus((2, 3)), on_nodes([0] * 6)).worst_hop == 1


def test_part_of_a_torus():
    """Five nodes in the corner of a mesh: the best tour of an odd number of points has one hop of two links."""
    points = [(0, 0), (1, 1), (0, 1), (1, 0), (2, 0)]
    found = topology.route(Torus((4, 4), False, points), on_nodes([0, 1, 2, 3, 4]))
    assert (found.worst_hop, found.mean_hop) == (2, 6 / 5)


def in_torus(coords, size="", names=("pod1",)) -> list[Place]:
    """Ranks on nodes of their own at coordinates that Slurm tells, in networks of these names in turn."""
    return [Place(rank, switches=(names[rank % len(names)],), grid=grid, torus=size) for rank, grid in enumerate(coords)]


def hops(found, coords):
    at = [coords[rank] for rank in found.order]
    return zip(at, at[1:] + at[:1])


def test_slurm_coordinates_are_a_mesh_while_nobody_says_their_size():
    coords = [(2 * rank % 7,) for rank in range(7)]
    found = topology.route("auto", in_torus(coords))
    assert found.worst_hop == 2 and found.source.endswith("whose size RINGMPI_TORUS does not say: taken as mesh 7")
    shifted = topology.route("auto", in_torus([(x + 3, 5) for x, in coords]))
    assert shifted.torus.dims == (7, 1)


@pytest.mark.parametrize("size", ["7", "8"])
def test_slurm_coordinates_close_only_where_the_size_says_so(size):
    coords = [(2 * rank % 7,) for rank in range(7)]
    found = topology.route("auto", in_torus(coords, size))
    assert found.source == f"SLURM_TOPOLOGY_ADDR: torus {size}, by RINGMPI_TORUS"
    assert found.worst_hop == (1 if size == "7" else 2)
    assert topology.route("natural", in_torus(coords, size)).unit == "links"
    assert topology.route(Torus((7,)), in_torus(coords)).source == "torus 7 at the coordinates of SLURM_TOPOLOGY_ADDR"
    assert [coords[rank] for rank in topology.route(Torus((7,)), in_torus(coords)).order] == [(x,) for x in range(7)]


def test_no_hop_is_said_to_be_of_fewer_links_than_it_may_take():
    """Parts of tori of all sizes, as a job sees them without being told the size: what is claimed holds in every one of them."""
    chance = random.Random(2)
    for _ in range(100):
        dims = [chance.randint(1, 5) for _ in range(3)]
        coords = list(itertools.product(*(chance.sample(range(dim), chance.randint(1, dim)) for dim in dims)))[:20]
        chance.shuffle(coords)
        found = topology.route("auto", in_torus(coords))
        true = [cycles.links(a, b, dims, (True,) * 3) for a, b in hops(found, coords)]
        assert len(coords) == 1 or max(true) <= found.worst_hop
        told = topology.route("auto", in_torus(coords, "x".join(map(str, dims))))
        assert len(coords) == 1 or max(cycles.links(a, b, dims, (True,) * 3) for a, b in hops(told, coords)) == told.worst_hop
        assert told.worst_hop <= found.worst_hop


@pytest.mark.parametrize(("box", "worst"), [((2, 3, 1), 1), ((4, 4, 2), 1), ((8, 3, 1), 1), ((8, 1, 1), 1), ((2, 2, 3), 1),
                                             ((5, 1, 1), 2), ((3, 5, 1), 2), ((5, 5, 3), 2)])  # fmt: skip
def test_a_box_of_a_torus_anywhere_over_its_edges_has_single_links_where_they_exist(box, worst):
    for low in ((0, 0, 0), (7, 6, 7), (3, 7, 5)):
        coords = [tuple((x + at) % 8 for x, at in zip(point, low)) for point in itertools.product(*map(range, box))]
        random.Random(sum(low)).shuffle(coords)
        found = topology.route("auto", in_torus(coords, "8x8x8"))
        assert sorted(found.order) == list(range(len(coords))) and found.worst_hop == worst, (box, low)


def test_one_rank_is_enough_to_say_the_size():
    places = [at._replace(torus="7" * (at.node == 3)) for at in in_torus([(x,) for x in range(7)])]
    assert topology.route("auto", places).worst_hop == 1


@pytest.mark.parametrize(("sizes", "words"), [
    (["8x8"], "such as 8x8x8: rank 0 is at"),
    (["8x"], "invalid literal"), (["-8"], "1 or more"), (["0"], "1 or more"), (["5"], "rank 5 is at"),
    (["8", "9"], "RINGMPI_TORUS differs: '8' on rank 4, '9' on rank 5"),
])  # fmt: skip
def test_a_size_that_is_wrong_is_refused(sizes, words):
    places = [at._replace(torus=sizes[at.node % len(sizes)]) for at in in_torus([(x,) for x in range(6)])]
    for order in ("auto", "natural", [5, 4, 3, 2, 1, 0]):
        with pytest.raises(ValueError, match=words):
            topology.route(order, places)


def test_the_size_is_read_from_the_environment():
    assert place.here(0, {"RINGMPI_TORUS": "8x8x8"}).torus == "8x8x8"
    assert topology.route("auto", [Place(0, torus="8x8x8"), Place(1, torus="?")]).torus is None, "there are no coordinates that it is of"


def test_coordinates_of_two_networks_are_no_places_in_one():
    coords = [(0,), (0,), (1,), (1,)]
    places = in_torus(coords, names=("pod1", "pod2"))
    found = topology.route(Torus((4,)), places)
    assert found.source == "torus 4 filled by ranks in order" and found.torus.coords == ((0,), (1,), (2,), (3,))
    with pytest.raises(ValueError, match="multiply to 5; there are 4"):
        topology.route(Torus((5,)), places)


def test_a_torus_with_many_holes_is_walked_in_seconds():
    chance = random.Random(3)
    for nodes in (60, 600, 4000):
        coords = chance.sample(list(itertools.product(range(16), repeat=3)), nodes)
        began = time.perf_counter()
        found = topology.route("auto", in_torus(coords, "16x16x16"))
        assert sorted(found.order) == list(range(nodes)) and found.mean_hop < found.natural_mean_hop / 2
        assert time.perf_counter() - began < 5


def test_two_networks_are_a_tree_not_a_torus():
    places = [Place(rank, switches=(f"pod{rank % 2}",), grid=(rank,)) for rank in range(4)]
    found = topology.route("auto", places)
    assert found.torus is None and found.order == (0, 2, 1, 3)


@pytest.mark.parametrize(("torus", "words"), [
    (lambda: Torus((2, 2)), "multiply to 4; there are 6 ranks on 3 nodes"),
    (lambda: Torus((6,), coords=[(0,)] * 5), "coordinates of 5 ranks; the ring has 6"),
    (lambda: Torus((3,), coords=[(i,) for i in range(6)]), r"rank 3 is at \(3,\), which is not in a torus of \(3,\)"),
    (lambda: Torus((3, 2), wrap=(True,)), "2 dimensions; wrap says something of 1"),
    (lambda: Torus((0, 2)), r"1 or more; these are \(0, 2\)"),
    (lambda: Torus((2, 2.5)), "dims of a torus are integers"), (lambda: Torus("23"), "dims of a torus are integers"),
    (lambda: Torus((2, 3), "no"), "True or False"), (lambda: Torus((2, 3), None), "True or False"),
    (lambda: Torus((6,), coords=[0] * 6), "coordinates of a torus are integers"),
])  # fmt: skip
def test_a_torus_that_does_not_fit_is_refused(torus, words):
    with pytest.raises((ValueError, TypeError), match=words):
        topology.route(torus(), on_nodes([0, 1, 2] * 2))


# -------------------------------------------------------------------------------------------------- never worse, and refused


def test_automatic_orders_are_never_worse_than_natural():
    chance = random.Random(1)
    for _ in range(300):
        size = chance.randint(1, 12)
        kind = chance.randrange(3)
        grid = [tuple(chance.randrange(3) for _ in range(kind)) for _ in range(size)]
        hosts = [(grid[rank], chance.randrange(4) if not kind else 0) for rank in range(size)]
        switches = [(f"s{host[1] % 2}",) for host in hosts]
        numa = [chance.randrange(2) for _ in range(size)]
        places = [Place(hosts.index(hosts[r]), numa=numa[r], switches=switches[r], grid=grid[r]) for r in range(size)]
        found = topology.route("auto", places)
        assert (found.worst_hop, found.mean_hop) <= (found.natural_worst_hop, found.natural_mean_hop)


@pytest.mark.parametrize(("order", "words"), [
    ([0, 1, 1], r"holds each once; this one holds 3, of which missing \[2\], twice \[1\]"),
    ([0, 1], r"an order of 3 ranks .* holds 2, of which missing \[2\]"),
    ([0, 1, 2, 3], "an order of 3 ranks .* holds 4"),
    ("fastest", "no order is called 'fastest'"),
    ("torus:2y3", "the order 'torus:2y3' cannot be read"),
    ("measured:0", "nbytes, seconds and repeats above 0"),
])  # fmt: skip
def test_wrong_orders_are_refused(order, words):
    with pytest.raises(ValueError, match=words):
        topology.route(order, on_nodes([0, 1, 2]))


@pytest.mark.parametrize("order", [None, 3, [0.5, 1, 2], ["0", "1", "2"], np.zeros((3, 3), int)])
def test_what_is_no_order_is_refused_by_its_name(order):
    with pytest.raises(TypeError, match="it must be a name, a Torus, a Measured or a list of ranks"):
        topology.route(order, on_nodes([0, 1, 2]))


def test_an_order_may_be_an_array_and_a_long_wrong_one_is_shown_in_part():
    assert topology.route(np.array([0, 2, 1]), on_nodes([0, 1, 2])).order == (0, 2, 1)
    with pytest.raises(ValueError, match=r"missing \[1, 2, .*, and 9989 more\], twice \[0\]") as refused:
        topology.route([0] * 10000, on_nodes([0]) * 10000)
    assert len(str(refused.value)) < 300


def test_an_address_that_was_handed_on_from_one_node_is_not_believed(caplog):
    """As mpiexec does that passes its own environment to all ranks."""
    for environ in ({"SLURM_TOPOLOGY_ADDR": "spine.leaf0.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"},
                    {"SLURM_TOPOLOGY_ADDR": "pod1:1:0:2.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "torus:x:y:z.node", "RINGMPI_TORUS": "4x4x4"}):
        places = place.believed([place.here(node, environ) for node in (0, 1, 0, 1)])
        found = topology.route("auto", places)
        assert (found.order, found.torus, found.source) == ((0, 2, 1, 3), None, "which ranks share memory")
        assert "says n1 on 2 nodes" in caplog.text
        one = [place.here(0, environ)] * 2
        assert place.believed(one) == one, "two ranks of a node"


def test_bounds_and_tours_of_thousands_of_nodes_take_seconds():
    cost = random_costs(1200, 1, 1000)
    began = time.perf_counter()
    assert tour.lower_bound(cost) <= tour.score(tour.solve(cost), cost)[0]
    assert time.perf_counter() - began < 30


def test_orders_in_words():
    assert topology.route("torus:2x3", on_nodes([0, 1, 2, 3, 4, 5])).worst_hop == 1
    assert topology.route("mesh:5", on_nodes([0, 1, 2, 3, 4])).worst_hop == 2
    assert topology.spelled("measured:65536:2.5") == topology.Measured(65536, 2.5)
    assert topology.spelled("measured") == topology.Measured()


def test_saved_and_loaded(tmp_path):
    places, path = on_nodes([0, 1, 0, 1]), tmp_path / "order.json"
    topology.save(path, topology.route([0, 2, 3, 1], places), places)
    assert topology.route(str(path), places).order == topology.route(path, places).order == (0, 2, 3, 1)
    saved = json.loads(path.read_text())
    assert {"order", "nodes", "links_between_nodes", "worst_hop", "natural_worst_hop", "source"} <= set(saved)
    assert saved["nodes"] == [[0, 2], [3, 1]] and saved["links_between_nodes"] == 2
    with pytest.raises(ValueError, match="rank 1 on host1; it is on host0"):
        topology.route(path, on_nodes([0, 0, 1, 1]))
    with pytest.raises(ValueError, match="an order of 3 ranks"):
        topology.route(path, on_nodes([0, 1, 0]))


@pytest.mark.parametrize(("saved", "words"), [
    ({}, "no order can be read"), ([], "no order can be read"),
    ({"order": [0, 1], "hosts": ["host0", "host1"]}, "another job.*2, of which missing"),
    ({"order": [0, 1, 2], "hosts": ["host0"]}, "on 1 hosts; there are 3 ranks"),
    ({"order": [0, 1, 2], "hosts": None}, "no order can be read"),
    ({"order": [0, 1.0, 2], "hosts": ["host0"] * 3}, "no order can be read"), ({"order": "abc", "hosts": []}, "no order can be read"),
])  # fmt: skip
def test_a_saved_order_of_another_job_is_refused(tmp_path, saved, words):
    path = tmp_path / "order.json"
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=words):
        topology.route(path, on_nodes([0, 1, 2]))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="no order can be read"):
        topology.route(path, on_nodes([0, 1, 2]))


# -------------------------------------------------------------------------------------------------------------- tours


def random_costs(n: int, seed: int, values: int = 5) -> np.ndarray:
    cost = np.random.default_rng(seed).integers(1, values + 1, (n, n)).astype(float)
    cost = np.maximum(cost, cost.T)
    np.fill_diagonal(cost, 0)
    return cost


@pytest.mark.parametrize("n", range(1, 8))
def test_small_tours_are_exact(n):
    for seed in range(10):
        cost = random_costs(n, seed)
        best = min(tour.score((0, *rest), cost) for rest in itertools.permutations(range(1, n)))
        assert tour.score(tour.solve(cost), cost) == best
        assert tour.lower_bound(cost) <= best[0]


def test_larger_tours_reach_the_bound_on_shuffled_rings_and_racks():
    chance = np.random.default_rng(0)
    at, rack = chance.permutation(40), chance.integers(0, 4, 40)
    apart = np.abs(at[:, None] - at)
    ring, racks = np.minimum(apart, 40 - apart).astype(float), np.where(rack[:, None] == rack, 1.0, 5.0)
    for cost, best in ((ring, (1, 40)), (racks, (5, 36 + 4 * 5))):
        assert tour.score(tour.solve(cost), cost) == best
        assert tour.lower_bound(cost) == best[0]


def test_changes_of_a_tour_gain_what_they_say():
    cost = random_costs(9, 3)
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(9).tolist()
        changes = [tour._best_exchange(order, cost), *(tour._best_move(order, cost, n) for n in (1, 2, 3))]
        for gain, change in changes:
            assert sorted(change()) == list(range(9))
            assert tour.score(change(), cost)[1] - tour.score(order, cost)[1] == pytest.approx(gain)


def test_a_single_way_between_two_halves_bounds_the_tour():
    cost = np.full((6, 6), 9.0)
    cost[:3, :3] = cost[3:, 3:] = cost[2, 3] = cost[3, 2] = 1
    assert tour.lower_bound(cost) == 9
