"""What a session's committed tokens come to, at a replica that did not make them."""

from dataclasses import dataclass

import numpy as np

from orchestrator.request import GenerationPlan
from orchestrator.store.base import RUNNING, SessionCorrupt, SessionRecord
from orchestrator.text.output import Emission, Output, RoundToken
from outrider.law.sparse import Int32Array
from outrider.lm.grammars import SessionGrammar
from outrider.v1.orchestrator_pb2 import TOKEN_ORIGIN_REPLAYED

_NO_TOKENS: Int32Array = np.empty(0, np.int32)


@dataclass(frozen=True)
class Replay:
    """A session as it was left.

    Attributes:
        plan: what was asked for.
        record: what the store holds, at the epoch of its new owner when it runs.
        output: after the committed tokens.
        grammar: after the committed tokens; None without one.
        emission: all that clients may have seen of them, from the first one on.
    """

    plan: GenerationPlan
    record: SessionRecord
    output: Output
    grammar: SessionGrammar | None
    emission: Emission

    @property
    def generated(self) -> int:
        """Number of committed generated tokens."""
        return len(self.record.tokens) - self.record.prompt_length

    @property
    def running(self) -> bool:
        """Whether there is more to generate."""
        return self.record.state == RUNNING


def replay(plan: GenerationPlan, record: SessionRecord, output: Output, grammar: SessionGrammar | None) -> Replay:
    """Takes a new output and grammar through the committed tokens: microseconds for each.

    Raises SessionCorrupt when they are not what the request could come to, OutriderError INVALID_FIELD when its grammar
    does not allow them.
    """
    generated = record.tokens[record.prompt_length :]
    emission, kept = Emission((), None), 0
    if len(generated):
        all_of_them = output.keep([RoundToken(token, TOKEN_ORIGIN_REPLAYED) for token in generated.tolist()])
        emission, kept = output.emit(all_of_them), len(all_of_them.tokens)
    if kept < len(generated) or (record.state == RUNNING and emission.finish is not None):
        raise SessionCorrupt(f"session {record.session_id} is damaged in the store: it goes on after its end")
    if grammar is not None and record.state == RUNNING:
        grammar.legal(record.tokens, _NO_TOKENS)
    return Replay(plan, record, output, grammar, emission)
