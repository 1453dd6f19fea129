"""Orders and schedules on networks with shared and limited links, communication alone. Needs root.

    python bench/topology.py                     all networks
    python bench/topology.py --scene physical    those whose name contains a word
    python bench/topology.py --mpi openmpi       under another MPI of RINGMPI_MPIS (default: mpich, or the one that runs this)
    python bench/topology.py --json              one JSON object a network

Hosts are network namespaces on this machine (tests/network/lab.py), links token buckets. A row is a lap of blocks of 1 MiB,
forward or forward and backward's own lap: its seconds (median and least of the repeats, which all cases take in turns), the
order, and the speed-up over another row with the bound that it has to keep: the figures are ratios of one run.
"""
import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from launch import launchers
from network.lab import why_not
from network.scenes import SCENES, play, speedup


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", default="", help="a word of the names of the networks to measure")
    mpis = {mpi.name: mpi for mpi in launchers()}
    parser.add_argument("--mpi", choices=mpis, default="mpich" if "mpich" in mpis else next(iter(mpis)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    trouble = why_not()
    if trouble:
        parser.error(f"a network on this machine {trouble}")
    missed = 0
    for name, scene in SCENES.items():
        if args.scene in name:
            with scene.lab() as lab:
                found = play(scene, mpis[args.mpi], lab, args.repeats)
            print(json.dumps({"network": name, "mpi": args.mpi, **found}) if args.json else table(name, scene, found), flush=True)
            missed += sum(speedup(found, *pair) < least for pair, least in scene.ratios.items())
    return 1 if missed else 0


def table(name, scene, found):
    lines = [f"\n{name}: {len(scene.hosts)} ranks, blocks of {scene.nbytes >> 10} KiB"]
    for case, row in found.items():
        lines.append(f"  {case:26} {row['seconds']:8.3f} s  least {row['least']:7.3f} s  {row['schedule']:13} order "
                     f"{' '.join(map(str, row['order']))}")  # fmt: skip
    for (slow, fast), least in scene.ratios.items():
        lines.append(f"  {fast} over {slow}: {speedup(found, slow, fast):.2f}x (bound {least}x)")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
