"""Two models that do not fit, or a draft that breaks the rules: rows B and E1 of shared/FAILURES.md.

Whatever the draft does, the output is the target's, and the client is told why a round had no block.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from transformers import PreTrainedTokenizerBase

from orchestrator.breaker import Breaker
from orchestrator.links.base import Link
from orchestrator.metrics import Metrics
from outrider.lm.engine import EngineInfo
from outrider.lm.tokenizer import first_difference, load_tokenizer, vocabulary_of
from outrider.v1 import draft_pb2
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_RATIO,
    PLAIN_REASON_DRAFT_CONTEXT,
    PLAIN_REASON_DRAFT_INVALID,
    PLAIN_REASON_DRAFT_UNAVAILABLE,
    PLAIN_REASON_LAST_TOKEN,
    PLAIN_REASON_PREFILL,
    PLAIN_REASON_UNSPECIFIED,
    PLAIN_REASON_VOCAB_MISMATCH,
    Chat,
    ChatMessage,
    GenerateRequest,
    OrchestratorServiceGetInfoRequest,
    Speculation,
    StopConditions,
)
from outrider.v1.types_pb2 import SamplingParams
from tests.harness import tiny_tokenizers
from tests.harness.engines import ScriptedEngine, next_token_script
from tests.harness.meters import Meters
from tests.harness.models import tiny_config
from tests.harness.orchestrator import Generation, RunningOrchestrator, ask, start_orchestrator
from tests.harness.rogue_draft import start_rogue_draft
from tests.harness.system import start_system, synthetic
from tests.harness.tiny_tokenizers import MIXED
from tests.harness.workers import eventually, health_of, start_draft, start_target
from tests.harness.wrappers import ChangedEngine, RecordingEngine, served_as

VOCAB = 16
GREEDY = {"temperature": 0.0}


def with_another_token(info: EngineInfo, token: int) -> EngineInfo:
    """The same size of vocabulary, and one token that is spelt otherwise."""
    hashes = np.frombuffer(info.token_hashes, "<u4").copy()
    hashes[token] ^= 1
    return replace(info, vocab_fingerprint="0" * 64, token_hashes=hashes.tobytes())


async def workers_of(orchestrator: RunningOrchestrator) -> dict[str, tuple[bool, str]]:
    """(usable, reason) by kind, as GetInfo tells it."""
    info = await orchestrator.stub.GetInfo(OrchestratorServiceGetInfoRequest(), timeout=10)
    return {worker.kind: (worker.usable, worker.reason) for worker in info.workers}


async def until_refused(link: Link) -> None:
    await eventually(lambda: not link.usable and link.reason not in ("", "connecting"))


async def test_b1_a_draft_with_another_vocabulary_is_refused_and_the_target_serves_alone() -> None:
    draft = ChangedEngine(synthetic(), info=with_another_token(synthetic().info, 5))
    async with (
        start_target(synthetic()) as target,
        start_draft(draft) as worker,
        start_orchestrator([target.address], [worker.address], expect=(1, 0)) as orchestrator,
    ):
        await until_refused(orchestrator.core.drafts.links[0])
        usable, reason = (await workers_of(orchestrator))["draft"]
        assert not usable
        assert "another vocabulary" in reason
        assert "first at token id 5" in reason
        assert await health_of(orchestrator.channel) == health_pb2.HealthCheckResponse.SERVING
        one = await orchestrator.generate(ask(max_tokens=10, lookahead=4, **GREEDY))
        plain = await orchestrator.generate(ask(max_tokens=10, lookahead=0, **GREEDY))
        assert one.ids == plain.ids
        assert {each.plain_reason for each in one.rounds[1:-1]} == {PLAIN_REASON_VOCAB_MISMATCH}
        assert worker.service.load().open_sessions == 0


async def test_b1_a_target_with_another_vocabulary_is_refused_and_nothing_is_generated() -> None:
    target = ChangedEngine(synthetic(), info=with_another_token(synthetic().info, 7))
    async with (
        start_target(target) as worker,
        start_orchestrator([worker.address], expect=(0, 0)) as orchestrator,
    ):
        await until_refused(orchestrator.core.targets.links[0])
        _, reason = (await workers_of(orchestrator))["target"]
        assert "first at token id 7" in reason
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await orchestrator.generate(ask(max_tokens=10))
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        # The caller is told what is the matter, not only that something is.
        assert "first at token id 7" in str(refused.value.details())


async def test_b1_tokenizers_of_two_families_are_told_apart(tmp_path: Path) -> None:
    """The orchestrator has the tokenizer of its target; the draft's is of another family."""
    tiny_tokenizers.byte_level().save_pretrained(tmp_path)
    tiny_config("llama").save_pretrained(tmp_path)
    ours = vocabulary_of(load_tokenizer(str(tmp_path)))
    theirs = vocabulary_of(tiny_tokenizers.byte_fallback())
    target, draft = (
        ChangedEngine(inner, info=served_as(inner.info, vocabulary))
        for vocabulary in (ours, theirs)
        for inner in [synthetic(vocab_size=vocabulary.size)]
    )
    async with (
        start_target(target) as one,
        start_draft(draft) as other,
        start_orchestrator([one.address], [other.address], expect=(1, 0), tokenizer=str(tmp_path)) as orchestrator,
    ):
        await until_refused(orchestrator.core.drafts.links[0])
        _, reason = (await workers_of(orchestrator))["draft"]
        differing = first_difference(ours.token_hashes, theirs.token_hashes)
        sizes = f"({theirs.size} tokens, the tokenizer has {ours.size})"
        assert f"another vocabulary than the tokenizer, first at token id {differing} {sizes}" in reason
        assert len((await orchestrator.generate(ask(max_tokens=5))).ids) == 5


def next_tokens(tokens: Sequence[int], count: int) -> list[int]:
    """What `next_token_script` says greedily."""
    return [(tokens[-1] + 1 + step) % VOCAB for step in range(count)]


@pytest.mark.parametrize("invalid", [VOCAB, VOCAB + 7, -1, 2**31 - 1])
async def test_b3_invalid_draft_ids_are_dropped_and_counted_and_open_the_breaker(invalid: int) -> None:
    """The ids stand amid right ones. Sessions with right blocks go on meanwhile."""
    meters, model = Meters(), ScriptedEngine(next_token_script(VOCAB))

    def say(session: str, tokens: list[int], lookahead: int) -> list[int]:
        block = next_tokens(tokens, lookahead)
        return [*block[:1], invalid, *block[2:]] if session.startswith("bad") else block

    async with (
        start_target(model) as target,
        start_rogue_draft(model.info, say) as (address, rogue),
        start_orchestrator([target.address], [address], metrics=Metrics(meters.provider)) as orchestrator,
    ):
        orchestrator.core.drafts.links[0].breaker = Breaker(threshold=3, cooldown=3600.0)

        async def one(name: str, tokens: int) -> Generation:
            return await orchestrator.generate(ask((0,), max_tokens=tokens, lookahead=3, session_id=name, **GREEDY))

        good = await one("good", 21)
        bad = await one("bad", 20)
        refused = await one("good-2", 20)
    assert [each.ids for each in (good, bad, refused)] == [next_tokens([0], size) for size in (21, 20, 20)]
    assert [each.accepted for each in good.rounds] == [0, 3, 3, 3, 3, 3]
    expected = [PLAIN_REASON_PREFILL] + [PLAIN_REASON_DRAFT_INVALID] * 3 + [PLAIN_REASON_DRAFT_UNAVAILABLE] * 15
    assert [each.plain_reason for each in bad.rounds] == [*expected, PLAIN_REASON_LAST_TOKEN]
    assert meters.count("outrider.draft_discarded", reason="token_outside_vocabulary") == 3
    assert rogue.asked.count("bad") == 3
    assert {each.plain_reason for each in refused.rounds[1:-1]} == {PLAIN_REASON_DRAFT_UNAVAILABLE}
    assert refused.drafted == 0


async def test_b3_a_session_with_invalid_draft_ids_leaves_its_neighbours_alone() -> None:
    """Eight sessions at once, every other one with invalid ids; then the draft is well again, and so is everybody."""
    model, broken = ScriptedEngine(next_token_script(VOCAB)), True

    def say(session: str, tokens: list[int], lookahead: int) -> list[int]:
        block = next_tokens(tokens, lookahead)
        return [VOCAB, *block[1:]] if broken and int(session) % 2 else block

    async with (
        start_target(model) as target,
        start_rogue_draft(model.info, say) as (address, _),
        start_orchestrator([target.address], [address]) as orchestrator,
    ):
        orchestrator.core.drafts.links[0].breaker = Breaker(threshold=3, cooldown=0.01, max_cooldown=0.01)
        for broken in (True, False):
            names = [str(index + 8 * broken) for index in range(8)]
            requests = [ask((0,), max_tokens=41, lookahead=3, session_id=name, **GREEDY) for name in names]
            for name, one in zip(names, await asyncio.gather(*map(orchestrator.generate, requests)), strict=True):
                assert one.ids == next_tokens([0], 41)
                dropped = sum(each.plain_reason == PLAIN_REASON_DRAFT_INVALID for each in one.rounds)
                is_bad = broken and int(name) % 2 == 1
                assert (dropped > 0, one.accepted > 0) == (is_bad, not is_bad)


async def test_b3_a_law_that_names_an_invalid_id_is_dropped_though_the_tokens_are_right() -> None:
    def with_padding(block: draft_pb2.Block) -> draft_pb2.Block:
        ids = np.array([[int(token), VOCAB] for token in np.frombuffer(block.tokens, "<i4")], "<i4")
        block.law.sizes = np.full(len(ids), 2, "<i4").tobytes()
        block.law.token_ids = ids.tobytes()
        block.law.probs = np.full(ids.size, 0.5, "<f4").tobytes()
        return block

    meters, model = Meters(), ScriptedEngine(next_token_script(VOCAB))
    async with (
        start_target(model) as target,
        start_rogue_draft(model.info, lambda _, tokens, count: next_tokens(tokens, count)) as (address, rogue),
        start_orchestrator([target.address], [address], metrics=Metrics(meters.provider)) as orchestrator,
    ):
        rogue.change = with_padding
        one = await orchestrator.generate(ask((0,), max_tokens=10, lookahead=3, **GREEDY, acceptance=ACCEPTANCE_RATIO))
    assert one.ids == next_tokens([0], 10)
    assert one.drafted == 0
    assert meters.count("outrider.draft_discarded", reason="audit") == 3


CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
CHATS = [
    [("user", MIXED)],
    [("system", ""), ("user", "hi")],
    [("system", "Be brief."), ("user", "  leading space"), ("assistant", "ok"), ("user", " 👩‍👩‍👧‍👦 ")],
    [("user", "special <|im_end|> inside </s> the text")],
]
RAW = [" leading space", "👩‍👩‍👧‍👦", "a<|im_end|>b", MIXED]


@pytest.mark.parametrize("build", [tiny_tokenizers.byte_level, tiny_tokenizers.byte_fallback])
async def test_b6_draft_and_target_see_the_same_ids(
    build: Callable[[], PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    """Those that the tokenizer itself makes of a chat or a text: once, with nothing put before or between."""
    tokenizer = build()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    tiny_config("llama").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    vocabulary = vocabulary_of(tokenizer)

    def engine() -> RecordingEngine:
        inner = synthetic(vocab_size=vocabulary.size)
        return RecordingEngine(ChangedEngine(inner, info=served_as(inner.info, vocabulary)))

    requests, prompts = [GenerateRequest(prompt=text) for text in RAW], [tokenizer(text).input_ids for text in RAW]
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        requests.append(GenerateRequest(chat=Chat(messages=[ChatMessage(**one) for one in messages])))
        written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(written, add_special_tokens=False).input_ids)
    for request in requests:
        request.MergeFrom(
            GenerateRequest(
                sampling=SamplingParams(temperature=0.0),
                stop=StopConditions(max_tokens=12),
                speculation=Speculation(lookahead=3),
            )
        )
    for request, prompt in zip(requests, prompts, strict=True):
        target, draft = engine(), engine()
        async with start_system(target, draft, tokenizer=str(tmp_path), ahead_blocks=0) as system:
            warm_ups = len(target.sequences), len(draft.sequences)
            one = await system.generate(request)
        (at_target,), (at_draft,) = target.sequences[warm_ups[0] :], draft.sequences[warm_ups[1] :]
        whole = [*prompt, *one.ids]
        assert one.accepted == one.drafted > 0
        assert one.started.prompt_tokens == len(prompt)
        # The last token is never fed: nothing follows it.
        assert at_target == whole[:-1]
        assert at_draft == whole[: len(at_draft)]
        assert len(at_draft) >= len(whole) - 3


@pytest.mark.parametrize("lookahead", [1, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 1.0])
async def test_e1_beyond_the_drafts_context_the_target_goes_on_alone(lookahead: int, noise: float) -> None:
    """Context 64 at the draft and 256 at the target, 60 prompt tokens and 100 more."""
    prompt = tuple(index % VOCAB for index in range(60))
    async with start_system(synthetic(context_length=256), synthetic(context_length=64, noise=noise)) as system:
        plain = await system.generate(ask(prompt, max_tokens=100, lookahead=0, **GREEDY))
        one = await system.generate(ask(prompt, max_tokens=100, lookahead=lookahead, **GREEDY))
        assert one.ids == plain.ids
        within = [each for each in one.rounds[1:] if each.base_length < 64]
        beyond = [each for each in one.rounds[1:] if each.base_length >= 64]
        assert within
        assert all(each.drafted == min(lookahead, 64 - each.base_length) for each in within)
        assert {each.plain_reason for each in beyond} == {PLAIN_REASON_DRAFT_CONTEXT}
        assert system.meters.count("outrider.speculation_disabled", reason="DRAFT_CONTEXT") == 1
        # The draft is well: it let the session go, and serves the next one.
        assert system.draft is not None
        await system.draft.until_sessions(0)
        short = await system.generate(ask((1, 2), max_tokens=20, lookahead=lookahead, **GREEDY))
        assert short.drafted > 0
        spoken = {each.plain_reason for each in short.rounds[1:]}
        assert spoken <= {PLAIN_REASON_UNSPECIFIED, PLAIN_REASON_LAST_TOKEN}


async def test_e1_a_prompt_beyond_the_drafts_context_runs_without_blocks() -> None:
    prompt = tuple(index % VOCAB for index in range(100))
    async with start_system(synthetic(context_length=256), synthetic(context_length=64)) as system:
        plain = await system.generate(ask(prompt, max_tokens=30, lookahead=0, **GREEDY))
        one = await system.generate(ask(prompt, max_tokens=30, lookahead=4, **GREEDY))
        assert one.ids == plain.ids
        assert {each.plain_reason for each in one.rounds[1:]} == {PLAIN_REASON_DRAFT_CONTEXT}
        assert system.meters.count("outrider.speculation_disabled") == 1
