"""What the user sees of a measurement: a bar while it runs, one table at the end."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.bench.report import Report
from outrider.bench.runner import Cell
from outrider.bench.tables import facts, summary_table

_WIDE = 200


class BenchView:
    """A progress bar on a terminal, one plain line for each cell elsewhere. A context manager around the measurement.

    Args:
        console: where to show it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
        self._runs = 0

    def begin(self, runs: int) -> None:
        """So many runs follow."""
        if self._console.is_terminal:
            self._progress.start()
        self._task = self._progress.add_task("", total=runs)

    def run(self, cell: Cell, turn: int) -> None:
        """A run begins; turn 0 is the warm-up."""
        name = f"{cell.prompts.name}, {cell.concurrency} at once, {cell.way.name}"
        self._progress.update(self._task, completed=self._runs, description=f"{name}, {turn or 'warm-up'}")
        self._runs += 1
        if not self._console.is_terminal and turn == 0:
            self._console.print(name, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:  # elsewhere stopping prints an empty line
            self._progress.stop()


def show(report: Report) -> None:
    """The facts and the summary, on stdout."""
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    for name, value in facts(report):
        console.print(f"{name:<9} {value}", highlight=False, markup=False, soft_wrap=True)
    console.print()
    console.print(summary_table(report))
