"""Runs a measurement of `outrider bench` and gives back its report, for the scripts here that judge or show one."""

from rich.console import Console

from outrider.bench.job import Job
from outrider.bench.measuring import run_job
from outrider.bench.report import Report
from outrider.cli.bench_view import BenchView
from outrider.cli.run import run
from outrider.cli.startup import StartupView


def measured(job: Job) -> Report:
    """The report. What a user can meet ends the program with one line, as in the commands."""
    reports: list[Report] = []

    async def work() -> None:
        console = Console(stderr=True)
        with BenchView(console) as view:
            reports.append(await run_job(job, StartupView(console, logs=False), view.begin, view.run))

    run(work(), farewell="interrupted: everything that was started has ended")
    return reports[0]
