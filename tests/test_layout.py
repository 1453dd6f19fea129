"""Layouts: every position is held exactly once, and a layout is one small class."""
import inspect
from dataclasses import dataclass

import numpy as np
import pytest

from ringmpi import Contiguous, Custom, Layout, Run, Striped, Zigzag
from ringmpi import layout as layouts
from ringmpi.layout import count, positions, slices

LAYOUTS = [Contiguous(), Zigzag(), Striped()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 64])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 101, 698, 2999])
def test_every_position_is_held_once(layout, size, length):
    held = np.concatenate([positions(runs) for runs in layout.partition(length, size)])
    assert sorted(held) == list(range(length))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("length", "size"), [(2999, 4), (7, 2), (698, 4), (3, 8)])
def test_no_rank_holds_more_than_a_row_or_two_beyond_another(layout, length, size):
    counts = [count(runs) for runs in layout.partition(length, size)]
    assert max(counts) - min(counts) <= (2 if isinstance(layout, Zigzag) else 1)


def test_lengths_that_do_not_divide():
    assert [count(runs) for runs in Contiguous().partition(2999, 4)] == [750, 750, 750, 749]
    assert [count(runs) for runs in Contiguous().partition(3, 8)] == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 16, 33, 64])
@pytest.mark.parametrize("per_rank", [64, 65, 95, 100])
@pytest.mark.parametrize("odd", [0, 1, 0.5, 1.5])
def test_zigzag_gives_every_rank_as_much_causal_work(size, per_rank, odd):
    length = per_rank * size + int(odd * size)
    work = [sum(int((run.positions() + 1).sum()) for run in runs) for runs in Zigzag().partition(length, size)]
    assert max(work) <= 1.05 * sum(work) / size


@pytest.mark.parametrize("run", [Run(0, 5), Run(3, 4, 2), Run(7, 1, 9), Run(2, 0, 3)], ids=str)
def test_before_counts_positions(run):
    for bound in range(-2, 25):
        want = int((run.positions() < bound).sum())
        assert run.before(bound) == want
        assert run.before(np.array([bound]))[0] == want


@pytest.mark.parametrize("run", [Run(0, 5), Run(3, 4, 2), Run(1, 17, 5)], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_are_the_run(run, parts):
    cut = np.concatenate([run.part(part, parts).positions() for part in range(parts)])
    assert (cut == run.positions()).all()


def test_custom_by_counts_and_by_runs():
    assert [positions(r).tolist() for r in Custom([2, 0, 3]).partition(5, 3)] == [[0, 1], [], [2, 3, 4]]
    mixed = Custom([[Run(4, 1), (0, 2, 2)], [], [(1, 2, 2)]])
    assert [positions(r).tolist() for r in mixed.partition(5, 3)] == [[4, 0, 2], [], [1, 3]]
    assert mixed == eval(repr(mixed)) and hash(mixed) == hash(eval(repr(mixed)))


@pytest.mark.parametrize(
    ("parts", "length", "size", "words"),
    [
        ([3, 2], 6, 2, "holds 5 positions; the sequence has 6"),
        ([3, 2], 5, 3, "for 2 ranks; the ring has 3"),
        ([[(0, 3)], [(2, 2)]], 5, 2, "rank 1 .* position 2 .* more than once"),
        ([[(0, 3)], [(4, 2)]], 5, 2, "rank 1 .* position 5"),
        ([[(0, 2, 3)], [(1, 2, 2)]], 4, 2, "rank 1 .* position 3 .* more than once"),
    ],
)
def test_custom_that_is_no_partition(parts, length, size, words):
    with pytest.raises(ValueError, match=words):
        Custom(parts).partition(length, size)


def test_a_position_held_257_times_is_not_taken_for_one():
    with pytest.raises(ValueError, match="position 0 that is held more than once"):
        Custom([[(0, 1)] * 257, [(257, 3)]]).partition(260, 2)


def test_a_layout_that_is_no_partition():
    class Half(Layout):
        def runs(self, length, size, rank):
            return (Run(rank, 1),)

        def __repr__(self):
            return "Half()"

    with pytest.raises(ValueError, match=r"Half\(\) holds 2 positions on 2 ranks; the sequence has 5"):
        Half().partition(5, 2)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([1.5, 2], "rank 0 of the custom layout holds 1.5; it must be a number of tokens, or a list of runs"),
        ([[(0, 2)], [(2, 1.7)]], "count of a run of rank 1 is 1.7; it must be an integer"),
        ([[(0, 2)], [(2, 1, 1, 1)]], r"rank 1 of the custom layout holds \(2, 1, 1, 1\); a run is"),
        ([(0, 4), (4, 4)], r"rank 0 of the custom layout holds \(0, 4\)"),
        ([[(0, 2)], None], "rank 1 of the custom layout holds None"),
    ],
    ids=str,
)
def test_custom_of_what_is_no_run(parts, words):
    """A fraction of a token is not rounded in silence."""
    with pytest.raises(TypeError, match=words):
        Custom(parts)


def test_custom_takes_arrays():
    assert Custom(np.array([3, 2])) == Custom([3, 2]) == Custom([np.array([[0, 3]]), np.array([[3, 2, 1]])])


def test_custom_with_an_impossible_run():
    with pytest.raises(ValueError, match="rank 1"):
        Custom([[(0, 3)], [(3, 2, 0)]])


def test_unknown_name():
    with pytest.raises(ValueError, match=r"'zagzig'; there are contiguous, zigzag, striped and Custom"):
        layouts.layout("zagzig")
    with pytest.raises(ValueError, match=r"no layout is called \['zigzag'\]"):
        layouts.layout(["zigzag"])


def test_slices_follow_the_runs():
    assert slices((Run(0, 2), Run(9, 0), Run(20, 3, 4))) == [slice(0, 2), slice(2, 2), slice(2, 5)]


@dataclass(frozen=True)
class Reversed(Layout):
    """The last chunk first."""

    def runs(self, length, size, rank):
        return (layouts.chunk(length, size, size - 1 - rank),)


def test_a_layout_is_one_small_class():
    assert len(inspect.getsource(Reversed).splitlines()) <= 6
    assert [positions(runs).tolist() for runs in Reversed().partition(5, 2)] == [[3, 4], [0, 1, 2]]
