"""F2, F3: the lookahead control in virtual time, against every fixed lookahead."""

from collections import Counter
from dataclasses import replace

import pytest

from orchestrator.costs import RoundCost, TargetCosts
from orchestrator.lookahead import PROBE_LOOKAHEAD, DraftHistory, SessionLookahead
from tests.harness.pool_sim import Pool, Scene, SimSession

CLIENTS, ACCEPTANCES, LOOKAHEADS = (1, 4, 16, 64), (0.0, 0.3, 0.6, 0.9), (0, 1, 2, 4, 8, 16)
WITHIN = 0.95  # of the best: what is sampled in so short a time is within a few parts in a hundred
LEARN, COUNT = {1: 10.0, 4: 6.0, 16: 4.0, 64: 4.0}, {1: 60.0, 4: 25.0, 16: 10.0, 64: 4.0}

SCENES = {
    "common": Scene(1, 0.0),
    "quick draft": Scene(1, 0.0, draft_pass=0.001, draft_item=0.00001),
    "dear positions": Scene(1, 0.0, target_position=0.001, draft_pass=0.002, python=0.0008),
}


def rates(scene: Scene) -> tuple[dict[int, float], Pool, float]:
    """(tokens a second by fixed lookahead, the control's pool after learning and counting, its tokens a second)."""
    learn, count = LEARN[scene.clients], COUNT[scene.clients]
    fixed = {}
    for lookahead in LOOKAHEADS:
        pool = Pool(scene, lookahead)
        pool.run(1.0)
        fixed[lookahead] = pool.run(count)
    control = Pool(scene)
    control.run(learn)
    control.kinds.clear()
    return fixed, control, control.run(count)


@pytest.mark.parametrize("kind", SCENES)
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("clients", CLIENTS)
def test_f2_no_fixed_lookahead_is_much_better(clients: int, acceptance: float, kind: str) -> None:
    fixed, control, rate = rates(replace(SCENES[kind], clients=clients, acceptance=acceptance))
    best = max(fixed, key=fixed.__getitem__)
    assert rate >= WITHIN * fixed[best], (best, fixed, rate)
    others = max(value for lookahead, value in fixed.items() if lookahead)
    if fixed[0] > 1.1 * others:
        assert control.kinds["block"] == 0
        assert control.kinds["probe"] <= 0.03 * control.kinds["plain"] + clients


def control_of(clients: int, acceptance: float) -> Pool:
    return Pool(Scene(clients, acceptance))


@pytest.mark.parametrize("clients", [1, 16])
def test_f3_it_comes_back_when_blocks_become_good(clients: int) -> None:
    pool = control_of(clients, 0.0)
    pool.run(20.0)
    assert pool.draft.common == 0
    pool.scene = replace(pool.scene, acceptance=0.9)
    pool.run(30.0)
    fresh = control_of(clients, 0.9)
    fresh.run(10.0)
    assert pool.run(20.0) > 0.9 * fresh.run(20.0)
    pool.scene = replace(pool.scene, acceptance=0.0)
    pool.run(10.0)
    pool.kinds.clear()
    pool.run(10.0)
    assert pool.kinds["block"] == 0


class Mixed(Pool):
    """Every other session has blocks that are never right."""

    def acceptance(self, session: SimSession) -> float:
        return 0.9 if session.number % 2 else 0.0


def test_positions_go_to_the_likeliest_tokens() -> None:
    pool = Mixed(Scene(16, 0.0, target_position=0.001, draft_pass=0.001))
    pool.run(20.0)
    asked = Counter[bool]()
    for _ in range(200):
        pool.run(0.05)
        for session in pool.sessions:
            asked[bool(session.number % 2)] += session.asked
    assert asked[True] > 10 * asked[False]
    uniform = []
    for lookahead in LOOKAHEADS:
        same = Mixed(pool.scene, lookahead)
        same.run(1.0)
        uniform.append(same.run(20.0))
    assert pool.run(20.0) > 1.05 * max(uniform)


def test_few_sessions_probe_at_a_time_and_shortly() -> None:
    pool = control_of(64, 0.0)
    pool.run(5.0)
    most = 0
    for _ in range(200):
        pool.run(0.02)
        probing = [session for session in pool.sessions if session.asked]
        assert all(session.asked == PROBE_LOOKAHEAD for session in probing)
        most = max(most, len(probing))
    assert 1 <= most <= 1 + 64 // 16


def test_sessions_that_end_are_not_counted_any_more() -> None:
    pool = control_of(8, 0.9)
    pool.run(5.0)
    assert pool.draft.costs.speculating == 8
    for session in pool.sessions:
        assert session.lookahead is not None
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
