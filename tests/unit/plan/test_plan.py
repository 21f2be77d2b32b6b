"""The arithmetic of `outrider plan`, against closed forms."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.plan import Costs, Curve, at, carried, continued, expected_tokens, kept_evenly, pools, round_seconds

FREE = Curve(((1.0, 0.0),))


def constant(seconds: float) -> Curve:
    return Curve(((1.0, seconds),))


def test_expected_tokens_are_the_geometric_sum() -> None:
    for rate in (0.0, 0.3, 0.9):
        for lookahead in (0, 1, 5, 16):
            closed = (1 - rate ** (lookahead + 1)) / (1 - rate)
            assert expected_tokens(kept_evenly(rate, 16), lookahead) == pytest.approx(closed)
    assert expected_tokens(kept_evenly(1.0, 8), 8) == 9


def test_acceptance_by_position_goes_on_as_it_ended() -> None:
    assert continued([0.8, 0.4], 4) == pytest.approx((0.8, 0.4, 0.2, 0.1))
    assert continued([0.8, 0.4, 0.1], 2) == (0.8, 0.4)
    assert continued([0.5], 3) == pytest.approx(kept_evenly(0.5, 3))
    assert continued([0.5, 0.0], 3) == (0.5, 0.0, 0.0)
    assert continued([], 3) == ()


def test_a_curve_is_linear_between_points_and_beyond_them() -> None:
    curve = Curve(((1.0, 10.0), (5.0, 18.0), (9.0, 30.0)))
    assert [curve(amount) for amount in (0.5, 1, 3, 5, 7, 9, 11)] == [10, 10, 14, 18, 24, 30, 36]
    assert constant(7.0)(1000) == 7.0
    no_amounts = ((), ((2.0, 1.0), (1.0, 1.0)), ((-1.0, 1.0),), ((1.0, 1.0), (math.nan, 2.0)), ((math.inf, 1.0),))
    # Falling times would be negative further on.
    no_times = (((1.0, -1.0),), ((1.0, math.nan),), ((1.0, 1.0), (2.0, math.inf)), ((1.0, 30.0), (16.0, 20.0)))
    for faulty, words in ((no_amounts, "rising amounts"), (no_times, "times that are not negative")):
        for points in faulty:
            with pytest.raises(ValueError, match=words):
                Curve(points)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("cost", [0.01, 0.1, 0.5])
def test_one_session_gets_the_speed_up_of_the_paper(rate: float, cost: float) -> None:
    """Leviathan et al. 2023, theorem 3.8: (1 - a^(k+1)) / ((1 - a)(k c + 1)), at the k where it is largest."""
    costs = Costs(kept_evenly(rate, 16), constant(1.0), constant(cost))
    found = at(costs, 1, 1)
    closed = [(1 - rate ** (k + 1)) / ((1 - rate) * (k * cost + 1)) for k in range(17)]
    assert found.speed_up == pytest.approx(max(closed))
    assert found.lookahead == closed.index(max(closed))
    # Corollary 3.9: it pays exactly where a > c.
    assert (found.lookahead > 0) == (rate > cost)


def test_sessions_that_take_turns_hide_what_is_no_pass() -> None:
    costs = Costs((), constant(1.0), FREE, rest=1.0)
    assert round_seconds(costs, 1, 0, 0) == 2.0
    # Two passes in turn take as long as one and what is between; a constant pass for all is no shorter.
    assert round_seconds(costs, 2, 0, 0) == 2.0
    growing = Costs((), Curve(((0.0, 0.0), (1.0, 1.0))), FREE, rest=1.0)
    # Four in one pass: 4 + 1. In two turns: max(2 + 1, 4); in four: max(1 + 1, 4).
    assert round_seconds(growing, 4, 0, 0) == 4.0


def test_blocks_that_were_drafted_ahead_are_not_waited_for() -> None:
    costs = Costs((0.5,), constant(1.0), constant(0.5), ahead=0.5)
    assert round_seconds(costs, 1, 1, 1) == 1.25


def test_a_draft_worker_is_shared_as_long_as_it_costs_a_tenth() -> None:
    # A step takes 0.1 and as much again for every further session; a round of one token is 1 + 0.1 m.
    costs = Costs((1.0,), constant(1.0), Curve(((0.0, 0.0), (1.0, 0.1))))
    shared = math.floor((1.1 / 0.9 - 1) / 0.1)
    assert at(costs, 1, 100).draft_sessions == shared == 2
    assert at(costs, 1, 1).draft_sessions == 1


def test_pools_for_sessions_and_for_tokens() -> None:
    # A pass of n sessions takes n: one alone has 1 token/s, four have a quarter each.
    costs = Costs((), Curve(((0.0, 0.0), (1.0, 1.0))), FREE)
    full = carried(costs, 0.25, 64)
    assert full is not None
    assert (full.sessions, full.lookahead, full.speed) == (4, 0, 0.25)
    assert carried(costs, 1.5, 64) is None
    capped = carried(costs, 0.01, 7)
    assert capped is not None
    assert capped.sessions == 7
    found = pools(full, sessions=10)
    assert (found.targets, found.drafts, found.tokens_per_second) == (3, 0, 2.5)
    assert pools(full, tokens_per_second=3.0).sessions == 12
    # The whole block kept, at no cost: two tokens a pass, positions being free.
    free = Costs((1.0,), constant(1.0), constant(0.01))
    drafted = at(free, 8, 8)
    assert (drafted.lookahead, drafted.tokens, drafted.draft_sessions) == (1, 2.0, 8)
    assert pools(drafted, sessions=9).drafts == 2


def report(at_path: Path) -> Path:
    """What `outrider bench` writes, of two concurrencies: passes of 10 + positions ms, 2 ms a drafted token."""
    quantiles, spread = {"p50": 1, "p95": 1, "p99": 1}, {"median": 1, "low": 1, "high": 1}

    def cell(way: str, concurrency: int, drafted: int) -> dict[str, object]:
        positions = concurrency * (1 + drafted)
        times = {"verify_forward": 10 + positions, "draft_wait": drafted, "draft_forward": 2 * drafted}
        times |= {"round": 20.7 + positions + drafted, "verify_wait": 0, "accept": 0, "other": 0, "commit": 0}
        blocks = {
            "drafted": 100 * drafted,
            "accepted": 50,
            "alpha": 0.5,
            "kept_at": [0.8, 0.47],
            "drafted_at": [50, 50],
        }
        blocks |= {"closed_form": 1, "closed_form_as_drafted": 1, "measured": 1}
        rounds = {"rounds": 100, "target_passes": 100, "tokens_per_pass": 1, "bytes_per_token": 1, "plain": {}}
        rounds |= {"times": times, "speculation": blocks if drafted else None}
        told = dict.fromkeys(("time_to_first_token", "inter_token", "message_gap", "same_tokens", "speed_up"))
        told |= {"prompt_set": "chat", "concurrency": concurrency, "way": way, "proposer": "", "lookahead": drafted}
        return told | {"runs": [], "tokens_per_second": spread, "end_to_end": quantiles, "rounds": rounds}

    machine = {
        "system": "",
        "processor": "",
        "cores": 1,
        "load_before": 0,
        "python": "",
        "torch": "",
        "transformers": "",
    }
    served = {"outrider": "", "address": "", "target": "", "drafts": [], "dtype": ""}
    served |= {"target_threads": None, "draft_threads": None}
    settings = {"max_tokens": 1, "ignore_eos": False, "temperature": 0, "seed": None, "acceptance": "", "repeats": 1}
    settings |= {"concurrencies": [1, 4], "prompts": {}}
    cells = [cell(way, count, drafted) for count in (1, 4) for way, drafted in (("plain", 0), ("speculative", 2))]
    whole = {"created": "2026-01-01T00:00:00Z", "machine": machine, "served": served, "settings": settings}
    at_path.write_text(json.dumps(whole | {"cells": cells, "not_measured": [], "memory": []}))
    return at_path


def test_a_report_says_the_same_as_its_numbers(tmp_path: Path) -> None:
    of_report = CliRunner().invoke(app, ["plan", "--report", str(report(tmp_path / "report.json")), "--sessions", "50"])
    given = ["--acceptance", "0.8,0.47", "--target-pass", "11@1,22@12", "--draft-step", "2@1,2@4", "--rest", "10.7"]
    of_numbers = CliRunner().invoke(app, ["plan", *given, "--ahead", "0.5", "--sessions", "50"])
    assert of_report.exit_code == of_numbers.exit_code == 0, of_report.output + of_numbers.output
    assert of_report.output == of_numbers.output
    assert "For 50 sessions" in of_report.output


GIVEN = ("--acceptance", "0.8", "--target-pass", "10", "--draft-step", "1")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--acceptance", "0.1", "--target-pass", "10", "--draft-step", "9"), 0, "Speculation does not pay"),
        (("--acceptance", "0.9", "--target-pass", "10", "--draft-step", "1", "--speed", "1e6"), 1, "out of reach"),
        (("--acceptance", "0.9"), 2, "give --report, or"),
        (("--acceptance", "0.4,0.8", "--target-pass", "10", "--draft-step", "1"), 2, "that do not rise"),
        (("--acceptance", "0.4", "--target-pass", "x", "--draft-step", "1"), 2, "--target-pass x"),
        (("--report", __file__), 2, "is no report"),
        (("--acceptance", "nan", "--target-pass", "10", "--draft-step", "1"), 2, "shares in [0, 1]"),
        (("--acceptance", "0.8", "--target-pass", "0", "--draft-step", "1"), 2, "takes some time"),
        (("--acceptance", "0.8", "--target-pass", "nan", "--draft-step", "1"), 2, "--target-pass nan"),
        (("--acceptance", "0.8", "--target-pass", "30@1,20@16", "--draft-step", "1"), 2, "do not fall"),
        (("--acceptance", "0.8", "--target-pass", "10", "--draft-step", "inf"), 2, "--draft-step inf"),
        ((*GIVEN, "--rest", "inf"), 2, "that is finite"),
        ((*GIVEN, "--tokens-per-second", "inf"), 2, "are finite"),
        ((*GIVEN, "--speed", "inf"), 2, "are finite"),
        (("--acceptance", "1", "--target-pass", "1e300", "--draft-step", "0"), 0, "A target carries"),
    ],
)
def test_what_the_command_says(flags: tuple[str, ...], code: int, words: str) -> None:
    result = CliRunner().invoke(app, ["plan", *flags], terminal_width=1000)
    assert result.exit_code == code
    assert words in " ".join(result.output.split()), result.output
