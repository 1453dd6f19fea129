"""Attention inside a simulation: drifting particles that gather at the modes of their own density (mean shift).

    mpiexec -n 4 python jobs/embed.py --check

The code has its own communicator, its own decomposition and its own arrays; attention is one operator in its time loop.
With q = x, k = y / h^2 and -|y|^2 / 2 h^2 as one more coordinate of k beside a 1 in q, the softmax over the keys is a
Gaussian kernel: softmax_j(-|x - y_j|^2 / 2 h^2), for |x|^2 cancels. So one attention gives, for every particle x, the mean of
the particles near it (kernel regression; mean shift, Comaniciu & Meer 2002), and lse its log density, which is not used here.

Every bandwidth h is an attention head. The ranks form a grid, lines x columns: the particles are spread unevenly over the
columns, and over the lines either the members of the ensemble (data parallel x sequence parallel) or the heads.
"""
from __future__ import annotations

import argparse

import numpy as np
from mpi4py import MPI

import ringmpi

BANDWIDTHS = np.array([0.25, 0.5, 1.0, 2.0])


def share(n: int, parts: int, part: int) -> slice:
    """Which of n things one of several parts has, as evenly as can be."""
    return slice(n * part // parts, n * (part + 1) // parts)


def ranges(particles: int, columns: int) -> list[int]:
    """How many particles each column owns: column c as many as its weight c + 1, as a load balancer would have it."""
    borders = np.cumsum([0, *range(1, columns + 1)])
    return np.diff(particles * borders // borders[-1]).tolist()


def kernel_mean(attn: ringmpi.RingAttention, x: np.ndarray, h: np.ndarray) -> np.ndarray:
    """The mean of all particles as each of these sees them, (members, particles here, bandwidths, 2). Collective."""
    y = np.broadcast_to(x[:, :, None], (*x.shape[:2], len(h), 2))
    scaled = h[:, None] ** -2.0
    q = np.concatenate([y, np.ones_like(y[..., :1])], axis=-1)
    k = np.concatenate([y * scaled, -0.5 * scaled * (y * y).sum(axis=-1, keepdims=True)], axis=-1)
    return attn.forward(q, k, y)[0]


def step(attn: ringmpi.RingAttention, across: MPI.Comm, x: np.ndarray, h: np.ndarray, dt: float) -> np.ndarray:
    """One step of dx/dt = mean over all bandwidths of (kernel mean - x). Lines with some bandwidths each add theirs up."""
    drift = (kernel_mean(attn, x, h) - x[:, :, None]).sum(axis=2)
    if len(h) < len(BANDWIDTHS):
        across.Allreduce(MPI.IN_PLACE, drift)
    return x + dt / len(BANDWIDTHS) * drift


def dense(x: np.ndarray, steps: int, dt: float) -> np.ndarray:
    """The same time loop by pairwise differences, for all particles and bandwidths at once."""
    for _ in range(steps):
        away = ((x[:, :, None] - x[:, None]) ** 2).sum(axis=-1)
        drift = np.zeros_like(x)
        for h in BANDWIDTHS:
            kernel = np.exp(-away / (2 * h * h))
            drift += kernel @ x / kernel.sum(axis=-1, keepdims=True) - x
        x = x + dt / len(BANDWIDTHS) * drift
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, default=1001)
    parser.add_argument("--members", type=int, default=3, help="of the ensemble: the batch")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--split", choices=("members", "heads"), default="members", help="what is spread over the lines")
    parser.add_argument("--check", action="store_true", help="compare with pairwise sums over all particles")
    args = parser.parse_args()

    # The simulation's own communicator: here every rank but those that a coupled code would have split off.
    simulation = MPI.COMM_WORLD.Split(0, MPI.COMM_WORLD.rank)
    grid = simulation.Create_cart(MPI.Compute_dims(simulation.size, 2)[::-1])
    (lines, columns), (line, column) = grid.dims, grid.coords
    along, across = grid.Sub([False, True]), grid.Sub([True, False])

    counts = ranges(args.particles, columns)
    start = np.random.default_rng(7).normal(size=(args.members, args.particles, 2)) * [2.0, 1.0]
    mine = slice(sum(counts[:column]), sum(counts[: column + 1]))
    members = share(args.members, lines, line) if args.split == "members" else slice(None)
    h = BANDWIDTHS[share(len(BANDWIDTHS), lines, line)] if args.split == "heads" else BANDWIDTHS
    x = start[members, mine]

    # The ring lives as long as the decomposition does; each step is one collective call on it.
    with ringmpi.Ring(along) as ring:
        attn = ringmpi.RingAttention(ring, args.particles, score=ringmpi.Score(scale=1.0), layout=ringmpi.Custom(counts))
        for _ in range(args.steps):
            x = step(attn, across, x, h, dt=0.1)
        worst = np.abs(x - dense(start[members], args.steps, 0.1)[:, mine]).max(initial=0) if args.check else 0.0

    worst = simulation.allreduce(worst, MPI.MAX)
    number, total, squares = simulation.allreduce(np.array([x.size, x.sum(), (x * x).sum()]))
    spread = np.sqrt(squares / number - (total / number) ** 2)
    if simulation.rank == 0:
        print(f"{lines} x {columns} ranks, {args.split} over lines, particles {counts} over columns: spread {spread:.12f}")
        if args.check:
            print(f"largest difference from pairwise sums: {worst:.1e}")
    if worst > 1e-12:
        raise SystemExit(f"the difference {worst:.1e} is more than rounding")


if __name__ == "__main__":
    main()
