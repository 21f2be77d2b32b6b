"""What suffix proposes: the commonest continuation of the longest match, as far as it is trusted; and whose text."""

from array import array

import pytest

from draft_service.commands import Ask, Key, SessionLaw
from draft_service.job import Job
from draft_service.proposers.suffix import SuffixProposer
from draft_service.suffix.continuing import Place, continued
from draft_service.suffix.history import Histories
from draft_service.suffix.indexes import SessionIndexes
from outrider.law.params import LawParams
from outrider.lm.session_cache import Session, SessionCache
from outrider.observe.metrics import DraftMetrics
from outrider.v1 import draft_pb2
from tests.harness.workers import int32

A, B = ("", "a"), ("", "b")
RATIO, GREEDY = LawParams(), LawParams(temperature=0.0)


def text(*tokens: int) -> "array[int]":
    return array("i", tokens)


def test_the_commoner_continuation_wins_and_the_newer_one_among_equals() -> None:
    said = text(1, 2, 7, 1, 2, 8, 1, 2, 7, 1, 2)
    places = [Place(said, after, 2) for after in (8, 5, 2)]
    assert continued(places, said, 1).tokens == [7]
    assert continued(places[1:], said, 1, trust=0).tokens == [8]


def test_a_longer_match_outweighs_many_shorter_ones() -> None:
    said = text(5, 1, 2, 7, *[1, 2, 8] * 5)
    shorter = [Place(said, after, 2) for after in (18, 15, 12, 9, 6)]
    assert continued([*shorter, Place(said, 3, 12)], text(), 1).tokens == [7]


@pytest.mark.parametrize("matched", [2, 3, 4, 8, 16])
def test_the_longer_the_match_the_longer_the_block(matched: int) -> None:
    said = text(*range(400))
    lengths = [len(continued([Place(said, 100, each)], text(), 64).tokens) for each in (matched, matched + 1)]
    assert 0 < lengths[0] <= lengths[1]
    assert len(continued([Place(said, 100, 2)], text(), 64).tokens) < len(
        continued([Place(said, 100, 3)], text(), 64).tokens
    )


def test_a_block_ends_where_the_places_disagree_too_much() -> None:
    said = text(*(token for other in range(16) for token in (1, 2, 3, 10 + other)))
    places = [Place(said, 4 * each + 1, 4) for each in range(16)]
    assert continued(places, text(), 8).tokens == [2, 3]


def test_a_copy_that_reaches_its_own_end_goes_on_with_what_it_copied() -> None:
    said = text(1, 2, 3, 1, 2, 3)
    assert continued([Place(said, 3, 32)], said, 7).tokens == [1, 2, 3, 1, 2, 3, 1]
    assert continued([Place(said, 3, 32)], text(), 7).tokens == [1, 2, 3]


def test_another_text_ends_where_it_ends() -> None:
    said = text(1, 2, 3, -1, 9, 9)
    assert continued([Place(said, 1, 32)], text(), 7).tokens == [2, 3]


def law(tenant: tuple[str, str] = A, params: LawParams = RATIO, seed: int = 1, *, coupled: bool = False) -> SessionLaw:
    return SessionLaw(draft_pb2.PROPOSER_SUFFIX, params, seed, 32, coupled=coupled, tenant=tenant)


class Proposing:
    """A proposer, and sessions that ask it."""

    def __init__(self, histories: Histories | None = None, most_tokens: int = 1 << 20) -> None:
        self.histories = histories or Histories(4096, 8, 60.0)
        cache: SessionCache[Key] = SessionCache(60.0, lambda _: False, lambda _: None)
        self.proposer = SuffixProposer(cache, 1 << 20, self.histories, most_tokens, DraftMetrics())

    def block(self, tokens: list[int], of: SessionLaw, limit: int = 4) -> list[int]:
        session = Session((1, str(tokens)))
        session.extend(int32(tokens))
        ask = Ask(session.key, 1, len(tokens), int32(tokens), 0, limit, of)
        return self.proposer.proposal(Job(ask, of, session, limit, 0)).tolist()


def test_what_a_tenant_was_told_is_drafted_for_no_other() -> None:
    proposing = Proposing()
    secret = list(range(100, 140))
    proposing.histories.add(A, int32(secret), 9)
    assert proposing.block([1, *secret[:20]], law(A)) == secret[20:24]
    assert proposing.block([1, *secret[:20]], law(B)) == []
    # Nor is the same name of another orchestrator's tenant, or nobody's.
    assert proposing.block([1, *secret[:20]], law(("other", "a"))) == []
    assert proposing.block([1, *secret[:20]], law(("", ""))) == []


def test_one_tenants_text_does_not_even_shape_anothers_block() -> None:
    """Not by outweighing what the request says itself."""
    alone, together = Proposing(), Proposing()
    for _ in range(20):
        together.histories.add(B, int32([1, 2, 3, 8, 8, 8]), 9)
    request = [1, 2, 3, 7, 7, 7, 1, 2, 3]
    assert alone.block(request, law(A)) == together.block(request, law(A)) == [7, 7, 7, 1]


def test_an_output_of_the_same_seed_is_left_out_where_the_draft_law_matters() -> None:
    """It tells of the noise that decides the round."""
    proposing = Proposing()
    proposing.histories.add(A, int32([1, 2, 3, 4, 5, 6, 7, 8, 9]), 5)
    asked = [1, 2, 3, 4, 5]
    assert proposing.block(asked, law(seed=6)) == [6, 7, 8, 9]
    assert proposing.block(asked, law(seed=5)) == []
    assert proposing.block(asked, law(seed=5, coupled=True)) == [6, 7, 8, 9]
    assert proposing.block(asked, law(params=GREEDY, seed=5)) == [6, 7, 8, 9]


def test_the_seed_of_a_place_is_that_of_its_output() -> None:
    proposing = Proposing()
    for seed in range(40):
        proposing.histories.add(A, int32([seed * 10 + each for each in range(10)]), seed)
    for seed in range(40):
        asked = [seed * 10 + each for each in range(8)]
        assert proposing.block(asked, law(seed=99), 2) == [seed * 10 + 8, seed * 10 + 9]
        assert proposing.block(asked, law(seed=seed), 2) == []


def test_a_history_keeps_the_newest_whole_outputs_within_its_limit() -> None:
    histories = Histories(1024, 8, 60.0)
    for number in range(100):
        histories.add(A, int32([number] * 30), number)
        history = histories.of(A)
        assert history is not None
        assert len(history.index) <= 1024
        assert histories.tokens == len(history.index)
        starts = [index for index, token in enumerate(history.index.tokens) if token == -1]
        assert all(after - before == 31 for before, after in zip([-1, *starts], starts, strict=False))
        assert history.index.tokens[-2] == number
    assert len(history.index) >= 700
    kept = [history.index.tokens[begin] for begin in history._begins]
    assert kept == list(range(100 - len(kept), 100))
    assert [history.seed_at(begin + 29) for begin in history._begins] == kept


def test_an_output_longer_than_a_history_leaves_its_end() -> None:
    histories = Histories(1024, 8, 60.0)
    histories.add(A, int32(range(5000)), 1)
    history = histories.of(A)
    assert history is not None
    assert history.index.tokens.tolist() == [*range(5000 - 1023, 5000), -1]


def test_tenants_are_bounded_and_the_least_recently_used_goes() -> None:
    now = 0.0
    histories = Histories(1024, 2, 10.0, lambda: now)
    c = ("", "c")
    histories.add(A, int32([1] * 9), 1)
    histories.add(B, int32([2] * 9), 1)
    assert histories.of(A) is not None
    histories.add(c, int32([3] * 9), 1)
    assert (histories.of(B), len(histories), histories.tokens) == (None, 2, 20)
    now = 9.0
    histories.of(c)
    now = 11.0
    histories.sweep()
    assert histories.of(A) is None
    assert histories.of(c) is not None
    assert histories.tokens == 10


def test_nothing_is_kept_unless_allowed() -> None:
    histories = Histories(0, 8, 60.0)
    histories.add(A, int32([1] * 99), 1)
    assert (len(histories), histories.tokens, histories.of(A)) == (0, 0, None)


def test_session_indexes_follow_their_sessions_and_are_bounded() -> None:
    indexes = SessionIndexes(100)
    sessions = [Session((1, str(number))) for number in range(5)]
    for number, session in enumerate(sessions):
        session.extend(int32([number] * 30))
        assert indexes.of(session).tokens.tolist() == [number] * 30
    assert indexes.tokens == 90
    first = sessions[0]
    first.extend(int32([7, 8, 9]))
    first.cut(31)
    first.extend(int32([5]))
    assert indexes.of(first).tokens.tolist() == [0] * 30 + [7, 5]
    before = indexes.of(first)
    first.cut(12)
    first.extend(int32([1] * 40))
    assert indexes.of(first) is before
    assert before.tokens.tolist() == [0] * 12 + [1] * 40
    assert indexes.tokens == sum(len(indexes.of(each)) for each in (sessions[-1], first))
    again = Session(first.key)
    again.extend(int32([4, 4]))
    assert indexes.of(again).tokens.tolist() == [4, 4]
    indexes.forget(first.key)
    indexes.forget(first.key)
    assert indexes.tokens == 30
