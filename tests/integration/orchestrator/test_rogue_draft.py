"""A draft worker is trusted in nothing: outputs are the target's, neighbours go on, and a liar is dropped."""

import asyncio

import pytest

from orchestrator.links import base
from orchestrator.links.base import Info, Link, Misbehaved
from outrider.lm.tokenizer import vocabulary_of
from outrider.v1 import orchestrator_pb2
from tests.harness.faults import Client, draft_engine, greedy_output, target_engine
from tests.harness.lies import CUT_OFF, LIES, SHUT_OUT, event_for, liar_says, says
from tests.harness.orchestrator import Generation, RunningOrchestrator, ask, start_orchestrator
from tests.harness.rogue_draft import point_masses
from tests.harness.tiny_tokenizers import byte_level
from tests.harness.workers import eventually, start_draft, start_target

TOKENS = 20
RATIO = orchestrator_pb2.ACCEPTANCE_RATIO


async def outputs(orchestrator: RunningOrchestrator, lookahead: int, *, by_law: bool) -> list[list[int]]:
    """What sessions say, several at once: two greedy and two coupled ones, or four of a rule that looks at the draft's
    law, over a target that leaves it no choice.
    """
    if by_law:
        settings: list[dict[str, object]] = [{"top_k": 1, "acceptance": RATIO}] * 4
    else:
        settings = [{"temperature": 0}, {"temperature": 0}, {"seed": 1}, {"seed": 2}]
    requests = [
        ask((2, index), max_tokens=TOKENS, lookahead=lookahead, **one)  # type: ignore[arg-type]
        for index, one in enumerate(settings)
    ]
    generations: list[Generation] = await asyncio.gather(*map(orchestrator.generate, requests))
    return [one.ids for one in generations]


@pytest.mark.parametrize("name", LIES)
async def test_a_lie_moves_no_output_and_no_neighbour(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lie = LIES[name]
    if lie.then == CUT_OFF:
        monkeypatch.setattr(base, "RECONNECT_SECONDS", base.LONGEST_PAUSE)
    async with (
        start_target(target_engine()) as target,
        start_draft(draft_engine()) as honest,
        liar_says(lie) as liar,
        # The first session goes to the first worker, the next to the other.
        start_orchestrator([target.address], [honest.address, liar.address], draft_timeout=lie.timeout) as orchestrator,
    ):
        (_, link) = orchestrator.core.drafts.links
        plain = await outputs(orchestrator, 0, by_law=lie.by_law)
        neighbour = Client(orchestrator, ask((9, 9), max_tokens=100, temperature=0), timeout=60)
        await neighbour.until_tokens(1)
        assert await outputs(orchestrator, 4, by_law=lie.by_law) == plain
        assert liar.commands, "it was asked"
        assert (await neighbour.finish()).ids == greedy_output((9, 9), 100)
        if lie.then == CUT_OFF:
            await eventually(lambda: link.reason.startswith("the worker broke the protocol"))
        elif lie.then == SHUT_OUT:
            # On a busy machine the connection may have been lost meanwhile, which clears a record once.
            while link.breaker.closed:
                assert await outputs(orchestrator, 4, by_law=lie.by_law) == plain
        else:
            await eventually(lambda: link.usable)


async def test_blocks_after_the_close_of_their_session_are_of_no_use() -> None:
    lie = says(lambda event: None, then=SHUT_OUT)
    async with start_target(target_engine()) as target, liar_says(lie) as liar:
        liar.closed = lambda command: [event_for(command, block=point_masses([1]), base_length=5)] * 100
        async with start_orchestrator([target.address], [liar.address], draft_timeout=20) as orchestrator:
            for _ in range(3):
                generation = await orchestrator.generate(ask((0, 1), max_tokens=20, temperature=0))
                assert generation.ids == greedy_output((0, 1), 20)
            assert orchestrator.core.drafts.links[0].usable


async def test_a_worker_that_begins_anew_again_and_again_is_not_forgiven_each_time() -> None:
    lie = LIES["an id far outside"]
    async with start_target(target_engine()) as target, liar_says(lie) as liar:
        async with start_orchestrator([target.address], [liar.address], draft_timeout=20) as orchestrator:
            (link,) = orchestrator.core.drafts.links
            for closed in (True, True, False, False):
                assert link.breaker.closed is closed
                await orchestrator.generate(ask((0, 1), max_tokens=20, temperature=0))
                assert not link.breaker.closed
                before = link.incarnation
                liar.hang_up()
                await eventually(lambda before=before: link.usable and link.incarnation > before)


class Offender(Link):
    kind = "draft"

    def _use(self, channel: object) -> None:
        """It calls nobody."""

    async def _get_info(self, seconds: float, *, include_token_hashes: bool = False) -> Info:
        raise Misbehaved("as ever")

    async def _serve_connection(self) -> None:
        raise AssertionError("the pair was not checked")

    async def _tend(self) -> None:
        raise AssertionError("it was never well")


async def test_each_offence_costs_a_worker_twice_the_time_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    enough = asyncio.Event()
    sleep = asyncio.sleep

    async def counted(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 8:
            enough.set()
        await sleep(0)

    monkeypatch.setattr(base.random, "uniform", lambda low, high: low)
    link = Offender("127.0.0.1:1", vocabulary_of(byte_level()), lambda: None)
    monkeypatch.setattr(asyncio, "sleep", counted)
    link.start()
    await enough.wait()
    monkeypatch.undo()
    await link.close()
    assert pauses[:8] == [2, 4, 8, 16, 32, 60, 60, 60]
