"""The CUDA tile on a GPU: operations a second of a pair, forward and backward.

    python bench/gpu.py                                            16,384 rows, every dtype, head_dim 64 and 128
    python bench/gpu.py --against torch                            beside PyTorch's scaled_dot_product_attention, where it is installed
    python bench/gpu.py --dtypes float64 --rows 4096 --masks full causal --json
    python bench/gpu.py --compile                                  every kernel into CuPy's cache, by all cores, and nothing else

A pass is 4 (forward) or 10 (backward) operations a number of head_dim for every query and key that meet; the backward
pass does 14, for it forms the scores twice. Timed from launch to the end of the stream, warm; the median of the runs.
"""
import importlib.util
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from driver import Table, arguments, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ringmpi import Mask, Run, Score
from ringmpi.pairs import Pair
from ringmpi.partial import Partial, accumulator
from ringmpi.tiles import cuda, registry

MASKS = {"full": Mask(), "causal": Mask(causal=True), "window": Mask(causal=True, window=(511, 0))}


class Problem:
    """A pair of runs on the device."""

    def __init__(self, xp, dtype, rows, dim, heads, mask):
        rng = np.random.default_rng(0)
        draw = lambda: xp.asarray(rng.standard_normal((1, rows, heads, dim), np.float32)).astype(dtype)  # noqa: E731
        self.q, self.k, self.v, self.dout = (draw() for _ in range(4))
        bounds = None if mask == Mask() else mask.bounds(np.arange(rows), rows, rows)[0]
        self.pair = Pair(slice(0, rows), slice(0, rows), Run(0, rows), Run(0, rows), bounds, Score().resolve(dim))
        self.met = rows * rows if bounds is None else int((bounds[1] - bounds[0]).sum())
        sums = accumulator(self.q.dtype)
        self.total = Partial.empty(self.q.shape, sums, xp)
        self.gradients = [xp.zeros(x.shape, sums) for x in (self.q, self.k, self.v)]
        self.xp, self.operations = xp, self.met * heads * dim

    def forward(self):
        for where, partial in cuda.forward(self.q, self.k, self.v, self.pair):
            cuda.merge(self.total, where, partial)
        self.xp.cuda.get_current_stream().synchronize()

    def backward(self):
        for _ in cuda.backward(self.q, self.k, self.v, self.dout, self.lse, self.delta, self.pair, *self.gradients):
            pass
        self.xp.cuda.get_current_stream().synchronize()

    def finish(self):
        out, self.lse = cuda.finish(self.total, self.q.dtype)
        self.delta = cuda.delta(self.dout, out)


class Torch:
    """PyTorch's attention on the same memory, by whichever of its kernels it takes."""

    def __init__(self, problem, causal):
        import torch

        self.torch, self.causal = torch, causal
        self.given = [self._given(x).requires_grad_() for x in (problem.q, problem.k, problem.v)]
        self.dout = self._given(problem.dout)

    def _given(self, x):
        """(batch, heads, tokens, head_dim), a view."""
        if x.dtype.name == "bfloat16":
            return self.torch.from_dlpack(x.view(np.int16)).view(self.torch.bfloat16).transpose(1, 2)
        return self.torch.from_dlpack(x).transpose(1, 2)

    def _attend(self):
        return self.torch.nn.functional.scaled_dot_product_attention(*self.given, is_causal=self.causal)

    def forward(self):
        with self.torch.no_grad():
            self._attend()
        self.torch.cuda.synchronize()

    def backward(self):
        self.torch.autograd.grad(self.out, self.given, self.dout, retain_graph=True)
        self.torch.cuda.synchronize()

    def finish(self):
        self.out = self._attend()


def rates(work, operations, args, prefix=""):
    """Operations a second of both passes, in 10^12."""
    forward = median(work.forward, args)
    work.finish()
    backward = median(work.backward, args)
    return {f"{prefix}forward_tflops": 4e-12 * operations / forward, f"{prefix}backward_tflops": 10e-12 * operations / backward}


def compiled(row):
    """Compiles a kernel for the device at hand; how many seconds it took."""
    began = time.perf_counter()
    cuda._compiled(cuda.device() or 0, *row)
    return row[1], time.perf_counter() - began


def compile_all(args):
    """Every kernel, in as many processes as there are cores: a first use would compile them one after the other."""
    rows = [*((row.file, row.name, row.shared) for row in registry.KERNELS), *(("rows.cu", name, 0) for name in registry.ROWS)]
    table, began = Table(args.json), time.perf_counter()
    if args.dry_run:
        done = [compiled(rows[-1])]
    else:
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
            done = list(pool.map(compiled, rows))
    table.row(kernels=len(done), seconds=time.perf_counter() - began, slowest=max(done, key=lambda one: one[1])[0])


def pretend():
    """The tests' device in the place of CuPy, and little to do for it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from emulator.device import Device, modules

    sys.modules.update(modules(Device()))


def main():
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="head_dim")
    parser.add_argument("--rows", type=int, default=16384, help="queries and keys")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--masks", nargs="+", default=["full", "causal"], choices=MASKS)
    parser.add_argument("--against", choices=["torch"], help="what to time beside it, for up to 32 bits, if it is installed")
    parser.add_argument("--compile", action="store_true", help="compile every kernel and stop")
    parser.add_argument("--dry-run", action="store_true", help="40 rows on the tests' pretended device: no figure means anything")
    args = parser.parse_args()
    if args.dry_run:
        pretend()
        args.rows, args.dims, args.heads, args.dtypes = 40, [64], 1, args.dtypes[:1]
    if args.compile:
        return compile_all(args)
    import cupy
    import ml_dtypes

    table, beside = Table(args.json), args.against and not args.dry_run and importlib.util.find_spec("torch")
    for dtype in args.dtypes:
        for dim in args.dims:
            for mask in args.masks:
                kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
                problem = Problem(cupy, kind, args.rows, dim, args.heads, MASKS[mask])
                row = rates(problem, problem.operations, args)
                # In float64 it writes all scores out; it has no window.
                if beside and dtype != "float64" and mask != "window":
                    row |= rates(Torch(problem, mask == "causal"), problem.operations, args, "torch_")
                elif beside:
                    row |= {"torch_forward_tflops": None, "torch_backward_tflops": None}
                table.row(dtype=dtype, dim=dim, rows=args.rows, mask=mask, **row)
    return None


if __name__ == "__main__":
    main()
