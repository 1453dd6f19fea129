"""ringmpi order, on ranks that think they are on two nodes or hang on switches that a scheduler tells of."""
import json

import numpy as np
import pytest
from fakes import ring_of_threads
from launch import launchers

from ringmpi import topology
from ringmpi.cli import main
from ringmpi.topology import measure

MPICH = [mpi for mpi in launchers() if mpi.name == "mpich"]
KEYS = {"order", "nodes", "links_between_nodes", "worst_hop", "natural_worst_hop", "source"}
needs_mpich = pytest.mark.skipif(not MPICH, reason="only MPICH can be told that its ranks are on several nodes")
ON_SWITCHES = """
import os, sys
rank = int(os.environ["PMI_RANK"])
os.environ["SLURM_TOPOLOGY_ADDR"] = f"spine.leaf{rank % 2}.n{rank}"
os.environ["SLURM_TOPOLOGY_ADDR_PATTERN"] = "switch.switch.node"
from ringmpi.cli import main
sys.exit(main(["order", "--json"]))
"""


IN_A_TORUS = """
import os, sys
rank = int(os.environ["PMI_RANK"])
os.environ["SLURM_TOPOLOGY_ADDR"] = f"r8:{2 * rank % 5}.n{rank}"
os.environ["SLURM_TOPOLOGY_ADDR_PATTERN"] = "ring:position.node"
if rank == 0:
    os.environ["RINGMPI_TORUS"] = sys.argv[1]
from ringmpi.cli import main
sys.exit(main(["order", "--json"]))
"""


def ordered(n, *words, env=None, code=0):
    done = MPICH[0].run(n, *words, env=env)
    assert done.returncode == code, done.stdout
    return done.stdout


@needs_mpich
@pytest.mark.parametrize("cliques", ["MPIR_CVAR_ODD_EVEN_CLIQUES", "MPIR_CVAR_NUM_CLIQUES"])
def test_two_nodes_of_three_ranks_have_two_links(cliques):
    env = {cliques: "1" if "ODD" in cliques else "2"}
    found = json.loads(ordered(6, "-m", "ringmpi", "order", "--json", env=env))
    assert set(found) >= KEYS and found["links_between_nodes"] == 2 and len(found["nodes"]) == 2
    assert sorted(map(len, found["nodes"])) == [3, 3] and [rank for node in found["nodes"] for rank in node] == found["order"]
    said = ordered(6, "-m", "ringmpi", "order", env=env)
    assert "2 between nodes" in said and "which ranks share memory" in said


@needs_mpich
def test_addresses_of_every_rank_make_the_order_depth_first():
    found = json.loads(ordered(6, "-c", ON_SWITCHES, env={"MPIR_CVAR_NOLOCAL": "1"}))
    assert found["order"] == [0, 2, 4, 1, 3, 5] and found["source"].startswith("SLURM_TOPOLOGY_ADDR")
    assert found["mean_hop"] < found["natural_mean_hop"] and (found["worst_hop"], found["natural_worst_hop"]) == (3, 3)


@needs_mpich
def test_what_rank_0_alone_says_of_the_torus_counts_for_all():
    env = {"MPIR_CVAR_NOLOCAL": "1"}
    assert json.loads(ordered(5, "-c", IN_A_TORUS, "", env=env))["worst_hop"] == 2
    found = json.loads(ordered(5, "-c", IN_A_TORUS, "5", env=env))
    assert (found["worst_hop"], found["source"]) == (1, "SLURM_TOPOLOGY_ADDR: torus 5, by RINGMPI_TORUS")
    said = ordered(5, "-c", IN_A_TORUS, "3x", env=env, code=2)
    assert said.count("RINGMPI_TORUS=3x is not the size") == 1 and "Traceback" not in said


@needs_mpich
def test_an_address_that_the_launcher_hands_on_is_not_believed():
    env = {"SLURM_TOPOLOGY_ADDR": "spine.leaf0.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    said = ordered(4, "-m", "ringmpi", "order", env={**env, "MPIR_CVAR_NUM_CLIQUES": "2"})
    assert said.count("not believed: it says n1 on 2 nodes") == 1 and "which ranks share memory" in said


@needs_mpich
def test_saved_then_loaded_and_wrong_ones_refused(tmp_path):
    path = str(tmp_path / "order.json")
    ordered(3, "-m", "ringmpi", "order", "--order", "0,2,1", "--save", path)
    assert json.loads(ordered(3, "-m", "ringmpi", "order", "--order", path, "--json"))["order"] == [0, 2, 1]
    said = ordered(3, "-m", "ringmpi", "order", "--order", "torus:2x2", code=2)
    assert said.count("multiply to 4; there are 3 ranks") == 1 and "Traceback" not in said


@pytest.mark.parametrize("words", [["--bytes", "64"], ["--seconds", "1", "--order", "0"], ["--bytes", "64", "--order", "measured:64:1"]])
def test_how_to_measure_is_said_only_where_it_is_measured(words, capsys):
    assert main(["order", *words]) == 2
    assert "--bytes and --seconds are for --order measured" in capsys.readouterr().err


@needs_mpich
def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    for name, order in (("ring.svg", "auto"), ("torus.png", "torus:2x3")):
        ordered(6, "-m", "ringmpi", "order", "--order", order, "--plot", str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 2000


# ---------------------------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize("players", range(1, 12))
def test_a_tournament_pairs_all_with_all_and_nobody_twice_at_once(players):
    met = set()
    for turn in range(measure.turns(players)):
        pairs = [(player, measure.partner(player, turn, players)) for player in range(players)]
        assert all(other is None or (other, player) in pairs for player, other in pairs)
        met |= {frozenset(pair) for pair in pairs if None not in pair}
    assert len(met) == players * (players - 1) // 2 and all(len(pair) == 2 for pair in met)


def timings(pairs, rings):
    """Replaces every timing by a table: of pairs by hosts, of rings by order."""

    def pair(seats, other, buffers, late, repeats):
        cost = pairs[seats.rank, other]
        return cost / 10, np.nan if late else cost

    def ring(seats, order, buffers):
        return rings(order)

    return pair, ring


@pytest.mark.parametrize("shared", [False, True])
def test_the_order_follows_what_was_measured(monkeypatch, shared):
    """Six hosts whose cheap hops are a ring in a bad order; where whole rings hardly differ, natural order stays."""
    at = [0, 3, 1, 4, 2, 5]
    apart = np.array([[min((a - b) % 6, (b - a) % 6) for b in at] for a in at], float)

    def whole(order):
        worst = max(apart[a, b] for a, b in zip(order, (*order[1:], order[0])))
        return 1 + worst / 100 if shared else worst

    pair, ring = timings(apart, whole)
    monkeypatch.setattr(measure, "_pair", pair)
    monkeypatch.setattr(measure, "_ring", ring)
    how = topology.Measured(nbytes=64, repeats=2)

    def body(made):
        return measure.measured(made._seats, topology.Route(tuple(range(6))), how)

    found = ring_of_threads(6, body)
    assert len(set(map(repr, found))) == 1
    assert (found[0].worst_hop, found[0].natural_worst_hop) == ((3, 3) if shared else (1, 3))
    assert dict(found[0].notes)["lower_bound"] == 1 and dict(found[0].notes)["pairs_measured"] == 1


def test_time_bounds_the_tournament(monkeypatch):
    pair, ring = timings(np.ones((5, 5)), lambda order: 1.0)
    monkeypatch.setattr(measure, "_pair", pair)
    monkeypatch.setattr(measure, "_ring", ring)
    how = topology.Measured(nbytes=64, seconds=1e-9)
    found = ring_of_threads(5, lambda made: measure.measured(made._seats, topology.Route(tuple(range(5))), how))
    assert dict(found[0].notes)["pairs_measured"] == 0 and found[0].order == tuple(range(5))
