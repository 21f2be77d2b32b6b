"""When a generation ends: the rules, and stop strings found in text that arrives in pieces."""

from dataclasses import dataclass

from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import FinishReason


@dataclass(frozen=True)
class StopRules:
    """When a generation ends; whatever comes first.

    Attributes:
        max_tokens: most generated tokens, at least 1.
        min_tokens: neither stop tokens nor stop strings end the output within so many tokens.
        strings: texts that end the output and are not part of it.
        token_ids: tokens that end the output, the model's end-of-sequence tokens included unless they are ignored.
    """

    max_tokens: int
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Finish:
    """Why and how a generation ended.

    Attributes:
        reason: FINISH_REASON_STOP or FINISH_REASON_LENGTH.
        matched_stop: the stop string, or the stop token as the vocabulary spells it; empty for LENGTH.
    """

    reason: "FinishReason.ValueType"
    matched_stop: str = ""


LENGTH = Finish(orchestrator_pb2.FINISH_REASON_LENGTH)
