"""Training over sequences that are spread over the ranks: a two-layer byte-level language model in NumPy.

    mpiexec -n 4 python jobs/train.py --steps 200 --checkpoint model.npz --plot loss.png

Forward and backward are written out. Every rank has all parameters and some tokens of each sequence: ringmpi attends over
the ring in both passes, everything else is local, and the gradients of the parameters are summed over the ranks in float64.
The text is Python's own documentation, which ships with it. Killed at any moment, the same command goes on from its last
checkpoint, to the same parameters bit for bit.
"""
from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter
from typing import Any
from zipfile import BadZipFile

import numpy as np
from mpi4py import MPI

import ringmpi

Params = dict[str, np.ndarray]
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, EPS = 2, 4, 2, 16, 192, 1e-5
WIDTH = HEADS * HEAD_DIM


def initial(dtype: Any) -> Params:
    """Parameters, the same on every rank: matrices (in, out), normal with variance 1 / in."""
    shapes = {"embed": (256, WIDTH), "unembed": (WIDTH, 256), "norm": (WIDTH,)}
    for i in range(LAYERS):
        qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        shapes |= {f"{i}.norm1": (WIDTH,), f"{i}.qkv": (WIDTH, qkv), f"{i}.out": (WIDTH, WIDTH)}
        shapes |= {f"{i}.norm2": (WIDTH,), f"{i}.up": (WIDTH, HIDDEN), f"{i}.down": (HIDDEN, WIDTH)}
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal(shape) / np.sqrt(shape[0]) if len(shape) == 2 else np.ones(shape) for name, shape in shapes.items()}
    return {name: x.astype(dtype) for name, x in made.items()}


# ------------------------------------------------------------------------------------------- the pieces, there and back


def norm(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, tuple]:
    """RMSNorm: x / rms(x) * w."""
    r = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + x.dtype.type(EPS))
    return x * r * w, (x, r, w)


def norm_back(dy: np.ndarray, kept: tuple) -> tuple[np.ndarray, np.ndarray]:
    """dx, dw."""
    x, r, w = kept
    unit, g = x * r, dy * w
    return r * (g - unit * (g * unit).mean(axis=-1, keepdims=True)), (dy * unit).sum(axis=(0, 1))


def relu2(x: np.ndarray) -> np.ndarray:
    """max(x, 0)^2, whose derivative is 2 max(x, 0) (arXiv:2109.08668)."""
    return np.maximum(x, 0) ** 2


def rope(x: np.ndarray, positions: np.ndarray, way: int = 1) -> np.ndarray:
    """Turns the halves of every head by angles that rise with the position; ``way=-1`` turns back, which is the gradient."""
    half = x.shape[-1] // 2
    angles = way * positions[:, None, None] * 1e4 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1])


# ----------------------------------------------------------------------------------------------------------- the model


def forward(p: Params, attn: ringmpi.RingAttention, tokens: np.ndarray) -> tuple[np.ndarray, list]:
    """Logits (batch, tokens here, 256), and what the backward pass needs."""
    x, kept = p["embed"][tokens], []
    for i in range(LAYERS):
        h, kept_1 = norm(x, p[f"{i}.norm1"])
        heads = (h @ p[f"{i}.qkv"]).reshape(*x.shape[:2], -1, HEAD_DIM)
        q, k, v = np.split(heads, [HEADS, HEADS + KV_HEADS], axis=2)
        q, k = rope(q, attn.positions), rope(k, attn.positions)
        out, lse = attn.forward(q, k, v)
        x = x + out.reshape(x.shape) @ p[f"{i}.out"]
        g, kept_2 = norm(x, p[f"{i}.norm2"])
        up = g @ p[f"{i}.up"]
        x = x + relu2(up) @ p[f"{i}.down"]
        kept.append((h, kept_1, (q, k, v, out, lse), g, kept_2, up))
    y, last = norm(x, p["norm"])
    return y @ p["unembed"], [*kept, (y, last)]


def backward(p: Params, attn: ringmpi.RingAttention, tokens: np.ndarray, dlogits: np.ndarray, kept: list) -> Params:
    """This rank's share of the gradients of all parameters."""
    grads = {}
    y, last = kept.pop()
    grads["unembed"] = flat(y).T @ flat(dlogits)
    dx, grads["norm"] = norm_back(dlogits @ p["unembed"].T, last)
    for i in reversed(range(LAYERS)):
        h, kept_1, (q, k, v, out, lse), g, kept_2, up = kept.pop()
        grads[f"{i}.down"] = flat(relu2(up)).T @ flat(dx)
        dup = dx @ p[f"{i}.down"].T * 2 * np.maximum(up, 0)
        grads[f"{i}.up"] = flat(g).T @ flat(dup)
        dg, grads[f"{i}.norm2"] = norm_back(dup @ p[f"{i}.up"].T, kept_2)
        dx = dx + dg
        grads[f"{i}.out"] = flat(out.reshape(dx.shape)).T @ flat(dx)
        dout = (dx @ p[f"{i}.out"].T).reshape(out.shape)
        dq, dk, dv = attn.backward(dout, q, k, v, out, lse)
        dheads = np.concatenate([rope(dq, attn.positions, -1), rope(dk, attn.positions, -1), dv], axis=2)
        dheads = dheads.reshape(*dx.shape[:2], -1)
        grads[f"{i}.qkv"] = flat(h).T @ flat(dheads)
        dh, grads[f"{i}.norm1"] = norm_back(dheads @ p[f"{i}.qkv"].T, kept_1)
        dx = dx + dh
    grads["embed"] = np.zeros_like(p["embed"])
    np.add.at(grads["embed"], tokens, dx)
    return grads


def cross_entropy(logits: np.ndarray, targets: np.ndarray, total: int) -> tuple[float, np.ndarray]:
    """This rank's share of the mean over ``total`` tokens of -log softmax(logits)[target], and its gradient."""
    s = logits - logits.max(axis=-1, keepdims=True)
    p = np.exp(s)
    sums = p.sum(axis=-1, keepdims=True)
    target = np.take_along_axis(s, targets[..., None], axis=-1)
    dlogits = p / sums
    np.put_along_axis(dlogits, targets[..., None], np.take_along_axis(dlogits, targets[..., None], axis=-1) - 1, axis=-1)
    return float((np.log(sums) - target).sum(dtype=float)) / total, dlogits / logits.dtype.type(total)


# -------------------------------------------------------------------------------------------------------- the training


class Run:
    """What a training run is after some steps: parameters, Adam's moments, losses. All float64, the same on every rank."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.losses = settings, np.empty(0)
        self.p = initial(np.float64)
        self.m, self.v = ({name: np.zeros_like(x) for name, x in self.p.items()} for _ in range(2))

    def update(self, grads: Params, rate: float, decay: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8) -> None:
        """A step of Adam (arXiv:1412.6980)."""
        t = len(self.losses)
        for name, g in grads.items():
            self.m[name] = decay[0] * self.m[name] + (1 - decay[0]) * g
            self.v[name] = decay[1] * self.v[name] + (1 - decay[1]) * g * g
            m, v = self.m[name] / (1 - decay[0] ** t), self.v[name] / (1 - decay[1] ** t)
            self.p[name] = self.p[name] - rate * m / (np.sqrt(v) + eps)

    def save(self, path: Path) -> None:
        """Whole or not at all: written under another name, brought to the disk, then renamed."""
        new = path.with_name(path.name + ".new")
        with open(new, "wb") as file:
            arrays = {f"{kind} {name}": x for kind in "pmv" for name, x in getattr(self, kind).items()}
            np.savez(file, settings=str(self.settings), losses=self.losses, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def load(self, path: Path) -> None:
        """Takes up the run of a checkpoint, which must have the same settings."""
        with np.load(path) as file:
            if str(file["settings"]) != str(self.settings):
                raise ValueError(f"{path} is of a run with {file['settings']}; this one has {self.settings}")
            self.losses = file["losses"]
            for kind in "pmv":
                getattr(self, kind).update({name: file[f"{kind} {name}"] for name in self.p})


def taken_up(run: Run, path: Path, comm: MPI.Comm) -> Run:
    """The run as its checkpoint has it, if there is one; one rank reads it for all. Collective."""
    problem = None
    if comm.rank == 0 and path.exists():
        try:
            run.load(path)
        except (OSError, KeyError, ValueError, BadZipFile) as error:
            problem = error
    run, problem = comm.bcast((run, problem))
    if problem:
        raise SystemExit(f"no checkpoint to go on from: {problem}" if comm.rank == 0 else 2)
    return run


def summed(comm: MPI.Comm, loss: float, grads: Params) -> tuple[float, Params]:
    """The loss and the gradients over all ranks, summed in float64 in one message. Collective."""
    whole = np.concatenate([[loss], *(g.ravel() for g in grads.values())], dtype=np.float64)
    comm.Allreduce(MPI.IN_PLACE, whole)
    cuts = np.split(whole[1:], np.cumsum([g.size for g in grads.values()])[:-1])
    return float(whole[0]), {name: cut.reshape(g.shape) for (name, g), cut in zip(grads.items(), cuts)}


def train_step(run: Run, attn: ringmpi.RingAttention, comm: MPI.Comm, text: np.ndarray, args: argparse.Namespace) -> None:
    """One step, on the sequences that its number picks. Collective."""
    number = len(run.losses)
    starts = np.random.default_rng([1, number]).integers(0, len(text) - args.seqlen, args.batch)
    here = starts[:, None] + attn.positions
    tokens, targets = text[here], text[here + 1]
    p = {name: x.astype(args.dtype) for name, x in run.p.items()}
    logits, kept = forward(p, attn, tokens)
    loss, dlogits = cross_entropy(logits, targets, args.batch * args.seqlen)
    loss, grads = summed(comm, loss, backward(p, attn, tokens, dlogits, kept))
    run.losses = np.append(run.losses, loss)
    run.update(grads, args.rate * min(1, (number + 1) / 20))


def show(run: Run, args: argparse.Namespace, per_second: float) -> None:
    """A progress bar on a terminal, else a line now and then."""
    done, loss = len(run.losses), run.losses[-1]
    if sys.stderr.isatty():
        bar = "#" * (40 * done // args.steps)
        sys.stderr.write(f"\r[{bar:<40}] {done}/{args.steps}  loss {loss:.4f}  {per_second:,.0f} tokens/s " + "\n" * (done == args.steps))
        sys.stderr.flush()
    elif done % 20 == 0 or done == args.steps:
        print(f"step {done:5}  loss {loss:.6f}  {per_second:,.0f} tokens/s", flush=True)


def plot(losses: np.ndarray, path: Path) -> None:
    """The loss curve, in bits, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(np.arange(1, len(losses) + 1), losses / np.log(2), color="black", linewidth=1)
    axes.set(xlabel="step", ylabel="loss (bits per byte)", ylim=(0, None), title="jobs/train.py")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seqlen", type=int, default=1001, help="bytes of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument("--rate", type=float, default=3e-3, help="Adam's learning rate, reached after 20 steps")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of the two passes")
    parser.add_argument("--checkpoint", type=Path, metavar="NPZ", help="where the run is kept, and taken up again")
    parser.add_argument("--every", type=int, default=50, metavar="N", help="steps between checkpoints")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="the loss curve (needs matplotlib)")
    return parser.parse_args()


def main() -> None:
    args, comm = arguments(), MPI.COMM_WORLD
    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8)
    run = Run({name: getattr(args, name) for name in ("seqlen", "batch", "rate", "dtype")})
    if args.checkpoint:
        run = taken_up(run, args.checkpoint, comm)

    with ringmpi.Ring(comm) as ring:
        attn = ringmpi.RingAttention(ring, args.seqlen, mask="causal", layout="zigzag")
        while len(run.losses) < args.steps:
            began = perf_counter()
            train_step(run, attn, comm, text, args)
            done = len(run.losses)
            if comm.rank == 0:
                show(run, args, args.batch * args.seqlen / (perf_counter() - began))
                if args.checkpoint and (done % args.every == 0 or done == args.steps):
                    run.save(args.checkpoint)
    if comm.rank == 0 and args.plot:
        plot(run.losses, args.plot)


if __name__ == "__main__":
    main()
