"""One core's tile: how near to a loop of multiply-adds, how much faster than another, how exact.

    OMP_NUM_THREADS=1 python bench/tile.py                       the host tile, head_dim 64 and 128, float32
    python bench/tile.py --against torch                         beside PyTorch's CPU flash attention
    python bench/tile.py --tile numpy --dtype float64 --rows 64 256 --masks full causal window

Everything of a row is timed in turns, so that a neighbour's noise falls on all alike; ratios are of medians.
README.md derives the formulas.
"""
import ctypes
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from driver import Table, arguments

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ringmpi import Mask, Run, Score, tiles
from ringmpi.pairs import Pair
from ringmpi.partial import accumulator
from ringmpi.tiles import native

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
MASKS = {"full": Mask(), "causal": Mask(causal=True), "window": Mask(causal=True, window=(511, 0))}


def peak(dtype, clock):
    """A function that runs about so many operations as multiply-adds on registers, and returns how many a second it did."""
    real, folder = native.REALS[accumulator(dtype).name], tempfile.mkdtemp()
    source, out = Path(__file__).with_name("peak.c"), f"{folder}/peak.so"
    line = [*native.compiler(), *native.FLAGS, *native.architecture(), f"-DREAL={real}", f"-I{native.sources()}", str(source), "-o", out]
    subprocess.run(line, check=True)
    loop, sink = ctypes.CDLL(out).multiply_adds, ctypes.c_double()
    loop.restype = ctypes.c_double

    a_step = loop(ctypes.c_int64(1), ctypes.byref(sink))

    def run(wanted):
        steps, began = int(wanted / a_step) + 1, clock()
        operations = loop(ctypes.c_int64(steps), ctypes.byref(sink))
        return operations / (clock() - began)

    return run


class Problem:
    """A pair of runs, and how many operations a pass over it is."""

    def __init__(self, rows, dim, args, mask):
        rng, heads, kv_heads = np.random.default_rng(0), args.heads, args.kv_heads or args.heads
        if args.dtype == "bfloat16":
            import ml_dtypes  # noqa: F401  (names the dtype)
        dtype = np.dtype(args.dtype)
        self.q, self.dout = (rng.standard_normal((1, rows, heads, dim)).astype(dtype) for _ in range(2))
        self.k, self.v = (rng.standard_normal((1, rows, kv_heads, dim)).astype(dtype) for _ in range(2))
        bounds = None if mask == Mask() else mask.bounds(np.arange(rows), rows, rows)[0]
        self.pair = Pair(slice(0, rows), slice(0, rows), Run(0, rows), Run(0, rows), bounds, Score().resolve(dim))
        self.kept = rows * rows if bounds is None else int((bounds[1] - bounds[0]).sum())
        self.forward_ops, self.backward_ops = (n * self.kept * heads * dim for n in (4, 10))

    def forward(self, tile):
        """out and lse of the tile."""
        total = tile.empty((*self.q.shape[:3], self.v.shape[3]), accumulator(self.q.dtype))
        for where, partial in tile.forward(self.q, self.k, self.v, self.pair):
            tile.merge(total, where, partial)
        return tile.finish(total, total.o.dtype)

    def backward(self, tile, out, lse):
        """dq, dk, dv of the tile."""
        gradients = [np.zeros(x.shape, accumulator(x.dtype)) for x in (self.q, self.k, self.v)]
        for _ in tile.backward(self.q, self.k, self.v, self.dout, lse, tile.delta(self.dout, out), self.pair, *gradients):
            pass
        return gradients

    def wide(self):
        """The same problem in float64."""
        twin = object.__new__(Problem)
        twin.__dict__ = {name: x.astype(np.float64) if isinstance(x, np.ndarray) else x for name, x in vars(self).items()}
        return twin


class Torch:
    """PyTorch's CPU flash attention on the same numbers."""

    def __init__(self, problem):
        import torch

        self.calls, self.torch = torch.ops.aten, torch
        torch.set_num_threads(int(tiles.host.threads()))
        self.q, self.k, self.v, self.dout = map(self._given, (problem.q, problem.k, problem.v, problem.dout))
        self.causal = problem.pair.bounds is not None

    def _given(self, x):
        heads_first = np.ascontiguousarray(x.swapaxes(1, 2))
        if x.dtype.name == "bfloat16":
            return self.torch.from_numpy(heads_first.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(heads_first)

    def forward(self):
        return self.calls._scaled_dot_product_flash_attention_for_cpu(self.q, self.k, self.v, is_causal=self.causal)

    def backward(self, out, lse):
        call = self.calls._scaled_dot_product_flash_attention_for_cpu_backward
        return call(self.dout, self.q, self.k, self.v, out, lse, 0.0, self.causal)


def in_turns(works, args):
    """The median seconds of each, one run of each at a time."""
    clock = CLOCKS[args.clock]
    seconds = {name: [] for name in works}
    for run in range(args.warmup + args.repeats):
        for name, work in works.items():
            began = clock()
            work()
            if run >= args.warmup:
                seconds[name].append(clock() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def rms(got, want):
    """The error's root mean square relative to the reference's."""
    wide = (got if isinstance(got, np.ndarray) else got.float().numpy()).astype(np.float64)
    return math.sqrt(((wide - want) ** 2).mean() / (want**2).mean())


def measure(rows, dim, mask, args, ceiling):
    """A row of the table."""
    problem, tile = Problem(rows, dim, args, MASKS[mask]), tiles.tile(args.tile, np.zeros(1, np.float32))
    out, lse = problem.forward(tile)
    peaks, works = [], {"peak": lambda: peaks.append(ceiling(problem.forward_ops))}
    works |= {"forward": lambda: problem.forward(tile), "backward": lambda: problem.backward(tile, out, lse)}
    rival = Torch(problem) if args.against == "torch" and mask != "window" else None
    if rival:
        theirs = rival.forward()
        works |= {"their_forward": rival.forward, "their_backward": lambda: rival.backward(*theirs)}
    took, top = in_turns(works, args), statistics.median(peaks[args.warmup :])
    row = {"rows": rows, "dim": dim, "mask": mask, "peak_gflops": top / 1e9}
    for name, operations in (("forward", problem.forward_ops), ("backward", problem.backward_ops)):
        rate = operations / took[name]
        row |= {f"{name}_gflops": rate / 1e9, f"{name}_of_peak": rate / top / tiles.host.threads()}
        if rival:
            row[f"{name}_ratio"] = took[f"their_{name}"] / took[name]
    return row | errors(problem, tile, out, lse, rival)


def errors(problem, tile, out, lse, rival):
    """Relative rms errors against float64, forward and the worst gradient; theirs too. For up to 4,096 rows."""
    if problem.q.shape[1] > 4096:
        return {"out_error": None, "gradient_error": None}
    reference, readable = problem.wide(), tiles.tile("numpy", np.zeros(1))
    exact, exact_lse = reference.forward(readable)
    wanted = reference.backward(readable, exact, exact_lse)
    row = {"out_error": rms(out, exact)}
    row["gradient_error"] = max(rms(g, w) for g, w in zip(problem.backward(tile, out, lse), wanted))
    if rival:
        theirs = rival.forward()
        row["their_out_error"] = rms(theirs[0].transpose(1, 2), exact)
        row["their_gradient_error"] = max(rms(g.transpose(1, 2), w) for g, w in zip(rival.backward(*theirs), wanted))
    return row


def main():
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--tile", default="host", choices=tiles.TILES)
    parser.add_argument("--against", choices=["torch"], help="what to time beside it")
    parser.add_argument("--dtype", default="float32", choices=["float16", "bfloat16", "float32", "float64"])
    parser.add_argument("--rows", type=int, nargs="+", default=[4096], help="queries and keys")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="head_dim")
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--kv-heads", type=int, default=0, help="K/V heads; 0: as many as heads")
    parser.add_argument("--masks", nargs="+", default=["full"], choices=MASKS, help="window: the last 512 keys")
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: this thread's own time, where neighbours share the cores")
    args = parser.parse_args()
    table, ceiling = Table(args.json), peak(args.dtype, CLOCKS[args.clock])
    for rows in args.rows:
        for dim in args.dims:
            for mask in args.masks:
                table.row(**measure(rows, dim, mask, args, ceiling))


if __name__ == "__main__":
    main()
