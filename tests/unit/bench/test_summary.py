"""The numbers of a report from scripted samples; the closed form against a simulation."""

import random

import pytest

from outrider.bench.prompts import Prompt, PromptSet
from outrider.bench.report import CellReport
from outrider.bench.runner import Cell, Run
from outrider.bench.sample import Sample
from outrider.bench.services import PLAIN, SPECULATIVE, Drafted
from outrider.bench.summary import closed_form, quantiles, summarised
from outrider.cli.options import ProposerName
from outrider.cli.stats import RunStats
from outrider.v1 import orchestrator_pb2 as pb
from tests.harness.counting_way import Counting

PROMPTS = PromptSet("set", (Prompt(prompt="a"), Prompt(prompt="b")))


def sample(ids: tuple[int, ...], *rounds: pb.Round, prompt: int = 0, seconds: float = 1.0) -> Sample:
    stats = RunStats(tokens=len(ids), seconds=seconds)
    for each in rounds:
        stats.add_round(each)
    arrivals = [seconds * (index + 1) / len(ids) for index in range(len(ids))]
    return Sample(prompt, arrivals, seconds, len(ids), ids, stats)


def cell(name: str, *runs: Run) -> Cell:
    return Cell(PROMPTS, 1, Counting(name), list(runs))


def reports(ours: Cell, plain: Cell, *, lookahead: int = 4, repeatable: bool = True) -> list[CellReport]:
    drafted = {SPECULATIVE: Drafted(lookahead, ProposerName.model)}
    return summarised([ours, plain], drafted, repeatable=repeatable)


def test_closed_form() -> None:
    assert closed_form(0.5, 0) == 1
    assert closed_form(0.8, 4) == pytest.approx((1 - 0.8**5) / 0.2)
    assert closed_form(1.0, 4) == 5
    assert closed_form(0.0, 4) == 1


def test_closed_form_meets_a_simulation_with_blocks_of_many_lengths() -> None:
    generator, alpha = random.Random(5), 0.7
    rounds = []
    for _ in range(40_000):
        drafted = generator.choice([0, 1, 2, 4])
        accepted = 0
        while accepted < drafted and generator.random() < alpha:
            accepted += 1
        rounds.append(pb.Round(drafted=drafted, accepted=accepted, target_passes=1))
    ours = cell(SPECULATIVE, Run(1.0, (sample((1, 2), *rounds),)))
    found = reports(ours, cell(PLAIN, Run(1.0, (sample((1, 2)),))))[0].rounds
    assert found is not None
    assert found.speculation is not None
    assert found.speculation.alpha == pytest.approx(alpha, abs=0.01)
    assert found.speculation.measured == pytest.approx(sum(closed_form(alpha, k) for k in (0, 1, 2, 4)) / 4, rel=0.01)
    assert found.speculation.closed_form_as_drafted == pytest.approx(found.speculation.measured, rel=0.005)
    assert found.speculation.closed_form == pytest.approx(closed_form(alpha, 4), rel=0.02)


def test_speeds_are_paired_by_turn_and_times_add_up() -> None:
    round_ = pb.Round(
        drafted=2,
        accepted=1,
        target_passes=1,
        draft_wait_micros=10_000,
        draft_forward_micros=8_000,
        verify_micros=30_000,
        verify_forward_micros=25_000,
        accept_micros=1_000,
        commit_micros=2_000,
        wire_bytes=300,
    )
    ours = cell(
        SPECULATIVE,
        Run(1.0, (sample((1, 2, 3), round_, seconds=0.05),)),
        Run(2.0, (sample((1, 2, 3), round_, seconds=0.05),)),
    )
    plain = cell(PLAIN, Run(2.0, (sample((1, 2, 3)),)), Run(8.0, (sample((1, 2, 3)),)))
    first, second = reports(ours, plain)
    assert second.speed_up is None
    assert first.speed_up is not None
    assert (first.speed_up.low, first.speed_up.median, first.speed_up.high) == (2.0, 3.0, 4.0)
    assert first.tokens_per_second.median == pytest.approx((3 + 1.5) / 2)
    assert (first.proposer, first.lookahead) == ("model", 4)
    assert first.rounds is not None
    assert first.rounds.bytes_per_token == 100
    times = first.rounds.times
    assert times is not None
    parts = times.draft_wait + times.verify_forward + times.verify_wait + times.accept + times.other
    assert parts == pytest.approx(times.round) == pytest.approx(50.0)
    assert (times.draft_wait, times.verify_wait, times.other, times.commit) == pytest.approx((10.0, 5.0, 9.0, 2.0))


def test_same_tokens_are_those_of_plain() -> None:
    plain = cell(PLAIN, Run(1.0, (sample((1, 2)), sample((5, 6), prompt=1))))
    ours = cell(SPECULATIVE, Run(1.0, (sample((1, 2)), sample((5, 7), prompt=1), sample((1, 2)), sample((1, 3)))))
    first, second = reports(ours, plain)
    assert (first.same_tokens, second.same_tokens) == (0.5, 1.0)
    # Without a seed two ways need not say the same.
    assert reports(ours, plain, repeatable=False)[0].same_tokens is None


def test_quantiles_interpolate_and_are_none_without_values() -> None:
    assert quantiles([]) is None
    found = quantiles([0.001 * value for value in range(101)])
    assert found is not None
    assert (found.p50, found.p95, found.p99) == pytest.approx((50, 95, 99))


def test_one_token_and_no_token_have_no_time_between_tokens() -> None:
    ours = cell(SPECULATIVE, Run(1.0, (sample((1,)), Sample(1, seconds=0.5))))
    first, _ = reports(ours, cell(PLAIN, Run(1.0, (sample((1,)),))))
    assert (first.inter_token, first.message_gap, first.rounds) == (None, None, None)
    assert first.time_to_first_token is not None
    assert first.end_to_end.p50 == pytest.approx(750)
