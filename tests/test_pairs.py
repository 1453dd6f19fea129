"""Pairs: what each rank computes is what the mask shows, no more than there is, and who needs what is known."""
import inspect

import numpy as np
import pytest
from fakes import ring_of_threads
from oracle import MASKS, close, problem

from ringmpi import Contiguous, Mask, RingAttention, Score, Striped, Zigzag
from ringmpi.mask import mask
from ringmpi.pairs import Work
from ringmpi.reference import visible

LAYOUTS = [Contiguous(), Zigzag(), Striped()]


def work_of(layout, size, rules, lengths=(101, 101)):
    return Work.over((layout, layout), lengths, size, mask(rules), Score())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rules", MASKS)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_pairs_are_the_mask(layout, rules, parts):
    """Every visible (query, key) is in exactly one pair of its rank, and nothing else is."""
    work, want = work_of(layout, 3, MASKS[rules]), visible(MASKS[rules], 101, 101)
    seen = np.zeros(want.shape, int)
    for rank in range(3):
        strips = work.strips(rank)
        for owner in range(3):
            for part in range(parts):
                for pair in work.pairs(strips, Score(), owner, part, parts):
                    lo, hi = pair.local()
                    j = np.arange(pair.key.count)
                    block = (lo[..., None] <= j) & (j < hi[..., None])
                    seen[np.ix_(range(len(want)), pair.query.positions(), pair.key.positions())] += block
    assert (seen == want).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rules", MASKS)
def test_who_needs_what(layout, rules):
    work = work_of(layout, 4, MASKS[rules])
    for parts in (1, 2):
        needed = work.needed(parts)
        for rank in range(4):
            strips = work.strips(rank)
            for owner in range(4):
                assert [any(work.pairs(strips, Score(), owner, part, parts)) for part in range(parts)] == needed[rank, owner].tolist()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rules", MASKS)
def test_who_needs_what_is_found_in_batches(layout, rules):
    work = work_of(layout, 4, MASKS[rules])
    assert sorted(work._extremes(rows=7)) == sorted(work._extremes())


def test_a_thousand_ranks_are_planned_in_few_calls():
    """The bounds of all rows are asked for in large batches, not rank by rank: seconds at a thousand ranks."""
    asked = []

    class Counting(Mask):
        def bounds(self, positions, queries, keys):
            asked.append(len(positions))
            return super().bounds(positions, queries, keys)

    needed = work_of(Zigzag(), 1000, Counting(causal=True), (5003, 5003)).needed()
    assert needed.shape == (1000, 1000, 1) and asked == [5003]


def test_a_narrow_window_computes_in_proportion():
    for length in (200, 400, 800):
        work = work_of(Contiguous(), 8, Mask(causal=True, window=(9, 0)), (length, length))
        assert work.needed().sum() == 8 + 7


def test_a_rank_that_needs_nothing():
    assert not work_of(Contiguous(), 3, Mask(kv_range=0)).needed().any()
    assert not work_of(Contiguous(), 3, "full", (0, 9)).needed().any()


class Chunked(Mask):
    """A query sees the keys of its own chunk of 16."""

    def bounds(self, positions, queries, keys):
        lo = positions[None] // 16 * 16
        return [(np.minimum(lo, keys), np.minimum(lo + 16, keys))]


def test_a_mask_rule_is_one_small_method():
    assert len(inspect.getsource(Chunked.bounds).splitlines()) == 3
    given = problem(101)
    want = given.solve(Mask(documents=[*range(0, 101, 16), 101]))

    def body(ring):
        attn = RingAttention(ring, 101, mask=Chunked(), layout="zigzag")
        q, k, v, dout = (attn.shard(x) for x in given[:4])
        out, lse = attn.forward(q, k, v)
        return [attn.unshard(x) for x in (out, *attn.backward(dout, q, k, v, out, lse))]

    for results in ring_of_threads(3, body):
        for got, reference in zip(results, (want[0], *want[2:])):
            close(got, reference)
