"""What the benchmarks share: warm-up, repeats and medians, and rows that are printed as a table or as JSON lines."""
import argparse
import json
import statistics
import time


def arguments(purpose, repeats=5):
    """A parser with the words that all benchmarks know."""
    parser = argparse.ArgumentParser(description=purpose, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats, help="timed runs, of which the median is shown")
    parser.add_argument("--warmup", type=int, default=1, help="runs before them")
    parser.add_argument("--json", action="store_true", help="a JSON object a row")
    return parser


def median(work, args):
    """The median of the seconds that ``work`` takes."""
    seconds = []
    for run in range(args.warmup + args.repeats):
        began = time.perf_counter()
        work()
        if run >= args.warmup:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


class Table:
    """Rows of the same columns; the heads are printed above the first."""

    def __init__(self, as_json=False):
        self.as_json, self.heads = as_json, None

    def row(self, **columns):
        """Prints a row. A column's name ends with its unit, as in ``time_ms``."""
        if self.as_json:
            return print(json.dumps(columns), flush=True)
        if self.heads is None:
            self.heads = {name: max(len(name), 10) for name in columns}
            print("  ".join(f"{name:>{width}}" for name, width in self.heads.items()))
        words = {name: f"{x:.4g}" if isinstance(x, float) else str(x) for name, x in columns.items()}
        print("  ".join(f"{words[name]:>{width}}" for name, width in self.heads.items()), flush=True)
