"""Gauges say which pool is short, and nothing of what is gone (FAILURES J9); requests and the store are timed."""

import asyncio

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from orchestrator.metrics import Metrics
from orchestrator.store import open_store
from orchestrator.store.base import StoreUnavailable
from outrider.observe.metrics import WorkerMetrics
from outrider.v1.orchestrator_pb2 import ResumeRequest
from tests.harness.engines import ScriptedEngine, next_token_script
from tests.harness.meters import Meters
from tests.harness.orchestrator import DEADLINE, RunningOrchestrator, ask, start_orchestrator
from tests.harness.scrape import Scrape
from tests.harness.system import start_system, synthetic
from tests.harness.workers import eventually, start_target, verify_item


def histograms(orchestrator: RunningOrchestrator) -> Scrape:
    registry = CollectorRegistry()
    registry.register(orchestrator.core.services.metrics.instruments)
    return Scrape(generate_latest(registry).decode())


async def test_j9_queues_rise_over_capacity_and_go_back_to_nothing() -> None:
    meters, model = Meters(), ScriptedEngine(next_token_script(16))
    async with start_target(model, metrics=WorkerMetrics("target", meters.provider), token_budget=8) as target:
        settings = {"max_sessions": 2, "queue_timeout": 60.0, "metrics": Metrics(meters.provider)}
        async with start_orchestrator([target.address], **settings) as orchestrator:  # type: ignore[arg-type]
            model.hold()
            running = [asyncio.create_task(orchestrator.generate(ask(max_tokens=4))) for _ in range(6)]
            expected = {
                "outrider.running_sessions": 2,
                "outrider.waiting_requests": 4,
                "outrider.verify_in_flight": 2,
                "outrider.target.queue": 2,
            }
            await eventually(lambda: {name: meters.count(name) for name in expected} == expected)
            assert meters.count("outrider.running_tokens") == 2 * (3 + 4)
            assert meters.count("outrider.target.token_budget") == 8
            model.let_go()
            await asyncio.gather(*running)
            nothing = dict.fromkeys([*expected, "outrider.verify_queue", "outrider.running_tokens"], 0)
            await eventually(lambda: {name: meters.count(name) for name in nothing} == nothing)
            await eventually(lambda: meters.count("outrider.target.sessions") == 0)


async def test_a_stuck_engine_is_seen() -> None:
    meters, model = Meters(), ScriptedEngine(next_token_script(16))
    metrics = WorkerMetrics("target", meters.provider)

    def state(name: str) -> int:
        return meters.count("outrider.target.state", state=name)

    async with start_target(model, metrics=metrics, stall_timeout=0.05, load=False) as target:
        assert (state("loading"), state("serving")) == (1, 0)
        await target.service.host.load()
        assert (state("loading"), state("serving"), meters.count("outrider.target.state")) == (0, 1, 1)
        model.hold()
        call = target.call(verify_item("one", [1, 2]))
        await eventually(lambda: state("stuck"))
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        model.let_go()
        await eventually(lambda: state("serving"))


async def test_j9_a_worker_that_failed_or_went_is_counted_as_that() -> None:
    model = synthetic()
    async with start_system(model, model) as system:

        def drafts(state: str) -> int:
            return system.meters.count("outrider.workers", pool="draft", state=state)

        await system.generate(ask(lookahead=3))
        assert (drafts("ready"), drafts("failing"), drafts("unavailable")) == (1, 0, 0)
        (link,) = system.orchestrator.core.drafts.links
        while link.breaker.closed:
            link.breaker.failure()
        assert (drafts("ready"), drafts("failing")) == (0, 1)
        assert system.draft is not None
        await system.draft.service.host.stop()
        await eventually(lambda: drafts("unavailable") == 1)
        assert (drafts("ready"), drafts("failing")) == (0, 0)
        assert system.meters.count("outrider.awaited_blocks") == 0
        assert system.meters.count("outrider.workers") == 2


async def test_requests_are_timed_with_the_reason_of_their_end() -> None:
    async with start_system(synthetic()) as system:
        await system.generate(ask(max_tokens=5))
        await system.generate(ask(max_tokens=1))
        with pytest.raises(grpc.aio.AioRpcError):
            await system.generate(ask(prompt=[]))
        seen = histograms(system.orchestrator)
    seen.check_numbers()
    duration = "gen_ai_server_request_duration_seconds_count"
    assert seen.sum(duration, gen_ai_operation_name="text_completion") == 3
    assert seen.sum(duration, error_type="") == 2
    assert seen.sum(duration, error_type="INVALID_FIELD") == 1
    assert seen.sum("gen_ai_server_time_to_first_token_seconds_count") == 2
    assert seen.sum("gen_ai_server_time_per_output_token_seconds_count") == 1
    tokens = [seen.sum("gen_ai_client_token_usage_sum", gen_ai_token_type=name) for name in ("input", "output")]
    assert tokens == [6, 6]


async def test_a_store_that_does_not_answer_is_an_error_and_one_that_refuses_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meters, store = Meters(), open_store("memory://", 60.0)
    async with start_target(synthetic()) as target:
        async with start_orchestrator([target.address], store=store, metrics=Metrics(meters.provider)) as orchestrator:
            assert await orchestrator.core.store.load("nobody") is None
            with pytest.raises(grpc.aio.AioRpcError):
                await orchestrator.stub.Resume(ResumeRequest(session_id="nobody"), timeout=DEADLINE).read()
            assert meters.count("outrider.store.errors") == 0

            async def unavailable(*_: object, **__: object) -> None:
                raise StoreUnavailable("gone")

            monkeypatch.setattr(store, "commit", unavailable)
            with pytest.raises(grpc.aio.AioRpcError):
                await orchestrator.generate(ask(max_tokens=3))
            assert (
                meters.count("outrider.store.errors", operation="commit") == meters.count("outrider.store.errors") == 1
            )
            seen = histograms(orchestrator)
    assert seen.sum("outrider_store_duration_seconds_count", operation="load") == 2
    assert seen.sum("outrider_store_duration_seconds_count", operation="commit") == 1
    assert seen.sum("gen_ai_server_request_duration_seconds_count", error_type="STORE_UNAVAILABLE") == 1
