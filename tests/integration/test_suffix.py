"""The suffix proposer at the worker and through the services: what it copies, what is kept, and for whom."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from draft_service.commands import SessionLaw
from orchestrator.tenants import by_metadata
from outrider.law.audit import audit
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.net.arrays import prefix_hash, to_bytes
from outrider.net.channel import connect
from outrider.net.tokens import bearer, new_token
from outrider.observe.metrics import DraftMetrics
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.v1.draft_pb2 import PROPOSER_SUFFIX, DraftCommand
from outrider.v1.orchestrator_pb2 import ACCEPTANCE_BLOCK, ACCEPTANCE_RATIO, Acceptance, GenerateRequest
from tests.harness.certificates import Authority, Mount
from tests.harness.engines import ScriptedEngine, next_token_script
from tests.harness.orchestrator import DEADLINE, Generation, RunningOrchestrator, ask, start_orchestrator
from tests.harness.outcomes import ALPHA, RIGHT, Sampling, enumerate_outcomes, p_value
from tests.harness.system import synthetic
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
    start_target,
)

KEEPING = {"proposers": "suffix", "suffix_history": 4096}
LAW = LawParams(prompt_length=2)
OUTPUT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def opening(name: str, tokens: Sequence[int], tenant: str = "", **options: object) -> DraftCommand:
    command = open_command(name, tokens, 4, **{"law": LAW, **options})  # type: ignore[arg-type]
    command.open.tenant = tenant
    return command


def ending(name: str, tokens: Sequence[int], new: int = 0, **fields: object) -> DraftCommand:
    """A Close of a session that is over; the worker has yet to hear of its last `new` tokens."""
    before = tokens[: len(tokens) - new]
    close = draft_pb2.Close(ended=True, base_length=len(tokens), tokens=to_bytes(int32(tokens[len(before) :])))
    close.prefix_hash = prefix_hash(int32(before))
    for field, value in fields.items():
        setattr(close, field, value)
    return DraftCommand(session_id=name, epoch=1, close=close)


async def told(draft: RunningDraft, stream: DraftStream, tenant: str, output: Sequence[int] = OUTPUT) -> None:
    """A session of the tenant generates the output, and ends."""
    tokens = [1, 2, *output]
    await stream.ask(opening("teller", tokens, tenant, seed=11))
    await stream.send(ending("teller", tokens))
    await draft.until_sessions(0)


async def drafted(stream: DraftStream, tenant: str, beginning: Sequence[int] = OUTPUT[:4]) -> list[int]:
    """What another session of the tenant gets once its output has begun like this."""
    tokens, _ = block_of(await stream.ask(opening("asker", [14, 15, *beginning], tenant)))
    await stream.send(close_command("asker"))
    return tokens


async def test_it_copies_with_a_point_mass_as_far_as_it_is_sure() -> None:
    model = ScriptedEngine(next_token_script(64), vocab_size=64)
    async with start_draft(model, proposers="suffix", ahead_blocks=0) as draft:
        stream = draft.stream()
        long = [*range(16), 20, *range(14)]
        event = await stream.ask(open_command("s", long, 8))
        tokens, shipped = block_of(event)
        assert tokens == [14, 15, 20, 0, 1, 2, 3, 4]
        assert shipped.sizes.tolist() == [1] * 8
        assert shipped.probs.tolist() == [1.0] * 8
        assert audit(int32(tokens), shipped, RoundNoise(7, len(long)), 64) is None
        assert (event.block.timing.passes, model.passes) == (0, [])
        # After a match of two tokens it is sure of few.
        short = block_of(await stream.ask(open_command("t", [*range(60), 62, 3, 4], 50)))[0]
        assert short == list(range(5, 5 + len(short)))
        assert 2 <= len(short) < 50
        sure = block_of(await stream.ask(open_command("u", [*range(60), 62, *range(5)], 50)))[0]
        assert sure == [*range(5, 55)]
        assert block_of(await stream.ask(advance_command("t", [*range(60), 62, 3, 4, 61], 8)))[0] == []
        assert list((await draft.info()).proposers) == [PROPOSER_SUFFIX]


async def test_after_a_rollback_and_a_resend_it_proposes_as_if_nothing_had_been() -> None:
    async with (
        start_draft(ScriptedEngine(next_token_script(32), vocab_size=32), proposers="suffix", ahead_blocks=3) as draft,
        start_draft(ScriptedEngine(next_token_script(32), vocab_size=32), proposers="suffix", ahead_blocks=0) as fresh,
    ):
        stream, plain = draft.stream(), fresh.stream()
        text = [1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2]
        await stream.ask(open_command("s", text, 4))
        for step, committed in enumerate(([3, 4], [3, 9, 1, 2, 3], [5, 1, 2], [3])):
            text = [*text, *committed]
            got = await stream.ask(advance_command("s", text, 4, new=len(committed)), text)
            expected = await plain.ask(open_command("s", text, 4, epoch=step + 1))
            assert (got.block.tokens, got.block.law) == (expected.block.tokens, expected.block.law)
        # All of it again, with another end: after SESSION_NOT_FOUND, or at another worker.
        changed = [*text[:-3], 9, 1, 2]
        got = await stream.ask(open_command("s", changed, 4), changed)
        expected = await plain.ask(open_command("s", changed, 4, epoch=9))
        assert got.block.tokens == expected.block.tokens != b""


async def test_an_ended_output_is_drafted_from_for_its_tenant_alone() -> None:
    async with start_draft(ScriptedEngine(next_token_script(16)), **KEEPING) as draft:
        stream, other = draft.stream(), draft.stream()
        await told(draft, stream, "acme")
        assert await drafted(stream, "acme") == OUTPUT[4:8]
        # Whichever orchestrator of that identity asks; sessions of streams never meet, outputs of a tenant do.
        assert await drafted(other, "acme") == OUTPUT[4:8]
        for stranger in ("", "acm", "acme2", "ACME", "acme/"):
            assert await drafted(stream, stranger) == []
        assert (await draft.info()).history_tokens == 4096


async def test_only_what_was_generated_is_kept() -> None:
    async with start_draft(ScriptedEngine(next_token_script(16)), **KEEPING) as draft:
        stream = draft.stream()
        tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
        await stream.ask(opening("teller", tokens, "acme", law=LawParams(prompt_length=8)))
        await stream.send(ending("teller", tokens))
        await draft.until_sessions(0)
        assert draft.service._scheduler.histories.tokens == 3
        assert await drafted(stream, "acme", [3, 4, 5, 6]) == []


async def test_the_last_tokens_come_with_the_end() -> None:
    async with start_draft(ScriptedEngine(next_token_script(16)), **KEEPING) as draft:
        stream = draft.stream()
        tokens = [1, 2, *OUTPUT]
        # Blocks ahead must not pass for what was committed.
        await stream.ask(opening("teller", tokens[:6], "acme", seed=11))
        await stream.send(ending("teller", tokens, 6))
        await draft.until_sessions(0)
        assert draft.service._scheduler.histories.tokens == len(OUTPUT) + 1
        assert await drafted(stream, "acme") == OUTPUT[4:8]


@pytest.mark.parametrize(
    "close",
    [
        close_command("teller"),
        ending("teller", [1, 2, *OUTPUT], ended=False),
        ending("teller", [1, 2, *OUTPUT], 2, prefix_hash=7),
        ending("teller", [1, 2, *OUTPUT, 1, 1, 1, 1], 2),
    ],
    ids=["moved", "not ended", "another prefix", "lost tokens"],
)
async def test_what_has_not_ended_or_does_not_agree_is_not_kept(close: DraftCommand) -> None:
    async with start_draft(ScriptedEngine(next_token_script(16)), **KEEPING) as draft:
        stream = draft.stream()
        await stream.ask(opening("teller", [1, 2, *OUTPUT], "acme"))
        await stream.send(close)
        await draft.until_sessions(0)
        assert await drafted(stream, "acme") == []


async def test_by_default_nothing_is_kept() -> None:
    async with start_draft(ScriptedEngine(next_token_script(16)), proposers="suffix") as draft:
        stream = draft.stream()
        await told(draft, stream, "acme")
        assert await drafted(stream, "acme") == []
        assert (await draft.info()).history_tokens == 0


async def test_a_broken_close_or_tenant_is_refused() -> None:
    async with start_draft(ScriptedEngine(next_token_script(16)), **KEEPING) as draft:
        stream = draft.stream()
        for command, message in (
            (opening("s", [1, 2], "x" * 257), "open.tenant has 257 characters, limit 256"),
            (ending("s", [1, 16], 1), "close.tokens holds token 16, outside [0, 16)"),
            (ending("s", [1, 2], 1, base_length=0), "close.tokens holds 1 tokens, must be at most base_length 0"),
        ):
            error = draft_error(await stream.ask(command))
            assert error.reason == reason("INVALID_FIELD")
            assert message in error.message


async def test_what_it_finds_blocks_in_is_counted() -> None:
    reader = InMemoryMetricReader()
    metrics = DraftMetrics(MeterProvider([reader]))
    async with start_draft(ScriptedEngine(next_token_script(16)), metrics=metrics, ahead_blocks=0, **KEEPING) as draft:
        stream = draft.stream()
        await told(draft, stream, "acme")
        await drafted(stream, "acme")
        await drafted(stream, "acme", [3, 4, 3, 4, 3, 4])
        assert {source: counted_by(reader, source) for source in ("request", "history", "none")} == {
            "request": 1,
            "history": 1,
            "none": 1,
        }
        assert counted(reader, "outrider.draft.history_tokens") == len(OUTPUT) + 1
        await stream.ask(opening("asker", [1, 2, 3], "acme"))
        assert counted(reader, "outrider.draft.indexed_tokens") == 3


def counted_by(reader: InMemoryMetricReader, source: str) -> float:
    data = reader.get_metrics_data()
    assert data is not None
    return sum(
        point.value  # type: ignore[union-attr]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "outrider.draft.suffix_blocks"
        for point in metric.data.data_points
        if (point.attributes or {}).get("source") == source
    )


async def test_the_same_tenant_of_another_orchestrator_is_another_tenant(tmp_path: Path) -> None:
    """An orchestrator is who its certificate says."""
    authority = Authority()
    worker = Mount(tmp_path / "worker", authority.issue("127.0.0.1"), authority.pem)
    ours, theirs = (Mount(tmp_path / name, authority.issue(name), authority.pem) for name in ("ours", "theirs"))
    async with start_draft(ScriptedEngine(next_token_script(16)), **KEEPING, **worker.settings()) as draft:
        async with (
            connect(draft.address, ours.client()) as one,
            connect(draft.address, theirs.client()) as two,
            connect(draft.address, ours.client()) as again,
        ):
            streams = [DraftStream(draft_pb2_grpc.DraftServiceStub(channel)) for channel in (one, two, again)]
            await told(draft, streams[0], "acme")
            assert [await drafted(stream, "acme") for stream in streams] == [OUTPUT[4:8], [], OUTPUT[4:8]]


BOTH = {"proposers": "suffix_or_model,model", "ahead_blocks": 0}
GREEDY = LawParams(temperature=0.0)


async def test_a_copy_comes_before_the_model_where_there_is_much_to_copy() -> None:
    model = ScriptedEngine(next_token_script(64), vocab_size=64)
    async with start_draft(model, **BOTH) as draft:
        model.passes.clear()  # those of the warm-up
        stream = draft.stream()
        tokens = [*range(10, 20), 30, 10, 11, 12, 13, 14]
        event = await stream.ask(open_command("s", tokens, 4, law=GREEDY))
        assert (block_of(event)[0], event.block.proposer) == ([15, 16, 17, 18], PROPOSER_SUFFIX)
        assert model.passes == []
        tokens += [15, 16, 17, 18, 40]
        event = await stream.ask(advance_command("s", tokens, 4, new=5))
        assert (block_of(event)[0], event.block.proposer) == ([41, 42, 43, 44], draft_pb2.PROPOSER_MODEL)
        # It has read what was copied, and all before.
        assert sum(one.tokens for seen in model.passes for one in seen) == len(tokens) + 3
        # A match of two tokens is not worth the model's block.
        tokens += [41, 15, 16]
        event = await stream.ask(advance_command("s", tokens, 4, new=3))
        assert (block_of(event)[0], event.block.proposer) == ([17, 18, 19, 20], draft_pb2.PROPOSER_MODEL)
        assert draft.service.load().open_sessions == 1
        await stream.send(close_command("s"))
        await draft.until_sessions(0)
        assert draft.service._scheduler.indexed_tokens == 0


async def test_copies_before_the_model_and_the_model_alone_share_sessions_and_passes() -> None:
    model = ScriptedEngine(next_token_script(64), vocab_size=64)
    async with start_draft(model, **BOTH) as draft:
        model.passes.clear()  # those of the warm-up
        stream = draft.stream()
        tokens = list(range(20, 30))
        both, alone = draft_pb2.PROPOSER_SUFFIX_OR_MODEL, draft_pb2.PROPOSER_MODEL
        await stream.send(
            open_command("s", tokens, 3, law=GREEDY, proposer=both),
            open_command("t", tokens, 3, law=GREEDY, proposer=alone),
        )
        assert [block_of(await stream.event())[0] for _ in range(2)] == [[30, 31, 32]] * 2
        assert [len(seen) for seen in model.passes] == [2, 2, 2]
        model.passes.clear()
        # Another proposer, the same model: it computes nothing anew but the last token, whose logits are wanted.
        await stream.ask(open_command("s", tokens, 1, law=GREEDY, proposer=alone))
        assert [one.tokens for seen in model.passes for one in seen] == [1]


# Through the services.

TENANTS = {name: new_token(name) for name in ("acme", "bell")}


class Repeating(ScriptedEngine):
    """A target that says 3, 4, 5, ... after any prompt that ends in 2: an output that stands nowhere in the request."""

    def __init__(self) -> None:
        super().__init__(next_token_script(64), vocab_size=64)


@asynccontextmanager
async def served(tmp_path: Path, **draft: object) -> AsyncIterator[tuple[RunningOrchestrator, RunningDraft]]:
    """An orchestrator that asks for tokens, over a draft worker that keeps outputs."""
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{line}\n" for _, line in TENANTS.values()))
    async with (
        start_target(Repeating()) as target,
        start_draft(Repeating(), **{**KEEPING, **draft}) as worker,
        start_orchestrator(
            [target.address],
            [worker.address],
            tokenizer="synthetic:vocab_size=64",
            keys_file=str(keys),
            draft_timeout=30.0,
        ) as orchestrator,
    ):
        yield orchestrator, worker


async def generated(
    orchestrator: RunningOrchestrator, request: GenerateRequest, metadata: Sequence[tuple[str, str]]
) -> Generation:
    generation = Generation()
    async for response in orchestrator.stub.Generate(request, timeout=DEADLINE, metadata=metadata):
        generation.add(response)
    return generation


async def test_a_tenant_proved_by_its_token_has_its_own_outputs_again(tmp_path: Path) -> None:
    async with served(tmp_path) as (orchestrator, worker):
        request = ask((9, 1, 2), max_tokens=40, lookahead=8, temperature=0.0)
        metadata = {name: bearer(token) for name, (token, _) in TENANTS.items()}
        first = await generated(orchestrator, request, metadata["acme"])
        assert first.accepted == 0
        await eventually(lambda: worker.service._scheduler.histories.tokens == 41)
        # All 40 tokens, the last of them told with the end.
        theirs = await generated(orchestrator, request, metadata["bell"])
        assert theirs.drafted == 0
        again = await generated(orchestrator, request, metadata["acme"])
        assert again.ids == theirs.ids == first.ids
        assert again.accepted >= 30


async def test_a_cancelled_generation_is_not_kept(tmp_path: Path) -> None:
    async with served(tmp_path) as (orchestrator, worker):
        request = ask((9, 1, 2), max_tokens=4_000, lookahead=4, temperature=0.0)
        call = orchestrator.stub.Generate(request, timeout=DEADLINE, metadata=bearer(TENANTS["acme"][0]))
        for _ in range(4):
            await call.read()
        call.cancel()
        await worker.until_sessions(0)
        assert worker.service._scheduler.histories.tokens == 0


async def test_a_worker_that_keeps_nothing_is_told_nothing_more(tmp_path: Path) -> None:
    async with served(tmp_path, suffix_history=0) as (orchestrator, worker):
        closes = []
        take = worker.service._scheduler._close
        worker.service._scheduler._close = lambda command: (closes.append(command), take(command))[1]  # type: ignore[method-assign, func-returns-value]
        await generated(orchestrator, ask((9, 1, 2), max_tokens=8, temperature=0.0), bearer(TENANTS["acme"][0]))
        await worker.until_sessions(0)
        assert [(close.ended, len(close.tokens)) for close in closes] == [(False, 0)]


SPEC = {"vocab_size": 6, "seed": 5, "scale": 1.0}
PROMPT, LENGTH, SEEDS = (0, 1, 2), 3, 700
SAMPLING = Sampling(temperature=0.8)


async def said_again(rule: "Acceptance.ValueType") -> Sequence[Sequence[int]]:
    """The outputs of requests that were all made before, each by a tenant of its own and with the seed of now."""
    async with (
        start_target(synthetic(**SPEC)) as target,
        start_draft(synthetic(**SPEC), **KEEPING, suffix_history_tenants=SEEDS) as draft,
        start_orchestrator(
            [target.address],
            [draft.address],
            tokenizer="synthetic:vocab_size=6",
            tenant_of=by_metadata("whose"),
            draft_timeout=30.0,
        ) as orchestrator,
    ):

        async def one(seed: int) -> list[int]:
            request = ask(
                PROMPT,
                max_tokens=5,
                lookahead=2,
                seed=seed,
                acceptance=rule,
                temperature=SAMPLING.temperature,
            )
            return (await generated(orchestrator, request, (("whose", str(seed)),))).ids

        async def all_of_them() -> list[list[int]]:
            many = range(0, SEEDS, 16)
            return [said for at in many for said in await asyncio.gather(*map(one, range(at, min(at + 16, SEEDS))))]

        await all_of_them()
        await eventually(lambda: len(draft.service._scheduler.histories) == SEEDS)
        return [said[:LENGTH] for said in await all_of_them()]


@pytest.mark.parametrize("rule", [ACCEPTANCE_RATIO, ACCEPTANCE_BLOCK])
async def test_a_request_sent_again_with_its_seed_keeps_the_targets_law(rule: "Acceptance.ValueType") -> None:
    law = enumerate_outcomes(synthetic(**SPEC), PROMPT, SAMPLING, LENGTH).law
    assert p_value(law, await said_again(rule)) > RIGHT


async def test_without_leaving_out_outputs_of_its_seed_it_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionLaw, "by_token", True)
    law = enumerate_outcomes(synthetic(**SPEC), PROMPT, SAMPLING, LENGTH).law
    assert p_value(law, await said_again(ACCEPTANCE_RATIO)) < ALPHA
