"""n > 1: every choice a session of its own, in one call."""

import asyncio

import grpc
import pytest

from outrider.net.errors import OutriderError, from_rpc_error
from outrider.v1 import types_pb2
from outrider.v1.orchestrator_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_LENGTH,
    SESSION_STATE_FINISHED,
    CancelSessionRequest,
    GenerateRequest,
    GenerateResponse,
    GetSessionRequest,
)
from tests.harness.engines import DEADLINE, ScriptedEngine, next_token_script
from tests.harness.orchestrator import ask
from tests.harness.system import RunningSystem, start_system, synthetic
from tests.harness.workers import eventually


def request(n: int, **fields: object) -> GenerateRequest:
    made = ask(**{"max_tokens": 40, "lookahead": 4, "seed": 7, **fields})  # type: ignore[arg-type]
    made.n = n
    return made


async def refusal(system: RunningSystem, wanted: GenerateRequest) -> OutriderError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await system.orchestrator.choices(wanted)
    error = from_rpc_error(failed.value)
    assert error is not None
    return error


async def test_each_choice_is_the_generation_of_its_own_seed() -> None:
    async with start_system(synthetic(order=2), synthetic(order=2, noise=0.7)) as system:
        choices = await system.orchestrator.choices(request(5, session_id="several"))
        assert [one.started.session_id for one in choices] == ["several", *(f"several.{i}" for i in range(1, 5))]
        assert choices[0].started.seed == 7
        assert len({one.started.seed for one in choices}) == len({tuple(one.ids) for one in choices}) == 5
        for one in choices:
            alone = await system.generate(request(0, seed=one.started.seed))
            assert alone.ids == one.ids
            assert len(one.ids) == one.finish.usage.completion_tokens == 40
            assert (one.finish.reason, one.finish.usage.rounds) == (FINISH_REASON_LENGTH, len(one.rounds))
            assert one.accepted > 0
            stored = await system.orchestrator.stub.GetSession(GetSessionRequest(session_id=one.started.session_id))
            assert (stored.state, stored.finish_reason) == (SESSION_STATE_FINISHED, FINISH_REASON_LENGTH)
        again = await system.orchestrator.choices(request(5))
        assert [one.ids for one in again] == [one.ids for one in choices]
        assert len((await system.orchestrator.choices(request(0)))[0].ids) == 40
        core, target, draft = system.orchestrator.core, system.target, system.draft
        assert draft is not None
        await eventually(lambda: core.sessions == target.service.load().open_sessions == 0)
        await draft.until_sessions(0)


async def test_greedy_choices_are_equal_and_unseeded_ones_are_not() -> None:
    async with start_system(synthetic(), synthetic(noise=0.7)) as system:
        greedy = await system.orchestrator.choices(request(3, temperature=0.0))
        assert len({tuple(one.ids) for one in greedy}) == 1
        unseeded = await system.orchestrator.choices(request(16, seed=None))
        assert len({tuple(one.ids) for one in unseeded}) == 16


async def test_the_prompt_is_computed_by_the_first_choice_alone() -> None:
    """The others begin when the target knows it; all of them start at once."""
    engine = ScriptedEngine(next_token_script(16))
    async with start_system(engine) as system:
        engine.hold()
        call = system.orchestrator.stub.Generate(request(3, max_tokens=4), timeout=DEADLINE)
        seen: list[GenerateResponse] = [await anext(aiter(call)) for _ in range(3)]
        assert sorted(response.choice for response in seen if response.HasField("started")) == [0, 1, 2]
        await engine.until_in_pass()
        engine.let_go()
        async for response in call:
            seen.append(response)
        assert len(engine.passes[0]) == 1
        assert next(response.choice for response in seen if response.tokens) == 0


async def test_cancelling_one_choice_leaves_the_others() -> None:
    engine = ScriptedEngine(next_token_script(16))
    async with start_system(engine) as system:
        call = system.orchestrator.stub.Generate(request(3, session_id="s", max_tokens=200), timeout=DEADLINE)
        tokens, finishes, cancelled = [0, 0, 0], {}, False
        async for response in call:
            tokens[response.choice] += len(response.tokens)
            if response.HasField("finish"):
                finishes[response.choice] = response.finish
            if tokens[1] >= 5 and not cancelled:
                cancelled = True
                await system.orchestrator.stub.CancelSession(CancelSessionRequest(session_id="s.1"))
        assert {number: one.reason for number, one in finishes.items()} == {
            0: FINISH_REASON_LENGTH, 1: FINISH_REASON_CANCELLED, 2: FINISH_REASON_LENGTH,
        }  # fmt: skip
        assert [finishes[number].usage.completion_tokens for number in range(3)] == tokens
        assert tokens[1] < 200
        await eventually(lambda: len(engine.open_tokens) == 0)
        stored = await system.orchestrator.stub.GetSession(GetSessionRequest(session_id="s.1"))
        assert stored.finish_reason == FINISH_REASON_CANCELLED


async def test_a_cancelled_first_choice_does_not_hold_up_the_others() -> None:
    engine = ScriptedEngine(next_token_script(16))
    async with start_system(engine) as system:
        engine.hold()
        work = asyncio.create_task(system.orchestrator.choices(request(2, session_id="s", max_tokens=4)))
        await engine.until_in_pass()
        await system.orchestrator.stub.CancelSession(CancelSessionRequest(session_id="s"))
        engine.let_go()
        choices = await work
        assert [one.finish.reason for one in choices] == [FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH]
        assert (choices[0].ids, choices[0].finish.usage.prompt_tokens, len(choices[1].ids)) == ([], 3, 4)


async def test_the_call_ends_when_every_choice_was_cancelled() -> None:
    engine = ScriptedEngine(next_token_script(16))
    async with start_system(engine) as system:
        engine.hold()
        call = system.orchestrator.stub.Generate(request(2, session_id="s"), timeout=DEADLINE)
        _ = [await anext(aiter(call)) for _ in range(2)]
        for session_id in ("s", "s.1"):
            await system.orchestrator.stub.CancelSession(CancelSessionRequest(session_id=session_id))
        engine.let_go()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in call:
                pass
        assert failed.value.code() is grpc.StatusCode.ABORTED
        error = from_rpc_error(failed.value)
        assert error is not None
        assert error.reason == types_pb2.ERROR_REASON_SESSION_CANCELLED


async def test_a_client_that_leaves_ends_every_choice() -> None:
    engine = ScriptedEngine(next_token_script(16))
    async with start_system(engine) as system:
        engine.hold()
        call = system.orchestrator.stub.Generate(request(3, session_id="s"), timeout=DEADLINE)
        _ = [await anext(aiter(call)) for _ in range(3)]
        call.cancel()
        core = system.orchestrator.core
        await eventually(lambda: core.sessions == 0)
        engine.let_go()
        await eventually(lambda: len(engine.open_tokens) == 0)
        for session_id in ("s", "s.1", "s.2"):
            stored = await system.orchestrator.stub.GetSession(GetSessionRequest(session_id=session_id))
            assert stored.finish_reason == FINISH_REASON_CANCELLED


async def test_a_failing_choice_ends_the_call() -> None:
    engine = ScriptedEngine(next_token_script(16))
    async with start_system(engine) as system:
        await system.generate(ask(max_tokens=2, session_id="s.2"))
        error = await refusal(system, request(3, session_id="s", max_tokens=200))
        assert error.reason == types_pb2.ERROR_REASON_SESSION_EXISTS
        core = system.orchestrator.core
        await eventually(lambda: core.sessions == 0)
        await eventually(lambda: len(engine.open_tokens) == 0)


async def test_limits() -> None:
    async with start_system(synthetic(), max_sessions=4) as system:
        assert "n is 17, must be in [0, 16]" in (await refusal(system, request(17))).message
        assert "n is 5000000" in (await refusal(system, request(5_000_000))).message
        assert "limit 120" in (await refusal(system, request(2, session_id="x" * 121))).message
        assert (await refusal(system, request(5))).reason == types_pb2.ERROR_REASON_QUEUE_FULL
        assert len(await system.orchestrator.choices(request(4, session_id="x" * 120))) == 4
        assert (await system.generate(request(1, session_id="y" * 128))).ids
