"""L: whatever a client asks, the answer is a status that names field and limit, and no model was troubled."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.net.errors import from_rpc_error, reason_name
from outrider.v1.orchestrator_pb2 import Chat, ChatMessage, GenerateRequest, StopConditions, TokenIds
from outrider.v1.types_pb2 import SamplingParams
from tests.harness.engines import DEADLINE
from tests.harness.faults import HookedEngine, draft_engine, greedy_output, raw_generate, refused, target_engine
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import start_draft, start_target

PROMPT = (0, 1, 2)
SPEC = SyntheticSpec(vocab_size=16, context_length=64)

System = tuple[RunningOrchestrator, HookedEngine, HookedEngine]


@asynccontextmanager
async def system() -> AsyncIterator[System]:
    target_model, draft_model = target_engine(SPEC), draft_engine(SPEC)
    async with (
        start_target(target_model) as target,
        start_draft(draft_model) as draft,
        start_orchestrator([target.address], [draft.address], max_lookahead=8, draft_timeout=20) as orchestrator,
    ):
        yield orchestrator, target_model, draft_model


def base() -> GenerateRequest:
    return ask(PROMPT, temperature=0)


def sampling(**fields: object) -> GenerateRequest:
    return GenerateRequest(token_ids=TokenIds(ids=PROMPT), sampling=SamplingParams(**fields))  # type: ignore[arg-type]


def stop(**fields: object) -> GenerateRequest:
    return GenerateRequest(token_ids=TokenIds(ids=PROMPT), stop=StopConditions(**fields))  # type: ignore[arg-type]


def changed(change: Callable[[GenerateRequest], None]) -> GenerateRequest:
    request = base()
    change(request)
    return request


def chat(*messages: tuple[str, str]) -> GenerateRequest:
    return GenerateRequest(chat=Chat(messages=[ChatMessage(role=role, content=text) for role, text in messages]))


# Request, the field that the message must begin with, and a word of the limit.
BAD: dict[str, tuple[GenerateRequest, str, str]] = {
    "temperature -1": (sampling(temperature=-1), "sampling.temperature", "[0.0, 100.0]"),
    "temperature NaN": (sampling(temperature=math.nan), "sampling.temperature", "[0.0, 100.0]"),
    "temperature inf": (sampling(temperature=math.inf), "sampling.temperature", "[0.0, 100.0]"),
    "temperature 999999": (sampling(temperature=999_999), "sampling.temperature", "[0.0, 100.0]"),
    "top_p -1": (sampling(top_p=-1), "sampling.top_p", "(0.0, 1.0]"),
    "top_p 0": (sampling(top_p=0), "sampling.top_p", "(0.0, 1.0]"),
    "top_p 1.5": (sampling(top_p=1.5), "sampling.top_p", "(0.0, 1.0]"),
    "top_p NaN": (sampling(top_p=math.nan), "sampling.top_p", "(0.0, 1.0]"),
    "top_k -2": (sampling(top_k=-2), "sampling.top_k", "[0, 1048576]"),
    "top_k 2^40": (sampling(top_k=1 << 40), "sampling.top_k", "[0, 1048576]"),
    "min_p -1": (sampling(min_p=-1), "sampling.min_p", "[0.0, 1.0]"),
    "min_p 2": (sampling(min_p=2), "sampling.min_p", "[0.0, 1.0]"),
    "repetition_penalty 0": (sampling(repetition_penalty=0), "sampling.repetition_penalty", "(0.0, 100.0]"),
    "repetition_penalty -1": (sampling(repetition_penalty=-1), "sampling.repetition_penalty", "(0.0, 100.0]"),
    "repetition_penalty inf": (sampling(repetition_penalty=math.inf), "sampling.repetition_penalty", "100.0]"),
    "presence_penalty 3": (sampling(presence_penalty=3), "sampling.presence_penalty", "[-2.0, 2.0]"),
    "frequency_penalty -3": (sampling(frequency_penalty=-3), "sampling.frequency_penalty", "[-2.0, 2.0]"),
    "logit_bias value": (sampling(logit_bias={1: 101}), "sampling.logit_bias[1]", "[-100.0, 100.0]"),
    "logit_bias NaN": (sampling(logit_bias={1: math.nan}), "sampling.logit_bias[1]", "[-100.0, 100.0]"),
    "logit_bias id": (sampling(logit_bias={16: 1}), "sampling.logit_bias", "15]"),
    "logit_bias negative id": (sampling(logit_bias={-1: 1}), "sampling.logit_bias", "15]"),
    "logit_bias entries": (sampling(logit_bias=dict.fromkeys(range(1025), 1)), "sampling.logit_bias", "1024"),
    "max_tokens 0": (stop(max_tokens=0), "stop.max_tokens", "[1, 61]"),
    "max_tokens beyond the context": (stop(max_tokens=62), "stop.max_tokens", "[1, 61]"),
    "max_tokens 2^32 - 1": (stop(max_tokens=(1 << 32) - 1), "stop.max_tokens", "[1, 61]"),
    "min_tokens": (stop(max_tokens=4, min_tokens=5), "stop.min_tokens", "4"),
    "17 stop strings": (stop(strings=["a"] * 17), "stop.strings", "16"),
    "empty stop string": (stop(strings=[""]), "stop.strings[0]", "[1, 1024]"),
    "long stop string": (stop(strings=["ok", "ü" * 513]), "stop.strings[1]", "[1, 1024]"),
    "17 stop tokens": (stop(token_ids=[1] * 17), "stop.token_ids", "16"),
    "stop token outside": (stop(token_ids=[16]), "stop.token_ids[0]", "[0, 16)"),
    "negative stop token": (stop(token_ids=[-1]), "stop.token_ids[0]", "[0, 16)"),
    "lookahead": (ask(PROMPT, lookahead=9), "speculation.lookahead", "[0, 8]"),
    "lookahead 2^32 - 1": (ask(PROMPT, lookahead=(1 << 32) - 1), "speculation.lookahead", "[0, 8]"),
    "greedy at temperature 1": (ask(PROMPT, acceptance=1), "speculation.acceptance", "temperature"),
    "no such acceptance": (ask(PROMPT, acceptance=99), "speculation.acceptance", "99"),
    "no such proposer": (ask(PROMPT, proposer=99), "speculation.proposer", "99"),
    "session id": (ask(PROMPT, session_id="a b"), "session_id", "128"),
    "long session id": (ask(PROMPT, session_id="a" * 5_000), "session_id", "128"),
    "no input": (GenerateRequest(), "input", "required"),
    "empty prompt": (GenerateRequest(prompt=""), "prompt", "empty"),
    "prompt of no token": (GenerateRequest(prompt="0123"), "prompt", "no tokens"),
    "long prompt": (GenerateRequest(prompt="ab" * 32), "prompt", "63"),
    "prompt over 4 MiB": (GenerateRequest(prompt="a" * (4 << 20) + "b"), "prompt", "4194304"),
    "no token ids": (ask([]), "token_ids", "empty"),
    "long token ids": (ask([1] * 64), "token_ids", "63"),
    "a million token ids": (ask([1] * 1_000_000), "token_ids", "63"),
    "token id outside": (ask([1, 16]), "token_ids", "[0, 16)"),
    "negative token id": (ask([1, -1]), "token_ids", "[0, 16)"),
    "no message": (chat(), "chat.messages", "[1, 1024]"),
    "too many messages": (chat(*[("user", "a")] * 1025), "chat.messages", "[1, 1024]"),
    "no such role": (chat(("admin", "a")), "chat.messages[0].role", "system, user, assistant"),
    "long role": (chat(("x" * 10_000, "a")), "chat.messages[0].role", "system, user, assistant"),
}


async def test_l1_l2_a_bad_value_is_refused_by_field_and_limit_before_any_model_call() -> None:
    async with system() as (orchestrator, target, draft):
        passes = target.passes, draft.passes
        for name, (request, field, limit) in BAD.items():
            error = await refused(orchestrator.generate(request), "INVALID_FIELD", grpc.StatusCode.INVALID_ARGUMENT)
            assert error.message.startswith(field), name
            assert limit in error.message, name
            assert len(error.message) < 500, name
        assert (target.passes, draft.passes) == passes
        assert orchestrator.core.sessions == 0
        assert (await orchestrator.generate(base())).ids == greedy_output(PROMPT, 20, SPEC)


async def test_l2_bad_requests_by_the_hundred_do_not_hold_up_a_good_one() -> None:
    async with system() as (orchestrator, _, _):
        bad = [orchestrator.generate(BAD["a million token ids"][0]) for _ in range(50)]
        outcomes, good = await asyncio.gather(
            asyncio.gather(*bad, return_exceptions=True), orchestrator.generate(base())
        )
        assert good.ids == greedy_output(PROMPT, 20, SPEC)
        for outcome in outcomes:
            assert isinstance(outcome, grpc.aio.AioRpcError)
            assert outcome.code() is grpc.StatusCode.INVALID_ARGUMENT


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of a protobuf message."""
    return bytes([number << 3 | 2, len(payload)]) + payload


MALFORMED: dict[str, bytes] = {
    "prompt ff fe": field(1, b"\xff\xfe"),
    "prompt with a lone surrogate": field(1, b"\xed\xa0\x80"),
    "prompt with half a character": field(1, "ü".encode()[:1]),
    "chat content ff": field(2, field(1, field(1, b"user") + field(2, b"\xff"))),
    "stop string ff": field(1, b"ab") + field(5, field(3, b"\xff")),
    "session id ff": field(1, b"ab") + field(8, b"\xff"),
    "a length beyond the end": b"\x0a\x7fabc",
    "a field of another wire type": b"\x0f\x00",
    "nothing but noise": bytes(range(255, 0, -1)),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_l4_bytes_that_are_no_message_are_the_clients_fault(name: str) -> None:
    async with system() as (orchestrator, target, draft):
        passes = target.passes, draft.passes
        error = await refused(
            raw_generate(orchestrator, MALFORMED[name]), "INVALID_FIELD", grpc.StatusCode.INVALID_ARGUMENT
        )
        for word in ("Error", "Exception", "Traceback", "class"):
            assert word not in error.message
        assert (target.passes, draft.passes) == passes
        assert (await orchestrator.generate(base())).ids == greedy_output(PROMPT, 20, SPEC)


# NUL, marks for writing from right to left, characters of four bytes, a byte order mark, letters that combine.
ODD_TEXTS = [
    "a\0b",
    "a\u202eb\u202c",
    "a\u200f\u200eb",
    "a\U0001f469\u200d\U0001f680b",
    "\ufeffab",
    "a\u0301b",
    "a\uffffb",
]


@pytest.mark.parametrize("text", ODD_TEXTS)
async def test_l4_odd_text_is_text(text: str) -> None:
    async with system() as (orchestrator, _, _):
        # The synthetic tokenizer knows "a" to "p" and drops the rest.
        generation = await orchestrator.generate(GenerateRequest(prompt=text, sampling=SamplingParams(temperature=0)))
        assert generation.ids[:10] == greedy_output((0, 1), 10, SPEC)
        stopped = GenerateRequest(prompt="ab", stop=StopConditions(strings=[text], max_tokens=5))
        assert len((await orchestrator.generate(stopped)).ids) == 5
        written = await orchestrator.generate(chat(("user", text)))
        assert written.started.prompt_tokens == 2


async def test_l1_a_message_for_the_client_fits_into_its_trailers() -> None:
    """A template that repeats the conversation in its complaint, as some do."""
    async with system() as (orchestrator, _, _):
        orchestrator.core._tokenizer.chat_template = "{{ raise_exception(messages[0]['content']) }}"
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await orchestrator.generate(chat(("user", "ü" * 100_000)), deadline=DEADLINE)
        error = from_rpc_error(failure.value)
        assert error is not None, failure.value
        assert reason_name(error.reason) == "INVALID_FIELD"
        assert error.message.startswith("chat is refused")


async def test_seeds_at_the_ends_of_their_range_are_seeds() -> None:
    async with system() as (orchestrator, _, _):
        for seed in (0, (1 << 64) - 1):
            first, second = [await orchestrator.generate(ask(PROMPT, seed=seed)) for _ in range(2)]
            assert first.ids == second.ids
            assert first.started.seed == seed
