"""What a starting system shows."""

import io
import logging

import pytest
from rich.console import Console

from outrider.cli.lines import Line
from outrider.cli.startup import StartupView
from outrider.cli.system import fair_threads
from outrider.lm import configured


def view(*, terminal: bool, logs: bool) -> tuple[StartupView, io.StringIO]:
    out = io.StringIO()
    return StartupView(Console(file=out, force_terminal=terminal, width=80), logs=logs), out


def progress_records(caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.INFO):
        report = configured.log_progress()
        for step in range(1001):
            report(step / 1000, "loading weights")
    return [record.getMessage() for record in caplog.records]


def test_progress_of_loading_is_logged_eleven_times(caplog: pytest.LogCaptureFixture) -> None:
    records = progress_records(caplog)
    assert len(records) == 11
    assert records[4] == "loading 40 % (loading weights)"


def test_a_terminal_shows_how_far_loading_is(caplog: pytest.LogCaptureFixture) -> None:
    shown, out = view(terminal=True, logs=False)
    with shown:
        shown.update("target", "loading")
        shown.log("target", Line(f"2026-01-01T00:00:00.000Z INFO m {progress_records(caplog)[4]}"))
    assert "40 %  loading weights" in out.getvalue()


def test_a_bar_of_a_library_shows_as_it_is() -> None:
    shown, out = view(terminal=True, logs=False)
    with shown:
        shown.update("target", "loading")
        shown.log("target", Line("model.safetensors: 12%", passing=True))
    assert "model.safetensors: 12%" in out.getvalue()


def test_a_pipe_gets_a_line_for_each_change_and_logs_when_wanted() -> None:
    for logs in (False, True):
        shown, out = view(terminal=False, logs=logs)
        with shown:
            for state in ("starting", "starting", "ready"):
                shown.update("target", state)
            shown.log("target", Line("INFO [x] hello"))
        lines = out.getvalue().splitlines()
        assert lines == ["target: starting", "target: ready", *(["target       INFO [x] hello"] if logs else [])]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (16, 8)])
def test_each_worker_gets_half_of_the_cores(cores: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    assert fair_threads() == threads
