"""Decoding on one rank, where the merge over ranks changes nothing; tests/rings/test_decode.py has the rest."""
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from oracle import MASKS, SCORES, close, problem

from ringmpi import Mask, Score, attention_reference, decode, layout
from ringmpi.mask import mask as named_mask


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_dense_attention(mask, score, queries):
    rules = named_mask(MASKS[mask])
    if rules.documents is not None:
        rules = replace(rules, documents=([0, queries // 2, queries], [0, 40, 101]))
    p = problem(queries, 101, sinks=True)
    got = decode(p.q, p.k, p.v, mask=rules, score=SCORES[score], sinks=p.sinks)
    want = attention_reference(p.q, p.k, p.v, mask=rules, score=SCORES[score], sinks=p.sinks)
    for name, x, y in zip(("out", "lse"), got, want):
        close(x, y, name)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtypes(dtype):
    p = problem(1, 77, dtype=dtype)
    out, lse = decode(p.q, p.k, p.v)
    want = attention_reference(*(x.astype(np.float64) for x in p[:3]))
    assert out.dtype == dtype and lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    close(out, want[0], "out")
    close(lse, want[1], "lse")


def test_keys_in_any_order():
    p = problem(4, 101)
    order = np.random.default_rng(1).permutation(101)
    rules = {"mask": Mask(causal=True, window=(6, 0), keep_first=2), "score": Score(alibi=[0.5, 0.25, 0.1, 0.05])}
    out, lse = decode(p.q, p.k[:, order], p.v[:, order], positions=order, **rules)
    want = attention_reference(p.q, p.k, p.v, **rules)
    close(out, want[0], "out")
    close(lse, want[1], "lse")


def test_an_empty_cache_gives_zero_and_a_sink_alone_its_score():
    p = problem(2, 0)
    out, lse = decode(p.q, p.k, p.v)
    assert (out == 0).all() and np.isneginf(lse).all()
    sinks = np.arange(4.0)
    out, lse = decode(p.q, p.k, p.v, sinks=sinks)
    assert (out == 0).all() and (lse == sinks[:, None]).all()


def test_a_view_of_a_larger_cache_whose_rest_is_nan():
    p = problem(1, 50)
    k, v = (np.full((2, 90, 2, x.shape[3]), np.nan) for x in (p.k, p.v))
    k[:, :50], v[:, :50] = p.k, p.v
    close(decode(p.q, k[:, :50], v[:, :50])[0], attention_reference(p.q, p.k, p.v)[0], "out")
    close(decode(p.q, k, v, mask=Mask(kv_range=50))[0], attention_reference(p.q, p.k, p.v)[0], "out")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"v_cache": np.ones((1, 6, 1, 4))}, ValueError, r"v has shape \(1, 6, 1, 4\)"),
        ({"k_cache": np.ones((1, 7, 3, 4))}, ValueError, "q has 2 heads and k 3"),
        ({"q": np.ones((1, 1, 2, 4), np.float32)}, TypeError, "k is float64, q float32"),
        ({"positions": [0, 1]}, ValueError, "beside a cache of 7 keys"),
        ({"positions": np.arange(7.0)}, ValueError, "7 integers"),
        ({"positions": [0, 1, 2, 3, 4, 5, 5]}, ValueError, r"position 5 .* more than once"),
        ({"positions": [0, 1, 2, 3, 4, 5, 9]}, ValueError, "holds position 9; the sequence has 7"),
        ({"positions": [0, 1, 2, 3, 4, 5, -1]}, ValueError, "start and count must be >= 0"),
        ({"mask": "cozy"}, ValueError, "no mask is called 'cozy'"),
        ({"mask": Mask(documents=([0, 1], [0, 8]))}, ValueError, "the documents end at 8; there are 7 keys"),
        ({"mask": Mask(kv_range=[3, 4, 5])}, ValueError, "given for 3 batch entries; the batch has 1"),
        ({"sinks": np.ones(3)}, ValueError, "sinks has shape .3,.; q has 2 heads"),
        ({"tile": "fast"}, ValueError, "no tile is called 'fast'"),
    ],
)
def test_errors(change, error, words):
    given = {"q": np.ones((1, 1, 2, 4)), "k_cache": np.ones((1, 7, 1, 4)), "v_cache": np.ones((1, 7, 1, 4))}
    with pytest.raises(error, match=words):
        decode(**{**given, **change})


@pytest.mark.parametrize("positions", [[], [4], [0, 1, 2, 7, 9, 11, 3], [5, 4, 3], [8, 8], [0, 2, 3, 4, 1, 6, 11]])
def test_runs_of(positions):
    runs = layout.runs_of(np.array(positions, np.int64))
    assert layout.positions(runs).tolist() == positions


def test_runs_of_what_layouts_hold():
    for which in (layout.Contiguous(), layout.Zigzag(), layout.Striped()):
        for runs in which.partition(101, 4):
            assert len(layout.runs_of(layout.positions(runs))) <= len(runs)
