"""A GenerateRequest, validated wholly before any model call."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from orchestrator.text.prompt import encode_utf8, prompt_tokens
from orchestrator.text.stopping import StopRules
from outrider.law.language import KINDS, Language, from_grammar
from outrider.law.logprobs import MAX_LOGPROBS
from outrider.law.params import GREEDY_TEMPERATURE, LawParams, ParamError, check, from_sampling
from outrider.law.sparse import Int32Array
from outrider.lm.grammars import SessionGrammars
from outrider.net.bounds import MAX_LAW_TOP, MAX_LOOKAHEAD
from outrider.net.errors import OutriderError, invalid_field
from outrider.v1 import draft_pb2, orchestrator_pb2, target_pb2
from outrider.v1.draft_pb2 import Proposer
from outrider.v1.orchestrator_pb2 import Acceptance
from outrider.v1.target_pb2 import RowFormat

DEFAULT_MAX_TOKENS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 16
MAX_PREDICTION_BYTES = 256 * 1024
MAX_PREDICTION_TOKENS = 65_536


@dataclass(frozen=True)
class ServingLimits:
    """What the pair of models and the orchestrator's settings allow.

    Attributes:
        vocab_size: real token ids of the target.
        context_length: longest sequence of the target, in tokens.
        max_lookahead: longest block that a request may ask for.
        default_lookahead: lookahead of requests that do not choose one; None lets the lookahead control choose.
        eos_token_ids: the target's end-of-sequence tokens.
        default_nodes: most tokens of a tree, of requests that do not say.
    """

    vocab_size: int
    context_length: int
    max_lookahead: int
    default_lookahead: int | None
    eos_token_ids: tuple[int, ...] = ()
    default_nodes: int = 0


@dataclass(frozen=True)
class GenerationPlan:
    """Everything that a generation needs to know; nothing in it is unset or out of range.

    Attributes:
        session_id: its name, see `names`.
        prompt: [n] int32, 1 <= n < context length.
        law: with prompt_length, stop_token_ids and min_tokens filled in.
        seed: in [0, 2^64); random when the client gave none.
        stop: when the output ends.
        lookahead: longest block, 0 for plain decoding.
        adaptive: whether the lookahead control chooses each round's lookahead, up to the longest.
        acceptance: never unspecified.
        proposer: unspecified leaves it to what is measured.
        row_format: what the target returns; never unspecified, and one that the acceptance rule can use.
        law_top: most entries that a row of the draft law keeps; 0 leaves it to the draft worker.
        max_nodes: most tokens of a block that is a tree; below 2 for chains alone.
        prediction: [n] int32, what the client expects to be generated; empty when it did not say.
        logprobs: how many of the likeliest tokens to tell beside each token and its log probability; None for no log
            probability at all.
        token_by_token: whether every message carries at most one token.
        resumable: whether the session outlives a stream that ends before it.
    """

    session_id: str
    prompt: Int32Array
    law: LawParams
    seed: int
    stop: StopRules
    lookahead: int
    adaptive: bool
    acceptance: "Acceptance.ValueType"
    proposer: "Proposer.ValueType"
    row_format: "RowFormat.ValueType"
    law_top: int
    max_nodes: int
    prediction: Int32Array
    logprobs: int | None
    token_by_token: bool
    resumable: bool

    @property
    def judged_by_token(self) -> bool:
        """Whether the acceptance rule compares tokens and looks at no law of the draft."""
        return self.acceptance in _BY_TOKEN


class _Speculation(NamedTuple):
    """The plan's part that the output law does not depend on; fields as in GenerationPlan."""

    lookahead: int
    adaptive: bool
    acceptance: "Acceptance.ValueType"
    proposer: "Proposer.ValueType"
    row_format: "RowFormat.ValueType"
    law_top: int
    max_nodes: int


_BY_TOKEN = {orchestrator_pb2.ACCEPTANCE_GREEDY, orchestrator_pb2.ACCEPTANCE_COUPLED}


def plan_request(
    request: orchestrator_pb2.GenerateRequest,
    tokenizer: PreTrainedTokenizerBase,
    limits: ServingLimits,
    grammars: SessionGrammars | None = None,
) -> GenerationPlan:
    """Validates a request, whose session has its name already, and fills in every other default.

    `grammars` compiles the request's grammar and keeps it for the session; without them one is made for this request.
    Raises OutriderError(INVALID_FIELD) naming field and limit. What is cheap to check comes before the prompt is
    tokenised; tokenising megabytes of text takes seconds: call this off the event loop when the prompt is long.
    """
    law = _law(request, tokenizer, limits)
    speculation = _speculation(request, law, limits)
    logprobs = _logprobs(request)
    _check_grammar(law, grammars or SessionGrammars(tokenizer, limits.vocab_size))
    _check_stop_strings(request.stop)
    room = limits.context_length - 1
    if len(request.token_ids.ids) > room:
        raise _too_long("token_ids", len(request.token_ids.ids), limits)
    prompt = prompt_tokens(request, tokenizer, limits.vocab_size)
    if len(prompt) > room:
        raise _too_long(str(request.WhichOneof("input")), len(prompt), limits)
    max_tokens = _max_tokens(request.stop, limits.context_length - len(prompt))
    return GenerationPlan(
        session_id=request.session_id,
        prompt=prompt,
        law=replace(law, prompt_length=len(prompt)),
        seed=request.seed if request.HasField("seed") else secrets.randbits(64),
        stop=StopRules(
            max_tokens=max_tokens,
            min_tokens=law.min_tokens,
            strings=tuple(request.stop.strings),
            token_ids=frozenset(law.stop_token_ids),
        ),
        prediction=_prediction_tokens(request.speculation.prediction, tokenizer),
        logprobs=logprobs,
        token_by_token=request.token_by_token,
        resumable=request.resumable,
        **speculation._asdict(),
    )


def _law(
    request: orchestrator_pb2.GenerateRequest, tokenizer: PreTrainedTokenizerBase, limits: ServingLimits
) -> LawParams:
    """The law without its prompt length."""
    law = replace(
        from_sampling(request.sampling),
        stop_token_ids=_stop_token_ids(request.stop, tokenizer, limits),
        min_tokens=request.stop.min_tokens,
        grammar=_grammar(request),
    )
    try:
        check(law, limits.vocab_size)
    except ParamError as error:
        raise invalid_field(str(error)) from None
    return law


def _grammar(request: orchestrator_pb2.GenerateRequest) -> Language | None:
    language = from_grammar(request.grammar)
    if language is None and request.HasField("grammar"):
        raise invalid_field(f"grammar names no language: one of {', '.join(KINDS)} is required")
    return language


def _check_grammar(law: LawParams, grammars: SessionGrammars) -> None:
    """Compiles the grammar. The output ends where it is a member, and in no other way."""
    if law.grammar is None:
        return
    if law.min_tokens:
        raise invalid_field(f"stop.min_tokens is {law.min_tokens}, must be 0 with a grammar, which says where to end")
    if not law.stop_token_ids:
        raise invalid_field("grammar needs a token that ends the output: an end-of-sequence token or stop.token_ids")
    grammars.open(law)


def _stop_token_ids(
    stop: orchestrator_pb2.StopConditions, tokenizer: PreTrainedTokenizerBase, limits: ServingLimits
) -> tuple[int, ...]:
    if len(stop.token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid_field(f"stop.token_ids has {len(stop.token_ids)} entries, limit {MAX_STOP_TOKEN_IDS}")
    for index, token in enumerate(stop.token_ids):
        if not 0 <= token < limits.vocab_size:
            raise invalid_field(f"stop.token_ids[{index}] is {token}, must be in [0, {limits.vocab_size})")
    end_of_sequence = () if stop.ignore_eos else limits.eos_token_ids
    named = _special_tokens_named(stop.strings, tokenizer) if stop.strings else []
    return tuple(sorted({*end_of_sequence, *stop.token_ids, *named}))


def _special_tokens_named(strings: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Special tokens whose spelling is a stop string: they have no text in which the string could be found."""
    wanted = set(strings)
    return [
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special and token.content in wanted
    ]


def _check_stop_strings(stop: orchestrator_pb2.StopConditions) -> None:
    if len(stop.strings) > MAX_STOP_STRINGS:
        raise invalid_field(f"stop.strings has {len(stop.strings)} entries, limit {MAX_STOP_STRINGS}")
    for index, string in enumerate(stop.strings):
        size = len(encode_utf8(f"stop.strings[{index}]", string))
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            raise invalid_field(
                f"stop.strings[{index}] has {size} bytes of UTF-8, must be in [1, {MAX_STOP_STRING_BYTES}]"
            )


def _max_tokens(stop: orchestrator_pb2.StopConditions, room: int) -> int:
    """The most tokens to generate, `room` being what the context still holds."""
    max_tokens = stop.max_tokens if stop.HasField("max_tokens") else min(DEFAULT_MAX_TOKENS, room)
    if not 1 <= max_tokens <= room:
        raise invalid_field(f"stop.max_tokens is {max_tokens}, must be in [1, {room}]")
    if stop.min_tokens > max_tokens:
        raise invalid_field(f"stop.min_tokens is {stop.min_tokens}, must be at most max_tokens, which is {max_tokens}")
    return max_tokens


def _logprobs(request: orchestrator_pb2.GenerateRequest) -> int | None:
    if request.HasField("logprobs") and request.logprobs > MAX_LOGPROBS:
        raise invalid_field(f"logprobs is {request.logprobs}, must be in [0, {MAX_LOGPROBS}]")
    return request.logprobs if request.HasField("logprobs") else None


def _speculation(request: orchestrator_pb2.GenerateRequest, law: LawParams, limits: ServingLimits) -> _Speculation:
    wanted = request.speculation
    chosen = wanted.lookahead if wanted.HasField("lookahead") else limits.default_lookahead
    lookahead = limits.max_lookahead if chosen is None else chosen
    if lookahead > limits.max_lookahead:
        raise invalid_field(f"speculation.lookahead is {lookahead}, must be in [0, {limits.max_lookahead}]")
    if wanted.law_top > MAX_LAW_TOP:
        raise invalid_field(f"speculation.law_top is {wanted.law_top}, must be in [0, {MAX_LAW_TOP}]")
    proposer = _proposer(wanted)
    acceptance = _acceptance(wanted.acceptance, law, seeded=request.HasField("seed"))
    row_format = _row_format(wanted.row_format, acceptance)
    nodes = wanted.max_nodes if wanted.HasField("max_nodes") else limits.default_nodes
    if nodes > MAX_LOOKAHEAD:
        raise invalid_field(f"speculation.max_nodes is {nodes}, must be in [0, {MAX_LOOKAHEAD}]")
    return _Speculation(lookahead, chosen is None, acceptance, proposer, row_format, wanted.law_top, nodes)


def _proposer(wanted: orchestrator_pb2.Speculation) -> "Proposer.ValueType":
    if wanted.proposer not in Proposer.values():
        raise invalid_field(f"speculation.proposer is {wanted.proposer}, which is no proposer")
    predicts = wanted.proposer == draft_pb2.PROPOSER_PREDICTION
    if wanted.proposer == draft_pb2.PROPOSER_AUTO and not wanted.prediction:
        return draft_pb2.PROPOSER_UNSPECIFIED
    if not wanted.prediction:
        if predicts:
            raise invalid_field("speculation.prediction is empty, which speculation.proposer prediction copies from")
        return wanted.proposer
    if wanted.proposer not in (draft_pb2.PROPOSER_UNSPECIFIED, draft_pb2.PROPOSER_AUTO) and not predicts:
        name = Proposer.Name(wanted.proposer).removeprefix("PROPOSER_").lower()
        raise invalid_field(f"speculation.proposer is {name}, speculation.prediction needs prediction")
    size = len(encode_utf8("speculation.prediction", wanted.prediction))
    if size > MAX_PREDICTION_BYTES:
        raise invalid_field(f"speculation.prediction has {size} bytes of UTF-8, limit {MAX_PREDICTION_BYTES}")
    return draft_pb2.PROPOSER_PREDICTION


def _prediction_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> Int32Array:
    """The first tokens of the prediction, as they would follow a prompt."""
    ids = tokenizer(text, add_special_tokens=False).input_ids if text else []
    return np.array(ids[:MAX_PREDICTION_TOKENS], dtype=np.int32)


def _acceptance(wanted: "Acceptance.ValueType", law: LawParams, *, seeded: bool) -> "Acceptance.ValueType":
    if wanted not in Acceptance.values():
        raise invalid_field(f"speculation.acceptance is {wanted}, which is no acceptance rule")
    if wanted == orchestrator_pb2.ACCEPTANCE_GREEDY and not law.greedy:
        raise invalid_field(
            f"speculation.acceptance is greedy, which needs a temperature below {GREEDY_TEMPERATURE}, "
            f"and sampling.temperature is {law.temperature}"
        )
    if wanted != orchestrator_pb2.ACCEPTANCE_UNSPECIFIED:
        return wanted
    if law.greedy:
        return orchestrator_pb2.ACCEPTANCE_GREEDY
    return orchestrator_pb2.ACCEPTANCE_COUPLED if seeded else orchestrator_pb2.ACCEPTANCE_RATIO


def _row_format(wanted: "RowFormat.ValueType", acceptance: "Acceptance.ValueType") -> "RowFormat.ValueType":
    compact = target_pb2.ROW_FORMAT_SAMPLE if acceptance in _BY_TOKEN else target_pb2.ROW_FORMAT_SUPPORT
    if wanted == target_pb2.ROW_FORMAT_UNSPECIFIED:
        return compact
    if wanted not in RowFormat.values():
        raise invalid_field(f"speculation.row_format is {wanted}, which is no row format")
    if wanted not in (compact, target_pb2.ROW_FORMAT_LOGITS):
        rule = Acceptance.Name(acceptance).removeprefix("ACCEPTANCE_").lower()
        names = [RowFormat.Name(one).removeprefix("ROW_FORMAT_") for one in (wanted, compact)]
        raise invalid_field(f"speculation.row_format is {names[0]}, {rule} acceptance needs {names[1]} or LOGITS")
    return wanted


def _too_long(field: str, length: int, limits: ServingLimits) -> OutriderError:
    return invalid_field(
        f"{field} has {length} tokens, limit {limits.context_length - 1}: "
        f"the context holds {limits.context_length}, at least one of them generated"
    )
