"""Both workers over real (tiny, random) models: paged KV, prefix sharing and page pressure under the schedulers."""

import asyncio

import grpc
import numpy as np
import pytest
import torch

from outrider.law.draft import propose, truncate
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.law.transforms import RowContext, law_probs
from tests.harness.engines_lm import own_logits, own_model, tiny_engine
from tests.harness.models import VOCAB
from tests.harness.workers import (
    advance_command,
    block_of,
    error_of,
    int32,
    open_command,
    reason,
    rows_of,
    start_draft,
    start_target,
    verify_item,
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def expected(tokens: list[int], rows: int) -> torch.Tensor:
    return own_logits(own_model("llama"), int32(tokens))[-rows:]


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("pages", "budget"), [(400, 512), (400, 7), (40, 16)])
async def test_f1_rounds_of_many_sessions_score_as_the_model_does(pages: int, budget: int) -> None:
    """Few pages: sessions are evicted between rounds, and the orchestrator's resend is played here."""
    shared = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 12)]

    async def session(number: int) -> None:
        choose = np.random.default_rng(number)
        committed, new = [*shared, number], None
        for _ in range(5):
            draft = choose.integers(0, VOCAB, choose.integers(0, 6)).tolist()
            (result,) = await target.verify(verify_item(str(number), committed, draft, new=new))
            if result.status.code:
                assert error_of(result).reason == reason("SESSION_NOT_FOUND")
                (result,) = await target.verify(verify_item(str(number), committed, draft))
            assert_close(rows_of(result, len(draft) + 1), expected(committed + draft, len(draft) + 1))
            committed = [*committed, *draft[: choose.integers(0, len(draft) + 1)], int(choose.integers(0, VOCAB))]
            new = 1

    async with start_target(tiny_engine("llama", pages=pages), token_budget=budget, max_lookahead=6) as target:
        await asyncio.gather(*(session(number) for number in range(8)))
        await target.release(*((str(number), 1) for number in range(8)))
        (last,) = await target.verify(verify_item("last", [1]))
        assert_close(rows_of(last, 1), expected([1], 1))
        assert (await target.info()).load.kv_pages_used == 1


async def test_a_prompt_seen_before_is_not_computed_again() -> None:
    prompt = [int(token) for token in np.random.default_rng(1).integers(0, VOCAB, 40)]
    async with start_target(tiny_engine("llama")) as target:
        await target.verify(verify_item("first", prompt))
        (second,) = await target.verify(verify_item("second", prompt, [3, 4]))
        assert second.timing.computed_tokens < 10
        assert_close(rows_of(second, 3), expected([*prompt, 3, 4], 3))


async def test_c2_draft_chains_over_a_model_are_those_of_a_fresh_one() -> None:
    law = LawParams(temperature=0.9, repetition_penalty=1.1)

    def chain(tokens: list[int], seed: int) -> list[int]:
        drawn: list[int] = []
        for _ in range(4):
            prefix = int32(tokens + drawn)
            probs = law_probs(expected(tokens + drawn, 1), [RowContext(law, prefix)], VOCAB)
            ((ids, row),) = truncate(probs, 32)
            drawn.append(propose(ids, row, RoundNoise(seed, len(tokens)), len(prefix)))
        return drawn

    async def session(number: int) -> None:
        stream, committed = draft.stream(), [number, 1, 2]
        block_of(await stream.ask(open_command("s", committed, 0, law=law, seed=number)))
        committed = [*committed, 5]
        for accepted in (4, 0, 2, 4):
            drawn, _ = block_of(await stream.ask(advance_command("s", committed, 4)))
            assert drawn == chain(committed, number)
            committed = [*committed, *drawn[:accepted], 7]
        assert await stream.end() is grpc.StatusCode.OK

    async with start_draft(tiny_engine("llama")) as draft:
        await asyncio.gather(*(session(number) for number in range(6)))
        await draft.until_sessions(0)
        assert draft.service.load().kv_pages_used == 0
