"""A report in words and tables, for the terminal and for the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.table import Table as RichTable

from outrider.bench.report import CellReport, Quantiles, Report, RoundTimes, Speculation, Spread
from outrider.bench.services import SPECULATIVE
from outrider.cli.report import counted, number, percent

_NONE = "–"
_WAY, _WAY_WIDTH = 2, 12


@dataclass(frozen=True)
class Table:
    """Rows of text.

    Attributes:
        names: how many of the first columns are names, not numbers.
        note: below it.
    """

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    names: int = 3
    note: str = ""


_Cell = Callable[[CellReport], str]
_NAMES: tuple[tuple[str, _Cell], ...] = (
    ("prompts", lambda cell: cell.prompt_set),
    ("at once", lambda cell: str(cell.concurrency)),
    ("way", lambda cell: cell.way),
)


def facts(report: Report) -> list[tuple[str, str]]:
    """(name, value) of what was measured, where and how."""
    served, machine, asked = report.served, report.machine, report.settings
    threads = "unknown threads"
    if served.target_threads is not None and served.draft_threads is not None:
        threads = f"{counted(served.target_threads, 'thread')} for the target, {served.draft_threads} for the draft"
    law = "greedy" if asked.temperature == 0 else f"temperature {asked.temperature:g}"
    seed = "" if asked.seed is None else f", seed {asked.seed}"
    rule = f", {asked.acceptance} acceptance" if asked.acceptance else ""
    ends = ", past the end of the sequence" if asked.ignore_eos else ""
    load = "" if machine.load_before is None else f", load average before {machine.load_before:.2f}"
    return [
        ("made", f"{report.created:%Y-%m-%d %H:%M} UTC, outrider {served.outrider}"),
        ("target", f"{served.target}, {served.dtype or 'unknown dtype'}, {threads}"),
        ("draft", ", ".join(served.drafts) or "none in use"),
        ("system", f"running at {served.address}" if served.address else "started for this report"),
        ("machine", f"{machine.processor or machine.system}, {counted(machine.cores, 'core')}{load}"),
        ("software", f"Python {machine.python}, torch {machine.torch}, transformers {machine.transformers}"),
        ("asked", f"{law}{seed}{rule}, at most {counted(asked.max_tokens, 'token')}{ends}"),
        ("runs", f"{asked.repeats} of each way, taking turns, after a short one that does not count"),
    ]


def tables(report: Report) -> list[Table]:
    """Everything that is in the report."""
    made = [_speed(report), _latencies(report), _rounds(report), _times(report), _speculation(report)]
    made += [_plain_rounds(report), _memory(report), _not_measured(report)]
    return [table for table in made if table.rows]


def summary_table(report: Report) -> RichTable:
    """What fits on a terminal of 80 columns: the speed and the gist of the rest, a row a cell."""
    columns: list[tuple[str, _Cell]] = [
        ("prompts", lambda cell: cell.prompt_set),
        ("at\nonce", lambda cell: str(cell.concurrency)),
        ("way", lambda cell: cell.way),
        ("tokens/s", lambda cell: number(cell.tokens_per_second.median)),
        ("range", lambda cell: f"{number(cell.tokens_per_second.low, 0)}–{number(cell.tokens_per_second.high, 0)}"),
        ("×\nplain", lambda cell: _field(cell.speed_up, "median", 2)),
        ("first\nms", lambda cell: _field(cell.time_to_first_token, "p50", 0)),
        ("token\nms", lambda cell: _field(cell.inter_token, "p50", 1)),
        ("tok/\npass", lambda cell: _field(cell.rounds, "tokens_per_pass", 2)),
        ("α", lambda cell: _of_speculation(cell, lambda it: percent(it.alpha))),
        ("same", lambda cell: percent(cell.same_tokens)),
    ]
    table = RichTable(box=SIMPLE_HEAD, show_edge=False, padding=0)
    for index, (head, _) in enumerate(columns):
        justify: JustifyMethod = "left" if index in (0, _WAY) else "right"
        table.add_column(head, justify=justify, no_wrap=index != _WAY, min_width=_WAY_WIDTH if index == _WAY else None)
    last: tuple[str, int] | None = None
    for cell in report.cells:
        if last is not None and last != (cell.prompt_set, cell.concurrency):
            table.add_section()
        last = cell.prompt_set, cell.concurrency
        table.add_row(*(text(cell) for _, text in columns), style="green" if cell.way == SPECULATIVE else "")
    return table


def _made(title: str, cells: Sequence[CellReport], columns: Sequence[tuple[str, _Cell]], note: str = "") -> Table:
    every = (*_NAMES, *columns)
    rows = [tuple(text(cell) for _, text in every) for cell in cells]
    return Table(title, tuple(head for head, _ in every), rows, note=note)


def _speed(report: Report) -> Table:
    columns: list[tuple[str, _Cell]] = [
        ("proposer", lambda cell: cell.proposer or _NONE),
        ("lookahead", lambda cell: "auto" if cell.lookahead is None else str(cell.lookahead)),
        ("requests", lambda cell: str(sum(run.requests for run in cell.runs))),
        ("tokens", lambda cell: str(sum(run.tokens for run in cell.runs))),
        ("tokens/s (range)", lambda cell: _spread(cell.tokens_per_second)),
        ("× plain (range)", lambda cell: _spread(cell.speed_up, 2)),
        ("same tokens", lambda cell: percent(cell.same_tokens)),
    ]
    note = "Medians of the runs with their range; × plain compares runs of the same turn."
    return _made("Speed", report.cells, columns, note)


def _latencies(report: Report) -> Table:
    columns: list[tuple[str, _Cell]] = [
        ("first token", lambda cell: _quantiles(cell.time_to_first_token)),
        ("between tokens", lambda cell: _quantiles(cell.inter_token, 1)),
        ("between messages", lambda cell: _quantiles(cell.message_gap, 1)),
        ("end to end", lambda cell: _quantiles(cell.end_to_end)),
    ]
    note = (
        "Milliseconds, p50 / p95 / p99 over all requests. Prompts were cached by the run before: the first token does "
        "not hold the time of a long prompt."
    )
    return _made("Latency", report.cells, columns, note)


def _rounds(report: Report) -> Table:
    cells = [cell for cell in report.cells if cell.rounds is not None]
    columns: list[tuple[str, _Cell]] = [
        ("rounds", lambda cell: _field(cell.rounds, "rounds", 0)),
        ("target passes", lambda cell: _field(cell.rounds, "target_passes", 0)),
        ("tokens/pass", lambda cell: _field(cell.rounds, "tokens_per_pass", 2)),
        ("wire bytes/token", lambda cell: _field(cell.rounds, "bytes_per_token", 0)),
    ]
    note = "A pass counts for every session that it held."
    return _made("Rounds", cells, columns, note)


def _times(report: Report) -> Table:
    cells = [cell for cell in report.cells if cell.rounds is not None and cell.rounds.times is not None]

    def part(name: str) -> _Cell:
        return lambda cell: number(getattr(_times_of(cell), name), 2)

    names = RoundTimes.model_fields
    columns = [(name.replace("_", " "), part(name)) for name in names]
    note = " ".join(f"{name.replace('_', ' ')}: {field.description}." for name, field in names.items())
    return _made("Where the time of a round goes, ms", cells, columns, note)


def _times_of(cell: CellReport) -> RoundTimes:
    assert cell.rounds is not None
    assert cell.rounds.times is not None
    return cell.rounds.times


def _speculation(report: Report) -> Table:
    cells = [cell for cell in report.cells if cell.rounds is not None and cell.rounds.speculation is not None]

    def column(text: Callable[[Speculation], str]) -> _Cell:
        return lambda cell: _of_speculation(cell, text)

    columns = [
        ("drafted", column(lambda it: str(it.drafted))),
        ("accepted", column(lambda it: str(it.accepted))),
        ("alpha", column(lambda it: percent(it.alpha))),
        ("kept at position 1, 2, …", column(lambda it: " ".join(map(percent, it.kept_at)))),
        ("tokens a round", column(lambda it: number(it.measured, 2))),
        ("closed form", column(lambda it: number(it.closed_form_as_drafted, 2))),
        ("closed form, full lookahead", column(lambda it: number(it.closed_form, 2))),
    ]
    note = (
        "alpha is the share of decided draft tokens that were kept; the closed form (1 − alpha^(K+1)) / (1 − alpha) "
        "takes it to be the same at every position and in every context. As drafted, K is each round's own."
    )
    return _made("Speculation, measured and closed form", cells, columns, note)


def _of_speculation(cell: CellReport, text: Callable[[Speculation], str]) -> str:
    found = cell.rounds.speculation if cell.rounds is not None else None
    return _NONE if found is None else text(found)


def _plain_rounds(report: Report) -> Table:
    rows = [
        (cell.prompt_set, str(cell.concurrency), cell.way, reason, str(count))
        for cell in report.cells
        if cell.rounds is not None and cell.lookahead != 0
        for reason, count in cell.rounds.plain.items()
    ]
    heads = (*(head for head, _ in _NAMES), "reason", "rounds")
    return Table("Rounds without a block", heads, rows, names=4)


def _memory(report: Report) -> Table:
    rows = [(each.service, number(each.peak_bytes / 2**20, 0)) for each in report.memory]
    return Table("Peak memory of the services", ("service", "MiB"), rows, names=1, note="Largest resident set.")


def _not_measured(report: Report) -> Table:
    rows = [(each.prompt_set, str(each.concurrency), each.way, each.reason) for each in report.not_measured]
    return Table("Not measured", (*(head for head, _ in _NAMES), "because"), rows, names=4)


def _field(part: BaseModel | None, name: str, digits: int) -> str:
    """A number of a part of the report; a dash where there is no such part."""
    return number(None if part is None else getattr(part, name), digits)


def _spread(values: Spread | None, digits: int = 1) -> str:
    if values is None:
        return _NONE
    middle, low, high = (number(it, digits) for it in (values.median, values.low, values.high))
    return f"{middle} ({low}–{high})"


def _quantiles(values: Quantiles | None, digits: int = 0) -> str:
    if values is None:
        return _NONE
    return " / ".join(number(it, digits) for it in (values.p50, values.p95, values.p99))
