# SPDX-License-Identifier: Apache-2.0
"""The report's charts, as SVG: the same figures give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from figures import Row

mpl.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

# The colours of Okabe and Ito, which colour-blind people can tell apart; markers for print in black and white.
_STYLES = {
    "ours": ("#000000", "o"),
    "Python set": ("#E69F00", "s"),
    "Python int": ("#56B4E9", "^"),
    "NumPy bool": ("#009E73", "v"),
    "pyroaring": ("#F0E442", "D"),
    "hwloc by ctypes": ("#0072B2", "<"),
    "hwloc in C": ("#0072B2", ">"),
    "Go cpuset": ("#D55E00", "P"),
}
_OTHER = ("#CC79A7", "X")

# Of each chart: file, title, and the panels as (chapter, job).
_CHARTS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "check.svg",
        "Check of a choice of CPUs",
        tuple(
            ("Check of a choice", kind)
            for kind in ("one range", "one range, far end", "eight ranges", "every second CPU")
        ),
    ),
    (
        "algebra.svg",
        "CPU-set algebra on every second CPU",
        tuple(("CPU-set algebra", job) for job in ("union", "is disjoint", "count", "list")),
    ),
    (
        "lists.svg",
        "The kernel's list syntax",
        (
            ("Parsing", "one range"),
            ("Parsing", "every second CPU"),
            ("Formatting", "one range"),
            ("Formatting", "every second CPU"),
        ),
    ),
    (
        "placement.svg",
        "Placement",
        (
            ("Placement", "eight CPUs of one socket, fragmented"),
            ("Placement", "two fifths of whole machine, fragmented"),
        ),
    ),
    (
        "claims.svg",
        "A claim",
        (("Claims", "JSON to checked CPUs"), ("Files", "write and remove a record")),
    ),
    (
        "prepare.svg",
        "Prepare over the socket",
        (
            ("Prepare over the socket, p50", "1 claim in a call"),
            ("Prepare over the socket, p50", "32 claims in a call"),
        ),
    ),
)


def draw(rows: Sequence[Row], folder: Path) -> dict[str, str]:
    """Draw all charts that there are figures for.

    Returns
    -------
    dict of str to str
        The titles by file name.
    """
    settings = {"svg.hashsalt": "dracpu", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
    drawn = {}
    with mpl.rc_context(settings):
        for name, title, panels in _CHARTS:
            chosen = [
                (panel, found)
                for panel in panels
                if (found := [row for row in rows if (row.chapter, row.job) == panel and row.n is not None])
            ]
            if chosen:
                _draw(title, chosen, folder / name)
                drawn[name] = title
    return drawn


def _draw(title: str, panels: list[tuple[tuple[str, str], list[Row]]], path: Path) -> None:
    height = (len(panels) + 1) // 2
    figure, axes = plt.subplots(height, 2, figsize=(10, 3.4 * height + 1.1), sharey=True, squeeze=False)
    handles: dict[str, object] = {}
    for axis, (panel, rows) in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, rows, handles)
        axis.set_title(": ".join(panel) if panel[0] != title else panel[1], fontsize=10)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(f"{title}: time of one call (both scales logarithmic; lower is better)", fontsize=12)
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=min(len(handles), 5), frameon=False)
    figure.tight_layout(rect=(0, 0.09 if len(handles) > 5 else 0.06, 1, 1))
    # What makes two runs of matplotlib differ.
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    path.write_text("".join(line.rstrip() + "\n" for line in path.read_text().splitlines()))


def _draw_panel(axis: Axes, rows: list[Row], handles: dict[str, object]) -> None:
    rivals = dict.fromkeys(name for row in rows for name in row.rivals)
    for name in ("ours", *rivals):
        points = [(row.n, row.ours_s if name == "ours" else row.rivals.get(name)) for row in rows]
        points = [(n, seconds * 1e6) for n, seconds in points if seconds is not None]
        colour, marker = _STYLES.get(name, _OTHER)
        (line,) = axis.plot(
            *zip(*points, strict=True),
            color=colour,
            marker=marker,
            markersize=6,
            markeredgecolor="#444444",
            markeredgewidth=0.5,
            linewidth=2.6 if name == "ours" else 1.4,
            linestyle="--" if name in ("hwloc in C", "Go cpuset") else "-",
            zorder=3 if name == "ours" else 2,
        )
        handles.setdefault(name, line)
    sizes = [row.n for row in rows]
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [f"{n:,}" for n in sizes])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.tick_params(labelleft=True)
    axis.set_xlabel("CPUs of the machine")
    axis.set_ylabel("microseconds")
    axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
