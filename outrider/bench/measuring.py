"""A whole measurement: from a job to a report."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime

import grpc

from outrider.bench.environment import machine, peak_memory
from outrider.bench.job import Job
from outrider.bench.openai import endpoint
from outrider.bench.report import CellReport, NotMeasured, Report, Served, Settings
from outrider.bench.runner import Cell, Declined, OnRun, cells_of, measure
from outrider.bench.sample import Way
from outrider.bench.services import ASSISTED, LOOP, PLAIN, SPECULATIVE, Drafted, Services
from outrider.bench.summary import summarised
from outrider.cli.run import Failure
from outrider.cli.startup import StartupView
from outrider.cli.system import fair_threads, running_system
from outrider.net.channel import connect
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

_INFO_SECONDS = 10.0

OnBegin = Callable[[int], None]


async def run_job(job: Job, view: StartupView, on_begin: OnBegin, on_run: OnRun) -> Report:
    """Starts what is needed, measures, and ends everything that it started.

    Args:
        on_begin: called with the number of runs before the first one.
        on_run: called before each run.

    Raises Failure, ProcessDied, NotReady, grpc.aio.AioRpcError.
    """
    before = machine()
    async with AsyncExitStack() as stack:
        system = await stack.enter_async_context(running_system(job.system, view)) if job.system else None
        channel = await stack.enter_async_context(connect(system.address if system else job.address))
        info = system.info if system else await _info(channel)
        ours = _our_ways(job, channel, info)
        ways: list[Way] = [*ours, *await _compared(job, ours[0], stack)]
        groups, declined = cells_of(ways, job.plan)
        on_begin(sum(map(len, groups)) * (1 + job.plan.repeats))
        work = measure(groups, job.plan, on_run)
        await (system.supervisor.guard(work) if system else work)
        memory = peak_memory(system.supervisor) if system else []
    return Report(
        created=datetime.now(UTC),
        machine=before,
        served=_served(job, info),
        settings=_settings(job),
        cells=[cell for group in groups for cell in _summarised(group, ours[0], repeatable=job.asked.repeatable)],
        not_measured=[_not_measured(each) for each in declined],
        memory=memory,
    )


async def _info(channel: grpc.aio.Channel) -> pb.OrchestratorServiceGetInfoResponse:
    request = pb.OrchestratorServiceGetInfoRequest()
    return await OrchestratorServiceStub(channel).GetInfo(request, timeout=_INFO_SECONDS)


def _our_ways(job: Job, channel: grpc.aio.Channel, info: pb.OrchestratorServiceGetInfoResponse) -> list[Services]:
    """Speculative, then plain. Raises Failure when there is nothing to speculate with."""
    drafts = [worker for worker in info.workers if worker.kind == "draft"]
    if not any(worker.usable for worker in drafts):
        reasons = "; ".join(worker.reason for worker in drafts) or "the orchestrator has none"
        raise Failure(f"no draft worker is in use: {reasons}")
    default = info.default_lookahead if info.HasField("default_lookahead") else None
    lookahead = default if job.lookahead is None else job.lookahead
    if lookahead == 0:
        raise Failure("lookahead 0 is plain decoding, which is measured anyway: give --lookahead")
    speculative = Services(
        SPECULATIVE, channel, job.asked, Drafted(lookahead, job.proposer), job.drafted, job.acceptance, job.seconds
    )
    return [speculative, replace(speculative, name=PLAIN, drafted=Drafted(0), by_set={})]


async def _compared(job: Job, ours: Services, stack: AsyncExitStack) -> list[Way]:
    """The ways beside our own, ready to answer."""
    ways = await _in_process(job, ours, stack) if job.compared.loop or job.compared.transformers else []
    for url in job.compared.endpoints:
        opened = endpoint(url, job.compared.openai_model, job.compared.openai_key, job.asked, job.seconds)
        ways.append(await stack.enter_async_context(opened))
    return ways


async def _in_process(job: Job, ours: Services, stack: AsyncExitStack) -> list[Way]:
    """Those that run the models here."""
    # Only here: measuring a running system needs no torch, which takes seconds to come.
    from outrider.bench.generate import Generate
    from outrider.bench.loop import Loop
    from outrider.bench.pair import ModelThread, Pair

    system = job.system
    assert system is not None
    pair = Pair(
        target=system.target,
        draft=system.draft,
        early_exit_layers=system.early_exit_layers,
        early_exit=system.early_exit,
        dtype=system.dtype,
        device=system.device,
        threads=system.target_threads or fair_threads(),
        context_length=system.context_length,
    )
    thread = ModelThread()
    stack.callback(thread.close)
    ways: list[Way] = [await Loop.load(pair, thread, ours, job.plan.sets)] if job.compared.loop else []
    if job.compared.transformers:
        ways += await Generate.load(pair, thread, ours, job.plan.sets)
    return ways


def _summarised(group: Sequence[Cell], ours: Services, *, repeatable: bool) -> list[CellReport]:
    """How blocks are made is known of our own way and of those that follow it."""
    drafted = ours.blocks_for(group[0].prompts)
    ways = {SPECULATIVE: drafted, LOOP: drafted.chosen(), ASSISTED: drafted.chosen()}
    return summarised(group, ways, repeatable=repeatable)


def _served(job: Job, info: pb.OrchestratorServiceGetInfoResponse) -> Served:
    started = job.system
    return Served(
        outrider=info.version,
        address="" if started else job.address,
        target=info.target.model_id,
        drafts=[worker.model_id for worker in info.workers if worker.kind == "draft" and worker.usable],
        dtype=info.target.dtype,
        target_threads=(started.target_threads or fair_threads()) if started else None,
        draft_threads=(started.draft_threads or fair_threads()) if started else None,
    )


def _settings(job: Job) -> Settings:
    rule = "" if job.acceptance is None else pb.Acceptance.Name(job.acceptance).removeprefix("ACCEPTANCE_").lower()
    return Settings(
        max_tokens=job.asked.max_tokens,
        ignore_eos=job.asked.ignore_eos,
        temperature=job.asked.temperature,
        seed=job.asked.seed,
        acceptance=rule,
        repeats=job.plan.repeats,
        concurrencies=list(job.plan.concurrencies),
        prompts={each.name: len(each.prompts) for each in job.plan.sets},
    )


def _not_measured(declined: Declined) -> NotMeasured:
    prompts, concurrency, way, reason = declined
    return NotMeasured(prompt_set=prompts.name, concurrency=concurrency, way=way.name, reason=reason)
