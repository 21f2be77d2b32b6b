from rich.console import Console

from outrider.cli.client import Generation
from outrider.cli.demo_runs import first_difference
from outrider.cli.report import Comparison, comparison_table, number, percent, reason_text, speed_up, summary
from outrider.cli.stats import RunStats
from outrider.v1 import orchestrator_pb2 as pb


def run_of(*accepted: int, drafted: int, tokens: int, seconds: float) -> RunStats:
    stats = RunStats(tokens=tokens, seconds=seconds)
    for count in accepted:
        stats.add_round(
            pb.Round(drafted=drafted, accepted=count, target_passes=1, wire_bytes=1000, verify_micros=25_000)
        )
    return stats


def compared(kind: str, speculative: RunStats, plain: RunStats) -> Comparison:
    return Comparison(kind, speculative, plain, draft="prompt_lookup", lookahead=8)


def shown(*comparisons: Comparison, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison_table(comparisons, title="Title", caption="Caption."))
    return console.export_text().splitlines()


def cells(lines: list[str], label: str) -> list[str]:
    line = next(line for line in lines if line.strip().startswith(label))
    return line.strip().removeprefix(label).split()


def test_table_shows_both_ways_side_by_side() -> None:
    fast = run_of(4, 0, drafted=4, tokens=6, seconds=0.05)
    slow = run_of(0, 0, 0, 0, 0, 0, drafted=0, tokens=6, seconds=0.15)
    lines = shown(compared("chat", fast, slow))
    assert cells(lines, "lookahead") == ["8", "0"]
    assert cells(lines, "tokens/s") == ["120.0", "40.0"]
    assert cells(lines, "target passes") == ["2", "6"]
    assert cells(lines, "tokens/pass") == ["3.00", "1.00"]
    assert cells(lines, "accepted at 1") == ["50%", "–"]
    assert cells(lines, "accepted at 4") == ["50%", "–"]
    assert cells(lines, "verify ms/round") == ["25.0", "25.0"]
    assert cells(lines, "bytes/token") == ["333", "1,000"]
    assert cells(lines, "speed-up") == ["3.00×"]


def test_three_kinds_fit_a_terminal_of_80_columns() -> None:
    stats = run_of(4, 4, drafted=8, tokens=1234, seconds=1.9)
    stats.wire_bytes, stats.target_passes = 1234 * 98_527, 400
    lines = shown(*(compared(kind, stats, stats) for kind in ("chat", "code", "quoting")))
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert cells(lines, "bytes/token") == ["98,527"] * 6


def test_i4_table_of_nothing_has_dashes() -> None:
    lines = shown(compared("chat", RunStats(), RunStats()))
    assert cells(lines, "tokens/s") == ["–", "–"]
    assert cells(lines, "speed-up") == ["–"]
    assert speed_up(compared("x", run_of(drafted=0, tokens=0, seconds=1.0), RunStats(seconds=1.0))) == "–"


def test_summary_counts_and_explains() -> None:
    result = Generation(stats=run_of(2, drafted=2, tokens=3, seconds=1.0))
    result.stats.add_round(pb.Round(plain_reason=pb.PLAIN_REASON_DRAFT_LATE))
    result.finish.MergeFrom(
        pb.Finish(
            reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(completion_tokens=3, accepted_tokens=2, bonus_tokens=1)
        )
    )
    text = summary(result)
    assert "3 tokens in 1.00 s (3.0 tokens/s, first after – ms), 0 prompt tokens, ended by length" in text
    assert "2 accepted, 0 recovered, 1 bonus, 0 plain" in text
    assert "acceptance 100%, by position 100% 100%" in text
    assert "rounds without a block: 1 draft late" in text


def test_summary_of_an_empty_generation() -> None:
    assert "acceptance –, by position –" in summary(Generation())


def test_a_summary_says_what_made_the_blocks_and_why() -> None:
    result = Generation()
    for proposer, drafted, choice in (
        (5, 3, "measured: suffix of model 1.20, suffix 2.00"),
        (5, 3, ""),
        (1, 2, ""),
        (1, 0, ""),
    ):
        result.stats.add_round(pb.Round(proposer=proposer, drafted=drafted, proposer_choice=choice))  # type: ignore[arg-type]
    lines = summary(result).splitlines()
    assert "blocks: 2 by suffix, 1 by model" in lines
    assert "proposer: measured: suffix of model 1.20, suffix 2.00" in lines


def test_words() -> None:
    assert (number(None), number(1234.56), percent(None), percent(0.426)) == ("–", "1,234.6", "–", "43%")
    assert reason_text(pb.PLAIN_REASON_VOCAB_MISMATCH) == "vocab mismatch"
    assert reason_text(99) == "reason 99"  # type: ignore[arg-type]


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], []) == 0
