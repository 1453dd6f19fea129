"""Masks: intervals against the boolean matrix written out by definition, rule by rule and combined."""
import itertools

import numpy as np
import pytest
from oracle import MASKS

from ringmpi import Mask, Run
from ringmpi.mask import Meeting, Span, mask
from ringmpi.reference import visible


def by_bounds(rules, queries, keys):
    """The boolean matrix that the intervals say, and whether two of a row overlap."""
    j, seen = np.arange(keys), 0
    for lo, hi in mask(rules).bounds(np.arange(queries), queries, keys):
        assert (lo <= hi).all() and (lo >= 0).all() and (hi <= keys).all()
        seen = seen + ((lo[..., None] <= j) & (j < hi[..., None])).astype(int)
    assert seen.max(initial=0) <= 1, "the intervals of a row overlap"
    return seen.astype(bool)


def same(rules, queries, keys):
    got, want = by_bounds(rules, queries, keys), visible(rules, queries, keys)
    assert (np.broadcast_to(got, want.shape) == want).all()


@pytest.mark.parametrize("rules", MASKS.values(), ids=MASKS)
def test_rules(rules):
    same(rules, 101, 101)


WINDOWS = [None, (0, 0), (2, None), (None, 3), (4, 1), (-1, 2)]
DOCUMENTS = [None, (0, 9), (0, 4, 4, 9), (0, 1, 8, 9)]
RANGES = [None, 5, [3, 9], [(2, 7), (0, 0)]]
COMBINATIONS = list(itertools.product((False, True), WINDOWS, DOCUMENTS, RANGES, (None, 0, 3), (0, 1, 2, 20)))


def combine(causal, window, documents, kv_range, prefix, keep_first):
    try:
        return Mask(causal, window, documents, kv_range, prefix, keep_first)
    except ValueError:
        return None


def test_all_rules_combined():
    rules = [made for made in (combine(*c) for c in COMBINATIONS) if made]
    assert len(rules) > 500
    for made in rules:
        same(made, 9, 9)


@pytest.mark.parametrize(("queries", "keys"), [(4, 9), (9, 4), (1, 9), (9, 1), (0, 5), (5, 0)])
def test_unequal_lengths_align_at_the_end(queries, keys):
    for window, prefix in itertools.product(WINDOWS, (None, 2)):
        same(Mask(causal=True, window=window, prefix=prefix), queries, keys)
        same(Mask(window=window), queries, keys)
    if queries and keys:
        assert by_bounds("causal", queries, keys)[0, -1].all(), "the last query sees every key"


def test_documents_of_unequal_lengths():
    pair = ([0, 3, 3, 9, 12], [0, 5, 6, 8, 20])
    for causal, window in itertools.product((False, True), WINDOWS):
        same(Mask(causal=causal, documents=pair, window=window), 12, 20)


@pytest.mark.parametrize("run", [Run(0, 4), Run(3, 5), Run(8, 3), Run(1, 4, 3), Run(5, 1)], ids=str)
def test_a_meeting_is_what_the_intervals_say(run):
    seen, near = set(), (0, run.start, run.start + 1, run.last, run.last + 1, 15)
    for ends in itertools.product(itertools.combinations_with_replacement(near, 2), repeat=2):
        lo, hi = (np.array(side) for side in zip(*map(sorted, ends)))
        inside = (lo[:, None] <= run.positions()) & (run.positions() < hi[:, None])
        meeting = Span.of(lo, hi).meets(run)
        seen.add(meeting)
        if inside.any():
            assert meeting is not Meeting.EMPTY
        assert (meeting is Meeting.FULL) == inside.all()
        if run.step == 1 and meeting is Meeting.PARTIAL and (hi > lo).all():
            assert inside.any() or hi.max() > run.start
    assert seen == set(Meeting)


def test_a_row_that_sees_nothing_is_never_full():
    lo, hi = np.array([0, 4, 0]), np.array([9, 4, 9])
    assert Span.of(lo, hi).meets(Run(2, 3)) is Meeting.PARTIAL
    assert Span.of(lo[1:2], hi[1:2]).meets(Run(2, 3)) is Meeting.EMPTY


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"window": (-3, 0)}, r"window=\(-3, 0\)"),
        ({"documents": [0, 5, 3]}, "borders rise"),
        ({"documents": [1, 5]}, "borders rise"),
        ({"documents": ([0, 5], [0, 2, 5])}, r"as many borders, not \[2, 3\]"),
        ({"prefix": 3}, "prefix=3 needs causal"),
        ({"keep_first": 3}, "keep_first=3"),
        ({"kv_range": [[1, 2, 3]]}, r"shape \(1, 3\)"),
        ({"kv_range": 2.5}, "kv_range"),
        ({"window": 3}, r"window=3: a window is \(left, right\)"),
        ({"window": (1, 2, 3)}, r"window=\(1, 2, 3\)"),
        ({"documents": []}, r"documents=\[\]"),
        ({"documents": 7}, "documents=7"),
    ],
)
def test_rules_without_a_meaning(rules, words):
    with pytest.raises(ValueError, match=words):
        Mask(**rules)


@pytest.mark.parametrize(
    "rules",
    [{"window": (2.5, 0)}, {"documents": [0, 2.5, 5]}, {"causal": True, "prefix": 1.5}, {"window": (1, 1), "keep_first": 0.5}],
    ids=str,
)
def test_numbers_of_keys_are_whole(rules):
    """A fraction is neither rounded in silence nor carried into the bounds; the error says which rule."""
    with pytest.raises(TypeError, match=rf"{[*rules][-1]} is .*; it must be an integer"):
        Mask(**rules)


@pytest.mark.parametrize("causal", ["full", "causal", "no", 2, None, np.ones(2)])
def test_causal_is_true_or_false(causal):
    """A mask's name given to Mask would be a causal mask, whichever it is."""
    with pytest.raises(TypeError, match=r"causal is .*; it must be True or False"):
        Mask(causal)


@pytest.mark.parametrize("ranges", [-1, [3, -1], [[-1, 4]], [[0, -1]]])
def test_a_negative_length_is_not_unlimited(ranges):
    """Beside a window whose -1 is no limit it would be taken for one, and hide every key."""
    with pytest.raises(ValueError, match=r"kv_range has -1; .* numbers of keys >= 0"):
        Mask(kv_range=ranges)


@pytest.mark.parametrize("many", [10, 2**31, 2**62, 2**63 - 1, 2**63, 2**80])
def test_limits_longer_than_everything_are_none(many):
    """No int64 overflows: sys.maxsize is how many a caller writes "unlimited"."""
    for documents in (None, [0, 4, 9]):
        rules = {"documents": documents, "causal": True}
        same(Mask(**rules, window=(many, many)), 9, 9)
        same(Mask(documents=documents, window=(None, many)), 9, 9)
        same(Mask(**rules, prefix=many), 9, 9)
        same(Mask(**rules, window=(1, 0), keep_first=many), 9, 9)
        same(Mask(kv_range=min(many, 2**63 - 1)), 9, 9)


def test_masks_are_the_same_whatever_their_numbers_are_made_of():
    """Ranks compare masks as they are written."""
    rules = {"window": (3, 0), "prefix": 2, "keep_first": 1, "documents": [0, 9], "kv_range": 4}
    arrays = {name: np.array(rule) for name, rule in rules.items()}
    made = {**arrays, "prefix": np.int32(2), "keep_first": np.int64(1)}
    assert repr(Mask(True, **rules)) == repr(Mask(np.True_, **made)) == repr(Mask(1, **made))


def test_rules_that_do_not_fit():
    with pytest.raises(ValueError, match="documents end at 5; there are 6 queries"):
        Mask(documents=[0, 5]).check(6, 5)
    with pytest.raises(ValueError, match="for 2 batch entries; the batch has 3"):
        Mask(kv_range=[1, 2]).check(5, 5, batch=3)


def test_masks_compare_by_what_they_say():
    assert Mask(documents=np.array([0, 5])) == Mask(documents=[0, 5]) != Mask(documents=[0, 6])
    assert mask("causal") == Mask(causal=True) and mask("full") == Mask(window=(-1, None))
    with pytest.raises(ValueError, match="'casual'"):
        mask("casual")
    with pytest.raises(ValueError, match=r"no mask is called \['causal'\]"):
        mask(["causal"])
