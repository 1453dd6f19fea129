"""Pictures of a profile and of a plan. Needs matplotlib (the extra ``plot``), and imports it only here.

Grey means little, black much; numbers and line styles say again what colours say, so that they read the same in print.
"""
from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..plan import Job, hides, price
from ..plan.machine import Machine
from ..profile.records import StepRow
from . import Report

STYLES = ("-", "--", "-.", ":")
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
        for style, name in zip(STYLES, ("ring", "bidirectional", "double", "gather")):
            if name == "double" and (job.ranks % machine.ranks_per_node or job.ranks <= machine.ranks_per_node):
                continue
            prices = [price(replace(job, tokens=int(r) * job.ranks), machine, name, backward) for r in rows]
            axis.plot(rows, [p.seconds / p.compute for p in prices], style, color="black", label=name)
        hide = hides(job, machine, backward)
        if hide.rows > rows[0]:
            axis.axvline(hide.rows, color="grey", linewidth=1)
            words, at, side = f"a hop of the ring hides\nfrom {hide.rows:,} tokens a rank", hide.rows, "right"
        else:
            words, at, side = "no hop of the ring is waited for", rows[0], "left"
        axis.annotate(words, (at, 0.97), xycoords=("data", "axes fraction"), xytext=(-6 if side == "right" else 0, 0),
                      textcoords="offset points", ha=side, va="top", fontsize=9)  # fmt: skip
        axis.set(xscale="log", yscale="log", title="backward" if backward else "forward", xlabel="block, tokens a rank")
        axis.yaxis.set_major_locator(plt.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(plt.matplotlib.ticker.FormatStrFormatter("%g"))
        axis.grid(True, which="major", color="0.85")
    # Room above the curves for the words.
    axes[0].set(ylabel="time of a lap / time of its tiles", ylim=(0.9, 2.5 * axes[0].get_ylim()[1]))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(STYLES))
    figure.suptitle(f"{machine.name}: {job.ranks} ranks, {job.heads} heads of {job.head_dim}, {job.dtype}")
    return _saved(plt, figure, path)


def _saved(plt: Any, figure: Any, path: str) -> str:
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
