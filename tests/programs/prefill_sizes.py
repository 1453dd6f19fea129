"""jobs/prefill.py on the first 1, 2, ... ranks, with the model read once: losses against the file's, and the tokens generated."""
import sys
from pathlib import Path

import numpy as np
import prefill
from mpi4py import MPI

import ringmpi

comm, (length, more) = MPI.COMM_WORLD, map(int, sys.argv[1:])
model, tokenizer = prefill.load(comm, prefill.smollm2.find())
with np.load(Path(__file__).parent.parent / "data" / "smollm2_gpl3.npz") as file:
    tokens, want = file["tokens"][:length], file["nll"][: length - 1]
made = set()
for n in range(1, comm.size + 1):
    some = comm.Split(0 if comm.rank < n else MPI.UNDEFINED, comm.rank)
    if comm.rank < n:
        with ringmpi.Ring(some) as ring:
            attn = ringmpi.RingAttention(ring, length, mask="causal", layout="zigzag")
            cache = prefill.Cache(model, len(attn.positions), more)
            x, _ = prefill.prefill(model, attn, tokens, cache)
            error = np.abs(prefill.losses(model, attn, tokens, x) - want).max()
            first = prefill.next_token(model, attn, some, x)
            made.add(tuple(prefill.generate(model, ring, some, cache, first, more)))
        if comm.rank == 0:
            assert error < 5e-4, f"{n} ranks: nll off by {error}"
            print(f"{n} ranks: nll within 5e-4 ({error:.1e}); {'the same' if len(made) == 1 else 'other'} {more} tokens")
if comm.rank == 0:
    assert len(made) == 1, [tokenizer.decode(list(tokens)) for tokens in made]
    print(repr(tokenizer.decode(list(made.pop()))))
