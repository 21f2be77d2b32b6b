"""A request is refused whole, with the field's name, before any model call; or becomes a plan without gaps."""

import copy
import os
import time
from collections.abc import Callable

import numpy as np
import pytest
from google.protobuf.json_format import ParseDict

from orchestrator.request import GenerationPlan, ServingLimits, plan_request
from orchestrator.text.prompt import check_text
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import load_tokenizer, synthetic_tokenizer
from outrider.net.errors import OutriderError
from outrider.v1 import draft_pb2, target_pb2, types_pb2
from outrider.v1 import orchestrator_pb2 as pb
from tests.harness.tiny_tokenizers import byte_fallback, byte_level

LIMITS = ServingLimits(vocab_size=402, context_length=512, max_lookahead=16, default_lookahead=4, eos_token_ids=(1,))
NAN, INFINITY = float("nan"), float("inf")


def plan(limits: ServingLimits = LIMITS, **fields: object) -> GenerationPlan:
    fields.setdefault("prompt", "the quick")
    tokenizer = copy.copy(byte_level())  # other tests may have given the shared one a template
    tokenizer.chat_template = None
    return plan_request(pb.GenerateRequest(**fields), tokenizer, limits)  # type: ignore[arg-type]


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(OutriderError) as refused:
        call()
    assert refused.value.reason == types_pb2.ERROR_REASON_INVALID_FIELD
    assert "\n" not in refused.value.message
    return refused.value.message


SAMPLING = [
    ({"temperature": -1}, "sampling.temperature"),
    ({"temperature": NAN}, "sampling.temperature"),
    ({"temperature": INFINITY}, "sampling.temperature"),
    ({"temperature": 999999}, "sampling.temperature"),
    ({"top_p": -1}, "sampling.top_p"),
    ({"top_p": 0}, "sampling.top_p"),
    ({"top_p": 1.5}, "sampling.top_p"),
    ({"top_p": NAN}, "sampling.top_p"),
    ({"top_k": -2}, "sampling.top_k"),
    ({"top_k": 2**40}, "sampling.top_k"),
    ({"min_p": -0.1}, "sampling.min_p"),
    ({"min_p": 1.1}, "sampling.min_p"),
    ({"min_p": NAN}, "sampling.min_p"),
    ({"repetition_penalty": 0}, "sampling.repetition_penalty"),
    ({"repetition_penalty": -1}, "sampling.repetition_penalty"),
    ({"repetition_penalty": INFINITY}, "sampling.repetition_penalty"),
    ({"presence_penalty": 2.1}, "sampling.presence_penalty"),
    ({"frequency_penalty": -2.1}, "sampling.frequency_penalty"),
    ({"frequency_penalty": NAN}, "sampling.frequency_penalty"),
    ({"logit_bias": {402: 1}}, "sampling.logit_bias"),
    ({"logit_bias": {-1: 1}}, "sampling.logit_bias"),
    ({"logit_bias": {5: 100.5}}, "sampling.logit_bias[5]"),
    ({"logit_bias": {5: NAN}}, "sampling.logit_bias[5]"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "sampling.logit_bias has 1025 entries, limit 1024"),
    ({"allowed_token_ids": [3, 402]}, "sampling.allowed_token_ids is 402, must be in [0, 401]"),
    ({"allowed_token_ids": [3, -1]}, "sampling.allowed_token_ids is -1"),
    ({"allowed_token_ids": [3] * 65_537}, "sampling.allowed_token_ids has 65537 entries, limit 65536"),
    ({"banned_token_ids": [402, 3]}, "sampling.banned_token_ids is 402"),
    ({"banned_token_ids": [3] * 65_537}, "sampling.banned_token_ids has 65537 entries, limit 65536"),
    ({"banned_token_ids": range(402)}, "sampling.banned_token_ids and what else is masked leave no token"),
    (
        {"allowed_token_ids": [3, 4], "banned_token_ids": [4], "logit_bias": {3: -100}},
        "sampling.allowed_token_ids names only tokens that are banned",
    ),
]


@pytest.mark.parametrize(("sampling", "names"), SAMPLING)
def test_l1_extreme_sampling_values(sampling: dict[str, object], names: str) -> None:
    message = refusal(lambda: plan(sampling=pb.GenerateRequest(sampling=sampling).sampling))  # type: ignore[arg-type]
    assert names in message
    assert plan().law.temperature == 1.0, "the next valid request is fine"


@pytest.mark.parametrize("seed", [2**64, -1])
def test_l1_seeds_that_do_not_fit_cannot_be_sent(seed: int) -> None:
    with pytest.raises(ValueError, match="range"):
        pb.GenerateRequest(seed=seed)


FIELDS = [
    ({"stop": {"max_tokens": 0}}, "stop.max_tokens is 0, must be in [1, 510]"),
    ({"stop": {"max_tokens": 511}}, "stop.max_tokens is 511, must be in [1, 510]"),
    ({"stop": {"max_tokens": 2**32 - 1}}, "stop.max_tokens"),
    ({"stop": {"max_tokens": 5, "min_tokens": 6}}, "stop.min_tokens is 6, must be at most max_tokens, which is 5"),
    ({"stop": {"min_tokens": 257}}, "stop.min_tokens is 257"),
    ({"stop": {"strings": ["x"] * 17}}, "stop.strings has 17 entries, limit 16"),
    ({"stop": {"strings": ["x", ""]}}, "stop.strings[1] has 0 bytes"),
    ({"stop": {"strings": ["가" * 342]}}, "stop.strings[0] has 1026 bytes of UTF-8, must be in [1, 1024]"),
    ({"stop": {"token_ids": [1] * 17}}, "stop.token_ids has 17 entries, limit 16"),
    ({"stop": {"token_ids": [3, 402]}}, "stop.token_ids[1] is 402, must be in [0, 402)"),
    ({"stop": {"token_ids": [-1]}}, "stop.token_ids[0] is -1"),
    ({"speculation": {"lookahead": 17}}, "speculation.lookahead is 17, must be in [0, 16]"),
    ({"speculation": {"lookahead": 5_000_000}}, "speculation.lookahead"),
    ({"speculation": {"acceptance": 1}}, "speculation.acceptance is greedy"),
    ({"speculation": {"acceptance": 99}}, "speculation.acceptance is 99"),
    ({"speculation": {"proposer": 99}}, "speculation.proposer is 99"),
    ({"speculation": {"row_format": 9}}, "speculation.row_format is 9"),
    ({"speculation": {"law_top": 1_025}}, "speculation.law_top is 1025"),
    ({"speculation": {"proposer": "PROPOSER_PREDICTION"}}, "speculation.prediction is empty"),
    (
        {"speculation": {"proposer": "PROPOSER_MODEL", "prediction": "the"}},
        "speculation.proposer is model, speculation.prediction needs prediction",
    ),
    (
        {"speculation": {"prediction": "x" * (256 * 1024 + 1)}},
        "speculation.prediction has 262145 bytes of UTF-8, limit 262144",
    ),
    ({"logprobs": 21}, "logprobs is 21, must be in [0, 20]"),
    ({"logprobs": 10**9}, "logprobs is 1000000000, must be in [0, 20]"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": "the quick " * 300}, "limit 511"),
    ({"prompt": None, "token_ids": {"ids": []}}, "token_ids is empty"),
    ({"prompt": None, "token_ids": {"ids": [1, -1]}}, "token_ids holds token -1 at index 1, must be in [0, 402)"),
    ({"prompt": None, "token_ids": {"ids": [402]}}, "token_ids holds token 402 at index 0"),
    ({"prompt": None, "token_ids": {"ids": [5] * 512}}, "token_ids has 512 tokens, limit 511"),
    ({"prompt": None}, "input is missing"),
    ({"prompt": None, "chat": {"messages": []}}, "chat.messages has 0 entries"),
    ({"prompt": None, "chat": {"messages": [{"role": "user"}] * 1025}}, "chat.messages has 1025 entries"),
    ({"prompt": None, "chat": {"messages": [{"role": "root"}]}}, "chat.messages[0].role is 'root'"),
    ({"prompt": None, "chat": {"messages": [{"role": "user"}]}}, "no chat template"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS)
def test_fields_out_of_range(fields: dict[str, object], message: str) -> None:
    assert message in refusal(lambda: plan(LIMITS, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x" * (4 * 1024 * 1024 + 1)},
        {"prompt": "가" * (2 * 1024 * 1024)},
        {"prompt": None, "token_ids": {"ids": [5] * 1_000_000}},
        {"speculation": {"lookahead": 5_000_000}},
        {"stop": {"strings": ["x" * 100_000] * 16}},
        {"prompt": "x" * (4 * 1024 * 1024), "stop": {"token_ids": [1] * 1000}},
    ],
)
def test_l2_oversized_requests_are_refused_without_work(fields: dict[str, object]) -> None:
    fields.setdefault("prompt", "x")
    request = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
    started = time.perf_counter()
    refusal(lambda: plan_request(request, byte_level(), LIMITS))
    assert time.perf_counter() - started < 2.0  # tokenising 4 MiB takes longer


@pytest.mark.parametrize(("text", "offset"), [("\ud800", 0), ("ab\udfffc", 2)])
def test_l4_lone_surrogates_are_refused_with_their_offset(text: str, offset: int) -> None:
    message = refusal(lambda: check_text("prompt", text))
    assert message == f"prompt has a lone surrogate at character {offset}"
    with pytest.raises(UnicodeEncodeError):
        pb.GenerateRequest(prompt=text)


def test_l4_odd_characters_are_ordinary_text() -> None:
    text = "a\x00b \u202e\u200f שלום \ufffd"
    assert byte_level().decode(plan(prompt=text).prompt) == text


def test_defaults() -> None:
    made = plan()
    assert made.prompt.dtype == np.int32
    assert len(made.prompt) == made.law.prompt_length == 2
    assert (made.law.temperature, made.law.top_p, made.law.repetition_penalty) == (1.0, 1.0, 1.0)
    assert (made.stop.max_tokens, made.stop.min_tokens, made.stop.strings) == (256, 0, ())
    assert made.stop.token_ids == frozenset(made.law.stop_token_ids) == {1}
    assert (made.lookahead, made.acceptance, made.proposer) == (4, pb.ACCEPTANCE_RATIO, 0)
    assert plan(ServingLimits(402, 10, 16, 4)).stop.max_tokens == 8
    assert len(plan(ServingLimits(402, 3, 16, 4)).prompt) == 2


def test_everything_asked_for_arrives() -> None:
    request = pb.GenerateRequest()
    ParseDict(
        {
            "tokenIds": {"ids": [7, 8, 9]},
            "sampling": {
                "repetitionPenalty": 1.5, "presencePenalty": 0.5, "frequencyPenalty": -0.5, "temperature": 0.7,
                "topK": 7, "topP": 0.9, "minP": 0.1, "logitBias": {9: -100, 3: 2.5},
                "allowedTokenIds": [9, 3, 4], "bannedTokenIds": [4],
            },
            "stop": {"maxTokens": 20, "minTokens": 3, "strings": ["a", "b"], "tokenIds": [9, 5], "ignoreEos": True},
            "seed": 2**64 - 1,
            "speculation": {"lookahead": 0, "proposer": "PROPOSER_PROMPT_LOOKUP", "acceptance": "ACCEPTANCE_RATIO"},
            "sessionId": "My.session-1_x",
        },
        request,
    )  # fmt: skip
    made = plan_request(request, byte_level(), LIMITS)
    law = made.law
    assert made.prompt.tolist() == [7, 8, 9]
    assert (law.repetition_penalty, law.presence_penalty, law.frequency_penalty) == (1.5, 0.5, -0.5)
    assert (law.temperature, law.top_k, law.top_p, law.min_p) == (0.7, 7, 0.9, 0.1)
    assert law.logit_bias == ((3, 2.5), (9, -100.0))
    assert (law.allowed_token_ids, law.banned_token_ids) == ((9, 3, 4), (4,))
    assert (law.prompt_length, law.stop_token_ids, law.min_tokens) == (3, (5, 9), 3)
    assert (made.stop.max_tokens, made.stop.min_tokens, made.stop.strings) == (20, 3, ("a", "b"))
    assert (made.seed, made.session_id) == (2**64 - 1, "My.session-1_x")
    assert (made.lookahead, made.acceptance) == (0, pb.ACCEPTANCE_RATIO)
    assert made.proposer == draft_pb2.PROPOSER_PROMPT_LOOKUP


def test_a16_unseeded_requests_differ() -> None:
    made = [plan() for _ in range(64)]
    assert len({one.seed for one in made}) == 64
    assert max(one.seed for one in made) >= 2**60
    assert plan(seed=0).seed == 0


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_is_chosen_at_temperature_0(temperature: float) -> None:
    assert plan(sampling={"temperature": temperature}).acceptance == pb.ACCEPTANCE_GREEDY
    assert plan(sampling={"temperature": 1e-5}).acceptance == pb.ACCEPTANCE_RATIO
    assert plan(sampling={"temperature": 1e-5}, seed=0).acceptance == pb.ACCEPTANCE_COUPLED
    assert plan(sampling={"temperature": 0.0}, seed=0).acceptance == pb.ACCEPTANCE_GREEDY
    assert plan(seed=0, speculation={"acceptance": "ACCEPTANCE_BLOCK"}).acceptance == pb.ACCEPTANCE_BLOCK


@pytest.mark.parametrize(
    ("rule", "compact", "other"),
    [("RATIO", "SUPPORT", "SAMPLE"), ("BLOCK", "SUPPORT", "SAMPLE"), ("COUPLED", "SAMPLE", "SUPPORT")],
)
def test_a_rule_gets_rows_that_it_can_use(rule: str, compact: str, other: str) -> None:
    def row_format(**fields: str) -> str:
        made = plan(speculation={"acceptance": f"ACCEPTANCE_{rule}", **fields})
        return target_pb2.RowFormat.Name(made.row_format)

    assert row_format() == row_format(row_format=f"ROW_FORMAT_{compact}") == f"ROW_FORMAT_{compact}"
    assert row_format(row_format="ROW_FORMAT_LOGITS") == "ROW_FORMAT_LOGITS"
    with pytest.raises(OutriderError, match=f"row_format is {other}, {rule.lower()} acceptance needs {compact}"):
        row_format(row_format=f"ROW_FORMAT_{other}")


def test_a_prediction_chooses_its_proposer() -> None:
    made = plan(speculation={"prediction": "the quick"})
    assert made.proposer == draft_pb2.PROPOSER_PREDICTION
    assert made.prediction.tolist() == plan(prompt="the quick").prompt.tolist()
    assert made.prediction.dtype == plan().prediction.dtype == np.int32
    assert len(plan().prediction) == 0
    assert len(plan(speculation={"prediction": "\x00" * (256 * 1024)}).prediction) == 65_536


def test_a_stop_string_that_is_a_special_token_is_a_stop_token() -> None:
    end = byte_level().get_vocab()["<|im_end|>"]
    made = plan(stop={"strings": ["<|im_end|>", "END"]})
    assert made.law.stop_token_ids == tuple(sorted((1, end)))
    assert made.stop.strings == ("<|im_end|>", "END")
    assert plan(stop={"strings": ["<tool>"]}).law.stop_token_ids == (1,)


def test_special_tokens_are_what_the_tokenizer_makes_them() -> None:
    tokenizer = byte_fallback()
    limits = ServingLimits(len(tokenizer), 512, 16, 4)
    made = plan_request(pb.GenerateRequest(prompt="the</s>"), tokenizer, limits)
    assert tokenizer.convert_ids_to_tokens(made.prompt.tolist()) == ["<s>", "▁the", "</s>"]


TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system must come first') }}{% endif %}<s>{{ message['role'] }}: {{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def test_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_fallback()
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    limits = ServingLimits(len(tokenizer), 512, 16, 4)

    def chat(*messages: tuple[str, str]) -> GenerationPlan:
        request = pb.GenerateRequest(chat={"messages": [{"role": r, "content": c} for r, c in messages]})  # type: ignore[arg-type]
        return plan_request(request, tokenizer, limits)

    ids = chat(("user", "the {{ 1 }}"), ("assistant", "")).prompt
    assert tokenizer.decode(ids) == "<s> user: the {{ 1 }}</s><s> assistant: </s><s> assistant:"
    assert tokenizer.convert_ids_to_tokens(ids.tolist()).count("<s>") == 3, "no second BOS before the template's own"
    message = refusal(lambda: chat(("user", "x"), ("system", "y")))
    assert message == "chat is refused by the model's chat template: system must come first"
    assert "has 513" in refusal(lambda: chat(("user", "x" * 500))) or "limit 511" in refusal(
        lambda: chat(("user", "x" * 600))
    )


def test_b6_synthetic_and_empty_prompts() -> None:
    tokenizer = synthetic_tokenizer(SyntheticSpec(vocab_size=8))
    limits = ServingLimits(8, 64, 8, 4)
    assert plan_request(pb.GenerateRequest(prompt="abc"), tokenizer, limits).prompt.tolist() == [0, 1, 2]
    message = refusal(lambda: plan_request(pb.GenerateRequest(prompt="ZZ"), tokenizer, limits))
    assert message == "prompt is empty: it has no tokens"


def test_b6_real_chat_template() -> None:
    path = os.environ.get("OUTRIDER_TEST_GGUF")
    if path is None:
        pytest.skip("OUTRIDER_TEST_GGUF names no GGUF file")
    tokenizer = load_tokenizer(f"gguf:{path}")
    limits = ServingLimits(len(tokenizer), 2048, 16, 4)
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": " leading 😀 space"}]
    made = plan_request(pb.GenerateRequest(chat={"messages": messages}), tokenizer, limits)  # type: ignore[arg-type]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert made.prompt.tolist() == expected
