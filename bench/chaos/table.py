"""What a soak prints: a line for each kind of fault, then the totals."""

from collections.abc import Iterator, Mapping
from statistics import median

from bench.chaos.clients import Tally
from bench.chaos.rounds import Record

_HEAD = ("fault", "injected", "lasted s", "median pause s", "longest pause s", "slowest recovery s")


def lines(records: Mapping[str, Record], tally: Tally) -> Iterator[str]:
    """The table, then the totals, as text."""
    rows = [_HEAD, *(_row(name, record) for name, record in sorted(records.items()))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        yield "  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))).rstrip()
    yield ""
    yield from totals(records, tally)


def totals(records: Mapping[str, Record], tally: Tally) -> Iterator[str]:
    """One figure a line."""
    yield f"faults injected  {sum(len(record.pauses) for record in records.values())}"
    yield f"sessions         {tally.sessions}"
    yield f"tokens           {tally.tokens}"
    yield f"lost             {tally.lost}"
    yield f"repeated         {tally.repeated}"
    yield f"differing        {tally.differing}"
    yield f"client errors    {len(tally.errors)}"
    slowest = max((pause for record in records.values() for pause in record.beyond), default=0.0)
    yield f"slowest recovery {slowest:.2f} s"


def _row(name: str, record: Record) -> tuple[str, ...]:
    figures = (max(record.lasted), median(record.pauses), max(record.pauses), max(record.beyond))
    return (name, str(len(record.pauses)), *(f"{figure:.2f}" for figure in figures))
