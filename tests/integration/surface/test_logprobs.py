"""Log probabilities through the services: row A18 of shared/FAILURES.md."""

import numpy as np
import pytest
import torch

from outrider.lm.engine import Segment
from outrider.lm.synthetic import SyntheticEngine
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_BLOCK,
    ACCEPTANCE_COUPLED,
    ACCEPTANCE_GREEDY,
    ACCEPTANCE_RATIO,
    TOKEN_ORIGIN_ACCEPTED,
    TOKEN_ORIGIN_BONUS,
    TOKEN_ORIGIN_PLAIN,
    TOKEN_ORIGIN_RECOVERED,
    Acceptance,
    GenerateRequest,
    StopConditions,
)
from outrider.v1.target_pb2 import ROW_FORMAT_LOGITS
from tests.harness.orchestrator import Generation, ask
from tests.harness.system import start_system, synthetic
from tests.harness.workers import int32

PROMPT = (0, 1, 2)
TOP = 5
ORIGINS = {TOKEN_ORIGIN_ACCEPTED, TOKEN_ORIGIN_RECOVERED, TOKEN_ORIGIN_BONUS, TOKEN_ORIGIN_PLAIN}
SHAPE = {"top_k": 9, "repetition_penalty": 1.2, "logit_bias": {3: 2.0}}


def request(*, logprobs: int | None = TOP, dense: bool = False, **fields: object) -> GenerateRequest:
    made = ask(PROMPT, **{"max_tokens": 60, "lookahead": 4, "seed": 5, **SHAPE, **fields})  # type: ignore[arg-type]
    if logprobs is not None:
        made.logprobs = logprobs
    if dense:
        made.speculation.row_format = ROW_FORMAT_LOGITS
    return made


def check(generation: Generation, engine: SyntheticEngine, top: int = TOP) -> None:
    """Against the log-softmax of the logits that a fresh forward over the output gives."""
    whole = int32([*PROMPT, *generation.ids])
    (logits,) = engine.forward([Segment(engine.open(whole), whole, len(whole))])
    logs = logits[:, :16].double().log_softmax(dim=1).numpy()[len(PROMPT) - 1 : -1]
    order = np.argsort(-logs, axis=1, kind="stable")[:, :top]
    assert len(generation.tokens) == generation.finish.usage.completion_tokens == len(logs)
    for token, row, likeliest in zip(generation.tokens, logs, order, strict=True):
        assert token.logprob == pytest.approx(row[token.id], abs=1e-5)
        assert [each.id for each in token.top_logprobs] == likeliest.tolist()
        assert [each.logprob for each in token.top_logprobs] == pytest.approx(row[likeliest].tolist(), abs=1e-5)


@pytest.mark.parametrize("rule", [ACCEPTANCE_RATIO, ACCEPTANCE_BLOCK, ACCEPTANCE_COUPLED, ACCEPTANCE_GREEDY])
@pytest.mark.parametrize("dense", [False, True], ids=["compact", "logits"])
async def test_a18_every_kind_of_token_has_the_models_log_probability(rule: int, dense: bool) -> None:
    """In every format; penalties, biases, temperature and top-k shape what is drawn and not what is told."""
    sampling = {"temperature": 0.0 if rule == ACCEPTANCE_GREEDY else 1.3}
    async with start_system(synthetic(order=2), synthetic(order=2, noise=0.8)) as system:
        one = await system.generate(request(acceptance=rule, dense=dense, **sampling))
        assert {token.origin for token in one.tokens} == ORIGINS, Acceptance.Name(rule)  # type: ignore[arg-type]
        check(one, synthetic(order=2))
        none = await system.generate(request(acceptance=rule, dense=dense, logprobs=None, **sampling))
        assert none.ids == one.ids
        assert not any(token.HasField("logprob") or token.top_logprobs for token in none.tokens)


@pytest.mark.parametrize(("rule", "temperature"), [(ACCEPTANCE_GREEDY, 0.0), (ACCEPTANCE_COUPLED, 1.0)])
async def test_a18_equal_to_plain_decoding(rule: int, temperature: float) -> None:
    async with start_system(synthetic(order=2), synthetic(order=2, noise=0.8)) as system:
        for lookahead in (1, 4, 9):
            spec = await system.generate(request(acceptance=rule, temperature=temperature, lookahead=lookahead))
            plain = await system.generate(request(acceptance=rule, temperature=temperature, lookahead=0))
            assert spec.accepted > 0
            assert [token.id for token in spec.tokens] == [token.id for token in plain.tokens]
            assert [token.logprob for token in spec.tokens] == pytest.approx(
                [token.logprob for token in plain.tokens], abs=1e-4
            )
            assert [list(map(str, token.top_logprobs)) for token in spec.tokens] == [
                list(map(str, token.top_logprobs)) for token in plain.tokens
            ]


@pytest.mark.parametrize("top", [0, 20])
async def test_a18_from_none_to_twenty_beside_the_token(top: int) -> None:
    async with start_system(synthetic(), synthetic(noise=0.8)) as system:
        one = await system.generate(request(logprobs=top))
        check(one, synthetic(), top=min(top, 16))


async def test_a18_tokens_held_back_by_a_stop_string_keep_theirs() -> None:
    stop = StopConditions(strings=["zz", "abab", "ba", "no"])
    async with start_system(synthetic(), synthetic(noise=0.8)) as system:
        one = await system.generate(request(stop=stop, max_tokens=200))
        check(one, synthetic())


async def test_batch_mates_that_ask_for_other_things_change_nothing() -> None:
    async with start_system(synthetic(order=2), synthetic(order=2, noise=0.8)) as system:
        wanted = [request(logprobs=top, seed=seed) for seed, top in enumerate((3, None, 0, 20, 1, None))]
        wanted += [request(seed=9, dense=True, logprobs=2), request(seed=9, acceptance=ACCEPTANCE_RATIO, logprobs=4)]
        alone = [await system.generate(one) for one in wanted]
        together = await system.generate_all(wanted)
    for one, other in zip(alone, together, strict=True):
        assert [token.SerializeToString() for token in one.tokens] == [
            token.SerializeToString() for token in other.tokens
        ]


torch.set_num_threads(1)
