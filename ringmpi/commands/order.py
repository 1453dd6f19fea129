"""order: where the ranks of this job stand, the ring through them, and what its hops cost against natural order."""
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from math import cos, pi, sin
from typing import Any

from ..cli import job, positive, ring_arguments, whole
from ..topology import Measured, Route, report


def arguments(parser: argparse.ArgumentParser) -> None:
    """The words of the command."""
    ring_arguments(parser)
    size, time = f"a block's size (default: {Measured.nbytes})", f"may take, about (default: {Measured.seconds:g})"
    parser.add_argument("--bytes", type=whole, help=f"of a message, for --order measured: {size}")
    parser.add_argument("--seconds", type=positive, help=f"how long --order measured {time}")
    parser.add_argument("--save", metavar="FILE.json", help="write the order, for --order FILE.json")
    parser.add_argument("--plot", metavar="FILE", help="draw the ring over the nodes or the torus: .png or .svg (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Makes the ring and tells of it. Collective."""
    if args.plot and not find_spec("matplotlib"):
        raise RuntimeError("--plot needs matplotlib: pip install 'ringmpi[plot]'")
    if args.order == "measured":
        args.order = f"measured:{args.bytes or Measured.nbytes}:{args.seconds or Measured.seconds}"
    elif args.bytes or args.seconds:
        raise ValueError(f"--bytes and --seconds are for --order measured; the order is {args.order}")
    with job(args) as ring:
        if args.save:
            ring.save_order(args.save)
        if ring.rank == 0:
            found = report(ring.route, ring.places)
            print(json.dumps(found) if args.json else "\n".join(words(found)), flush=True)
            if args.plot:
                plot(ring.route, found, args.plot)
    return 0


def words(found: dict[str, Any]) -> list[str]:
    """The report in words."""
    host = found["hosts"]
    nodes = "; ".join(f"{host[ranks[0]]}: {' '.join(map(str, ranks))}" for ranks in found["nodes"])
    lines = [
        f"nodes        {len(found['nodes'])} in ring order, with their ranks: {nodes}",
        f"order        {' '.join(map(str, found['order']))}",
        f"links        {found['links_between_nodes']} between nodes",
        *(f"{name} hop".ljust(13) + f"{amount(found[f'{name}_hop'], found)} (natural order {amount(found[f'natural_{name}_hop'], found)})"
          for name in ("worst", "mean")),
        f"source       {found['source']}",
    ]  # fmt: skip
    if "ring" in found:
        lines += [
            f"lower bound  {amount(found['lower_bound'], found)}: no order's worst hop is shorter",
            f"whole ring   {amount(found['ring'], found)} a step, all hops at once (natural order {amount(found['natural_ring'], found)}, "
            f"noise {found['noise']:.0%}); {found['pairs_measured']:.0%} of all pairs timed",
        ]
    return lines


def amount(cost: float, found: dict[str, Any]) -> str:
    """A cost with its unit."""
    return f"{cost * 1e3:.3f} ms" if found["unit"] == "seconds" else f"{cost:.3g} {found['unit']}"


# ----------------------------------------------------------------------------------------------------------- a picture


def plot(route: Route, found: dict[str, Any], path: str) -> None:
    """Draws every point of a torus, or every node round a circle in the order of its lowest rank, and the ring through them."""
    groups = places_to_draw(route, found["nodes"])
    where = positions(route, groups)
    of_rank = {rank: where[i] for i, ranks in enumerate(groups) for rank in ranks}
    figure = import_module("matplotlib.figure").Figure(figsize=(6, 6))
    axes = figure.subplots()
    for a, b in zip(found["order"], found["order"][1:] + found["order"][:1]):
        if of_rank[a] != of_rank[b]:
            axes.annotate("", of_rank[b], of_rank[a], arrowprops={"arrowstyle": "->", "shrinkA": 14, "shrinkB": 14, "color": "tab:blue"})
    for (x, y), ranks in zip(where, groups):
        label = f"{found['hosts'][ranks[0]]}\n{ranks[0]}" + (f" .. {ranks[-1]}" if len(ranks) > 1 else "")
        axes.text(x, y, label, ha="center", va="center", fontsize=8, bbox={"boxstyle": "round", "fc": "white"})
    axes.set(title=f"{len(found['order'])} ranks, {found['source']}: worst hop {amount(found['worst_hop'], found)}")
    axes.set_xlim(min(x for x, _ in where) - 0.5, max(x for x, _ in where) + 0.5)
    axes.set_ylim(min(y for _, y in where) - 0.5, max(y for _, y in where) + 0.5)
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight")


def places_to_draw(route: Route, nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks of every point of the torus, else of every node."""
    if route.torus is None or route.torus.coords is None:
        return [list(ranks) for ranks in nodes]
    points: dict[tuple[int, ...], list[int]] = {}
    for rank in route.order:
        points.setdefault(route.torus.coords[rank], []).append(rank)
    return list(points.values())


def positions(route: Route, nodes: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """Where to draw each node.

    >>> positions(Route((0, 1)), [[0], [1]])
    [(1.0, 0.0), (-1.0, 0.0)]
    """
    coords = route.torus.coords if route.torus else None
    if coords is not None and len(coords[0]) > 1:
        # Further dimensions go aslant, so that their planes lie beside each other.
        points = [coords[ranks[0]] for ranks in nodes]
        return [(p[-1] + sum(0.3 * z for z in p[:-2]), -p[-2] + sum(0.2 * z for z in p[:-2])) for p in points]
    place = {ranks[0]: i for i, ranks in enumerate(sorted(nodes, key=min))}
    angles = [2 * pi * place[ranks[0]] / len(nodes) for ranks in nodes]
    radius = max(1.0, len(nodes) / 6)
    return [(round(radius * cos(angle), 6), round(radius * sin(angle), 6)) for angle in angles]
