"""Whom ``ringmpi profile`` names when something is slow: a late link, a slow link, a slow rank, nothing; twenty of each. Root.

    python bench/verdicts.py --repeats 20

Four hosts in network namespaces, joined in a ring of 400 Mbit/s wires (tests/network/lab.py); a wire has 5 ms of delay or a
quarter of the rate, or a rank takes 20 ms longer over every tile. Each row says how many were right.
"""
import sys
import time
from pathlib import Path

import driver

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from network.lab import why_not
from network.trials import HOSTS, KINDS, trial


def main():
    parser = driver.arguments(__doc__.split("\n")[0], repeats=20)
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas between")
    parser.add_argument("--seconds", type=float, default=3.0, help="each profile may take")
    args = parser.parse_args()
    if why_not():
        sys.exit(f"verdicts: {why_not()}")
    table = driver.Table(args.json)
    for kind in args.kinds.split(","):
        began, right, wrong = time.perf_counter(), 0, []
        for number in range(args.repeats):
            ok, said = trial(kind, number % HOSTS, args.seconds)
            right += ok
            wrong += [] if ok else [said]
        table.row(fault=kind.replace(" ", "-"), right=right, of=args.repeats, seconds_each=(time.perf_counter() - began) / args.repeats)
        for said in wrong:
            print(f"  wrong: {said}", file=sys.stderr)


if __name__ == "__main__":
    main()
