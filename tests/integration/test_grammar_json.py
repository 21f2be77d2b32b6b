"""Row A19 whole: a JSON schema, a draft that is illegal half the time; the output parses, the state is the replay."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from orchestrator.request import ServingLimits, plan_request
from orchestrator.session import Session
from orchestrator.stats import RoundStats
from orchestrator.text.output import Kept
from outrider.law.params import LawParams
from outrider.law.sparse import Int32Array
from outrider.lm.grammars import SessionGrammar, SessionGrammars
from outrider.v1 import orchestrator_pb2 as pb
from tests.harness.orchestrator import ask, start_orchestrator
from tests.harness.rogue_draft import start_rogue_draft
from tests.harness.spelled import SpelledEngine, save_tokenizer
from tests.harness.tiny_tokenizers import byte_level
from tests.harness.workers import int32, start_target

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["fox", "dog"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "brown": {"type": "boolean"},
    },
    "required": ["name", "kind", "sizes", "brown"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PROMPT = (10, 11, 12)
LIMITS = ServingLimits(len(byte_level()), 4096, 16, 4, (byte_level().eos_token_id,))
RULES = (pb.ACCEPTANCE_RATIO, pb.ACCEPTANCE_BLOCK, pb.ACCEPTANCE_COUPLED)


def request(**fields: int) -> pb.GenerateRequest:
    made = ask(PROMPT, max_tokens=200, lookahead=3, **fields)  # type: ignore[arg-type]
    made.grammar.json_schema = json.dumps(SCHEMA)
    return made


def fresh(law: LawParams) -> SessionGrammar:
    state = SessionGrammars(byte_level(), len(byte_level())).open(law)
    assert state is not None
    return state


def choices(mask: Int32Array, wanted: int) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(byte_level())]
    return np.flatnonzero(bits == wanted).tolist()


class HalfIllegal:
    """Says what the language allows, but ends every other block in a token that it does not."""

    def __init__(self, law: LawParams) -> None:
        self._state = fresh(law)
        self.blocks = self.illegal = 0

    def say(self, session_id: str, tokens: list[int], lookahead: int) -> Sequence[int]:
        self.blocks += 1
        block: list[int] = []
        while len(block) < lookahead and byte_level().eos_token_id not in block:
            wanted = int(self.blocks % 2 == 0 or len(block) < lookahead - 1)
            self.illegal += 1 - wanted
            path = int32(tokens + block)
            found = choices(self._state.masks(path, len(path))[0], wanted)
            block.append(found[len(path) % len(found)])
        tokens.extend(block)  # a worker holds what it proposed: what was accepted of it is not sent again
        return block


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After every round the session's state is compared with a replay of its committed tokens; counts the rounds."""
    rounds: list[int] = []
    advance = Session.advance

    def checked(self: Session, kept: Kept, stats: RoundStats) -> None:
        advance(self, kept, stats)
        tokens = self.tokens.view()
        if kept.finish is None:
            assert self.grammar is not None
            replay = fresh(self.plan.law).masks(tokens, len(tokens))
            assert (self.grammar.masks(tokens, len(tokens)) == replay).all()
            rounds.append(len(kept.tokens))

    monkeypatch.setattr(Session, "advance", checked)
    return rounds


@pytest.mark.parametrize("rule", RULES)
async def test_a19_json_with_a_draft_that_is_illegal_half_the_time(
    rule: "pb.Acceptance.ValueType", replays: list[int], tmp_path: Path
) -> None:
    engine = SpelledEngine(byte_level(), seed=3)
    draft = HalfIllegal(plan_request(request(), byte_level(), LIMITS).law)
    async with (
        start_target(engine) as target,
        start_rogue_draft(engine.info, draft.say) as (address, _),
        start_orchestrator(
            [target.address], [address], tokenizer=save_tokenizer(byte_level(), tmp_path), draft_timeout=30.0
        ) as orchestrator,
    ):
        generations = [await orchestrator.generate(request(seed=seed, acceptance=rule)) for seed in range(3)]
    for generation in generations:
        assert generation.finish.reason == pb.FINISH_REASON_STOP, generation.text
        value = json.loads(generation.text)
        assert list(value) == ["name", "kind", "sizes", "brown"]
        assert value["kind"] in ("fox", "dog")
        assert len(value["name"]) <= 6
        assert all(0 <= size <= 99 for size in value["sizes"])
        assert isinstance(value["brown"], bool)
    rounds = [one for generation in generations for one in generation.rounds]
    refused = sum(one.plain_reason == pb.PLAIN_REASON_DRAFT_INVALID for one in rounds)
    verified = sum(one.drafted > 0 for one in rounds)
    # Nearly every other block: one that ends with the output before its last token has no illegal one.
    assert refused == draft.illegal > draft.blocks / 3
    assert refused + verified == draft.blocks > len(rounds) / 2
    assert sum(one.accepted for one in rounds) > 0
    assert len(replays) == len(rounds) - len(generations)
