"""What the user sees while the system starts: one line for each process."""

import re
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from outrider.cli.lines import Line

_LONGEST_DETAIL = 60
# As workers log it, see outrider/lm/configured.py.
_LOADING = re.compile(r"\bloading (\d+) % \((.*)\)$")


class StartupView:
    """Live lines on a terminal, one plain line for each change elsewhere. Use as a context manager around the start.

    Args:
        console: where to show it.
        logs: whether the processes' own log lines are shown, each with its process' name before it.
    """

    def __init__(self, console: Console, *, logs: bool) -> None:
        self._console = console
        self._logs = logs
        self._tasks: dict[str, TaskID] = {}
        self._states: dict[str, str] = {}
        columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)

    def update(self, name: str, state: str) -> None:
        """Shows that a process is "starting", "loading" or "ready"."""
        if self._states.get(name) == state:
            return
        self._states[name] = state
        self._show(name, state)
        if not self._console.is_terminal:
            self._console.print(f"{name}: {state}")

    def log(self, name: str, line: Line) -> None:
        """A line that a process wrote to stderr; progress bars of a loading one become part of its line here."""
        if self._states.get(name) == "loading" and (detail := _progress(line)):
            self._show(name, f"loading  {detail[:_LONGEST_DETAIL]}")
        if self._logs and not line.passing:
            self._console.print(f"[dim]{name:<12}[/dim] {escape(line.text)}", highlight=False, soft_wrap=True)

    def _show(self, name: str, state: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task("", total=1)
        finished = 1 if state == "ready" else 0
        description = f"{name:<12} {escape(state)}"
        self._progress.update(self._tasks[name], description=description, completed=finished)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def _progress(line: Line) -> str:
    """How far a loading process says that it is; empty when the line is about something else."""
    if line.passing:
        return line.text
    found = _LOADING.search(line.text)
    return f"{found.group(1):>3} %  {found.group(2)}" if found else ""
