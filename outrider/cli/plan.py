"""`outrider plan`: how many targets and drafts it takes, from what was measured. docs/operations.md explains it."""

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from outrider.bench.report import CellReport, Report, Rounds, RoundTimes
from outrider.cli.options import LONGEST_LOOKAHEAD
from outrider.plan import Costs, Curve, Point, Pools, at, carried, continued, kept_evenly, pools

_MS = 1e-3
_CURVE = "MS[@N],..."

ReportFile = Annotated[
    Path | None, typer.Option("--report", help="report.json of `outrider bench`, at several concurrencies.")
]
Acceptance = Annotated[
    str,
    typer.Option(
        help="Share of draft tokens kept; or, by commas, of blocks kept up to each position.", metavar="A,..."
    ),
]
TargetPass = Annotated[
    str, typer.Option(help="Milliseconds of a target pass, at N positions: 20@1,36@16,99@144.", metavar=_CURVE)
]
DraftStep = Annotated[
    str, typer.Option(help="Milliseconds for a draft token, at N sessions of one draft worker.", metavar=_CURVE)
]
Rest = Annotated[float | None, typer.Option(min=0, help="Milliseconds of a round beside both: network, services.")]
Ahead = Annotated[
    float | None, typer.Option(min=0, max=1, help="Share of blocks that are there in time, drafted ahead.")
]
Sessions = Annotated[int, typer.Option(min=0, help="Sessions at once that are to be served.")]
Throughput = Annotated[float, typer.Option("--tokens-per-second", min=0, help="Or tokens a second of all together.")]
Speed = Annotated[
    float, typer.Option(min=0, help="Least tokens a second of a session; 0: half of what one alone gets.")
]
Most = Annotated[int, typer.Option("--most-sessions", min=1, max=4096, help="That a worker's KV cache holds.")]
MaxLookahead = Annotated[int, typer.Option(min=0, max=LONGEST_LOOKAHEAD, help="The orchestrator's --max-lookahead.")]


def plan(
    report: ReportFile = None,
    acceptance: Acceptance = "",
    target_pass: TargetPass = "",
    draft_step: DraftStep = "",
    rest: Rest = None,
    ahead: Ahead = None,
    sessions: Sessions = 0,
    tokens_per_second: Throughput = 0.0,
    speed: Speed = 0.0,
    most_sessions: Most = 256,
    max_lookahead: MaxLookahead = 16,
) -> None:
    """Size the pools: from acceptance and costs to the number of target and draft workers."""
    try:
        read = _from_report(report) if report else None
        if not (math.isfinite(tokens_per_second) and math.isfinite(speed)):
            raise ValueError("--tokens-per-second and --speed are finite numbers")
        if read is None and not (acceptance and target_pass and draft_step):
            raise ValueError("give --report, or --acceptance, --target-pass and --draft-step")
        kept = _kept(acceptance, max_lookahead) if acceptance else continued(read.kept if read else (), max_lookahead)
        costs = Costs(
            kept,
            _curve("--target-pass", target_pass) if target_pass or read is None else read.target_pass,
            _curve("--draft-step", draft_step) if draft_step or read is None else read.draft_step,
            rest * _MS if rest is not None else read.rest if read else 0.0,
            ahead if ahead is not None else read.ahead if read else 0.0,
        )
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    alone = at(costs, 1, most_sessions)
    full = carried(costs, speed or alone.speed / 2, most_sessions)
    console = Console(width=None if Console().is_terminal else 200)
    if full is None:
        console.print(f"One session alone gets {alone.speed:.3g} tokens/s: --speed {speed:g} is out of reach.")
        raise typer.Exit(1)
    steps = sorted({full.sessions, *(2**power for power in range(13) if 2**power < full.sessions)})
    console.print(_table([at(costs, count, most_sessions) for count in steps]))
    console.print("\n".join(_words(alone, pools(full, sessions=sessions, tokens_per_second=tokens_per_second))))


def _table(points: Iterable[Point]) -> Table:
    table = Table(title="a target with so many sessions", title_justify="left", box=SIMPLE_HEAD)
    for name in ("sessions", "lookahead", "tokens/pass", "round ms", "tokens/s each", "plain each", "speed-up", "all"):
        table.add_column(name, justify="right")
    for point in points:
        numbers = (point.tokens, 1e3 * point.round, point.speed, 1 / point.plain_round)
        cells = [str(point.sessions), str(point.lookahead), *(f"{each:.2f}" for each in numbers)]
        table.add_row(*cells, f"{point.speed_up:.2f}×", f"{point.sessions * point.speed:.0f}")
    return table


def _words(alone: Point, found: Pools) -> list[str]:
    full = found.full
    lines = [f"A target carries {full.sessions} sessions at {full.speed:.1f} tokens/s each."]
    if not alone.lookahead:
        lines.append("Speculation does not pay: run no draft workers.")
    elif not full.lookahead:
        lines.append("With so many sessions speculation does not pay; with few it does: a larger target pool, or none.")
    else:
        lines.append(f"A draft worker carries {full.draft_sessions} sessions.")
    if found.sessions:
        lines.append(
            f"For {found.sessions} sessions, {found.tokens_per_second:.0f} tokens/s: "
            f"{found.targets} target and {found.drafts} draft workers."
        )
    return lines


def _kept(text: str, longest: int) -> tuple[float, ...]:
    rates = [float(part) for part in text.split(",")]
    if not all(0 <= later <= rate <= 1 for rate, later in zip(rates, [*rates[1:], 0.0], strict=True)):
        raise ValueError(f"--acceptance {text}: shares in [0, 1] that do not rise")
    return kept_evenly(rates[0], longest) if len(rates) == 1 else continued(rates, longest)


def _curve(flag: str, text: str) -> Curve:
    try:
        pairs = [part.partition("@") for part in text.split(",")]
        return Curve(tuple(sorted((float(count or 1), float(ms) * _MS) for ms, _, count in pairs)))
    except ValueError as error:
        raise ValueError(f"{flag} {text}: {error}") from None


def _from_report(path: Path) -> Costs:
    """What the runs of a report cost, taking it that all sessions under way share a pass."""
    try:
        cells = [cell for cell in Report.model_validate_json(path.read_text()).cells if _told(cell)]
    except ValidationError as error:
        raise ValueError(f"{path} is no report of `outrider bench`: {error.error_count()} fields are wrong") from None
    drafted = [cell for cell in cells if cell.rounds and cell.rounds.speculation]
    if not drafted:
        raise ValueError(f"{path} has no run with blocks")
    passes, steps = defaultdict(list), defaultdict(list)
    kept: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for cell in cells:
        rounds, times = _of(cell)
        spoken = rounds.speculation
        positions = cell.concurrency * (1 + (spoken.drafted / rounds.rounds if spoken else 0.0))
        passes[positions].append(times.verify_forward * _MS * rounds.rounds / rounds.target_passes)
        if spoken:
            steps[float(cell.concurrency)].append(times.draft_forward * _MS * rounds.rounds / spoken.drafted)
            for position, pair in enumerate(zip(spoken.kept_at, spoken.drafted_at, strict=True)):
                kept[position].append(pair)
    _, lone = _of(min(drafted, key=lambda cell: cell.concurrency))
    shares = [
        sum(share * count for share, count in kept[at]) / sum(count for _, count in kept[at]) for at in sorted(kept)
    ]
    ahead = max(0.0, 1.0 - lone.draft_wait / lone.draft_forward) if lone.draft_forward else 0.0
    rest = max(0.0, lone.round - lone.draft_wait - lone.verify_forward) * _MS
    return Costs(tuple(shares), _rising(passes), _rising(steps), rest, ahead)


def _told(cell: CellReport) -> bool:
    return cell.way in ("speculative", "plain") and cell.rounds is not None and cell.rounds.times is not None


def _of(cell: CellReport) -> tuple[Rounds, RoundTimes]:
    assert cell.rounds
    assert cell.rounds.times
    return cell.rounds, cell.rounds.times


def _rising(points: dict[float, list[float]]) -> Curve:
    """Through the means; a mean below that of a smaller amount is chance."""
    amounts = sorted(points)
    return Curve(tuple(zip(amounts, accumulate(map(mean, (points[each] for each in amounts)), max), strict=True)))
