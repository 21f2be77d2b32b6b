"""Drafting ahead at the worker: what is pushed is what an Advance would get, commands come first, nothing is lost."""

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from outrider.law.audit import audit
from outrider.law.language import Language
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.net.arrays import int32s
from outrider.observe.metrics import DraftMetrics
from outrider.v1 import draft_pb2
from tests.harness.engines import ScriptedEngine, next_token_script
from tests.harness.faults import HookedEngine
from tests.harness.workers import (
    DraftStream,
    RunningDraft,
    advance_command,
    block_of,
    close_command,
    counted,
    draft_error,
    eventually,
    int32,
    open_command,
    reason,
    start_draft,
)

VOCAB, EOS = 27, 26
SPEC = SyntheticSpec(vocab_size=VOCAB, order=3, context_length=256, eos=EOS)
GREEDY = LawParams(temperature=0.0)
RICH = LawParams(
    temperature=0.8, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, prompt_length=2
)
GRAMMAR = LawParams(grammar=Language("regex", "([a-d]|xy)*(e|f[ab]+)"), prompt_length=4, stop_token_ids=(EOS,))
PROPOSERS = {
    "model": draft_pb2.PROPOSER_MODEL,
    "early_exit": draft_pb2.PROPOSER_EARLY_EXIT,
    "prompt_lookup": draft_pb2.PROPOSER_PROMPT_LOOKUP,
    "prediction": draft_pb2.PROPOSER_PREDICTION,
    "suffix": draft_pb2.PROPOSER_SUFFIX,
    "suffix_or_model": draft_pb2.PROPOSER_SUFFIX_OR_MODEL,
}
PROMPTS = ([0, 1, 2, 3], [3, 0, 1, 2, 3, 0, 1, 2, 3, 0], [5, 2, 1, 2, 3, 2, 1])
PREDICTION = [0, 1, 2, 3] * 8


def opening(session: str, tokens: list[int], law: LawParams, proposer: str, rule: str) -> draft_pb2.DraftCommand:
    command = open_command(session, tokens, 3, law=law, seed=len(tokens), proposer=PROPOSERS[proposer])
    command.open.coupled = rule == "coupled"
    command.open.omit_law = rule in ("coupled", "greedy")
    command.open.prediction = int32(PREDICTION).tobytes()
    return command


def hypothesis_of(event: draft_pb2.DraftEvent) -> list[int]:
    return int32s(event.hypothesis, "hypothesis").tolist()


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize(
    ("law", "rule"),
    [
        (LawParams(), "ratio"),
        (LawParams(), "coupled"),
        (GREEDY, "greedy"),
        (RICH, "ratio"),
        (RICH, "coupled"),
        (GRAMMAR, "ratio"),
        (GRAMMAR, "coupled"),
    ],
    ids=["ratio", "coupled", "greedy", "penalties", "penalties-coupled", "grammar", "grammar-coupled"],
)
async def test_what_is_pushed_is_bit_for_bit_what_an_advance_would_get(
    proposer: str, law: LawParams, rule: str
) -> None:
    """For sessions that share passes, two blocks ahead, against a worker that looks at nothing but the tokens."""
    offered = "suffix_or_model,model" if proposer == "suffix_or_model" else proposer
    settings = {"proposers": offered, "early_exit_layers": 1}
    async with (
        start_draft(SyntheticEngine(SPEC), ahead_blocks=2, **settings) as draft,
        start_draft(SyntheticEngine(SPEC), ahead_blocks=0, **settings) as fresh,
    ):
        stream, plain = draft.stream(), fresh.stream()
        prompts = {str(index): prompt for index, prompt in enumerate(PROMPTS)}
        await stream.send(*(opening(name, prompt, law, proposer, rule) for name, prompt in prompts.items()))
        for _ in prompts:
            event = await stream.event()
            assert not event.block.timing.ahead_tokens
        await until_idle(draft, stream)
        seen = 0
        for event in stream.pushed:
            committed = prompts[event.session_id] + hypothesis_of(event)
            assert len(committed) == event.base_length
            alone = opening(event.session_id, committed, law, proposer, rule)
            alone.open.law.seed, alone.epoch = len(prompts[event.session_id]), event.base_length
            expected = await plain.ask(alone)
            assert event.block.tokens == expected.block.tokens
            assert event.block.law == expected.block.law
            assert event.block.timing.ahead_tokens == len(event.block.tokens) // 4
            seen += len(event.block.tokens) // 4
            if rule == "ratio":
                drawn, shipped = block_of(event)
                noise = RoundNoise(len(prompts[event.session_id]), event.base_length)
                assert proposer in ("prompt_lookup", "prediction") or audit(int32(drawn), shipped, noise, VOCAB) is None
        assert seen > 0


async def until_idle(draft: RunningDraft, stream: DraftStream) -> None:
    """Returns when the worker has nothing more to do, and everything that it pushed is here."""
    # What was sent before has been taken in when this is answered, and what was pushed before has come.
    await stream.ask(advance_command("nobody", [1], 1))
    await eventually(lambda: not draft.service.pending and not draft.service._scheduler.busy)
    await stream.ask(advance_command("nobody", [1], 1))


async def test_an_advance_to_what_is_prepared_needs_no_pass() -> None:
    model = ScriptedEngine(next_token_script(16))
    async with start_draft(model, ahead_blocks=1, ahead_others=0) as draft:
        stream = draft.stream()
        assert block_of(await stream.ask(open_command("s", [1, 2], 3, law=GREEDY)))[0] == [3, 4, 5]
        pushed = await stream.push()
        assert (pushed.base_length, hypothesis_of(pushed)) == (6, [3, 4, 5, 6])
        assert block_of(pushed)[0] == [7, 8, 9]
        model.hold()
        # The worker is in the middle of another session's pass, and knows the block all the same.
        await stream.send(advance_command("s", [1, 2, 3, 4, 5, 6], 3), open_command("other", [1], 1))
        await model.until_in_pass()
        await eventually(lambda: draft.service.pending == 1)
        model.let_go()
        assert (await stream.event()).session_id == "other"
        while (later := await stream.push()).session_id == "other":
            pass
        assert hypothesis_of(later) == [7, 8, 9, 10]


async def test_an_advance_to_a_block_in_the_making_goes_on_with_it() -> None:
    model = HookedEngine(ScriptedEngine(next_token_script(16)))
    async with start_draft(model, ahead_blocks=1) as draft:
        stream = draft.stream()
        model.stepping = True
        await stream.send(open_command("s", [1, 2], 3, law=GREEDY))
        # Three tokens, the guess, and the first token of the block ahead; the next pass has begun.
        for _ in range(5):
            await model.until_in_pass()
            model.step()
        await model.until_in_pass()
        assert block_of(await stream.event())[0] == [3, 4, 5]
        await stream.send(advance_command("s", [1, 2, 3, 4, 5, 6], 3))
        await eventually(lambda: draft.service.pending == 1)
        model.step()
        await model.until_in_pass()
        model.stepping = False
        model.step()
        event = await stream.event()
        assert (event.base_length, block_of(event)[0], event.hypothesis) == (6, [7, 8, 9], b"")
        assert event.block.timing.ahead_tokens == 2


async def test_a_prepared_block_is_cut_to_what_is_wanted_and_the_session_goes_on_from_there() -> None:
    async with (
        start_draft(SyntheticEngine(SPEC), ahead_blocks=2) as draft,
        start_draft(SyntheticEngine(SPEC), ahead_blocks=0) as fresh,
    ):
        stream, plain = draft.stream(), fresh.stream()
        await stream.ask(open_command("s", [1, 2, 3], 4, seed=5))
        first = await stream.push()
        committed = [1, 2, 3, *hypothesis_of(first)]
        drawn, _ = block_of(first)
        command = advance_command("s", committed, 2)
        command.advance.held = True
        await stream.send(command)
        later = await stream.push()
        while later.base_length != len(committed) + 3:
            later = await stream.push()
        assert hypothesis_of(later)[:2] == drawn[:2]
        expected = await plain.ask(open_command("s", committed + hypothesis_of(later), 2, seed=5))
        assert block_of(later)[0] == block_of(expected)[0]
        assert later.block.law == expected.block.law


@pytest.mark.parametrize("accepted", [0, 1, 3])
async def test_after_another_outcome_the_block_is_that_of_a_fresh_draft(accepted: int) -> None:
    async with (
        start_draft(SyntheticEngine(SPEC), ahead_blocks=2) as draft,
        start_draft(SyntheticEngine(SPEC), ahead_blocks=0) as fresh,
    ):
        stream, plain = draft.stream(), fresh.stream()
        drawn, _ = block_of(await stream.ask(open_command("s", [1, 2, 3], 3, law=RICH)))
        await until_idle(draft, stream)
        guess = hypothesis_of(stream.pushed[0])[-1]
        stream.pushed.clear()
        committed = [1, 2, 3, *drawn[:accepted], (guess + 1) % VOCAB]
        event = await stream.ask(advance_command("s", committed, 3))
        expected = await plain.ask(open_command("s", committed, 3, law=RICH))
        assert not event.hypothesis
        assert (event.block.tokens, event.block.law) == (expected.block.tokens, expected.block.law)
        assert not event.block.timing.ahead_tokens
        # And what is ahead of it now is right again.
        pushed = await stream.push()
        expected = await plain.ask(open_command("s", committed + hypothesis_of(pushed), 3, law=RICH))
        assert pushed.block.tokens == expected.block.tokens


@pytest.mark.parametrize("rule", ["ratio", "coupled", "greedy"])
@pytest.mark.parametrize("number", [0, 1])
async def test_an_advance_to_another_outcome_finds_its_block(rule: str, number: int) -> None:
    law = GREEDY if rule == "greedy" else RICH
    async with (
        start_draft(SyntheticEngine(SPEC), ahead_others=3) as draft,
        start_draft(SyntheticEngine(SPEC), ahead_blocks=0) as fresh,
    ):
        stream, plain = draft.stream(), fresh.stream()
        drawn, _ = block_of(await stream.ask(opening("s", [1, 2, 3], law, "model", rule)))
        await until_idle(draft, stream)
        (course,) = draft.service._scheduler._ahead._courses.values()
        assert len({job.ask.base_length for job in course.others}) == 3
        *accepted, other = course.others[number].ask.tokens.tolist()
        assert accepted == drawn[: len(accepted)]
        stream.pushed.clear()
        committed = [1, 2, 3, *accepted, other]
        event = await stream.ask(advance_command("s", committed, 3))
        alone = opening("s", committed, law, "model", rule)
        alone.open.law.seed = 3
        expected = await plain.ask(alone)
        assert not event.hypothesis
        assert event.block.timing.ahead_tokens == 3
        assert (event.block.tokens, event.block.law) == (expected.block.tokens, expected.block.law)
        # And the worker goes on from there.
        await until_idle(draft, stream)
        pushed = stream.pushed[0]
        alone = opening("s", committed + hypothesis_of(pushed), law, "model", rule)
        alone.open.law.seed = 3
        expected = await plain.ask(alone)
        assert (pushed.block.tokens, pushed.block.law) == (expected.block.tokens, expected.block.law)


async def test_after_work_on_other_outcomes_the_likeliest_is_still_there() -> None:
    """Pushed blocks, and an outcome that nothing was prepared for, after the session had gone aside."""
    async with (
        start_draft(SyntheticEngine(SPEC), ahead_blocks=2, ahead_others=3) as draft,
        start_draft(SyntheticEngine(SPEC), ahead_blocks=0) as fresh,
    ):
        stream, plain = draft.stream(), fresh.stream()
        committed, epoch = [1, 2, 3], 1
        drawn, _ = block_of(await stream.ask(open_command("s", committed, 3, law=RICH)))
        for wrong in (False, True, False, False, True):
            await until_idle(draft, stream)
            likeliest = stream.pushed[0]
            outcome = hypothesis_of(likeliest)[len(committed) - likeliest.base_length :]
            stream.pushed.clear() if wrong else None
            committed = [*committed, *outcome[: len(drawn)], (outcome[-1] + 7 * wrong) % VOCAB]
            event = await stream.ask(advance_command("s", committed, 3))
            assert event.WhichOneof("outcome") == "block", event
            assert bool(event.hypothesis) is not wrong
            epoch += 1
            expected = await plain.ask(open_command("s", committed, 3, law=RICH, epoch=epoch))
            assert (event.block.tokens, event.block.law) == (expected.block.tokens, expected.block.law)
            drawn, _ = block_of(event)
            stream.pushed = [one for one in stream.pushed if one.base_length > len(committed)]


async def test_commands_come_before_work_ahead() -> None:
    model = ScriptedEngine(next_token_script(16))
    async with start_draft(model, ahead_blocks=8) as draft:
        stream = draft.stream()
        model.hold()
        await stream.send(open_command("s", [1, 2], 4, law=GREEDY))
        await model.until_in_pass()
        await stream.send(open_command("t", [5], 4, law=GREEDY))
        await eventually(lambda: draft.service.pending == 2)
        model.let_go()
        for _ in range(2):
            await stream.event()
        # Nothing was ahead of them: the passes of both hold one or both, and each step wants one row of each.
        assert [len(seen) for seen in model.passes[2:7]] == [1, 2, 2, 2, 1]


async def test_work_ahead_takes_no_page_from_another_session() -> None:
    model = ScriptedEngine(next_token_script(16), pages=4, page_size=4)
    async with start_draft(model, ahead_blocks=2) as draft:
        stream = draft.stream()
        block_of(await stream.ask(open_command("full", [1] * 11, 1, law=GREEDY)))
        block_of(await stream.ask(open_command("s", [1], 3, law=GREEDY)))
        await until_idle(draft, stream)
        block_of(await stream.ask(advance_command("full", [1] * 12, 0)))
        event = await stream.ask(advance_command("s", [1, 2, 3, 4, 5], 1))
        assert event.WhichOneof("outcome") == "block"


async def test_a_session_takes_the_pages_of_work_ahead_before_those_of_others() -> None:
    model = ScriptedEngine(next_token_script(16), pages=4, page_size=4)
    # Without other outcomes: preparing for one may leave "s" with a single page, and then nothing has to be taken.
    async with start_draft(model, ahead_blocks=2, ahead_others=0) as draft:
        stream = draft.stream()
        block_of(await stream.ask(open_command("s", [1, 2], 2, law=GREEDY)))
        await stream.push()
        await stream.push()
        before = len(model.passes)
        block_of(await stream.ask(open_command("big", [1] * 9, 2, law=GREEDY)))
        assert all(len(seen) == 1 for seen in model.passes[before:])
        # Not evicted: it is known, and its prompt is cached.
        assert block_of(await stream.ask(advance_command("s", [1, 2, 9], 1)))[0] == [10]


async def test_logits_that_are_no_law_end_the_work_ahead_and_not_the_session() -> None:
    def script(prefix: tuple[int, ...]) -> list[float]:
        row = next_token_script(16)(prefix)
        return [float("nan")] * 16 if prefix[-1] == 6 else list(row)

    async with start_draft(ScriptedEngine(script), ahead_blocks=2) as draft:
        stream = draft.stream()
        assert block_of(await stream.ask(open_command("s", [1, 2], 3, law=GREEDY)))[0] == [3, 4, 5]
        await until_idle(draft, stream)
        assert not stream.pushed
        assert block_of(await stream.ask(advance_command("s", [1, 2, 3, 9], 3)))[0] == [10, 11, 12]
        event = await stream.ask(advance_command("s", [1, 2, 3, 9, 6], 3))
        assert draft_error(event).reason == reason("NON_FINITE_LOGITS")


async def test_nothing_is_ahead_of_the_end_of_an_output_or_of_the_context() -> None:
    ends = LawParams(temperature=0.0, stop_token_ids=(5,))
    async with start_draft(ScriptedEngine(next_token_script(16), context_length=9), ahead_blocks=2) as draft:
        stream = draft.stream()
        assert block_of(await stream.ask(open_command("block", [1, 2], 3, law=ends)))[0] == [3, 4, 5]
        assert block_of(await stream.ask(open_command("guess", [1, 2], 2, law=ends)))[0] == [3, 4]
        await until_idle(draft, stream)
        assert not stream.pushed
        await stream.ask(open_command("short", [1, 2], 3, law=GREEDY))
        await until_idle(draft, stream)
        assert [block_of(event)[0] for event in stream.pushed] == [[7, 8, 9]]
        assert stream.pushed[0].base_length == 6


async def test_a_new_epoch_gets_its_block_again() -> None:
    async with start_draft(ScriptedEngine(next_token_script(16)), ahead_blocks=1) as draft:
        stream = draft.stream()
        await stream.ask(open_command("s", [1, 2], 2, law=GREEDY))
        await stream.push()
        event = await stream.ask(advance_command("s", [1, 2, 3, 4, 5], 2, epoch=2))
        assert (event.epoch, block_of(event)[0], event.block.timing.ahead_tokens) == (2, [6, 7], 2)
        stale = await stream.ask(advance_command("s", [1, 2, 3, 4, 5], 2, epoch=1))
        assert draft_error(stale).reason == reason("STALE_EPOCH")


async def test_an_advance_that_holds_what_the_worker_no_longer_has_is_answered_by_nothing_and_goes_on() -> None:
    async with start_draft(ScriptedEngine(next_token_script(16)), ahead_blocks=1) as draft:
        stream = draft.stream()
        await stream.ask(open_command("s", [1, 2], 2, law=GREEDY))
        await stream.push()
        command = advance_command("s", [1, 2, 3, 9], 2)
        command.advance.held = True
        await stream.send(command)
        pushed = await stream.push()
        assert (hypothesis_of(pushed), block_of(pushed)[0]) == ([10, 11, 12], [13, 14])
        lost = advance_command("s", [1] * 20, 2)
        lost.advance.held = True
        assert draft_error(await stream.ask(lost)).reason == reason("SESSION_NOT_FOUND")


async def test_closing_gives_up_the_work_ahead() -> None:
    model = ScriptedEngine(next_token_script(16))
    async with start_draft(model, ahead_blocks=8) as draft:
        stream = draft.stream()
        await stream.ask(open_command("s", [1, 2], 4, law=GREEDY))
        await stream.send(close_command("s"))
        await draft.until_sessions(0)
        await eventually(lambda: not draft.service._scheduler.busy)
        assert model.open_tokens == []
        assert draft_error(await stream.ask(advance_command("s", [1, 2, 3], 1))).reason == reason("SESSION_NOT_FOUND")


async def test_what_is_drafted_ahead_and_what_of_it_is_wasted_is_counted() -> None:
    reader = InMemoryMetricReader()
    metrics, model = DraftMetrics(MeterProvider([reader])), ScriptedEngine(next_token_script(16))
    async with start_draft(model, ahead_blocks=2, ahead_others=0, metrics=metrics) as draft:
        stream = draft.stream()
        await stream.ask(open_command("s", [1, 2], 3, law=GREEDY))
        await until_idle(draft, stream)
        assert counted(reader, "outrider.draft.ahead_tokens") == 6
        assert counted(reader, "outrider.draft.ahead_wasted_tokens") == 0
        command = advance_command("s", [1, 2, 3, 4, 5, 6], 3)
        command.advance.held = True
        await stream.send(command)
        await until_idle(draft, stream)
        assert counted(reader, "outrider.draft.ahead_tokens") == 9
        await stream.ask(advance_command("s", [1, 2, 3, 4, 5, 6, 0], 3))
        await stream.send(close_command("s"))
        await draft.until_sessions(0)
        await until_idle(draft, stream)
        drafted, wasted = (
            counted(reader, f"outrider.draft.{name}") for name in ("ahead_tokens", "ahead_wasted_tokens")
        )
        # Of the first three blocks ahead one was of use.
        assert drafted - wasted == 3
        assert counted(reader, "outrider.draft.ahead_outcomes") == 2


async def test_a_guess_is_the_targets_draw_where_the_laws_are_equal() -> None:
    """The bonus token of a target that has the draft's law, by the rows that the target would answer with."""
    from outrider.law.rows import Support, support_rows
    from outrider.law.transforms import RowContext, law_probs
    from outrider.lm.engine import Segment

    engine = SyntheticEngine(SPEC)
    async with start_draft(engine, ahead_blocks=1) as draft:
        stream = draft.stream()
        for seed in range(30):
            name = str(seed)
            drawn, _ = block_of(await stream.ask(open_command(name, [1, 2, 3], 3, law=RICH, seed=seed)))
            guess = hypothesis_of(await stream.push())[-1]
            prefix = int32([1, 2, 3, *drawn])
            other = SyntheticEngine(SPEC)
            (logits,) = other.forward([Segment(other.open(prefix), prefix, 4)])
            contexts = [RowContext(RICH, prefix[: 3 + row]) for row in range(4)]
            sizes, ids = np.zeros(3, np.int32), np.empty(0, np.int32)
            (rows,) = support_rows(law_probs(logits, contexts, VOCAB), [Support(RoundNoise(seed, 3), sizes, ids)])
            assert rows.tail_tokens[3] == guess
