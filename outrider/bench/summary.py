"""From samples to the numbers of a report. Counts are summed before any ratio is taken."""

from collections.abc import Sequence
from statistics import median

import numpy as np

from outrider.bench.report import CellReport, Quantiles, Rounds, RoundTimes, RunReport, Speculation, Spread
from outrider.bench.runner import Cell, Run
from outrider.bench.sample import Sample
from outrider.bench.services import PLAIN, Drafted
from outrider.cli.report import reason_text
from outrider.cli.stats import RunStats, ratio, total

_MS = 1e3


def closed_form(alpha: float, lookahead: int) -> float:
    """(1 - alpha^(K+1)) / (1 - alpha): expected tokens of a round whose K draft tokens are each kept with probability
    alpha, as long as all before were (Leviathan et al. 2023, equation 1). K + 1 at alpha = 1."""
    return sum(alpha**kept for kept in range(lookahead + 1))


def summarised(cells: Sequence[Cell], drafted: dict[str, Drafted], *, repeatable: bool) -> list[CellReport]:
    """One report for each cell of a group, which holds a plain one.

    Args:
        drafted: how blocks were made, by the name of the way; ways that make none, or do not tell, are missing.
        repeatable: whether all ways are to give the same tokens.
    """
    plain = next(cell for cell in cells if cell.way.name == PLAIN)
    first = _first_answers(plain) if repeatable else {}
    return [_cell_report(cell, plain, drafted.get(cell.way.name, Drafted(0)), first) for cell in cells]


def _cell_report(cell: Cell, plain: Cell, drafted: Drafted, first: dict[int, tuple[int, ...]]) -> CellReport:
    samples = [sample for run in cell.runs for sample in run.samples]
    proposer = drafted.proposer.value if drafted.proposer and drafted.lookahead != 0 else ""
    return CellReport(
        prompt_set=cell.prompts.name,
        concurrency=cell.concurrency,
        way=cell.way.name,
        proposer=proposer,
        lookahead=drafted.lookahead,
        runs=[_run_report(run) for run in cell.runs],
        tokens_per_second=spread([run.tokens_per_second for run in cell.runs]),
        speed_up=None if cell is plain else _speed_up(cell, plain),
        time_to_first_token=quantiles([sample.arrivals[0] for sample in samples if sample.arrivals]),
        inter_token=quantiles([_inter_token(sample) for sample in samples if sample.tokens > 1 and sample.arrivals]),
        message_gap=quantiles([gap for sample in samples for gap in np.diff(sample.arrivals).tolist()]),
        end_to_end=_all_quantiles([sample.seconds for sample in samples]),
        same_tokens=_same_tokens(samples, first),
        rounds=_rounds(total(sample.stats for sample in samples), drafted.lookahead),
    )


def _run_report(run: Run) -> RunReport:
    return RunReport(
        seconds=run.seconds,
        requests=len(run.samples),
        tokens=run.tokens,
        tokens_per_second=run.tokens_per_second,
    )


def spread(values: Sequence[float]) -> Spread:
    """Of one or more numbers."""
    return Spread(median=median(values), low=min(values), high=max(values))


def quantiles(seconds: Sequence[float]) -> Quantiles | None:
    """Of times in seconds; None without any."""
    return _all_quantiles(seconds) if seconds else None


def _all_quantiles(seconds: Sequence[float]) -> Quantiles:
    p50, p95, p99 = (float(it) for it in np.percentile(np.array(seconds) * _MS, [50, 95, 99]))
    return Quantiles(p50=p50, p95=p95, p99=p99)


def _speed_up(cell: Cell, plain: Cell) -> Spread:
    pairs = zip(cell.runs, plain.runs, strict=True)
    return spread([ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in pairs])


def _inter_token(sample: Sample) -> float:
    return (sample.arrivals[-1] - sample.arrivals[0]) / (sample.tokens - 1)


def _first_answers(plain: Cell) -> dict[int, tuple[int, ...]]:
    answers: dict[int, tuple[int, ...]] = {}
    for sample in (sample for run in plain.runs for sample in run.samples):
        if sample.ids is not None:
            answers.setdefault(sample.prompt, sample.ids)
    return answers


def _same_tokens(samples: Sequence[Sample], first: dict[int, tuple[int, ...]]) -> float | None:
    known = [sample for sample in samples if sample.ids is not None and sample.prompt in first]
    return ratio(sum(sample.ids == first[sample.prompt] for sample in known), len(known))


def _rounds(stats: RunStats, lookahead: int | None) -> Rounds | None:
    if not stats.rounds:
        return None
    return Rounds(
        rounds=stats.rounds,
        target_passes=stats.target_passes,
        tokens_per_pass=stats.tokens_per_pass,
        bytes_per_token=stats.bytes_per_token if stats.wire_bytes else None,
        plain={reason_text(reason): count for reason, count in stats.plain.most_common()},
        times=_times(stats) if stats.verify_seconds else None,
        speculation=_speculation(stats, lookahead) if stats.drafted else None,
    )


def _times(stats: RunStats) -> RoundTimes:
    parts = {
        "draft_wait": stats.draft_seconds,
        "verify_forward": stats.verify_forward_seconds,
        "verify_wait": stats.verify_seconds - stats.verify_forward_seconds,
        "accept": stats.accept_seconds,
    }
    seconds = {
        **parts,
        "round": stats.seconds,
        "other": stats.seconds - sum(parts.values()),
        "commit": stats.commit_seconds,
        "draft_forward": stats.draft_forward_seconds,
    }
    return RoundTimes(**{name: value * _MS / stats.rounds for name, value in seconds.items()})


def _speculation(stats: RunStats, lookahead: int | None) -> Speculation:
    alpha = ratio(stats.accepted, stats.accepted + stats.rejections)
    return Speculation(
        drafted=stats.drafted,
        accepted=stats.accepted,
        alpha=alpha,
        kept_at=stats.acceptance_by_position,
        drafted_at=[stats.drafted_at[position] for position in sorted(stats.drafted_at)],
        closed_form=None if alpha is None or lookahead is None else closed_form(alpha, lookahead),
        closed_form_as_drafted=None if alpha is None else _as_drafted(stats, alpha),
        measured=ratio(stats.accepted + stats.rounds, stats.rounds),
    )


def _as_drafted(stats: RunStats, alpha: float) -> float:
    """The mean of the closed form over the rounds: alpha^(i+1) for every round with a draft token at position i."""
    kept = sum(count * alpha ** (position + 1) for position, count in stats.drafted_at.items())
    return 1 + kept / stats.rounds
