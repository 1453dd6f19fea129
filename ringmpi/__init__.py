"""Exact attention over sequences that no single rank can hold, as an MPI library.

    with ringmpi.Ring(comm) as ring:
        attn = ringmpi.RingAttention(ring, seqlen, mask="causal", layout="zigzag")
        out, lse = attn.forward(q, k, v)
        dq, dk, dv = attn.backward(dout, q, k, v, out, lse)

Importing it initialises nothing: MPI is touched when a communicator is given.
"""
from .api import Ring, RingAttention, ring_attention, ring_attention_backward
from .comm import RingTimeout
from .decode import decode
from .layout import Contiguous, Custom, Layout, Run, Striped, Zigzag
from .mask import Mask
from .partial import Partial, merge
from .profile.chrome import save as save_trace
from .reference import attention_reference, attention_reference_backward
from .schedule import Schedule
from .score import Score
from .tiles.cuda import choose_gpu
from .topology import Torus

__version__ = "0.1.0"
__all__ = [
    "Contiguous", "Custom", "Layout", "Mask", "Partial", "Ring", "RingAttention", "RingTimeout", "Run", "Schedule", "Score",
    "Striped", "Torus", "Zigzag", "attention_reference", "attention_reference_backward", "choose_gpu", "decode", "merge",
    "ring_attention", "ring_attention_backward", "save_trace",
]  # fmt: skip
