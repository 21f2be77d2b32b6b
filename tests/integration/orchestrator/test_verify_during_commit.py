"""The next round begins while the commit is under way: nothing of it counts before the commit does."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from orchestrator import round as rounds
from orchestrator.session import Session
from orchestrator.store import SessionStore, fence
from orchestrator.store.base import SessionRecord, StoreUnavailable
from outrider.v1.orchestrator_pb2 import Acceptance, CancelSessionRequest, ResumeRequest
from tests.harness.engines import DEADLINE
from tests.harness.faults import Client, HookedEngine, KeptStore, draft_engine, greedy_output, refused, target_engine
from tests.harness.orchestrator import Generation, RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import RunningTarget, eventually, start_draft, start_target

PROMPT = (0, 1, 2)
# The commit at which something happens, and the tokens that the client has by then.
AT = 3
SEEN = greedy_output(PROMPT, AT - 1)

Happening = Callable[[], object]


class Interrupted(KeptStore):
    """At its third commit something happens, once the target computes the round after it.

    Args:
        engine: of the target; one pass a round.
        happens: raises what the commit comes to; it is written before where `written`.
    """

    def __init__(self, engine: HookedEngine, happens: Happening, *, written: bool = False) -> None:
        super().__init__(60)
        self._engine, self._happens, self._written = engine, happens, written
        self.commits = self._before = 0
        self.waits = False

    async def create(self, record: SessionRecord) -> None:
        self._before = self._engine.passes
        await super().create(record)

    async def commit(self, *round_: Any, finish_reason: int = 0) -> None:
        self.commits += 1
        if self.commits == AT:
            await eventually(lambda: self._engine.passes - self._before > AT)
            if self._written:
                await super().commit(*round_, finish_reason=finish_reason)
            outcome = self._happens()
            if isinstance(outcome, asyncio.Event):
                self.waits = True
                await outcome.wait()
        await super().commit(*round_, finish_reason=finish_reason)


@asynccontextmanager
async def over(engine: HookedEngine, store: SessionStore) -> AsyncIterator[tuple[RunningOrchestrator, RunningTarget]]:
    async with start_target(engine) as target, start_orchestrator([target.address], [], store=store) as orchestrator:
        yield orchestrator, target


async def until_freed(orchestrator: RunningOrchestrator, target: RunningTarget) -> None:
    await eventually(lambda: not orchestrator.core.sessions and not orchestrator.core._endings)
    await eventually(lambda: not target.service.load().open_sessions)


def raising(error: Exception) -> Happening:
    def happens() -> None:
        raise error

    return happens


async def test_the_next_verify_leaves_while_the_commit_is_under_way_and_none_after_the_last_round() -> None:
    engine = target_engine()
    async with over(engine, Interrupted(engine, lambda: None)) as (orchestrator, target):
        before = engine.passes
        generation = await orchestrator.generate(ask(PROMPT, max_tokens=20, temperature=0))
        assert generation.ids == greedy_output(PROMPT, 20)
        assert engine.passes - before == len(generation.rounds) == 20
        await until_freed(orchestrator, target)


@pytest.mark.parametrize("held", [True, False], ids=["in its pass", "answered"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (fence.stale("s", 1, 2), "STALE_EPOCH"),
        (fence.cancelled("s"), "SESSION_CANCELLED"),
        (fence.length("s", 4, 3), "STORE_UNAVAILABLE"),
        (StoreUnavailable("no answer"), "STORE_UNAVAILABLE"),
        (ZeroDivisionError(), "ENGINE_FAILED"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_a_commit_that_is_refused_drops_the_verify_that_left_before_it(
    error: Exception, reason: str, held: bool
) -> None:
    engine = target_engine()
    store = Interrupted(engine, raising(error))
    async with over(engine, store) as (orchestrator, target):
        engine.stepping = held
        client = Client(orchestrator, ask(PROMPT, max_tokens=50, temperature=0, session_id="s"))
        for _ in range(AT * held):
            engine.step()
        # The stream ends without waiting for the pass.
        await refused(client.finish(), reason)
        assert client.generation.ids == SEEN
        record = await store.load("s")
        assert record is not None
        assert record.tokens[record.prompt_length :].tolist() == SEEN
        if held:
            engine.stepping = False
            engine.step()
        await until_freed(orchestrator, target)
        assert store.commits == AT
        again = await orchestrator.generate(ask(PROMPT, max_tokens=20, temperature=0))
        assert again.ids == greedy_output(PROMPT, 20)


async def test_a_commit_whose_answer_was_lost_is_what_a_resume_goes_on_from() -> None:
    engine = target_engine()
    store = Interrupted(engine, raising(StoreUnavailable("no answer")), written=True)
    async with over(engine, store) as (orchestrator, target):
        request = ask(PROMPT, max_tokens=20, temperature=0, session_id="s")
        request.resumable = True
        client = Client(orchestrator, request)
        await refused(client.finish(), "STORE_UNAVAILABLE")
        assert client.generation.ids == SEEN
        rest = Client(orchestrator, ResumeRequest(session_id="s", offset=len(SEEN)))
        assert SEEN + (await rest.finish()).ids == greedy_output(PROMPT, 20)
        await until_freed(orchestrator, target)


@pytest.mark.parametrize("by", ["client", "CancelSession", "another owner"])
async def test_a_session_that_ends_while_both_are_under_way_is_freed(by: str) -> None:
    engine, gate = target_engine(), asyncio.Event()
    store = Interrupted(engine, lambda: gate)
    async with over(engine, store) as (orchestrator, target):
        engine.stepping = True
        request = ask(PROMPT, max_tokens=20, temperature=0, session_id="s")
        request.resumable = by == "another owner"
        client = Client(orchestrator, request)
        for _ in range(AT):
            engine.step()
        await client.until_tokens(len(SEEN))
        await eventually(lambda: store.waits)
        engine.stepping = False
        if by == "client":
            client.cancel()
        elif by == "CancelSession":
            await orchestrator.stub.CancelSession(CancelSessionRequest(session_id="s"), timeout=DEADLINE)
            await refused(client.finish(), "SESSION_CANCELLED")
        else:
            rest = Client(orchestrator, ResumeRequest(session_id="s", offset=len(SEEN)))
            await refused(client.finish(), "STALE_EPOCH")
        engine.step()
        if by == "another owner":
            assert SEEN + (await rest.finish()).ids == greedy_output(PROMPT, 20)
        await until_freed(orchestrator, target)
        assert client.generation.ids == SEEN


RULES = ["greedy", "coupled", "ratio", "block"]


def asked(rule: str, lookahead: int) -> Any:
    acceptance = Acceptance.Value(f"ACCEPTANCE_{rule.upper()}")
    temperature = 0.0 if rule == "greedy" else 1.0
    return ask(PROMPT, max_tokens=60, lookahead=lookahead, seed=11, acceptance=acceptance, temperature=temperature)


@pytest.mark.parametrize("lookahead", [0, 3])
async def test_the_output_is_the_same_with_it_and_without(lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = 0
    score_ahead = rounds.score_ahead

    async def counted(session: Session) -> None:
        nonlocal begun
        begun += 1
        await score_ahead(session)

    async def nothing(_: Session) -> None:
        return

    engine = target_engine()
    async with (
        start_target(engine) as target,
        start_draft(draft_engine()) as draft,
        start_orchestrator([target.address], [draft.address], draft_timeout=20) as running,
    ):

        async def outputs() -> list[Generation]:
            return [await running.generate(asked(rule, lookahead)) for rule in RULES]

        monkeypatch.setattr(rounds, "score_ahead", counted)
        with_it = await outputs()
        # Every round but the last begins the next one.
        assert begun == sum(len(each.rounds) - 1 for each in with_it)
        monkeypatch.setattr(rounds, "score_ahead", nothing)
        without = await outputs()
    assert [each.ids for each in with_it] == [each.ids for each in without]
    assert with_it[0].ids == greedy_output(PROMPT, 60)
    assert lookahead == 0 or all(each.accepted for each in with_it)
