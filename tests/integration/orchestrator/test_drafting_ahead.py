"""Drafting ahead at the orchestrator: pushed blocks are used when they fit, audited like any, and dropped when not."""

import asyncio
from collections.abc import Callable

import pytest

from orchestrator.links.draft import MAX_PUSHED, DraftLink
from orchestrator.prefix import TokenBuffer
from outrider.lm.tokenizer import load_tokenizer, vocabulary_of
from outrider.net.arrays import to_bytes
from outrider.v1 import draft_pb2, orchestrator_pb2
from outrider.v1.draft_pb2 import (
    PROPOSER_MODEL,
    PROPOSER_PREDICTION,
    PROPOSER_PROMPT_LOOKUP,
    PROPOSER_SUFFIX,
    DraftCommand,
    DraftEvent,
)
from outrider.v1.orchestrator_pb2 import ACCEPTANCE_BLOCK, ACCEPTANCE_COUPLED, ACCEPTANCE_RATIO
from tests.harness.faults import Client, Counters, FakeDraft, fake_draft, greedy_output, target_engine
from tests.harness.orchestrator import Generation, ask, start_orchestrator
from tests.harness.system import start_system, synthetic
from tests.harness.workers import advance_command, eventually, int32, open_command, start_target

PROMPT = (0, 1, 2)
PREDICTION = load_tokenizer("synthetic:vocab_size=16").decode(list(range(16)) * 8)
RULES = {
    "greedy": {"temperature": 0.0},
    "coupled": {"acceptance": ACCEPTANCE_COUPLED},
    "ratio": {"acceptance": ACCEPTANCE_RATIO},
    "block": {"acceptance": ACCEPTANCE_BLOCK},
    "penalties": {"acceptance": ACCEPTANCE_RATIO, "repetition_penalty": 1.3, "presence_penalty": 0.4, "top_p": 0.9},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("proposer", [PROPOSER_MODEL, PROPOSER_PROMPT_LOOKUP, PROPOSER_PREDICTION, PROPOSER_SUFFIX])
async def test_the_output_is_the_same_with_drafting_ahead_and_without(
    rule: str, proposer: draft_pb2.Proposer.ValueType
) -> None:
    """Also for `ratio` and `block`, whose output depends on the blocks: they are the same blocks."""
    requests = [
        ask(PROMPT * 3, max_tokens=60, lookahead=3, seed=seed, proposer=proposer, **RULES[rule]) for seed in range(6)
    ]
    for request in requests if proposer == PROPOSER_PREDICTION else ():
        request.speculation.prediction = PREDICTION
    found: list[list[Generation]] = []
    # Long enough for a block of a model to be there before the round is over, on any machine.
    pass_ms = 20.0 if proposer == PROPOSER_MODEL else 2.0
    for blocks in (0, 2):
        async with start_system(
            synthetic(order=2, pass_ms=pass_ms),
            synthetic(order=2, noise=0.4),
            proposers="model,prompt_lookup,prediction,suffix",
            ahead_blocks=blocks,
        ) as system:
            found.append(await system.generate_all(requests))
    off, on = found
    assert [one.ids for one in on] == [one.ids for one in off]
    assert [one.drafted for one in on] == [one.drafted for one in off]
    assert not any(one.drafted_ahead for generation in off for one in generation.rounds)
    if proposer == PROPOSER_MODEL:
        assert any(one.drafted_ahead and one.block_ready for generation in on for one in generation.rounds)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "ratio", "block"])
async def test_with_a_draft_that_is_the_target_every_block_was_drafted_ahead(rule: str) -> None:
    """The guess of the bonus token is the target's own draw: nothing that was pushed is missed."""
    async with start_system(synthetic(pass_ms=20.0), synthetic(), ahead_blocks=2) as system:
        one = await system.generate(ask(PROMPT, max_tokens=80, lookahead=3, seed=5, **RULES[rule]))
        assert one.accepted == one.drafted > 0
        blocks = [each for each in one.rounds if each.drafted]
        # Only on a machine that stops for a while does the block begin after its Advance.
        assert sum(each.drafted_ahead > 0 for each in blocks[1:]) >= len(blocks) - 4
        assert sum(each.block_ready for each in blocks[1:]) >= len(blocks) - 6


def block(tokens: list[int]) -> draft_pb2.Block:
    return draft_pb2.Block(tokens=to_bytes(int32(tokens)), timing=draft_pb2.DraftTiming(ahead_tokens=len(tokens)))


class Script:
    """A draft that knows the output: it answers with blocks of two, and pushes what `push` makes for the next round.

    Attributes:
        base: length that the last command named.
        silent: whether commands stay unanswered.
    """

    def __init__(self, push: Callable[["Script", DraftEvent], list[DraftEvent]]) -> None:
        self.whole = [*PROMPT, *greedy_output(PROMPT, 200)]
        self.push = push
        self.base = 0
        self.silent = False

    def answer(self, command: DraftCommand) -> list[DraftEvent]:
        action = command.WhichOneof("action")
        if action == "close":
            return []
        self.base = len(command.open.tokens) // 4 if action == "open" else command.advance.base_length
        lookahead = command.open.lookahead if action == "open" else command.advance.lookahead
        event = DraftEvent(session_id=command.session_id, epoch=command.epoch, base_length=self.base)
        event.block.tokens = to_bytes(int32(self.whole[self.base : self.base + min(2, lookahead)]))
        told = command.advance.held or self.silent
        return ([] if told else [event]) + (self.push(self, event) if lookahead else [])

    def pushed(self, event: DraftEvent, tokens: int = 2, ahead: int = 3) -> DraftEvent:
        """A block for the base length after `ahead` more tokens, all of them right."""
        base = self.base + ahead
        pushed = DraftEvent(session_id=event.session_id, epoch=event.epoch, base_length=base)
        pushed.hypothesis = to_bytes(int32(self.whole[self.base : base]))
        pushed.block.CopyFrom(block(self.whole[base : base + tokens]))
        return pushed


async def generate(
    script: Script, counters: Counters, count: int = 30, **fields: object
) -> tuple[Generation, FakeDraft]:
    """A greedy generation over the script's draft, which must say what the target says."""
    async with (
        start_target(target_engine()) as target,
        fake_draft(script.answer) as draft,
        start_orchestrator(
            [target.address], [draft.address], draft_timeout=20, metrics=counters.metrics
        ) as orchestrator,
    ):
        one = await orchestrator.generate(ask(PROMPT, max_tokens=count, temperature=0, **{"lookahead": 2, **fields}))
        assert one.ids == greedy_output(PROMPT, count)
        await eventually(lambda: not orchestrator.core.drafts.links[0]._told)
        return one, draft


async def test_a_pushed_block_is_used_and_the_worker_is_told() -> None:
    counters = Counters()
    one, draft = await generate(Script(lambda script, event: [script.pushed(event)]), counters)
    commands = [command.advance for command in draft.commands if command.WhichOneof("action") == "advance"]
    # The first block is answered, all others were there.
    assert [command.held for command in commands] == [False] + [True] * (len(commands) - 1)
    blocks = [each for each in one.rounds if each.drafted]
    assert [each.drafted_ahead for each in blocks] == [0] + [each.drafted for each in blocks[1:]]
    assert all(each.block_ready for each in blocks[1:])
    assert one.accepted == one.drafted


async def test_a_pushed_block_that_is_longer_than_wanted_is_cut() -> None:
    script = Script(lambda script, event: [script.pushed(event, tokens=7)])
    one, _ = await generate(script, Counters())
    blocks = [each for each in one.rounds if each.drafted]
    assert {each.drafted for each in blocks[:-1]} == {2}
    assert all(each.drafted_ahead == each.drafted for each in blocks[1:])


async def test_a_push_that_crosses_its_advance_is_the_answer() -> None:
    """Pushed, as the worker sees it, before the Advance came that it does not answer again."""

    def push(script: Script, event: DraftEvent) -> list[DraftEvent]:
        script.silent = True
        base, script.base = script.base, script.base - 3
        crossing = script.pushed(event)
        script.base = base
        return [crossing] if base > len(PROMPT) + 1 else [event]

    one, draft = await generate(Script(push), Counters())
    assert not any(command.advance.held for command in draft.commands)
    assert one.accepted == one.drafted > 15


@pytest.mark.parametrize("crossing", ["with the answer to it", "as the answer to it", "held since before it"])
async def test_what_was_pushed_before_a_session_is_opened_anew_is_not_used(crossing: str) -> None:
    """Another proposer may have made it, or one that went on from wrong tokens."""
    reopened: list[int] = []

    def answer(command: DraftCommand) -> list[DraftEvent]:
        events = script.answer(command)
        if not (command.open.lookahead or command.advance.lookahead):
            return events
        (block,) = events
        if script.base < len(PROMPT) + 10:
            return events
        if not reopened and command.WhichOneof("action") == "advance":
            reopened.append(0)
            error = DraftEvent(session_id=command.session_id, epoch=command.epoch, base_length=script.base)
            error.error.code = 5
            # A round without a block commits one token.
            return [script.pushed(block, ahead=4), error] if crossing == "held since before it" else [error]
        if len(reopened) == 1 and command.WhichOneof("action") == "open":
            reopened.append(script.base)
            if crossing == "as the answer to it":
                script.base -= 3
                pushed = script.pushed(block)
                script.base += 3
                return [pushed, block]
            if crossing == "with the answer to it":
                return [script.pushed(block), block]
        return events

    script, counters = Script(lambda script, event: []), Counters()
    async with (
        start_target(target_engine()) as target,
        fake_draft(answer) as draft,
        start_orchestrator(
            [target.address], [draft.address], draft_timeout=20, metrics=counters.metrics
        ) as orchestrator,
    ):
        one = await orchestrator.generate(ask(PROMPT, max_tokens=40, temperature=0, lookahead=2))
    assert one.ids == greedy_output(PROMPT, 40)
    assert len(reopened) == 2
    assert not any(each.drafted_ahead for each in one.rounds)
    assert not any(command.advance.held for command in draft.commands)
    assert counters.read()["outrider.draft_discarded{missed}"] == 1


async def test_what_is_pushed_after_the_answer_to_an_open_is_of_use_also_when_that_was_late() -> None:
    link = DraftLink(
        "127.0.0.1:1", vocabulary_of(load_tokenizer("synthetic:vocab_size=16")), lambda: None, lambda _: None
    )
    tokens = TokenBuffer(int32(PROMPT))
    link.request(open_command("s", PROMPT, 2), tokens)
    tokens.append(int32([7]))
    link.request(advance_command("s", [*PROMPT, 7], 2), tokens)
    late = DraftEvent(session_id="s", epoch=1, base_length=len(PROMPT), block=block([7]))
    pushed = DraftEvent(session_id="s", epoch=1, base_length=5, hypothesis=to_bytes(int32([7, 8])), block=block([9]))
    for event, held in ((pushed, False), (late, False), (pushed, True)):
        link._dispatch(event)
        assert bool(link._told["s"].pushed) == held
    await link.close()


def for_other_tokens(script: Script, event: DraftEvent) -> list[DraftEvent]:
    pushed = script.pushed(event)
    *right, last = script.whole[script.base : pushed.base_length]
    pushed.hypothesis = to_bytes(int32([*right, (last + 1) % 16]))
    return [pushed]


def for_another_length(script: Script, event: DraftEvent) -> list[DraftEvent]:
    return [script.pushed(event, ahead=2)]


def of_another_epoch(script: Script, event: DraftEvent) -> list[DraftEvent]:
    pushed = script.pushed(event)
    pushed.epoch += 1
    return [pushed]


def of_the_past(script: Script, event: DraftEvent) -> list[DraftEvent]:
    pushed = script.pushed(event, ahead=0)
    pushed.base_length -= 1
    pushed.hypothesis = to_bytes(int32([script.whole[script.base - 2]]))
    return [pushed]


def without_a_hypothesis(script: Script, event: DraftEvent) -> list[DraftEvent]:
    pushed = script.pushed(event)
    pushed.hypothesis = b""
    return [pushed]


@pytest.mark.parametrize(
    ("push", "reason"),
    [
        (for_other_tokens, "missed"),
        (for_another_length, "missed"),
        (of_another_epoch, "stale"),
        (of_the_past, "stale"),
        (without_a_hypothesis, "stale"),
    ],
)
async def test_a_push_that_does_not_fit_is_dropped_and_counted(
    push: Callable[[Script, DraftEvent], list[DraftEvent]], reason: str
) -> None:
    counters = Counters()
    one, draft = await generate(Script(push), counters)
    assert not any(each.drafted_ahead for each in one.rounds)
    assert not any(command.advance.held for command in draft.commands)
    assert one.accepted == one.drafted > 15
    found = counters.read()
    asked = sum(bool(command.open.lookahead or command.advance.lookahead) for command in draft.commands)
    assert found[f"outrider.draft_discarded{{{reason}}}"] == found["outrider.draft_discarded"] == asked


async def test_blocks_that_went_another_way_make_room_at_once() -> None:
    """Far ahead and wrong from the next token on: they must not keep out what comes after them."""

    def push(script: Script, event: DraftEvent) -> list[DraftEvent]:
        wrong = [script.pushed(event, ahead=ahead) for ahead in range(100, 100 + MAX_PUSHED - 1)]
        for one in wrong:
            one.hypothesis = to_bytes(int32([(script.whole[script.base] + 1) % 16])) + one.hypothesis[4:]
        return [*wrong, script.pushed(event)]

    one, _ = await generate(Script(push), Counters())
    blocks = [each for each in one.rounds if each.drafted]
    assert all(each.drafted_ahead == each.drafted for each in blocks[1:])


async def test_pushed_blocks_that_wait_are_bounded() -> None:
    def flood(script: Script, event: DraftEvent) -> list[DraftEvent]:
        return [script.pushed(event, ahead=ahead) for ahead in range(100, 150)]

    counters = Counters()
    async with (
        start_target(target_engine()) as target,
        fake_draft(Script(flood).answer) as draft,
        start_orchestrator(
            [target.address], [draft.address], draft_timeout=20, metrics=counters.metrics
        ) as orchestrator,
    ):
        client = Client(orchestrator, ask(PROMPT, max_tokens=60, temperature=0, lookahead=2))
        await client.until_tokens(6)
        (session,) = orchestrator.core.drafts.links[0]._told.values()
        await eventually(lambda: counters.read()["outrider.draft_discarded{stale}"] >= 50 - MAX_PUSHED)
        assert len(session.pushed) == MAX_PUSHED
        assert (await client.finish()).ids == greedy_output(PROMPT, 60)


async def test_a_pushed_block_that_fails_the_audit_is_dropped_and_nothing_more_is_built_on_it() -> None:
    def lie(script: Script, event: DraftEvent) -> list[DraftEvent]:
        pushed = script.pushed(event)
        for length in (event, pushed):
            ids = length.block.tokens
            count = len(ids) // 4
            length.block.law.sizes = to_bytes(int32([2] * count))
            length.block.law.token_ids = b"".join(ids[4 * i : 4 * i + 4] + to_bytes(int32([15])) for i in range(count))
            length.block.law.probs = b"\x00\x00\x00\x3f" * (2 * count)
        return [pushed]

    counters = Counters()
    async with (
        start_target(target_engine()) as target,
        fake_draft(Script(lie).answer) as draft,
        start_orchestrator(
            [target.address], [draft.address], draft_timeout=20, metrics=counters.metrics
        ) as orchestrator,
    ):
        request = ask(PROMPT, max_tokens=40, lookahead=2, seed=3, acceptance=ACCEPTANCE_RATIO, top_k=1)
        one = await orchestrator.generate(request)
        assert one.ids == greedy_output(PROMPT, 40)
        found = counters.read()
        assert found["outrider.draft_discarded{audit}"] > 0
        invalid = [each for each in one.rounds if each.plain_reason == orchestrator_pb2.PLAIN_REASON_DRAFT_INVALID]
        assert len(invalid) == found["outrider.draft_discarded{audit}"]
        # After each of them the session is opened anew, and what was pushed before is not used.
        opened = sum(command.WhichOneof("action") == "open" for command in draft.commands)
        assert opened > len(invalid) - 2


async def test_an_error_to_an_advance_that_nobody_waits_for_opens_the_session_anew() -> None:
    refused: list[int] = []

    def answer(command: DraftCommand) -> list[DraftEvent]:
        events = script.answer(command)
        if command.advance.held and not refused:
            refused.append(len(draft.commands))
            error = DraftEvent(session_id=command.session_id, epoch=command.epoch, base_length=script.base)
            error.error.code = 5
            return [error]
        return events

    model = target_engine()
    script = Script(lambda script, event: [script.pushed(event)])
    async with start_target(model) as target, fake_draft(answer) as draft:
        async with start_orchestrator([target.address], [draft.address], draft_timeout=20) as orchestrator:
            (link,) = orchestrator.core.drafts.links
            model.stepping = True
            running = asyncio.create_task(orchestrator.generate(ask(PROMPT, max_tokens=30, temperature=0, lookahead=2)))
            # The prompt, and the round whose block was answered; with the next one's pushed meanwhile.
            await model.until_in_pass()
            model.step()
            await model.until_in_pass()
            await eventually(lambda: any(one.pushed for one in link._told.values()))
            model.step()
            await model.until_in_pass()
            await eventually(lambda: refused and all(one.answer is None for one in link._told.values()))
            model.stepping = False
            model.step()
            one = await running
            assert one.ids == greedy_output(PROMPT, 30)
            assert refused
            assert link.breaker.closed
            # One round at most had no block: that which found out.
            plain = [each for each in one.rounds[1:] if not each.drafted and each.plain_reason]
            assert {each.plain_reason for each in plain} <= {orchestrator_pb2.PLAIN_REASON_LAST_TOKEN}
            after = draft.commands[refused[0] :]
            assert after[0].WhichOneof("action") == "open"
