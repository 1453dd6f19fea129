"""Compares the gradients of jobs/train.py with central differences along random directions, one for every parameter."""
import numpy as np
import train
from mpi4py import MPI

import ringmpi

comm, seqlen = MPI.COMM_WORLD, 37
text = np.random.default_rng(5).integers(0, 256, (2, seqlen + 1))
with ringmpi.Ring(comm) as ring:
    attn = ringmpi.RingAttention(ring, seqlen, mask="causal", layout="zigzag")
    tokens, targets = text[:, attn.positions], text[:, attn.positions + 1]

    def loss_of(p):
        logits, kept = train.forward(p, attn, tokens)
        return (*train.cross_entropy(logits, targets, targets.shape[0] * seqlen), kept)

    p = train.initial(np.float64)
    loss, dlogits, kept = loss_of(p)
    _, grads = train.summed(comm, loss, train.backward(p, attn, tokens, dlogits, kept))
    assert sorted(grads) == sorted(p)
    worst, rng, step = 0.0, np.random.default_rng(6), 1e-6
    for name, x in p.items():
        way = rng.standard_normal(x.shape)
        ahead, behind = (comm.allreduce(loss_of({**p, name: x + sign * step * way})[0]) for sign in (1, -1))
        numeric, exact = (ahead - behind) / (2 * step), float((grads[name] * way).sum())
        error = abs(numeric - exact) / abs(exact)
        assert error < 1e-6, f"{name}: {exact} by backward, {numeric} by differences"
        worst = max(worst, error)
if comm.rank == 0:
    print(f"worst relative difference {worst:.1e}")
