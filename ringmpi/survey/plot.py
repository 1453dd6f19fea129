"""Pictures of a profile and of a plan. Needs matplotlib (the extra ``plot``), and imports it only here.

Grey means little, black much; numbers and line styles say again what colours say, so that they read the same in print.
"""
from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..plan import Hide, Job, hides, price
from ..plan.machine import Machine
from ..profile.records import StepRow
from . import Report

STYLES = {"ring": "-", "bidirectional": "--", "double": "-.", "gather": ":"}
# With more cells than this, a heat map bears no numbers.
NUMBERED = 200


def pyplot() -> Any:
    """matplotlib, drawing to files."""
    try:
        import_module("matplotlib").use("Agg")
    except ImportError as missing:
        raise RuntimeError("pictures need matplotlib: pip install 'ringmpi[plot]'") from missing
    return import_module("matplotlib.pyplot")


def profile(report: Report, folder: str) -> list[str]:
    """Draws ``waits.png`` and ``ring.png`` of a report into a folder; returns their paths."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    laps = max(1, report.laps[0].laps)
    paths = [waits(report.trace.table, report.trace.order, laps, str(Path(folder, "waits.png")))]
    if report.timings:
        paths.append(ring(report, str(Path(folder, "ring.png"))))
    return paths


def waits(rows: list[StepRow], order: tuple[int, ...], laps: int, path: str) -> str:
    """A heat map of exposed wait: a row a rank, in ring order, a column a step; milliseconds a lap."""
    plt = pyplot()
    ways = sorted({row.backward for row in rows})
    shape = 2 + 5 * len(ways), 2 + 0.25 * min(len(order), 40)
    figure, axes = plt.subplots(1, len(ways), squeeze=False, figsize=shape, layout="constrained")
    cells = [_cells([row for row in rows if row.backward == way], order) * (1e3 / laps) for way in ways]
    top = max(float(its.max()) for its in cells) or 1.0
    for axis, way, its in zip(axes[0], ways, cells):
        image = axis.imshow(its, cmap="Greys", vmin=0, vmax=top, aspect="auto")
        axis.set(title="backward" if way else "forward", xlabel="step", ylabel="rank, in ring order")
        axis.set_xticks(range(its.shape[1])[:: max(1, its.shape[1] // 16)])
        axis.set_yticks(range(len(order))[:: max(1, len(order) // 32)], [order[i] for i in range(len(order))[:: max(1, len(order) // 32)]])
        for (i, j), value in np.ndenumerate(its if its.size <= NUMBERED else np.empty((0, 0))):
            axis.text(j, i, f"{value:.3g}", ha="center", va="center", color="white" if value > top / 2 else "black", fontsize=8)
    figure.colorbar(image, ax=axes[0].tolist(), label="exposed wait, ms a lap")
    return _saved(plt, figure, path)


def _cells(rows: list[StepRow], order: tuple[int, ...]) -> np.ndarray:
    seat = {rank: i for i, rank in enumerate(order)}
    cells = np.zeros((len(order), 1 + max(row.step for row in rows)))
    for row in rows:
        cells[seat[row.rank], row.step] = row.exposed
    return cells


def ring(report: Report, path: str) -> str:
    """The ring, its links as dark and wide as a hop of a block over them alone takes long."""
    plt = pyplot()
    size, order = max(t.nbytes for t in report.timings), report.trace.order
    times = {(t.src, t.dst): 1e3 * t.p50 for t in report.timings if t.nbytes == size and not t.together}
    figure, axis = plt.subplots(figsize=(7, 6), layout="constrained")
    shade = plt.matplotlib.colors.Normalize(0, max(times.values()))
    angle = np.pi / 2 - 2 * np.pi * np.arange(len(order)) / len(order)
    at = dict(zip(order, np.stack([np.cos(angle), np.sin(angle)], axis=1)))
    for (src, dst), time in times.items():
        arc = "arc3,rad=-0.3" if len(order) == 2 else "arc3,rad=0"
        dark = {"linewidth": 1 + 3 * shade(time), "color": plt.cm.Greys(0.35 + 0.65 * shade(time))}
        axis.annotate("", at[dst], at[src], arrowprops={"arrowstyle": "-|>", "connectionstyle": arc, "shrinkA": 16, "shrinkB": 16, **dark})
        if len(order) <= 32:
            beside = 0.41 * (at[src] + at[dst]) if len(order) > 2 else np.array([0.45 if src == order[0] else -0.45, 0])
            axis.text(*beside, f"{time:.3g}", ha="center", va="center", fontsize=9)
    for rank, (x, y) in at.items():
        axis.plot(x, y, "o", markersize=26 if len(order) <= 32 else 4, markerfacecolor="white", markeredgecolor="black")
        if len(order) <= 32:
            axis.text(x, y, str(rank), ha="center", va="center")
    axis.set(title=f"ranks in ring order; ms for {size:,} bytes, each link alone", xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    axis.axis("off")
    figure.colorbar(plt.cm.ScalarMappable(shade, plt.cm.Greys), ax=axis, label="median time one way, ms")
    return _saved(plt, figure, path)


def plan(job: Job, machine: Machine, path: str) -> str:
    """Time of a lap against the block, for every schedule, as a multiple of its tiles; and where a hop begins to hide."""
    plt = pyplot()
    rows = np.unique(np.geomspace(64, 64 * 4096, 25).astype(int))
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for axis, backward in zip(axes, (False, True)):
        curves = merged(_curves(job, machine, rows, backward))
        for name, times in curves.items():
            axis.plot(rows, times, STYLES[name.split()[0]], color="black")
            _name(axis, name, rows, times, [its for other, its in curves.items() if other != name])
        _mark(axis, hides(job, machine, backward), rows[0])
        axis.set(xscale="log", yscale="log", title="backward" if backward else "forward", xlabel="block, tokens a rank")
        axis.yaxis.set_major_locator(plt.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(plt.matplotlib.ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(plt.matplotlib.ticker.NullFormatter())
        axis.grid(True, which="major", color="0.85")
    # Room above the curves for the words.
    axes[0].set(ylabel="time of a lap / time of its tiles", ylim=(0.8, 2.5 * axes[0].get_ylim()[1]))
    figure.suptitle(f"{machine.name}: {job.ranks} ranks, {job.heads} heads of {job.head_dim}, {job.dtype}")
    return _saved(plt, figure, path)


def _curves(job: Job, machine: Machine, rows: np.ndarray, backward: bool) -> dict[str, np.ndarray]:
    """For every schedule, the time of a lap as a multiple of its tiles, at each number of tokens a rank."""
    names = [name for name in STYLES if name != "double" or machine.whole_nodes(job.ranks)]
    prices = {name: [price(replace(job, tokens=int(n) * job.ranks), machine, name, backward) for n in rows] for name in names}
    return {name: np.array([p.seconds / p.compute for p in its]) for name, its in prices.items()}


def merged(curves: dict[str, np.ndarray], near: float = 0.03) -> dict[str, np.ndarray]:
    """Curves by their names; those that nowhere differ by more than ``near`` are one, with all their names.

    >>> list(merged({"a": np.array([1.0, 2.0]), "b": np.array([1.0, 3.0]), "c": np.array([1.01, 2.0])}))
    ['a = c', 'b']
    """
    groups: list[tuple[list[str], np.ndarray]] = []
    for name, its in curves.items():
        same = next((names for names, other in groups if np.abs(np.log(its / other)).max() < near), None)
        if same:
            same.append(name)
        else:
            groups.append(([name], its))
    return {" = ".join(names): its for names, its in groups}


def apart(curve: np.ndarray, others: list[np.ndarray]) -> int:
    """Where, not near its ends, a curve is farthest from all others, and so its name stands best; with no others, at its height.

    >>> apart(np.array([1.0, 2.0, 2.0, 1.0]), [np.array([9.0, 1.9, 3.0, 9.0])])
    2
    """
    gaps = np.min([np.abs(np.log(curve / its)) for its in others], axis=0) if others else curve
    edge = len(curve) // 6 or 1
    return edge + int(np.argmax(gaps[edge:-edge]))


def _name(axis: Any, name: str, rows: np.ndarray, curve: np.ndarray, others: list[np.ndarray]) -> None:
    """A curve's name beside it: outside of its slope, and below it where another is close above."""
    i = apart(curve, others)
    nearest = min((its[i] for its in others), key=lambda other: abs(np.log(other / curve[i])), default=0.0)
    below, falls = 1 < nearest / curve[i] < 1.35, curve[i + 1] < curve[i - 1]
    side = "center" if abs(np.log(curve[i + 1] / curve[i - 1])) < 0.1 else "right" if below == falls else "left"
    axis.annotate(name, (rows[i], curve[i]), xytext=(0, -6 if below else 4), textcoords="offset points", fontsize=9, ha=side,
                  va="top" if below else "bottom", bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5})  # fmt: skip


def _mark(axis: Any, hide: Hide, first: int) -> None:
    """The block from which on no hop of the ring is waited for; and what hops cost nevertheless."""
    words, at, side = "no hop of the ring is waited for", first, "left"
    # Where hops are for a core to do, none may be waited for, and all cost.
    if hide.rows > first:
        axis.axvline(hide.rows, color="grey", linewidth=1)
        words, at, side = f"a hop of the ring hides\nfrom {hide.rows:,} tokens a rank", hide.rows, "right"
    if hide.core:
        words += ";\nwhat is above 1 then is\nthe core's work for it"
    axis.annotate(words, (at, 0.97), xycoords=("data", "axes fraction"), xytext=(-6 if side == "right" else 0, 0),
                  textcoords="offset points", ha=side, va="top", fontsize=9)  # fmt: skip


def _saved(plt: Any, figure: Any, path: str) -> str:
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
