"""What users are told when they err: both values and the rank, the same on all ranks."""
import threading

import numpy as np
import pytest
from fakes import ring_of_threads
from oracle import problem

import ringmpi
import ringmpi.tiles.numpy
from ringmpi import Custom, Mask, Ring, RingAttention, Score, ring_attention, ring_attention_backward, schedule, tiles


def everyone_raises(size, body, error, words):
    """``body(ring)`` raises the same on every rank."""
    said = [None] * size

    def catch(ring):
        with pytest.raises(error, match=words) as caught:
            body(ring)
        said[ring.rank] = str(caught.value)

    ring_of_threads(size, catch)
    assert len(set(said)) == 1 and said[0]


wrong = schedule.Schedule("wrong", schedule.Group(1, 3), (schedule.Walk(0, ((0, 0), (1, 1), (2, 1))),))


def odd_call(ring, **odd):
    """A forward pass in which rank 1 differs."""
    mine = odd if ring.rank == 1 else {}
    given = problem(31, **{key: value for key, value in mine.items() if key in ("dim", "v_dim", "heads", "kv_heads", "batch", "dtype")})
    plan = {key: mine[key] for key in ("mask", "layout", "score", "schedule") if key in mine}
    attn = RingAttention(ring, mine.get("seqlen", 31), **plan)
    attn.forward(*(attn.shard(x) for x in given[:3]), mine.get("sinks"))


@pytest.mark.parametrize(
    ("odd", "error", "words"),
    [
        ({"dim": 16}, ValueError, "forward: rank 1 was given head_dim 16, rank 0 8"),
        ({"v_dim": 5}, ValueError, "rank 1 was given v_dim 5, rank 0 6"),
        ({"heads": 2}, ValueError, "rank 1 was given heads 2, rank 0 4"),
        ({"batch": 3}, ValueError, "rank 1 was given batch 3, rank 0 2"),
        ({"dtype": "float32"}, TypeError, "rank 1 was given dtype float32, rank 0 float64"),
        ({"dtype": ">f8"}, TypeError, "rank 1: q is >f8"),
        ({"dtype": "int64"}, TypeError, "rank 1: q is <i8; it must be one of float16, bfloat16, float32, float64"),
        ({"sinks": np.ones(4)}, ValueError, r"rank 1 was given sinks \[1.0, 1.0, 1.0, 1.0\], rank 0 None"),
        ({"sinks": np.ones(3)}, ValueError, r"rank 1: sinks has shape \(3,\); q has 4 heads: it must be \(4,\)"),
        ({"sinks": np.ones((4, 1))}, ValueError, r"rank 1: sinks has shape \(4, 1\)"),
        ({"sinks": [1.0] * 4}, TypeError, "rank 1: sinks is list; it must be an array of float16"),
        ({"sinks": np.ones(4, int)}, TypeError, "rank 1: sinks is int64; it must be an array of float16"),
        ({"score": 0}, TypeError, "rank 1: score is 0; it must be a Score or None"),
        ({"seqlen": -31}, ValueError, "rank 1: seqlen is -31"),
        ({"seqlen": (31, 31, 31)}, ValueError, r"rank 1: seqlen is \(31, 31, 31\)"),
        ({"seqlen": 30.5}, TypeError, "rank 1: seqlen is 30.5; it must be an integer"),
        ({"schedule": wrong}, ValueError, "rank 1: the schedule 'wrong' is wrong"),
        ({"mask": "causal"}, ValueError, r"RingAttention: rank 1 was given mask Mask\(causal=True"),
        ({"mask": "casual"}, ValueError, "rank 1: no mask is called 'casual'"),
        ({"layout": "zigzag"}, ValueError, r"rank 1 was given layout \(Zigzag\(\), Zigzag\(\)\), rank 0 \(Contiguous"),
        ({"score": Score(softcap=3)}, ValueError, "rank 1 was given score"),
        ({"schedule": "bidirectional"}, ValueError, "rank 1 was given schedule"),
        ({"seqlen": 30}, ValueError, r"rank 1 was given seqlen \(30, 30\), rank 0 \(31, 31\)"),
    ],
)
def test_one_odd_rank_is_named_on_all(odd, error, words):
    everyone_raises(3, lambda ring: odd_call(ring, **odd), error, words)


def test_a_rank_in_another_call_is_named_on_all():
    def body(ring):
        attn = RingAttention(ring, 31)
        q, k, v, dout = (attn.shard(x) for x in problem(31)[:4])
        out, lse = attn.forward(q, k, v)
        if ring.rank == 1:
            attn.backward(dout, q, k, v, out, lse)
        else:
            attn.forward(q, k, v)

    everyone_raises(3, body, ValueError, "^rank 1 called backward, rank 0 forward$")


def test_a_rank_without_memory_kills_the_ring(monkeypatch):
    """Its buffers are made after the agreement: the others must learn that none will come."""
    def body(ring):
        attn = RingAttention(ring, 31, tile="numpy")
        monkeypatch.setattr(ring.space(tiles.numpy), "empty", lambda nbytes: np.empty(10**18))
        with pytest.raises(MemoryError):
            attn.forward(*(attn.shard(x) for x in problem(31)[:3]))
        assert not ring._seats.alive

    ring_of_threads(2, body)


def call(ring, change):
    attn = RingAttention(ring, 31)
    q, k, v, dout = (attn.shard(x) for x in problem(31)[:4])
    out, lse = attn.forward(q, k, v)
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    attn.backward(**{**arrays, **(change(arrays) if ring.rank == ring.size - 1 else {})})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda a: {"q": a["q"][0]}, ValueError, r"rank 2: q has shape \(10, 4, 8\)"),
        (lambda a: {"q": a["q"][:, 1:]}, ValueError, "rank 2: q has 9 tokens; its layout gives this rank 10"),
        (lambda a: {"k": a["k"][:, 1:]}, ValueError, "rank 2: k has 9 tokens"),
        (lambda a: {"v": a["v"][:, 1:]}, ValueError, r"rank 2: v has shape \(2, 9, 2, 6\).*must be \(2, 10, 2, 6\)"),
        (lambda a: {"k": a["k"][..., :4]}, ValueError, r"rank 2: k has shape \(2, 10, 2, 4\)"),
        (lambda a: {"q": a["q"][:, :, :3], "dout": a["dout"][:, :, :3]}, ValueError, "q has 3 heads and k 2; k's must divide q's"),
        (lambda a: {name: x[:, :, :0] for name, x in a.items() if name not in ("k", "v")}, ValueError, "q has 0 heads and k 2"),
        (lambda a: {"lse": a["lse"].swapaxes(1, 2)}, ValueError, r"rank 2: lse has shape"),
        (lambda a: {"out": a["out"].astype(np.float32)}, TypeError, "rank 2: out is float32, q float64"),
        (lambda a: {"lse": a["lse"].astype(complex)}, TypeError, "rank 2: lse is <c16; it must be one of float16"),
        (lambda a: {"lse": a["lse"].astype(int)}, TypeError, "rank 2: lse is <i8"),
        (lambda a: {"v": a["v"].astype(">f8")}, TypeError, "rank 2: v is >f8; .* in this machine's byte order"),
        (lambda a: {"k": np.ma.masked_array(a["k"], a["k"] > 0)}, TypeError, "rank 2: a masked array has values that no tile would"),
        (lambda a: {"dout": a["dout"].tolist()}, TypeError, r"rank 2: a builtins\.list is not an array"),
    ],
)
def test_arrays_that_do_not_fit(change, error, words):
    everyone_raises(3, lambda ring: call(ring, change), error, words)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"mask": Mask(documents=[0, 30])}, "documents end at 30; there are 31 queries"),
        ({"layout": Custom([31, 0])}, "for 2 ranks; the ring has 3"),
        ({"layout": "diagonal"}, "no layout is called 'diagonal'"),
        ({"schedule": "spiral"}, "no schedule is called 'spiral'"),
        ({"tile": "roof"}, "no tile is called 'roof'"),
        ({"layout": ("zigzag",)}, r"layout is \('zigzag',\); it must be one for queries and keys, or a pair"),
        ({"seqlen": (31, 31, 31)}, r"seqlen is \(31, 31, 31\); it must be one"),
        ({"seqlen": -1}, "seqlen is -1; it must be a number of tokens >= 0"),
    ],
)
def test_plans_that_do_not_fit(plan, words):
    everyone_raises(3, lambda ring: RingAttention(ring, **{"seqlen": 31, **plan}), ValueError, words)


@pytest.mark.parametrize("seqlen", [31.0, None, "31", [31, 31], (31, 31.5)])
def test_a_length_is_an_integer(seqlen):
    everyone_raises(2, lambda ring: RingAttention(ring, seqlen), TypeError, r"rank 0: seqlen is .*; it must be an integer")


def test_a_closed_ring_says_so():
    ring = Ring()
    attn = RingAttention(ring, 5)
    ring.close()
    for call in (lambda: ring.gather(1), lambda: attn.unshard(np.ones((1, 5))), lambda: attn.record().__enter__()):
        with pytest.raises(RuntimeError, match="rank 0: the ring is closed"):
            call()


def test_rows_are_rows_of_arrays():
    def body(ring):
        attn = RingAttention(ring, 6)
        for call in (attn.shard, attn.unshard):
            with pytest.raises(TypeError, match="axis 1 of an array; what was given is a list"):
                call([[1, 2, 3]])
            with pytest.raises(TypeError, match="axis 2 of an array; what was given has 2 axes"):
                call(np.ones((1, 3)), 2)
        with pytest.raises(TypeError, match="rank 0: an array of object holds references"):
            attn.unshard(np.array([[None] * 3]))

    ring_of_threads(2, body)


def test_rules_that_need_the_batch_or_the_heads():
    given = problem(31)
    lengths, slopes = {"mask": Mask(kv_range=[1, 2, 3])}, {"score": Score(alibi=[1.0])}
    for plan, words in ((lengths, "batch has 2"), (slopes, "alibi has 1 numbers; q has 4")):
        with pytest.raises(ValueError, match=words):
            RingAttention(None, 31, **plan).forward(*given[:3])


@pytest.mark.parametrize("score", [{"scale": np.nan}, {"softcap": 0}, {"softcap": -2}, {"alibi": [1, np.inf]}])
def test_scores_without_a_meaning(score):
    with pytest.raises(ValueError):
        Score(**score)


def test_shard_and_unshard():
    def body(ring):
        attn = RingAttention(ring, (11, 7), layout=("zigzag", "striped"))
        x, y = np.arange(22).reshape(11, 2), np.arange(21).reshape(3, 7)
        assert (attn.shard(x, 0)[:, 0] == 2 * attn.positions).all()
        assert (attn.unshard(attn.shard(x, 0), 0) == x).all()
        assert (attn.unshard(attn.shard(y, 1, kv=True), 1, kv=True) == y).all()
        assert (attn.shard(y, 1, kv=True)[0] == attn.kv_positions).all()
        with pytest.raises(ValueError, match=f"rank {ring.rank}: axis 0 has 3 rows; the sequence has 11"):
            attn.shard(y, 0)
        with pytest.raises(ValueError, match="rank 0: axis 1 has 7 rows"):
            attn.unshard(y)

    ring_of_threads(3, body)


def test_one_call_takes_rows_as_they_are():
    given, cuts = problem(31), [0, 20, 20, 31]
    want = given.solve("causal")

    def body(ring):
        held = slice(cuts[ring.rank], cuts[ring.rank + 1])
        q, k, v, dout = (x[:, held] for x in given[:4])
        out, lse = ring_attention(q, k, v, ring, mask="causal")
        gradients = ring_attention_backward(dout, q, k, v, out, lse, ring, mask="causal")
        for got, reference in zip((out, *gradients), (want[0], *want[2:])):
            assert got.shape == reference[:, held].shape and abs(got - reference[:, held]).max(initial=0) < 1e-13

    ring_of_threads(3, body)


def test_a_code_without_batch_or_heads():
    x = np.random.default_rng(0).standard_normal((9, 4))[None, :, None]
    out, lse = ring_attention(x, x, x)
    assert out[0, :, 0].shape == (9, 4) and lse[0, 0].shape == (9,)


def test_close_and_with():
    ring = Ring()
    ring.close()
    ring.close()
    with pytest.raises(RuntimeError, match="the ring is closed"):
        RingAttention(ring, 5)
    with pytest.raises(TypeError, match="comm is 4; it must be an mpi4py intracommunicator"):
        Ring(4)
    with RingAttention(None, 5) as attn:
        out, _ = attn.forward(*problem(5)[:3])
    assert out.shape == (2, 5, 4, 6)
    with pytest.raises(ValueError, match="'sideways'"):
        Ring(order="sideways")


def test_outputs_are_new_and_inputs_untouched():
    given = problem(31)
    before = [x.copy() for x in given[:4]]
    with RingAttention(None, 31) as attn:
        first, _ = attn.forward(*given[:3])
        again, lse = attn.forward(*given[:3])
        attn.backward(given.dout, *given[:3], again, lse)
    assert first is not again and not np.shares_memory(first, again)
    assert all((x == y).all() for x, y in zip(before, given))


def test_public_names():
    assert all(hasattr(ringmpi, name) for name in ringmpi.__all__)
    assert threading.active_count() < 50
