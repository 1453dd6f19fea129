"""Whom a profile blames: by numbers made up here, and in rings of network namespaces where something is really slow."""
import numpy as np
import pytest
from network.lab import why_not
from network.trials import HOSTS, KINDS, trial

from ringmpi.profile.links import colours
from ringmpi.survey.verdict import FLOOR, LinkTest, Pace, outliers, slow_links, slow_ranks, suspects


def paces(slow=None, by=1.0, waits=0.060):
    """Four ranks of 20 ms a lap; one ``by`` times slower, for which the others wait."""
    return [Pace(rank, *(0.020 * (by if rank == slow else 1),) * 4, 0.0002 if rank == slow else waits) for rank in range(4)]


def links_like(slow=(), by=1.0, noise=0.0, seed=0, count=4, between=True):
    draw = np.random.default_rng(seed)
    found = []
    for src in range(count):
        for nbytes, base in ((8, 3e-4), (1 << 20, 25e-3)):
            low = base * (by if src in slow else 1) * (1 + noise * draw.random())
            found.append(LinkTest(src, (src + 1) % count, between, nbytes, low, low * (1 + noise)))
    return found


def test_a_slow_rank_is_named_and_its_victims_are_not():
    (verdict,) = slow_ranks(paces(slow=2, by=3.0))
    assert verdict.ranks == (2,) and verdict.what == "rank"
    assert verdict.sentence == ("rank 2 is slow: its tiles take 60.0 ms a lap, those of the others 20.0 ms; alone 60.0 ms. "
                                "It waited 0.2 ms a lap, the others 60.0 ms, for it.")  # fmt: skip


def test_a_rank_that_waits_most_is_not_the_culprit():
    victims = [pace._replace(waited=0.2) if pace.rank == 1 else pace for pace in paces()]
    assert slow_ranks(victims) == []
    contradiction = [pace._replace(waited=0.2) if pace.rank == 2 else pace for pace in paces(slow=2, by=3.0)]
    assert slow_ranks(contradiction) == []


def test_a_rank_slow_in_one_kind_of_lap_only_is_not_named():
    once = [pace._replace(alone_best=0.020, alone_typical=0.021) for pace in paces(slow=2, by=3.0)]
    assert slow_ranks(once) == []


def test_a_slow_link_is_named_when_it_is_slow_twice():
    tests = links_like(slow=[1], by=4.0)
    assert suspects(tests) == [(1, 2)]
    again = [test for test in tests if test.src == 1]
    (verdict,) = slow_links(tests, again)
    assert verdict.ranks == (1, 2) and "from rank 1 to rank 2, between nodes" in verdict.sentence
    assert "100.000 ms for 1,048,576 bytes, its like 25.000 ms" in verdict.sentence
    assert slow_links(tests, [test for test in links_like() if test.src == 1]) == []


def test_links_are_compared_with_their_like():
    mixed = links_like() + [test._replace(src=test.src + 4, dst=test.dst + 4, between=False, low=test.low / 50, p50=test.p50 / 50)
                          for test in links_like()]  # fmt: skip
    assert suspects(mixed) == []


@pytest.mark.parametrize("noise", [0.0, 0.3, 2.0])
def test_noise_makes_the_judge_careful(noise):
    named = [suspects(links_like(noise=noise, seed=seed)) for seed in range(200)]
    assert sum(map(bool, named)) <= 1
    assert sum(suspects(links_like(slow=[2], by=4.0, noise=min(noise, 0.5), seed=seed)) == [(2, 3)] for seed in range(200)) >= 199


def test_a_few_microseconds_are_not_a_fault():
    tests = [test._replace(low=1e-6 * (3 if test.src == 0 else 1), p50=1e-6 * (3 if test.src == 0 else 1)) for test in links_like()]
    assert FLOOR > 3e-6 and suspects(tests) == []


def test_outliers_are_at_most_so_many():
    assert outliers([9, 9, 1, 1], [9, 9, 1, 1], 1.5, most=2) == [0, 1]
    assert outliers([9, 9, 1, 1], [9, 9, 1, 1], 1.5, most=1) == []


@pytest.mark.parametrize("nodes", [(1,) * 7, (4,) * 6, (2, 3, 1), (8,), (1, 1)])
def test_no_node_is_in_two_tests_at_once(nodes):
    node = np.repeat(np.arange(len(nodes)), nodes).tolist()
    ring = [(node[seat], node[(seat + 1) % len(node)]) for seat in range(len(node))]
    colour = colours(ring)
    for turn in set(colour):
        busy = [n for ends, its in zip(ring, colour) if its == turn for n in {*ends}]
        assert len(busy) == len(set(busy))
    assert max(colour) < max(nodes) + 3


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("kind", KINDS)
def test_the_culprit_is_named(kind, number):
    right, said = trial(kind, (number + 1) % HOSTS)
    assert right, said
