"""A GenerateRequest, validated wholly before any model call."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from orchestrator.text.stopping import StopRules
from outrider.law.params import LawParams
from outrider.law.sparse import Int32Array
from outrider.v1 import orchestrator_pb2
from outrider.v1.draft_pb2 import Proposer
from outrider.v1.orchestrator_pb2 import Acceptance


@dataclass(frozen=True)
class ServingLimits:
    """What the pair of models and the orchestrator's settings allow.

    Attributes:
        vocab_size: real token ids of the target.
        context_length: longest sequence of the target, in tokens.
        max_lookahead: longest block that a request may ask for.
        default_lookahead: lookahead of requests that do not choose one.
        eos_token_ids: the target's end-of-sequence tokens.
    """

    vocab_size: int
    context_length: int
    max_lookahead: int
    default_lookahead: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationPlan:
    """Everything that a generation needs to know; nothing in it is unset or out of range.

    Attributes:
        session_id: the client's, or a random one.
        prompt: [n] int32, 1 <= n < context length.
        law: with prompt_length, stop_token_ids and min_tokens filled in.
        seed: in [0, 2^64); random when the client gave none.
        stop: when the output ends.
        lookahead: longest block, 0 for plain decoding.
        acceptance: never unspecified.
        proposer: unspecified leaves it to the draft worker.
    """

    session_id: str
    prompt: Int32Array
    law: LawParams
    seed: int
    stop: StopRules
    lookahead: int
    acceptance: "Acceptance.ValueType"
    proposer: "Proposer.ValueType"


def plan_request(
    request: orchestrator_pb2.GenerateRequest, tokenizer: PreTrainedTokenizerBase, limits: ServingLimits
) -> GenerationPlan:
    """Validates a request and fills in every default.

    Raises OutriderError(INVALID_FIELD) naming field and limit. Tokenising a text of megabytes takes a second: call it
    off the event loop when the prompt is long.
    """
    raise NotImplementedError
