"""Statistics in words and in a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from outrider.cli.client import Generation
from outrider.cli.stats import RunStats
from outrider.v1 import draft_pb2
from outrider.v1 import orchestrator_pb2 as pb

_NONE = "–"


@dataclass(frozen=True)
class Comparison:
    """One kind of prompt, run both ways.

    Attributes:
        kind: its name.
        speculative, plain: counts of all runs with blocks, and with lookahead 0.
        draft, lookahead: what made the blocks, and how long they might be; None: chosen each round.
    """

    kind: str
    speculative: RunStats
    plain: RunStats
    draft: str
    lookahead: int | None


def number(value: float | None, digits: int = 1) -> str:
    """A number, or a dash where there is none."""
    return _NONE if value is None else f"{value:,.{digits}f}"


def scaled(value: float | None, factor: float) -> float | None:
    """In another unit; None stays None."""
    return None if value is None else value * factor


def counted(count: int, noun: str) -> str:
    """ "1 thread", "2 threads"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def percent(value: float | None) -> str:
    """A share, or a dash where there is none."""
    return _NONE if value is None else f"{value:.0%}"


def summary(result: Generation) -> str:
    """A few lines on one generation."""
    stats, usage = result.stats, result.finish.usage
    first = scaled(result.first_token_seconds, 1e3)
    reason = pb.FinishReason.Name(result.finish.reason).removeprefix("FINISH_REASON_").lower()
    lines = [
        f"{usage.completion_tokens} tokens in {stats.seconds:.2f} s ({number(stats.tokens_per_second)} tokens/s, "
        f"first after {number(first, 0)} ms), {usage.prompt_tokens} prompt tokens, ended by {reason}",
        f"{usage.accepted_tokens} accepted, {usage.recovered_tokens} recovered, {usage.bonus_tokens} bonus, "
        f"{usage.plain_tokens} plain",
        f"{stats.rounds} rounds, {stats.target_passes} target passes, "
        f"{number(stats.tokens_per_pass, 2)} tokens per pass, {number(stats.bytes_per_token, 0)} wire bytes per token",
        f"acceptance {percent(stats.acceptance)}, by position "
        f"{' '.join(map(percent, stats.acceptance_by_position)) or _NONE}",
        f"draft {number(stats.draft_ms)} ms, verify {number(stats.verify_ms)} ms per round",
        f"seed {result.started.seed}, session {result.started.session_id}",
    ]
    return "\n".join(lines + _proposers(stats) + _plain_rounds(stats))


def logprob_table(tokens: Sequence[pb.Token]) -> str:
    """A line for each token: its text, its log probability, and the likeliest tokens at its position by id."""
    return "\n".join(
        f"{token.text!r:<16} {token.logprob:9.4f}"
        + "".join(f"  {each.id}: {each.logprob:.4f}" for each in token.top_logprobs)
        for token in tokens
    )


def _proposers(stats: RunStats) -> list[str]:
    """What made the blocks, and the newest reason where that was left to the orchestrator."""
    names = draft_pb2.Proposer.DESCRIPTOR.values_by_number
    made = [
        f"{count} by {names[kind].name.removeprefix('PROPOSER_').lower() if kind in names else kind}"
        for kind, count in stats.made_by.most_common()
    ]
    return ([f"blocks: {', '.join(made)}"] if made else []) + [f"proposer: {why}" for why in stats.choices[-1:]]


def _plain_rounds(stats: RunStats) -> list[str]:
    if not stats.plain:
        return []
    reasons = (f"{count} {reason_text(reason)}" for reason, count in stats.plain.most_common())
    return [f"rounds without a block: {', '.join(reasons)}"]


def reason_text(reason: "pb.PlainReason.ValueType") -> str:
    """A plain round's reason in words; unknown ones by their number."""
    names = pb.PlainReason.DESCRIPTOR.values_by_number
    name = names[reason].name if reason in names else f"reason {reason}"
    return name.removeprefix("PLAIN_REASON_").lower().replace("_", " ")


_Cell = Callable[[RunStats], str]


def _rows(positions: int) -> list[tuple[str, _Cell]]:
    """(label, cell) of each row of the table."""

    def at(index: int) -> _Cell:
        return lambda run: percent(dict(enumerate(run.acceptance_by_position)).get(index))

    return [
        ("tokens/s", lambda run: number(run.tokens_per_second)),
        ("tokens", lambda run: str(run.tokens)),
        ("rounds", lambda run: str(run.rounds)),
        ("target passes", lambda run: str(run.target_passes)),
        ("tokens/pass", lambda run: number(run.tokens_per_pass, 2)),
        *[(f"accepted at {index + 1}", at(index)) for index in range(positions)],
        ("draft ms/round", lambda run: number(run.draft_ms)),
        ("verify ms/round", lambda run: number(run.verify_ms)),
        ("bytes/token", lambda run: number(run.bytes_per_token, 0)),
    ]


def comparison_table(comparisons: Sequence[Comparison], *, title: str, caption: str) -> Table:
    """Every number of every kind, speculative beside lookahead 0."""
    table = Table(title=title, caption=caption, caption_justify="left", title_justify="left")
    table.box, table.show_edge, table.padding = SIMPLE_HEAD, False, 0
    table.add_column("", no_wrap=True)
    for each in comparisons:
        table.add_column(f"{each.kind}\n{each.draft}", justify="right", style="green")
        table.add_column("\nplain", justify="right")
    table.add_row(
        "lookahead",
        *(cell for each in comparisons for cell in ("auto" if each.lookahead is None else str(each.lookahead), "0")),
    )
    runs = [run for each in comparisons for run in (each.speculative, each.plain)]
    for label, cell in _rows(max((len(run.drafted_at) for run in runs), default=0)):
        table.add_row(label, *map(cell, runs))
    table.add_section()
    table.add_row("speed-up", *(cell for each in comparisons for cell in (speed_up(each), "")), style="bold")
    return table


def speed_up(each: Comparison) -> str:
    """How many times faster the speculative runs were, or a dash."""
    fast, slow = each.speculative.tokens_per_second, each.plain.tokens_per_second
    return f"{fast / slow:.2f}×" if fast is not None and slow else _NONE
