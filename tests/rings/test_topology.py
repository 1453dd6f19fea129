"""Orders and schedules on real rings, against the dense oracle."""
from __future__ import annotations

import numpy as np
import pytest

import ringmpi


@pytest.fixture
def comm():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def arrays(tokens: int, heads: int = 2, kv_heads: int = 1, dim: int = 8):
    rng = np.random.default_rng(tokens)
    return [rng.standard_normal((1, tokens, h, dim)) for h in (heads, kv_heads, kv_heads, heads)]


def worst_error(ring, tokens: int, mask, layout: str, schedule) -> float:
    """The worst error of this rank's rows of out, lse, dq, dk, dv against dense float64."""
    q, k, v, dout = arrays(tokens)
    out, lse = ringmpi.attention_reference(q, k, v, mask=mask)
    expected = (out, lse, *ringmpi.attention_reference_backward(dout, q, k, v, out, lse, mask=mask))
    attn = ringmpi.RingAttention(ring, tokens, mask=mask, layout=layout, schedule=schedule)
    mine = [attn.shard(x) for x in (q, k, v, dout)]
    found = attn.forward(*mine[:3])
    found = (*found, *attn.backward(mine[3], *mine[:3], *found))
    rows = [2 if name == "lse" else 1 for name in ("out", "lse", "dq", "dk", "dv")]
    return max(float(np.abs(x - attn.shard(e, axis)).max(initial=0)) for x, e, axis in zip(found, expected, rows))


MASKS = {"full": "full", "causal": "causal", "window": ringmpi.Mask(causal=True, window=(9, 0)),
         "documents": ringmpi.Mask(causal=True, documents=[0, 13, 14, 70, 103])}  # fmt: skip


@pytest.mark.mpi
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", ["multi"])
def test_schedules_against_the_oracle(comm, schedule, mask, layout):
    with ringmpi.Ring(comm) as ring:
        assert worst_error(ring, 103, MASKS[mask], layout, schedule) < 1e-13
