"""The report's figures as SVG."""

from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from outrider.bench.report import CellReport, Quantiles, Report, Speculation

_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the reader's font
    "svg.hashsalt": "outrider",  # the same report gives the same bytes
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
_WIDTH, _HEIGHT = 4.2, 3.2
_COLORS = ("tab:green", "tab:gray", "tab:blue", "tab:orange", "tab:purple", "tab:brown", "tab:pink", "tab:olive")
# Of a round, in its order.
_PARTS = {
    "draft_wait": "waiting for the block",
    "verify_forward": "the target's passes",
    "verify_wait": "rest of verifying",
    "accept": "acceptance",
    "other": "other",
}


def figures(report: Report) -> list[tuple[str, str]]:
    """(title, SVG) of each figure that the report has numbers for."""
    drawn = [
        ("Throughput against concurrency", _throughput(report)),
        ("Latency against concurrency", _latency(report)),
        ("Acceptance by position", _acceptance(report)),
        ("Where the time of a round goes", _times(report)),
        ("Tokens a round: measured and closed form", _closed_form(report)),
    ]
    with matplotlib.rc_context(_STYLE):
        return [(title, _svg(draw)) for title, draw in drawn if draw is not None]


_Draw = Callable[[], Figure]


def _svg(draw: _Draw) -> str:
    buffer = StringIO()
    draw().savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _sets(cells: Iterable[CellReport]) -> list[str]:
    return list(dict.fromkeys(cell.prompt_set for cell in cells))


def _ways(report: Report) -> dict[str, str]:
    """The colour of each way."""
    names = dict.fromkeys(cell.way for cell in report.cells)
    return {name: _COLORS[index % len(_COLORS)] for index, name in enumerate(names)}


def _panels(sets: Sequence[str], rows: int = 1) -> tuple[Figure, list[list[Axes]]]:
    """A column for each prompt set."""
    figure = Figure(figsize=(_WIDTH * len(sets), _HEIGHT * rows), layout="constrained")
    axes = figure.subplots(rows, len(sets), squeeze=False)
    for axis, name in zip(axes[0], sets, strict=True):
        axis.set_title(name)
    return figure, [list(row) for row in axes]


def _throughput(report: Report) -> _Draw:
    def draw() -> Figure:
        sets = _sets(report.cells)
        figure, (axes,) = _panels(sets)
        for axis, name in zip(axes, sets, strict=True):
            for way, color, cells in _lines(report, name):
                speeds = [cell.tokens_per_second for cell in cells]
                below = [it.median - it.low for it in speeds]
                above = [it.high - it.median for it in speeds]
                levels = [cell.concurrency for cell in cells]
                axis.errorbar(
                    levels, [it.median for it in speeds], [below, above], color=color, label=way, marker="o", capsize=3
                )
            _levels(axis, report)
            axis.set_ylabel("tokens/s, median and range")
            axis.set_ylim(bottom=0)
        axes[0].legend()
        return figure

    return draw


def _latency(report: Report) -> _Draw:
    def draw() -> Figure:
        sets = _sets(report.cells)
        figure, rows = _panels(sets, rows=3)
        kinds: list[tuple[str, Callable[[CellReport], Quantiles | None]]] = [
            ("first token, ms", lambda cell: cell.time_to_first_token),
            ("between tokens, ms", lambda cell: cell.inter_token),
            ("end to end, ms", lambda cell: cell.end_to_end),
        ]
        for axes, (label, pick) in zip(rows, kinds, strict=True):
            for axis, name in zip(axes, sets, strict=True):
                _latency_panel(axis, report, name, pick)
            axes[0].set_ylabel(f"{label}\np50, whisker to p95")
        rows[0][0].legend()
        return figure

    return draw


def _latency_panel(axis: Axes, report: Report, name: str, pick: Callable[[CellReport], Quantiles | None]) -> None:
    for way, color, cells in _lines(report, name):
        points = [(cell.concurrency, found) for cell in cells if (found := pick(cell)) is not None]
        if points:
            p50, p95 = [it.p50 for _, it in points], [it.p95 for _, it in points]
            whiskers = [[0.0] * len(points), [high - low for low, high in zip(p50, p95, strict=True)]]
            axis.errorbar([level for level, _ in points], p50, whiskers, color=color, label=way, marker="o", capsize=3)
    _levels(axis, report)
    axis.set_ylim(bottom=0)


def _lines(report: Report, prompt_set: str) -> list[tuple[str, str, list[CellReport]]]:
    """(way, colour, its cells by concurrency)."""
    lines = []
    for way, color in _ways(report).items():
        cells = [cell for cell in report.cells if (cell.way, cell.prompt_set) == (way, prompt_set)]
        if cells:
            lines.append((way, color, cells))
    return lines


def _levels(axis: Axes, report: Report) -> None:
    levels = report.settings.concurrencies
    axis.set_xscale("log", base=2)
    axis.set_xticks(levels, [str(level) for level in levels])
    axis.minorticks_off()
    axis.set_xlabel("requests under way")


def _speculated(report: Report) -> list[tuple[CellReport, Speculation]]:
    """The cells whose blocks are known."""
    return [
        (cell, cell.rounds.speculation)
        for cell in report.cells
        if cell.rounds is not None and cell.rounds.speculation is not None
    ]


def _acceptance(report: Report) -> _Draw | None:
    known = _speculated(report)
    if not known:
        return None

    def draw() -> Figure:
        sets = _sets(cell for cell, _ in known)
        figure, (axes,) = _panels(sets)
        for axis, name in zip(axes, sets, strict=True):
            for index, (cell, found) in enumerate(each for each in known if each[0].prompt_set == name):
                positions = range(1, len(found.kept_at) + 1)
                color = _COLORS[index % len(_COLORS)]
                axis.plot(positions, found.kept_at, color=color, marker="o", label=_label(cell))
                if found.alpha is not None:
                    axis.plot(positions, [found.alpha**position for position in positions], "--", color=color, lw=1)
            axis.set_xlabel("position in the block (dashed: alpha to that power)")
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
            axis.set_ylim(0, 1.02)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.legend()
        axes[0].set_ylabel("kept up to here")
        return figure

    return draw


def _label(cell: CellReport) -> str:
    return f"{cell.way}, {cell.concurrency} at once"


def _times(report: Report) -> _Draw | None:
    known = [(cell, cell.rounds.times) for cell in report.cells if cell.rounds is not None and cell.rounds.times]
    if not known:
        return None

    def draw() -> Figure:
        labels = [f"{cell.prompt_set}, {_label(cell)}" for cell, _ in known]
        figure = Figure(figsize=(2 * _WIDTH, 1.1 + 0.3 * len(known)), layout="constrained")
        axis = figure.subplots()
        left = [0.0] * len(known)
        for part, words in _PARTS.items():
            widths = [max(0.0, getattr(times, part)) for _, times in known]
            axis.barh(labels, widths, left=left, label=words)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axis.invert_yaxis()
        axis.set_xlabel("ms a round, mean")
        figure.legend(ncols=3, loc="outside upper center")
        return figure

    return draw


def _closed_form(report: Report) -> _Draw | None:
    known = [(cell, found) for cell, found in _speculated(report) if found.alpha is not None]
    if not known:
        return None

    def draw() -> Figure:
        labels = [f"{cell.prompt_set}, {_label(cell)}" for cell, _ in known]
        figure = Figure(figsize=(2 * _WIDTH, 1.0 + 0.5 * len(known)), layout="constrained")
        axis = figure.subplots()
        series: list[tuple[str, str, Callable[[Speculation], float | None]]] = [
            ("measured", "tab:green", lambda it: it.measured),
            ("closed form, blocks as they were", "tab:blue", lambda it: it.closed_form_as_drafted),
            ("closed form, full lookahead", "lightsteelblue", lambda it: it.closed_form),
        ]
        for index, (words, color, pick) in enumerate(series):
            places = [row + 0.26 * (index - 1) for row in range(len(known))]
            axis.barh(places, [pick(found) or 0.0 for _, found in known], height=0.24, color=color, label=words)
        axis.set_yticks(range(len(known)), labels)
        axis.invert_yaxis()
        axis.set_xlabel("tokens a round, mean")
        figure.legend(ncols=3, loc="outside upper center")
        return figure

    return draw
