"""G1, H4, K3, I1, I2: whatever a draft does, the output is the target's, and drafting comes back."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from orchestrator.breaker import Breaker
from orchestrator.links import draft as draft_link
from outrider.lm.engine import Segment
from outrider.net.arrays import to_bytes
from outrider.net.errors import OutriderError, to_status
from outrider.v1 import draft_pb2, orchestrator_pb2, types_pb2
from outrider.v1.draft_pb2 import DraftCommand, DraftEvent
from tests.harness.faults import (
    SPEC,
    Client,
    Counters,
    draft_engine,
    fake_draft,
    first_token,
    greedy_output,
    target_engine,
)
from tests.harness.orchestrator import ask, start_orchestrator
from tests.harness.workers import RunningDraft, eventually, int32, start_draft, start_target

PROMPT = (0, 1, 2)
LONG = 100_000
OURS = Path(draft_link.__file__).parents[1]
LATE = orchestrator_pb2.PLAIN_REASON_DRAFT_LATE
UNAVAILABLE = orchestrator_pb2.PLAIN_REASON_DRAFT_UNAVAILABLE


def reasons(rounds: Sequence[orchestrator_pb2.Round]) -> set[int]:
    """Why rounds ran without a block, the first and the last token's aside."""
    ordinary = {
        orchestrator_pb2.PLAIN_REASON_PREFILL,
        orchestrator_pb2.PLAIN_REASON_LAST_TOKEN,
        orchestrator_pb2.PLAIN_REASON_UNSPECIFIED,
    }
    return {one.plain_reason for one in rounds} - ordinary


async def crash(draft: RunningDraft) -> int:
    """Cuts every connection at once, as a killed process does; returns the port, now free."""
    await draft.host.server.grpc.stop(0)
    return int(draft.address.rpartition(":")[2])


async def test_g1_a_draft_that_dies_and_returns_costs_neither_the_stream_nor_its_drafting() -> None:
    async with start_target(target_engine()) as target, start_draft(draft_engine()) as draft:
        async with start_orchestrator([target.address], [draft.address], draft_timeout=60) as orchestrator:
            client = Client(orchestrator, ask(PROMPT, max_tokens=LONG, temperature=0), timeout=60)
            await client.until_round(lambda one: one.drafted > 0)
            port = await crash(draft)
            await client.until_round(lambda one: one.plain_reason == UNAVAILABLE)
            async with start_draft(draft_engine(), port=port) as again:
                generation = await client.until_round(lambda one: one.drafted > 0)
                assert generation.ids == greedy_output(PROMPT, len(generation.ids))
                # The new worker is told everything at once: it never has to ask.
                assert reasons(generation.rounds) == {UNAVAILABLE}
                client.cancel()
                await again.until_sessions(0)


async def test_g1_a_draft_that_returns_is_asked_at_once_whatever_its_former_self_did() -> None:
    async with start_target(target_engine()) as target, start_draft(draft_engine()) as draft:
        async with start_orchestrator([target.address], [draft.address]) as orchestrator:
            (link,) = orchestrator.core.drafts.links
            for _ in range(40):
                link.breaker.failure()
            incarnation = link.incarnation
            async with start_draft(draft_engine(), port=await crash(draft)):
                await eventually(lambda: link.incarnation > incarnation)
                generation = await orchestrator.generate(ask(PROMPT, temperature=0))
                assert generation.drafted > 0
                assert generation.ids == greedy_output(PROMPT, 20)


async def test_draft_late_rounds_run_plain_and_drafting_resumes() -> None:
    counters, model = Counters(), draft_engine()
    async with (
        start_target(target_engine()) as target,
        start_draft(model) as draft,
        start_orchestrator(
            [target.address], [draft.address], draft_timeout=0.25, metrics=counters.metrics
        ) as orchestrator,
    ):
        client = Client(orchestrator, ask(PROMPT, max_tokens=LONG, temperature=0), timeout=60)
        await client.until_round(lambda one: one.drafted > 0)
        before = len(client.generation.rounds)
        model.hold()
        await client.until_round(lambda one: one.plain_reason == LATE)
        held = (await client.until_round(lambda one: one.plain_reason == UNAVAILABLE)).rounds[before:]
        model.let_go()
        generation = await client.until_round(lambda one: one.drafted > 0)
        assert generation.ids == greedy_output(PROMPT, len(generation.ids))
        # The breaker let no more through than it takes to open it, and then probes.
        late = [one for one in held if one.plain_reason == LATE]
        assert 1 <= len(late) <= 5
        client.cancel()


async def test_many_sessions_that_find_the_draft_late_at_once_do_not_shut_it_out_for_long() -> None:
    model, scorer = draft_engine(), target_engine()
    async with (
        start_target(scorer) as target,
        # With blocks ahead they would find it late one after another.
        start_draft(model, ahead_blocks=0) as draft,
        start_orchestrator([target.address], [draft.address], draft_timeout=0.5) as orchestrator,
    ):
        (link,), (verifying,) = orchestrator.core.drafts.links, orchestrator.core.targets.links
        clients = [Client(orchestrator, ask((index, 1), max_tokens=LONG), timeout=60) for index in range(16)]
        await asyncio.gather(*(client.until_tokens(2) for client in clients))
        # All wait for the target, and then for their blocks.
        scorer.hold()
        await eventually(lambda: sum(verifying.queued) == len(clients))
        model.hold()
        scorer.let_go()
        await asyncio.gather(*(client.until_round(lambda one: one.plain_reason == LATE) for client in clients))
        model.let_go()
        # One hiccup is one failure: the first cooldown, not the longest.
        assert link.breaker._cooldown <= 2.0
        await asyncio.gather(*(client.until_round(lambda one: one.drafted > 0) for client in clients))
        for client in clients:
            client.cancel()


async def test_a_session_leaves_a_draft_that_keeps_failing_for_one_that_works() -> None:
    stuck = draft_engine()
    async with (
        start_target(target_engine()) as target,
        start_draft(stuck) as bad,
        start_draft(draft_engine()) as good,
        start_orchestrator([target.address], [bad.address, good.address], draft_timeout=0.2) as orchestrator,
    ):
        client = Client(orchestrator, ask(PROMPT, max_tokens=LONG, temperature=0), timeout=60)
        await client.until_round(lambda one: one.drafted > 0)
        assert [link.sessions for link in orchestrator.core.drafts.links] == [1, 0]
        stuck.hold()
        await client.until_round(lambda one: one.plain_reason == LATE)
        generation = await client.until_round(lambda one: one.drafted > 0)
        assert [link.sessions for link in orchestrator.core.drafts.links] == [0, 1]
        assert generation.ids == greedy_output(PROMPT, len(generation.ids))
        assert orchestrator_pb2.PLAIN_REASON_DRAFT_ERROR not in reasons(generation.rounds)
        assert orchestrator.core.drafts.links[0].incarnation == 1
        assert orchestrator.core.drafts.links[0].usable, "the first draft is stuck, not dead"
        client.cancel()
        stuck.let_go()


async def test_sessions_spread_over_drafts_and_survive_the_death_of_one() -> None:
    async with start_target(target_engine()) as target, start_draft(draft_engine()) as first:
        async with (
            start_draft(draft_engine()) as second,
            start_orchestrator([target.address], [first.address, second.address]) as orchestrator,
        ):
            prompts = [(index, 5) for index in range(8)]
            clients = [Client(orchestrator, ask(prompt, max_tokens=300, temperature=0)) for prompt in prompts]
            for client in clients:
                await client.until_tokens(5)
            assert [link.sessions for link in orchestrator.core.drafts.links] == [4, 4]
            await crash(first)
            for client, prompt in zip(clients, prompts, strict=True):
                generation = await client.finish()
                assert generation.ids == greedy_output(prompt, 300)
                assert any(one.drafted for one in generation.rounds[-20:])
            await eventually(lambda: sum(link.sessions for link in orchestrator.core.drafts.links) == 0)


def own_tasks() -> int:
    """Tasks that run the orchestrator's code; gRPC begins and ends its own as it likes."""
    codes = (getattr(task.get_coro(), "cr_code", None) for task in asyncio.all_tasks())
    return sum(code is not None and Path(code.co_filename).is_relative_to(OURS) for code in codes)


async def test_h4_a_draft_that_is_down_is_asked_at_most_once_a_second_and_costs_nothing() -> None:
    async with start_target(target_engine()) as target, fake_draft(lambda _: [], refuses=True) as draft:
        async with start_orchestrator([target.address], [draft.address], expect=(1, 0)) as orchestrator:
            await eventually(lambda: len(draft.info_calls) >= 1)
            tasks = own_tasks()
            generation = await orchestrator.generate(ask(PROMPT, max_tokens=100, temperature=0))
            assert reasons(generation.rounds) == {UNAVAILABLE}
            await eventually(lambda: len(draft.info_calls) >= 4)
            waits = [later - sooner for sooner, later in zip(draft.info_calls, draft.info_calls[1:], strict=False)]
            assert min(waits) >= 0.95
            (link,) = orchestrator.core.drafts.links
            assert not link._told
            assert link._queue.empty()
            assert link.reason == "unavailable: down"
            # One beside them may be about to end or to begin.
            assert own_tasks() <= tasks + 1


async def test_h4_connections_that_end_leave_nothing_behind() -> None:
    def answer(command: DraftCommand) -> list[DraftEvent]:
        raise ConnectionAbortedError

    def readers() -> int:
        return sum("_consume_request_iterator" in repr(task) for task in asyncio.all_tasks())

    async with start_target(target_engine()) as target, fake_draft(answer) as draft:
        async with start_orchestrator([target.address], [draft.address]) as orchestrator:
            (link,) = orchestrator.core.drafts.links
            for incarnation in (1, 2, 3):
                await eventually(lambda wanted=incarnation: link.usable and link.incarnation == wanted)
                # The first command ends the stream.
                await orchestrator.generate(ask(PROMPT, max_tokens=2))
                await eventually(lambda: not link.usable)
                assert not link._told
            assert readers() <= 1


async def test_k3_nan_in_the_draft_costs_its_session_the_blocks_and_nothing_else() -> None:
    model = draft_engine()

    def poison(segments: Sequence[Segment], rows: list[torch.Tensor]) -> list[torch.Tensor]:
        bad = [first_token(segment) == 15 for segment in segments]
        return [row * torch.nan if poisoned else row for row, poisoned in zip(rows, bad, strict=True)]

    model.edit = poison
    async with start_target(target_engine()) as target, start_draft(model) as draft:
        async with start_orchestrator([target.address], [draft.address], draft_timeout=20) as orchestrator:
            sick, well = await asyncio.gather(
                orchestrator.generate(ask((15, 1), max_tokens=3, temperature=0)),
                orchestrator.generate(ask((3, 1), max_tokens=40, temperature=0)),
            )
            assert reasons(sick.rounds) == {orchestrator_pb2.PLAIN_REASON_DRAFT_ERROR}
            assert sick.ids == greedy_output((15, 1), 3)
            assert not reasons(well.rounds)
            assert well.ids == greedy_output((3, 1), 40)


async def test_a_saturated_draft_makes_rounds_plain_and_recovers() -> None:
    model = draft_engine()
    async with (
        start_target(target_engine()) as target,
        start_draft(model, max_queue_items=2) as draft,
        start_orchestrator([target.address], [draft.address], draft_timeout=20) as orchestrator,
    ):
        prompts = [(index, 7) for index in range(12)]
        generations = await asyncio.gather(
            *(orchestrator.generate(ask(prompt, max_tokens=60, temperature=0)) for prompt in prompts)
        )
        assert [one.ids for one in generations] == [greedy_output(prompt, 60) for prompt in prompts]
        found = set().union(*(reasons(one.rounds) for one in generations))
        assert orchestrator_pb2.PLAIN_REASON_DRAFT_SATURATED in found
        # Being full is no loss of state: the worker never has to say that it does not know a session. The refusal of a
        # warm-up may cross the first command, though.
        later = set().union(*(reasons(one.rounds[2:]) for one in generations))
        assert orchestrator_pb2.PLAIN_REASON_DRAFT_ERROR not in later
        client = Client(orchestrator, ask(PROMPT, max_tokens=LONG, temperature=0), timeout=60)
        await client.until_round(lambda one: one.drafted > 0)
        client.cancel()


async def test_a_full_command_queue_makes_rounds_plain_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_link, "MAX_QUEUED_COMMANDS", 1)
    async with (
        start_target(target_engine()) as target,
        start_draft(draft_engine()) as draft,
        start_orchestrator([target.address], [draft.address], draft_timeout=20) as orchestrator,
    ):
        prompts = [(index, 7) for index in range(12)]
        generations = await asyncio.gather(
            *(orchestrator.generate(ask(prompt, max_tokens=40, temperature=0)) for prompt in prompts)
        )
        assert [one.ids for one in generations] == [greedy_output(prompt, 40) for prompt in prompts]
        found = set().union(*(reasons(one.rounds) for one in generations))
        assert orchestrator_pb2.PLAIN_REASON_DRAFT_SATURATED in found
        assert orchestrator_pb2.PLAIN_REASON_DRAFT_ERROR not in found
        client = Client(orchestrator, ask(PROMPT, max_tokens=LONG, temperature=0), timeout=60)
        await client.until_round(lambda one: one.drafted > 0)
        client.cancel()


def answer_to(command: DraftCommand, **outcome: object) -> DraftEvent:
    opened = command.WhichOneof("action") == "open"
    base_length = len(command.open.tokens) // 4 if opened else command.advance.base_length
    return DraftEvent(session_id=command.session_id, epoch=command.epoch, base_length=base_length, **outcome)  # type: ignore[arg-type]


def empty() -> draft_pb2.Block:
    return draft_pb2.Block()


def lookahead_of(command: DraftCommand) -> int:
    return command.open.lookahead if command.WhichOneof("action") == "open" else command.advance.lookahead


def tokens_block(tokens: Sequence[int], laws: int | None = None, probs: float = 1.0) -> draft_pb2.Block:
    """Tokens with point masses on them."""
    count = len(tokens) if laws is None else laws
    block = draft_pb2.Block(tokens=to_bytes(int32(tokens)))
    block.law.sizes = to_bytes(int32([1] * count))
    block.law.token_ids = to_bytes(int32(list(tokens)[:count] + [0] * (count - len(tokens))))
    block.law.probs = torch.full((count,), probs, dtype=torch.float32).numpy().tobytes()
    return block


BLOCKS: dict[str, draft_pb2.Block] = {
    "id is the vocabulary's size": tokens_block([16]),
    "id far outside": tokens_block([2**31 - 1]),
    "negative id": tokens_block([-1]),
    "more than asked for": tokens_block([1] * 9),
    "rows without tokens": tokens_block([1], laws=2),
    "tokens without rows": tokens_block([1, 2], laws=1),
    "probability of nothing": tokens_block([1], probs=0.0),
    "probability of NaN": tokens_block([1], probs=float("nan")),
    "half a token": draft_pb2.Block(tokens=b"\1\0"),
    "half a row": draft_pb2.Block(tokens=to_bytes(int32([1])), law={"sizes": b"\1\0\0\0", "token_ids": b"\1"}),
    "negative row size": draft_pb2.Block(tokens=to_bytes(int32([1])), law={"sizes": to_bytes(int32([-1]))}),
}


@pytest.mark.parametrize("name", BLOCKS)
async def test_b3_a_block_that_breaks_the_protocol_is_dropped_and_counted_and_shuts_the_draft_out(name: str) -> None:
    counters = Counters()

    def answer(command: DraftCommand) -> list[DraftEvent]:
        if command.WhichOneof("action") == "close":
            return []
        if not lookahead_of(command):
            return [answer_to(command, block=empty())]
        return [answer_to(command, block=BLOCKS[name])]

    async with start_target(target_engine()) as target, fake_draft(answer) as draft:
        async with start_orchestrator(
            [target.address], [draft.address], draft_timeout=20, metrics=counters.metrics
        ) as orchestrator:
            orchestrator.core.drafts.links[0].breaker = Breaker(threshold=3, cooldown=3600.0)
            # A rule that looks at the draft's law, over a target that leaves it no choice.
            request = ask(PROMPT, max_tokens=12, top_k=1, acceptance=orchestrator_pb2.ACCEPTANCE_RATIO)
            generation = await orchestrator.generate(request)
            assert generation.ids == greedy_output(PROMPT, 12)
            invalid = [
                one for one in generation.rounds if one.plain_reason == orchestrator_pb2.PLAIN_REASON_DRAFT_INVALID
            ]
            assert len(invalid) == 3
            assert not orchestrator.core.drafts.links[0].breaker.closed
            found = counters.read()
            assert found["outrider.draft_tokens"] == 0
            assert found["outrider.draft_discarded"] == 3


Wrong = Callable[[DraftCommand], DraftEvent]


def of_another(change: Callable[[DraftEvent], None]) -> Wrong:
    def wrong(command: DraftCommand) -> DraftEvent:
        event = answer_to(command, block=tokens_block([1]))
        change(event)
        return event

    return wrong


def other_session(event: DraftEvent) -> None:
    event.session_id = "nobody"


def other_epoch(event: DraftEvent) -> None:
    event.epoch += 1


def other_round(event: DraftEvent) -> None:
    event.base_length -= 1


@pytest.mark.parametrize("change", [other_session, other_epoch, other_round])
async def test_i2_an_answer_to_another_question_is_not_taken_and_counted_once(
    change: Callable[[DraftEvent], None],
) -> None:
    counters, wrong = Counters(), of_another(change)

    def answer(command: DraftCommand) -> list[DraftEvent]:
        if command.WhichOneof("action") == "close" or not lookahead_of(command):
            return []
        # The right answer to the same command follows: an empty block.
        return [wrong(command), answer_to(command, block=empty())]

    async with start_target(target_engine()) as target, fake_draft(answer) as draft:
        async with start_orchestrator(
            [target.address], [draft.address], draft_timeout=20, metrics=counters.metrics
        ) as orchestrator:
            generation = await orchestrator.generate(ask(PROMPT, max_tokens=12, temperature=0))
            assert generation.ids == greedy_output(PROMPT, 12)
            assert reasons(generation.rounds) == {orchestrator_pb2.PLAIN_REASON_NO_PROPOSAL}
            assert counters.read()["outrider.draft_discarded{stale}"] == 10


async def test_i2_a_late_block_is_counted_once() -> None:
    counters, model = Counters(), draft_engine()
    held: list[DraftEvent] = []

    def answer(command: DraftCommand) -> list[DraftEvent]:
        if command.WhichOneof("action") == "close" or not lookahead_of(command):
            return []
        late, held[:] = list(held), [answer_to(command, block=tokens_block([1]))]
        # Each block comes with the next command: its round was over long before.
        return late

    async with start_target(target_engine()) as target, fake_draft(answer) as draft:
        async with start_orchestrator(
            [target.address], [draft.address], draft_timeout=0.05, metrics=counters.metrics
        ) as orchestrator:
            generation = await orchestrator.generate(ask(PROMPT, max_tokens=12, temperature=0))
            assert generation.ids == greedy_output(PROMPT, 12)
            late = [one for one in generation.rounds if one.plain_reason == LATE]
            assert len(late) == 3
            found = counters.read()
            assert found["outrider.rounds{DRAFT_LATE}"] == 3
            assert found["outrider.draft_discarded"] == 2
            assert model.passes == 0


async def test_i2_a_block_that_comes_while_its_round_is_verified_without_it_is_late() -> None:
    counters, model = Counters(), target_engine()
    async with start_target(model) as target, fake_draft(lambda _: []) as draft:
        async with start_orchestrator(
            [target.address], [draft.address], draft_timeout=0.05, metrics=counters.metrics
        ) as orchestrator:
            model.hold()
            running = asyncio.create_task(orchestrator.generate(ask(PROMPT, max_tokens=5, temperature=0)))
            await model.until_in_pass()
            passes = model.passes
            model.stepping = True
            model.let_go()
            # The second round has given its block up, and its pass is held.
            await eventually(lambda: model.passes == passes + 1)
            # The worker may read it later than it was given up.
            await eventually(lambda: any(map(lookahead_of, draft.commands)))
            asked = [command for command in draft.commands if lookahead_of(command)]
            await draft.send([answer_to(asked[-1], block=tokens_block([1]))])
            await eventually(lambda: counters.read()["outrider.draft_discarded{late}"] == 1)
            model.stepping = False
            model.step()
            assert (await running).ids == greedy_output(PROMPT, 5)
            assert counters.read()["outrider.draft_discarded"] == 1


async def test_i2_an_unanswered_warm_up_is_no_discarded_block() -> None:
    counters = Counters()
    held: list[DraftEvent] = []

    def answer(command: DraftCommand) -> list[DraftEvent]:
        if command.WhichOneof("action") == "close":
            return []
        if command.WhichOneof("action") == "open":
            held.append(answer_to(command, block=empty()))
            return []
        before, held[:] = list(held), []
        return [*before, answer_to(command, block=empty())]

    async with start_target(target_engine()) as target, fake_draft(answer) as draft:
        async with start_orchestrator(
            [target.address], [draft.address], draft_timeout=20, metrics=counters.metrics
        ) as orchestrator:
            await orchestrator.generate(ask(PROMPT, max_tokens=5, temperature=0))
            assert counters.read()["outrider.draft_discarded"] == 0


async def test_a_warm_up_that_was_refused_is_not_built_on() -> None:
    full = to_status(OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, "full"))
    model = target_engine()

    def answer(command: DraftCommand) -> list[DraftEvent]:
        if command.WhichOneof("action") == "close":
            return []
        return [answer_to(command, error=full)] if not lookahead_of(command) else [answer_to(command, block=empty())]

    async with start_target(model) as target, fake_draft(answer) as draft:
        async with start_orchestrator([target.address], [draft.address], draft_timeout=20) as orchestrator:
            (link,) = orchestrator.core.drafts.links
            model.hold()
            running = asyncio.create_task(orchestrator.generate(ask(PROMPT, max_tokens=3, temperature=0)))
            # The refusal is here before the prompt is done.
            await eventually(lambda: draft.commands and all(one.answer is None for one in link._told.values()))
            model.let_go()
            assert (await running).ids == greedy_output(PROMPT, 3)
            assert [one.WhichOneof("action") for one in draft.commands[:2]] == ["open", "open"]


async def test_i1_i2_counters_hold_their_invariants_over_many_kinds_of_rounds() -> None:
    counters, model, verified = Counters(), target_engine(), 0

    def count(segments: Sequence[Segment], rows: list[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal verified
        verified += sum(segment.rows - 1 for segment in segments)
        return rows

    async with (
        start_target(model) as target,
        start_draft(draft_engine()) as draft,
        start_orchestrator(
            [target.address], [draft.address], draft_timeout=20, metrics=counters.metrics
        ) as orchestrator,
    ):
        model.edit = count
        requests = [ask((index, 2), max_tokens=40, lookahead=index % 6, seed=index) for index in range(12)]
        generations = await asyncio.gather(*(orchestrator.generate(request) for request in requests))
        rounds = [one for generation in generations for one in generation.rounds]
        found = counters.read()
        assert found["outrider.draft_tokens"] == verified > 0
        assert found["outrider.draft_tokens"] == sum(one.drafted for one in rounds)
        assert found["outrider.accepted_tokens"] == sum(one.accepted for one in rounds)
        assert found["outrider.accepted_tokens_by_position"] == found["outrider.accepted_tokens"]
        assert found["outrider.accepted_tokens"] <= found["outrider.draft_tokens"]
        assert found["outrider.rounds"] == len(rounds)
        assert found["outrider.emitted_tokens"] == 12 * 40
        # Nothing was trimmed: a block never reaches past max_tokens.
        assert found["outrider.emitted_tokens"] == found["outrider.accepted_tokens"] + found["outrider.rounds"]
        for generation in generations:
            usage = generation.finish.usage
            assert usage.completion_tokens == 40
            assert usage.rounds == len(generation.rounds)
            assert usage.accepted_tokens == generation.accepted


async def test_a_block_is_not_asked_for_when_one_token_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[DraftCommand] = []

    def answer(command: DraftCommand) -> list[DraftEvent]:
        commands.append(command)
        return [] if command.WhichOneof("action") == "close" else [answer_to(command, block=empty())]

    async with start_target(target_engine()) as target, fake_draft(answer) as draft:
        async with start_orchestrator([target.address], [draft.address], draft_timeout=20) as orchestrator:
            generation = await orchestrator.generate(ask(PROMPT, max_tokens=4, temperature=0))
            await eventually(lambda: commands and commands[-1].WhichOneof("action") == "close")
            assert [one.WhichOneof("action") for one in commands] == ["open", "advance", "advance", "close"]
            assert [lookahead_of(one) for one in commands[:-1]] == [0, 2, 1]
            assert generation.rounds[-1].plain_reason == orchestrator_pb2.PLAIN_REASON_LAST_TOKEN
            # What was sent for nothing was sent all the same.
            sent = sum(one.ByteSize() for one in commands[:-1])
            assert sum(one.wire_bytes for one in generation.rounds) >= sent


async def test_plain_requests_say_that_speculation_is_off() -> None:
    async with start_target(target_engine()) as target, start_draft(draft_engine()) as draft:
        async with start_orchestrator([target.address], [draft.address]) as orchestrator:
            generation = await orchestrator.generate(ask(PROMPT, lookahead=0))
            assert {one.plain_reason for one in generation.rounds} == {orchestrator_pb2.PLAIN_REASON_DISABLED}
            assert draft.service.load().open_sessions == 0


async def test_a_repaired_draft_gets_its_sessions_anew_after_an_invalid_block() -> None:
    opened: list[str] = []

    def answer(command: DraftCommand) -> list[DraftEvent]:
        if command.WhichOneof("action") == "close":
            return []
        if not lookahead_of(command):
            return [answer_to(command, block=empty())]
        if command.WhichOneof("action") == "open":
            opened.append(command.session_id)
            return [answer_to(command, block=empty())]
        return [answer_to(command, block=tokens_block([99]))]

    async with start_target(target_engine()) as target, fake_draft(answer) as draft:
        async with start_orchestrator([target.address], [draft.address], draft_timeout=20) as orchestrator:
            generation = await orchestrator.generate(ask(PROMPT, max_tokens=10, temperature=0, session_id="s"))
            assert generation.ids == greedy_output(PROMPT, 10)
            assert opened[:1] == ["s"]


async def test_a_draft_equal_to_the_target_is_always_accepted_after_a_reconnect() -> None:
    async with start_target(target_engine()) as target, start_draft(draft_engine(SPEC)) as draft:
        async with start_orchestrator([target.address], [draft.address]) as orchestrator:
            client = Client(orchestrator, ask(PROMPT, max_tokens=LONG, temperature=0), timeout=60)
            await client.until_round(lambda one: one.drafted > 0)
            port = await crash(draft)
            await client.until_round(lambda one: one.plain_reason == UNAVAILABLE)
            async with start_draft(draft_engine(SPEC), port=port):
                generation = await client.until_round(lambda one: one.drafted > 0)
                assert generation.accepted == generation.drafted
                client.cancel()
