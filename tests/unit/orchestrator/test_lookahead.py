"""F2, F3: the lookahead control in virtual time, against every fixed lookahead."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from bench.unlike_texts import COPIES, DEMO, OneByOne
from orchestrator import own_blocks
from orchestrator.costs import RoundCost, TargetCosts
from orchestrator.lookahead import PROBE_LOOKAHEAD, DraftHistory, SessionLookahead
from outrider.v1.target_pb2 import VerifyTiming
from tests.harness.pool_sim import Pool, Scene, SimSession

# How many times slower the workers are with so many clients, as in bench/lookahead_cells.py.
CLIENTS, ACCEPTANCES, LOOKAHEADS = {1: 1.0, 4: 1.0, 16: 2.0, 64: 4.0}, (0.0, 0.3, 0.6, 0.9), (0, 1, 2, 4, 8)
WITHIN = 0.97
# Tokens of a session before and after those that count.
LEARNED, COUNTED = {1: 100, 4: 80, 16: 100, 64: 24}, {1: 400, 4: 180, 16: 200, 64: 56}
SEEDS = {1: 3, 4: 2, 16: 2, 64: 1}


def scene(clients: int, acceptance: float, **changed: float) -> Scene:
    usual, scale = Scene(clients, acceptance, **changed), CLIENTS[clients]
    return replace(
        usual,
        target_pass=scale * usual.target_pass,
        target_position=scale * usual.target_position,
        draft_pass=scale * usual.draft_pass,
        draft_item=scale * usual.draft_item,
    )


def rates(clients: int, acceptance: float, lookahead: int | None) -> tuple[float, Counter[str]]:
    """(tokens a second, on average over the seeds, rounds by kind)."""
    total, kinds = 0.0, Counter[str]()
    for seed in range(SEEDS[clients]):
        with Pool(scene(clients, acceptance), lookahead, seed=1 + seed) as pool:
            total += pool.rate(LEARNED[clients], COUNTED[clients])
            kinds += pool.kinds
    return total / SEEDS[clients], kinds


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("clients", CLIENTS)
def test_f2_no_fixed_lookahead_is_better(clients: int, acceptance: float) -> None:
    fixed = {lookahead: rates(clients, acceptance, lookahead)[0] for lookahead in LOOKAHEADS}
    controlled, kinds = rates(clients, acceptance, None)
    assert controlled >= WITHIN * max(fixed.values()), (fixed, controlled)
    if fixed[0] > 1.1 * max(value for lookahead, value in fixed.items() if lookahead):
        # Those of the first sessions, before anything is known.
        assert kinds["block"] <= SEEDS[clients] * (2 * clients + 16)
        assert kinds["probe"] <= 0.03 * kinds["plain"] + clients


@pytest.mark.parametrize("clients", [1, 4, 16])
def test_a_draft_that_slows_the_target_is_held_against_plain_rounds_as_they_are(clients: int) -> None:
    """What passes with blocks take says nothing of those without, where the draft takes of the target's cores."""
    disturbed = replace(scene(clients, 0.6), interference=CLIENTS[clients] * 0.04)
    rates = {}
    for lookahead in (0, 2, None):
        with Pool(disturbed, lookahead) as pool:
            pool.run(20.0)
            rates[lookahead] = pool.run(30.0)
    assert rates[2] < 0.95 * rates[0]
    assert rates[None] > WITHIN * rates[0]


@pytest.mark.parametrize("clients", [1, 16])
def test_f3_it_comes_back_when_blocks_become_good(clients: int) -> None:
    with Pool(scene(clients, 0.9)) as fresh:
        fresh.run(10.0)
        good = fresh.run(20.0)
    with Pool(scene(clients, 0.0)) as pool:
        pool.run(20.0)
        assert pool.draft.common == 0
        pool.scene = replace(pool.scene, acceptance=0.9)
        pool.run(40.0)
        assert pool.run(20.0) > 0.9 * good
        pool.scene = replace(pool.scene, acceptance=0.0)
        pool.run(20.0)
        pool.kinds.clear()
        pool.run(30.0)
        # But for a session that still thinks better of its own.
        assert pool.kinds["block"] <= 0.01 * pool.kinds["plain"]


class Mixed(Pool):
    """Every other session has blocks that are never right."""

    def acceptance(self, session: SimSession) -> float:
        return 0.9 if session.number % 2 else 0.0


def test_positions_go_to_the_likeliest_tokens() -> None:
    mixed = Scene(16, 0.0, target_position=0.001, draft_pass=0.001)
    uniform = []
    for lookahead in LOOKAHEADS:
        with Mixed(mixed, lookahead) as same:
            same.run(1.0)
            uniform.append(same.run(10.0))
    with Mixed(mixed) as pool:
        pool.run(10.0)
        asked = Counter[bool]()
        for _ in range(100):
            pool.run(0.05)
            for session in pool.sessions:
                asked[bool(session.number % 2)] += session.asked
        assert asked[True] > 10 * asked[False]
        assert pool.run(10.0) > 1.05 * max(uniform)


def test_few_sessions_probe_at_a_time_and_shortly() -> None:
    with Pool(Scene(64, 0.0)) as pool:
        pool.run(5.0)
        most = 0
        for _ in range(500):
            pool.run(0.02)
            probing = [session for session in pool.sessions if session.asked]
            assert all(session.asked == PROBE_LOOKAHEAD for session in probing)
            most = max(most, len(probing))
        assert 1 <= most <= 1 + 64 // 16


def test_sessions_that_end_are_not_counted_any_more() -> None:
    with Pool(Scene(8, 0.9)) as pool:
        pool.run(5.0)
        assert pool.draft.costs.speculating == 8
        for session in pool.sessions:
            session.lookahead.close()
            session.lookahead.close()
        assert pool.draft.costs.speculating == pool.draft.probing == 0


@pytest.mark.parametrize(("longest", "kept"), [(1, True), (None, False)])
def test_a_block_that_could_be_no_longer_says_nothing_of_what_lies_beyond(longest: int | None, kept: bool) -> None:
    """One that was drafted ahead is as long as the round before wanted: its end is no rejection."""
    costs, draft = TargetCosts(), DraftHistory()
    session = SessionLookahead(4, lambda: costs, adaptive=False)
    for _ in range(50):
        assert session.choose(draft, 4) == 4
        session.learn(RoundCost(0.05, 0.0, 0.0, 0.04, 2), accepted=1, longest=longest)
    assert (draft.survival.rates(2)[1] > 0.5) is kept


class Copies:
    """One session whose proposer copies: it seldom finds anything, and then it is right.

    Args:
        lookahead: of every block; None for the control.
        found: how often.
        jitter: what a round takes longer by chance, in seconds on average.
    """

    def __init__(self, lookahead: int | None, found: float, jitter: float = 0.0) -> None:
        self.costs, self.draft, self._dice = TargetCosts(), DraftHistory(), random.Random(3)
        self.session = SessionLookahead(lookahead or 8, lambda: self.costs, adaptive=lookahead is None)
        self.found, self._jitter, self.asked = found, jitter, 0

    def rate(self, rounds: int) -> float:
        """Tokens a second."""
        tokens, seconds = 0, 0.0
        for _ in range(rounds):
            asked = self.session.choose(self.draft, 8)
            self.asked += asked > 0
            drafted = asked if self._dice.random() < self.found else 0
            passes, wait = 0.013 + 0.001 * drafted, 0.0003 if asked else 0.0
            timing = VerifyTiming(
                passes=1,
                batch_items=1,
                batch_positions=1 + drafted,
                computed_tokens=1 + drafted,
                forward_micros=int(1e6 * passes),
            )
            self.costs.observe_pass(timing, 1)
            whole = passes + wait + 0.003 + self._dice.random() * 2.0 * self._jitter
            self.session.learn(RoundCost(whole, wait, 0.0, passes, 1 + drafted, drafted, drafted), drafted)
            tokens, seconds = tokens + 1 + drafted, seconds + whole
        return tokens / seconds


@pytest.mark.parametrize("found", [0.03, 0.1, 0.9])
def test_copies_cost_no_positions_where_there_are_none(found: float) -> None:
    assert Copies(None, found).rate(3000) > WITHIN * Copies(8, found).rate(3000)


def test_a_session_that_finds_nothing_to_copy_yet_is_not_given_up() -> None:
    """What no block came of cost what it was waited for, not what a block costs."""
    run = Copies(None, 0.9)
    run.rate(200)
    run.session.close()
    run.session, run.found, run.asked = SessionLookahead(8, lambda: run.costs), 0.0, 0
    run.rate(15)
    assert run.asked >= 14
    run.found, run.asked = 0.9, 0
    run.rate(40)
    assert run.asked >= 39


def test_what_probes_for_copies_costs_is_what_they_wait() -> None:
    """Rounds are longer and shorter by chance: that is no reason to look less often."""
    run = Copies(None, 0.0, jitter=0.01)
    run.rate(1000)
    assert run.draft.common == 0
    run.found, run.asked = 0.3, 0
    run.rate(60)
    assert run.asked > 30


def test_f2_a_session_loses_little_to_blocks_though_others_gain_much_by_them() -> None:
    """What others were given says little of a text that the draft does not know: the session's own blocks do, and what
    they may lose is bounded."""
    bad, good = [], []
    for seed in range(8):
        draft = OneByOne(DEMO, seed)
        draft.session(0.9, plain=True)
        good += [draft.session(0.95) for _ in range(3)]
        bad += [draft.session(0.2) for _ in range(2)]
    assert sum(bad) / len(bad) > 0.92
    assert min(bad) > 0.82
    assert sum(good) / len(good) > 2.2


def test_f2_the_window_ends_long_blocks_before_the_account_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_blocks, "MOST_LOSS", 1e9)
    bad = []
    for seed in range(6):
        draft = OneByOne(COPIES, seed)
        draft.session(0.9, plain=True)
        for _ in range(3):
            draft.session(0.97)
        bad += [draft.session(0.2) for _ in range(2)]
    assert sum(bad) / len(bad) > 0.9


def test_f3_probes_in_vain_do_not_burden_the_account() -> None:
    """They are paid for already: after a long stretch of them, a few good ones bring blocks back."""
    costs, draft = TargetCosts(), DraftHistory()
    session = SessionLookahead(16, lambda: costs)

    def round_of_one(*, right: bool) -> tuple[int, bool]:
        """(what was asked, whether as a probe)"""
        asked = session.choose(draft, 50)
        probing, accepted = session.probing, asked if right else 0
        passes, wait = DEMO.plain + DEMO.position * asked, DEMO.step * asked
        timing = VerifyTiming(passes=1, batch_items=1, batch_positions=1 + asked, forward_micros=int(1e6 * passes))
        costs.observe_pass(timing, 1)
        whole = passes + wait + DEMO.rest + DEMO.block * (asked > 0)
        session.learn(RoundCost(whole, wait, 0.0, passes, 1 + accepted, asked, asked), accepted)
        return asked, probing

    for _ in range(20):
        round_of_one(right=True)
    bad = [round_of_one(right=False) for _ in range(15_000)]
    assert sum(probing for _, probing in bad) > 40
    probes = 0
    for _ in range(1_000):
        asked, probing = round_of_one(right=True)
        probes += probing
        if asked and not probing:
            break
    assert 0 < probes < 22
