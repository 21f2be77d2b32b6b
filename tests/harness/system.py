"""All three services in the test's event loop, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from orchestrator.metrics import Metrics
from outrider.lm.engine import Engine
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.v1.orchestrator_pb2 import GenerateRequest
from tests.harness.meters import Meters
from tests.harness.orchestrator import Generation, RunningOrchestrator, start_orchestrator
from tests.harness.workers import RunningDraft, RunningTarget, start_draft, start_target


@dataclass
class RunningSystem:
    """One target, at most one draft, one orchestrator."""

    target: RunningTarget
    draft: RunningDraft | None
    orchestrator: RunningOrchestrator
    meters: Meters

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self.orchestrator.generate(request)

    async def generate_all(self, requests: Iterable[GenerateRequest], concurrency: int = 64) -> list[Generation]:
        """The generations of the requests, in their order, so many at a time."""
        room = asyncio.Semaphore(concurrency)

        async def one(request: GenerateRequest) -> Generation:
            async with room:
                return await self.generate(request)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
        return [task.result() for task in tasks]


def synthetic(**settings: object) -> SyntheticEngine:
    """A synthetic engine with 16 tokens and seed 3 unless told otherwise."""
    return SyntheticEngine(SyntheticSpec(**{"vocab_size": 16, "seed": 3, **settings}))  # type: ignore[arg-type]


@asynccontextmanager
async def start_system(
    target: Engine,
    draft: Engine | None = None,
    *,
    tokenizer: str = "",
    proposers: str = "model",
    ahead_blocks: int = 2,
    draft_settings: Mapping[str, object] | None = None,
    translation: str = "auto",
    **settings: object,
) -> AsyncIterator[RunningSystem]:
    """Starts the services and waits until they are linked.

    Args:
        draft: the draft's model; none without a draft service.
        proposers, ahead_blocks, draft_settings, translation: of the draft worker.
        tokenizer: MODEL of the tokenizer; by default the synthetic one of the target's size.
        settings: fields of OrchestratorConfig.
    """
    tokenizer = tokenizer or f"synthetic:vocab_size={target.info.vocab_size}"
    meters = Meters()
    async with AsyncExitStack() as stack:
        running_target = await stack.enter_async_context(start_target(target))
        running_draft = None
        if draft is not None:
            running_draft = await stack.enter_async_context(
                start_draft(
                    draft,
                    proposers=proposers,
                    ahead_blocks=ahead_blocks,
                    translation=translation,
                    **(draft_settings or {}),
                )
            )
        running = await stack.enter_async_context(
            start_orchestrator(
                [running_target.address],
                [running_draft.address] if running_draft else [],
                tokenizer=tokenizer,
                metrics=Metrics(meters.provider),
                **settings,
            )
        )
        yield RunningSystem(running_target, running_draft, running, meters)


def forget_sessions(running: RunningSystem) -> None:
    """The draft worker loses all of them, as by an eviction: in its engine thread, while nothing is in the making."""
    assert running.draft is not None
    scheduler: Any = running.draft.service._scheduler
    handle = scheduler.handle

    def forgetful(commands: list[object]) -> object:
        if not scheduler.busy:
            scheduler.handle = handle
            for proposer in scheduler._proposers.values():
                for session in list(proposer.cache):
                    proposer.cache.drop(session)
                    scheduler._evicted(session.key)
        return handle(commands)

    scheduler.handle = forgetful
