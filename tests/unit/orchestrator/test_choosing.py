"""The choice of a proposer in virtual time, against every single one, on workloads that suit them differently."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from orchestrator.choosing import (
    MEASURED,
    ONLY,
    REVIEW,
    STANDING,
    TRIAL,
    TRIAL_SHARE,
    Kind,
    ProposerChoice,
    Served,
    Trials,
    eligible,
    observe,
    told,
)
from orchestrator.costs import RoundCost, TargetCosts
from outrider.v1.draft_pb2 import (
    PROPOSER_EARLY_EXIT,
    PROPOSER_MODEL,
    PROPOSER_PREDICTION,
    PROPOSER_PROMPT_LOOKUP,
    PROPOSER_SUFFIX,
    PROPOSER_SUFFIX_OR_MODEL,
    PROPOSER_UNSPECIFIED,
)

WITHIN = 0.97
# Tokens that finding out may cost the first session of 128, and the first twelve.
FIRST_COST, ALL_COST = 65.0, 90.0
MODEL, SUFFIX, BOTH = PROPOSER_MODEL, PROPOSER_SUFFIX, PROPOSER_SUFFIX_OR_MODEL
PLAIN, POSITION, REST, STEP, LOOKAHEAD = 0.025, 0.0004, 0.001, 0.0025, 4


@dataclass(frozen=True)
class Workload:
    """How often the last tokens stood before, and how likely a token is right: copied, and drawn from the model."""

    found: float
    copied: float
    drawn: float


WORKLOADS = {
    "chat": Workload(0.1, 0.5, 0.75),
    "code": Workload(0.5, 0.85, 0.7),
    "quoting": Workload(0.9, 0.96, 0.6),
    # A draft that was trained for something else.
    "foreign": Workload(0.3, 0.8, 0.05),
    # And one that is better than copies that are there.
    "tempting": Workload(0.9, 0.3, 0.9),
}


class FixedCosts(TargetCosts):
    """A target whose passes always take the same."""

    @property
    def plain_seconds(self) -> float:
        return PLAIN

    @property
    def known(self) -> bool:
        return True


@dataclass
class World:
    """Sessions one after the other, each with a proposer that is given or chosen."""

    workloads: Mapping[str, Workload]
    offered: Sequence[Kind] = (MODEL, SUFFIX, BOTH)
    seed: int = 1
    step: float = STEP
    trials: Trials = field(default_factory=Trials)
    target: TargetCosts = field(default_factory=FixedCosts)
    pools: dict[Kind, Served] = field(default_factory=dict)
    drafted: Counter[Kind] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.pools |= {kind: Served() for kind in self.offered}
        self._sessions = 0

    def session(self, workload: str, fixed: Kind | None = None, tokens: int = 160) -> tuple[int, float]:
        """(tokens, seconds)"""
        self._sessions += 1
        dice, said, seconds = random.Random(f"{self.seed} {self._sessions} {workload}"), 0, 0.0
        choice = ProposerChoice(lambda: self.pools, lambda: self.target, self.trials)
        while said < tokens:
            if fixed is None:
                choice.choose()
            kind = choice.kind if fixed is None else fixed
            cost = self._round(kind, self.workloads[workload], dice)
            observe(self.pools[kind], cost, self.target)
            choice.learn(cost)
            self.drafted[kind] += 1
            said, seconds = said + cost.tokens, seconds + cost.seconds
        return said, seconds

    def rate(self, workload: str, sessions: int, fixed: Kind | None = None) -> float:
        told = [self.session(workload, fixed) for _ in range(sessions)]
        return sum(tokens for tokens, _ in told) / sum(seconds for _, seconds in told)

    def _round(self, kind: Kind, work: Workload, dice: random.Random) -> RoundCost:
        copies = kind != MODEL and dice.random() < work.found
        draws = not copies and kind != SUFFIX
        right = work.copied if copies else work.drawn
        block = LOOKAHEAD if copies or draws else 0
        accepted = 0
        while accepted < block and dice.random() < right:
            accepted += 1
        wait = LOOKAHEAD * self.step if draws else 0.0
        seconds = (PLAIN + POSITION * block + REST + wait) * (1.0 + 0.05 * dice.expovariate(1.0))
        return RoundCost(seconds, wait, 0.0, PLAIN + POSITION * block, accepted + 1, block)


def best_single(workload: str, offered: Sequence[Kind], sessions: int) -> float:
    return max(World(WORKLOADS, offered).rate(workload, sessions, kind) for kind in offered)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("offered", [(MODEL, SUFFIX, BOTH), (MODEL, SUFFIX), (MODEL,)], ids=["all", "two", "one"])
def test_no_single_proposer_is_better(workload: str, offered: Sequence[Kind]) -> None:
    """From the first session on, what was spent on finding out included."""
    world = World(WORKLOADS, offered)
    chosen = world.rate(workload, 150)
    assert chosen >= WITHIN * best_single(workload, offered, 150), world.drafted


@pytest.mark.parametrize("step", [STEP, 5 * STEP])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_finding_out_costs_is_bounded_from_the_first_session_on(workload: str, step: float) -> None:
    """Also where a block of the model costs more than it gives, and nobody was here before: in tokens that the best
    proposer would have given meanwhile, over the first sessions of a client."""
    lost, seeds = [0.0, 0.0], range(10)
    for seed in seeds:
        best = max(World(WORKLOADS, seed=seed, step=step).rate(workload, 12, kind) for kind in (MODEL, SUFFIX, BOTH))
        world = World(WORKLOADS, seed=seed, step=step)
        for count in range(12):
            tokens, seconds = world.session(workload, tokens=128)
            lost[0] += (best * seconds - tokens) * (count == 0) / len(seeds)
            lost[1] += (best * seconds - tokens) / len(seeds)
    assert lost[0] < FIRST_COST
    assert lost[1] < ALL_COST


def test_nor_where_the_workloads_are_mixed() -> None:
    world, turns = World(WORKLOADS), 60
    told = dict.fromkeys(WORKLOADS, (0, 0.0))
    for _ in range(turns):
        for name in WORKLOADS:
            tokens, seconds = world.session(name)
            told[name] = told[name][0] + tokens, told[name][1] + seconds
    everything = sum(tokens for tokens, _ in told.values()) / sum(seconds for _, seconds in told.values())
    single = []
    for kind in (MODEL, SUFFIX, BOTH):
        alone = World(WORKLOADS)
        each = [alone.session(name, kind) for _ in range(turns) for name in WORKLOADS]
        single.append(sum(tokens for tokens, _ in each) / sum(seconds for _, seconds in each))
    assert everything >= WITHIN * max(single)


def test_a_proposer_that_becomes_good_is_found_again_and_costs_little_until_then() -> None:
    workloads = {"work": Workload(0.0, 0.9, 0.7)}
    world = World(workloads, (MODEL, SUFFIX))
    plain = world.rate("work", 100, MODEL)
    assert world.rate("work", 100) > 0.97 * plain
    before = world.drafted[SUFFIX]
    world.rate("work", 100)
    rounds = world.trials.rounds
    # Trials of what is known to be worse are paid for, and there are some.
    assert 0 < world.drafted[SUFFIX] - before <= TRIAL_SHARE * rounds / 0.2 + 2 * REVIEW
    world.workloads = {"work": Workload(1.0, 0.95, 0.7)}
    world.rate("work", 150)
    assert world.rate("work", 20) > 1.2 * plain
    assert world.drafted[SUFFIX] > before + 1000


def test_a_session_unlike_the_others_goes_by_its_own_rounds() -> None:
    world = World(WORKLOADS, (MODEL, SUFFIX))
    world.rate("quoting", 40)
    world.drafted.clear()
    tokens, seconds = world.session("chat", tokens=2000)
    assert world.drafted[MODEL] > 0.85 * world.drafted.total()
    assert tokens / seconds > 0.95 * best_single("chat", (MODEL, SUFFIX), 20)


def test_sessions_that_begin_at_once_see_different_proposers() -> None:
    world = World(WORKLOADS)
    choices = [ProposerChoice(lambda: world.pools, lambda: world.target, world.trials) for _ in range(6)]
    assert all(choice.choose() for choice in choices)
    assert Counter(choice.kind for choice in choices) == {MODEL: 2, SUFFIX: 2, BOTH: 2}
    assert {choice.reason for choice in choices} == {TRIAL}


def rounds_of(choice: ProposerChoice, cost: RoundCost) -> int:
    """How many until it thinks again."""
    for count in range(1, 2 * REVIEW):
        choice.learn(cost)
        if choice.choose():
            return count
    raise AssertionError("never")


def test_a_trial_is_over_when_it_has_cost_enough() -> None:
    pools: dict[Kind, Served] = {MODEL: served(4), SUFFIX: Served()}
    fair, bad = (RoundCost(seconds, 0.0, 0.0, PLAIN, 4, 3) for seconds in (PLAIN, 2.0 * PLAIN))
    for cost, rounds in ((fair, REVIEW), (bad, 4)):
        choice = choice_of(pools)
        assert (choice.kind, choice.reason) == (SUFFIX, TRIAL)
        assert rounds_of(choice, cost) == rounds
    # What is measured is no trial.
    choice = choice_of({MODEL: served(4), SUFFIX: served(2)})
    assert (choice.kind, choice.reason) == (MODEL, MEASURED)
    assert rounds_of(choice, bad) == REVIEW


def test_the_first_of_all_is_held_against_plain_rounds() -> None:
    choice = choice_of({BOTH: Served(), SUFFIX: Served()})
    dear = RoundCost(4.0 * PLAIN, 2.5 * PLAIN, 0.0, 1.2 * PLAIN, 2, 4)
    assert rounds_of(choice, dear) < REVIEW
    assert choice.kind == SUFFIX


def test_what_never_comes_to_a_round_is_tried_once_a_session() -> None:
    """Where its worker has to read a long text first; at the next session's start it reads beside the target."""
    choice = choice_of({MODEL: Served(), SUFFIX: served(4)})
    assert (choice.kind, choice.reason) == (MODEL, TRIAL)
    assert rounds_of(choice, RoundCost(PLAIN, 0.0, 0.0, PLAIN, 1, catching_up=True)) == 4
    assert (choice.kind, choice.reason) == (SUFFIX, MEASURED)


def test_and_by_few_sessions() -> None:
    trials, pools = Trials(), {MODEL: served(4), SUFFIX: Served()}
    choices = [ProposerChoice(lambda: pools, FixedCosts, trials) for _ in range(6)]
    assert [choice.choose() and choice.kind for choice in choices] == 4 * [SUFFIX] + 2 * [MODEL]


def test_a_stall_is_no_fault_of_the_proposer() -> None:
    pool, stalled = served(2), RoundCost(100.0 * PLAIN, 0.0, 0.0, PLAIN, 2)
    pool.observe(stalled, PLAIN, 1000.0)
    assert pool.goodput == 2.0
    pool.observe(stalled, PLAIN, 1000.0)
    assert pool.goodput < 1.1


def test_nor_are_rounds_in_which_it_reads_what_was_said_before() -> None:
    pool, reading = served(4), RoundCost(PLAIN, 0.0, 0.0, PLAIN, 1, catching_up=True)
    observe(pool, reading, FixedCosts())
    assert (pool.goodput, pool.rounds) == (4.0, 100)
    choice = choice_of({MODEL: pool, SUFFIX: served(3)})
    assert choice.kind == MODEL
    assert rounds_of(choice, reading) == REVIEW
    assert choice.kind == MODEL


def served(tokens: int, rounds: int = 100, seconds: float = PLAIN) -> Served:
    pool = Served()
    for _ in range(rounds):
        pool.observe(RoundCost(seconds, 0.0, 0.0, seconds, tokens), PLAIN, 1000.0)
    return pool


def choice_of(pools: dict[Kind, Served]) -> ProposerChoice:
    choice = ProposerChoice(lambda: pools, FixedCosts, Trials())
    choice.choose()
    return choice


def test_it_says_what_it_chose_and_why() -> None:
    choice = choice_of({MODEL: served(2), SUFFIX: served(4)})
    assert (choice.kind, choice.reason) == (SUFFIX, MEASURED)
    assert told(choice) == "measured: suffix of suffix 4.20, model 2.10"
    assert told(choice_of({MODEL: Served()})) == "only: model of model 0.00"


@pytest.mark.parametrize(("tokens", "expected"), [(102, STANDING), (104, MODEL)])
def test_the_standing_choice_goes_to_what_is_clearly_better(tokens: int, expected: Kind) -> None:
    assert choice_of({MODEL: served(tokens), BOTH: served(100)}).kind == expected


def test_a_choice_stands_for_some_rounds_unless_it_is_gone() -> None:
    pools = {MODEL: served(3), SUFFIX: served(4)}
    choice = choice_of(pools)
    cost = RoundCost(PLAIN, 0.0, 0.0, PLAIN, 1)
    for _ in range(REVIEW):
        assert not choice.choose()
        choice.learn(cost)
    assert choice.choose()
    assert choice.kind == MODEL
    del pools[MODEL]
    assert not choice.choose()
    choice.gone()
    assert choice.choose()
    assert (choice.kind, choice.reason) == (SUFFIX, ONLY)
    pools.clear()
    choice.gone()
    assert not choice.choose()
    assert choice.kind == PROPOSER_UNSPECIFIED


@pytest.mark.parametrize("part", [MODEL, SUFFIX])
def test_a_hard_text_is_hard_for_the_parts_of_what_drafts(part: Kind) -> None:
    """That its own rounds give less than those of others is no reason to change to what the present one is made of."""
    choice = choice_of({BOTH: served(5), part: served(4)})
    assert choice.kind == BOTH
    rounds_of(choice, RoundCost(PLAIN, 0.0, 0.0, PLAIN, 1))
    assert choice.kind == BOTH


def test_and_not_for_another() -> None:
    choice = choice_of({MODEL: served(5), SUFFIX: served(4)})
    assert choice.kind == MODEL
    rounds_of(choice, RoundCost(PLAIN, 0.0, 0.0, PLAIN, 1))
    assert choice.kind == SUFFIX


def test_what_is_seen_little_is_thought_better_than_it_looks() -> None:
    assert choice_of({MODEL: served(100, rounds=1000), PROPOSER_EARLY_EXIT: served(95, rounds=20)}).kind == (
        PROPOSER_EARLY_EXIT
    )


def test_what_may_be_chosen() -> None:
    """Not what needs the client, nor what another covers, nor what only a newer worker knows."""
    offered = (PROPOSER_PROMPT_LOOKUP, PROPOSER_PREDICTION, SUFFIX, MODEL, BOTH, 4711)
    assert list(eligible({kind: Served() for kind in offered})) == [BOTH, SUFFIX, MODEL]  # type: ignore[misc]
    assert list(eligible({PROPOSER_PROMPT_LOOKUP: Served()})) == [PROPOSER_PROMPT_LOOKUP]


def test_load_makes_no_proposer_look_worse() -> None:
    """What was seen while passes took long is held against what was seen while they were short."""
    busy = Served()
    for _ in range(100):
        busy.observe(RoundCost(10 * PLAIN, 0.0, 0.0, 10 * PLAIN, 3), 10 * PLAIN, 1000.0)
    assert choice_of({MODEL: served(2), SUFFIX: busy}).kind == SUFFIX
