"""The CUDA tile on a GPU: operations a second of a pair, forward and backward.

    python bench/gpu.py                                            16,384 rows, every dtype, head_dim 64 and 128
    python bench/gpu.py --dtypes float64 --rows 4096 --masks full causal --json

A pass is 4 (forward) or 10 (backward) operations a number of head_dim for every query and key that meet; the backward
pass does 14, for it forms the scores twice. Timed from launch to the end of the stream, warm; the median of the runs.
"""
import sys
from pathlib import Path

import numpy as np
from driver import Table, arguments, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ringmpi import Mask, Run, Score
from ringmpi.pairs import Pair
from ringmpi.partial import Partial, accumulator
from ringmpi.tiles import cuda

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
        self.total = Partial.empty(xp.empty(self.q.shape, sums))
        self.gradients = [xp.zeros(x.shape, sums) for x in (self.q, self.k, self.v)]
        self.xp, self.operations = xp, self.met * heads * dim

    def forward(self):
        for where, partial in cuda.forward(self.q, self.k, self.v, self.pair):
            cuda.merge(self.total.at(*where), partial)
        self.xp.cuda.get_current_stream().synchronize()

    def backward(self):
        for _ in cuda.backward(self.q, self.k, self.v, self.dout, self.lse, self.delta, self.pair, *self.gradients):
            pass
        self.xp.cuda.get_current_stream().synchronize()

    def finish(self):
        out, self.lse = cuda.finish(self.total, self.q.dtype)
        self.delta = cuda.delta(self.dout, out)


def main():
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="head_dim")
    parser.add_argument("--rows", type=int, default=16384, help="queries and keys")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--masks", nargs="+", default=["full", "causal"], choices=MASKS)
    args = parser.parse_args()
    import cupy
    import ml_dtypes

    table = Table(args.json)
    for dtype in args.dtypes:
        for dim in args.dims:
            for mask in args.masks:
                kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
                problem = Problem(cupy, kind, args.rows, dim, args.heads, MASKS[mask])
                forward = median(problem.forward, args)
                problem.finish()
                backward = median(problem.backward, args)
                rates = {"forward_tflops": 4e-12 * problem.operations / forward, "backward_tflops": 10e-12 * problem.operations / backward}
                table.row(dtype=dtype, dim=dim, rows=args.rows, mask=mask, **rates)


if __name__ == "__main__":
    main()
