"""G6, J1: pools of several targets and drafts, whose members come, go, fail and fill up under load."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from orchestrator import discovery
from orchestrator.links.base import Link
from outrider.net.arrays import to_bytes
from outrider.net.errors import OutriderError, to_status
from outrider.v1 import target_pb2
from outrider.v1.orchestrator_pb2 import OrchestratorServiceGetInfoRequest, WorkerStatus
from outrider.v1.target_pb2 import VerifyItem, VerifyRequest, VerifyResponse, VerifyResult
from tests.harness.engines import DEADLINE
from tests.harness.faults import (
    Client,
    FakeTarget,
    draft_engine,
    fake_target,
    greedy_output,
    refused,
    target_engine,
)
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import error_of, eventually, int32, reason, start_draft, start_target, verify_item

PROMPT = (0, 1, 2)
LONG = 100_000


class Names:
    """A resolver whose answers the test sets, by name."""

    def __init__(self, **answers: Sequence[str]) -> None:
        self.answers: dict[str, Sequence[str]] = dict(answers)

    async def __call__(self, name: str, port: int) -> Sequence[str]:
        if name not in self.answers:
            raise OSError("the resolver is ill")
        return self.answers[name]


@pytest.fixture(autouse=True)
def quick_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOKUP_SECONDS", 0.02)


async def workers_of(orchestrator: RunningOrchestrator) -> list[WorkerStatus]:
    answer = await orchestrator.stub.GetInfo(OrchestratorServiceGetInfoRequest(), timeout=DEADLINE)
    return list(answer.workers)


def bound(links: Sequence[Link]) -> dict[str, int]:
    return {link.address: link.sessions for link in links}


async def streaming(orchestrator: RunningOrchestrator, count: int, tokens: int = LONG) -> list[Client]:
    """Clients in the middle of their streams; those at the same index have the same prompt."""
    clients = [
        Client(orchestrator, ask((index, 5), max_tokens=tokens, temperature=0), timeout=300) for index in range(count)
    ]
    for client in clients:
        await client.until_tokens(5)
    return clients


async def read_on(clients: Sequence[Client], tokens: int = 30) -> None:
    """Each stream gives more, and what it gave is the target's own output."""
    for index, client in enumerate(clients):
        generation = await client.until_tokens(len(client.generation.ids) + tokens)
        assert generation.ids == greedy_output((index, 5), len(generation.ids))


async def test_j1_three_targets_and_three_drafts_that_join_and_leave_under_load() -> None:
    async with AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(start_target(target_engine())) for _ in range(3)]
        drafts = [await stack.enter_async_context(start_draft(draft_engine())) for _ in range(3)]
        names = Names(targets=[targets[0].address], drafts=[drafts[0].address])
        orchestrator = await stack.enter_async_context(
            start_orchestrator(
                ["dns:targets:1"], ["dns:drafts:1"], resolve=names, expect=(1, 1), draft_timeout=DEADLINE
            )
        )
        core = orchestrator.core
        clients = await streaming(orchestrator, 3)
        names.answers["targets"] = [one.address for one in targets]
        names.answers["drafts"] = [one.address for one in drafts]
        await orchestrator.until_linked(3, 3)
        clients += await streaming(orchestrator, 9)
        # Nobody was moved: three are where they began, the others went where the fewest were.
        assert list(bound(core.targets.links).values()) == [4, 4, 4]
        assert list(bound(core.drafts.links).values()) == [4, 4, 4]
        for one in await workers_of(orchestrator):
            assert (one.usable, one.reason, one.sessions) == (True, "", 4)
        assert len({one.instance_id for one in await workers_of(orchestrator)}) == 6
        names.answers["targets"] = [one.address for one in targets[1:]]
        names.answers["drafts"] = [one.address for one in drafts[1:]]
        await eventually(lambda: len(core.targets.links) == len(core.drafts.links) == 2)
        await read_on(clients[:3])
        await read_on(clients[3:])
        # The others went to the two that are left, and the one that was left, alive, holds nothing any more.
        await eventually(lambda: sorted(bound(core.targets.links).values()) == [6, 6])
        await eventually(lambda: sorted(bound(core.drafts.links).values()) == [6, 6])
        await eventually(lambda: not targets[0].service.load().open_sessions)
        await drafts[0].until_sessions(0)
        for client in clients:
            client.cancel()
        await eventually(lambda: not any(bound(core.targets.links).values()))
        await eventually(lambda: not any(bound(core.drafts.links).values()))


async def test_j1_sessions_move_to_a_draft_that_joins_and_their_outputs_stay() -> None:
    async with (
        start_target(target_engine()) as target,
        start_draft(draft_engine()) as first,
        start_draft(draft_engine()) as second,
    ):
        names = Names(drafts=[first.address])
        async with start_orchestrator([target.address], ["dns:drafts:1"], resolve=names, expect=(1, 1)) as orchestrator:
            clients = await streaming(orchestrator, 8)
            names.answers["drafts"] = sorted([first.address, second.address])
            # Once neither has more than twice the other's and three, nobody moves any more.
            await eventually(lambda: sorted(bound(orchestrator.core.drafts.links).values()) == [2, 6])
            await read_on(clients)
            assert sorted(bound(orchestrator.core.drafts.links).values()) == [2, 6]
            assert any(one.drafted for one in clients[0].generation.rounds[-3:])
            for client in clients:
                client.cancel()


async def test_a_draft_that_failed_is_tried_by_one_session_while_others_do_the_work() -> None:
    stuck = draft_engine()
    async with (
        start_target(target_engine()) as target,
        start_draft(stuck) as first,
        start_draft(draft_engine()) as second,
        start_orchestrator([target.address], [first.address, second.address], draft_timeout=0.2) as orchestrator,
    ):
        links = orchestrator.core.drafts.links
        (client,) = await streaming(orchestrator, 1)
        assert [link.sessions for link in links] == [1, 0]
        stuck.hold()
        await eventually(lambda: not links[0].breaker.closed)
        assert not (await workers_of(orchestrator))[1].usable
        stuck.let_go()
        await eventually(lambda: links[0].breaker.closed)
        await client.until_round(lambda one: one.drafted > 0)
        await read_on([client])
        client.cancel()


async def test_a_resolver_that_fails_drops_no_worker_and_is_shown() -> None:
    async with start_target(target_engine()) as target:
        names = Names(targets=[target.address])
        async with start_orchestrator(
            ["dns:targets:1"], ["dns:nobody:2"], resolve=names, expect=(1, 0)
        ) as orchestrator:
            (client,) = await streaming(orchestrator, 1)
            del names.answers["targets"]
            await eventually(lambda: orchestrator.core.targets.problems)
            await read_on([client])
            worker, name, draft_name = await workers_of(orchestrator)
            assert (worker.address, worker.usable, worker.sessions) == (target.address, True, 1)
            assert (name.kind, name.address, name.usable) == ("target", "dns:targets:1", False)
            assert "the resolver is ill; the 1 addresses found before stay" in name.reason
            assert (draft_name.kind, draft_name.address) == ("draft", "dns:nobody:2")
            client.cancel()


async def test_without_any_member_the_refusal_names_the_lookup() -> None:
    async with start_orchestrator(["dns:nobody:1"], resolve=Names(), expect=(0, 0)) as orchestrator:
        error = await refused(orchestrator.generate(ask(PROMPT)), "NO_WORKER", grpc.StatusCode.UNAVAILABLE)
        assert "dns:nobody:1: the lookup failed: the resolver is ill" in error.message


async def test_the_systems_resolver_finds_a_worker() -> None:
    async with start_target(target_engine()) as target:
        port = target.address.rpartition(":")[2]
        async with start_orchestrator([f"dns:localhost:{port}"], expect=(1, 0)) as orchestrator:
            assert (await orchestrator.generate(ask(PROMPT, temperature=0))).ids == greedy_output(PROMPT, 20)


async def test_one_worker_behind_two_addresses_counts_once_and_either_will_do() -> None:
    async with start_target(target_engine()) as target, start_draft(draft_engine()) as draft:
        both = [(one.address, one.address.replace("127.0.0.1", "localhost")) for one in (target, draft)]
        names = Names(t1=[both[0][0]], t2=[both[0][1]], d1=[both[1][0]], d2=[both[1][1]])
        async with start_orchestrator(
            ["dns:t1:1", "dns:t2:1"], ["dns:d1:1", "dns:d2:1"], resolve=names, expect=(1, 1)
        ) as orchestrator:
            core = orchestrator.core
            for pool in (core.targets, core.drafts):
                await eventually(lambda pool=pool: any("the same worker as" in link.reason for link in pool.links))
                assert len(pool.usable) == 1
            used = core.targets.usable[0].address
            (client,) = await streaming(orchestrator, 1)
            names.answers["t1" if used == both[0][0] else "t2"] = [both[0][1] if used == both[0][0] else both[0][0]]
            await eventually(lambda: len(core.targets.links) == 1 and core.targets.usable)
            assert core.targets.usable[0].address != used
            await read_on([client])
            client.cancel()


async def test_a_prompt_goes_to_the_target_that_read_its_beginning() -> None:
    beginning = [index % 16 for index in range(100)]
    async with start_target(target_engine()) as first, start_target(target_engine()) as second:
        async with start_orchestrator([first.address, second.address]) as orchestrator:
            links = orchestrator.core.targets.links
            (other,) = await streaming(orchestrator, 1)
            assert [link.sessions for link in links] == [1, 0]
            await orchestrator.generate(ask([*beginning, 1], temperature=0))
            other.cancel()
            await eventually(lambda: not links[0].sessions)
            busy = Client(orchestrator, ask([*beginning, 2], max_tokens=LONG, temperature=0), timeout=300)
            again = Client(orchestrator, ask([*beginning, 3], max_tokens=LONG, temperature=0), timeout=300)
            for client in (busy, again):
                await client.until_tokens(3)
            # Both went to the second, where the beginning is, although the first had fewer sessions.
            assert [link.sessions for link in links] == [0, 2]
            for client in (busy, again):
                client.cancel()


def failing(name: str) -> Any:
    status = to_status(OutriderError(reason(name), "because"))

    def answer(request: VerifyRequest) -> VerifyResponse:
        return VerifyResponse(
            results=[
                VerifyResult(session_id=item.session_id, base_length=item.base_length, status=status)
                for item in request.items
            ]
        )

    return answer


def sampling(request: VerifyRequest) -> VerifyResponse:
    """Token 0 everywhere: of use for trials alone."""

    def one(item: VerifyItem) -> VerifyResult:
        sample = target_pb2.SampleRows(tokens=to_bytes(int32([0] * (1 + len(item.draft_tokens) // 4))))
        return VerifyResult(session_id=item.session_id, base_length=item.base_length, sample=sample)

    return VerifyResponse(results=[one(item) for item in request.items])


async def test_a_full_target_is_left_for_another_at_once() -> None:
    async with fake_target(failing("QUEUE_FULL")) as full, start_target(target_engine()) as other:
        async with start_orchestrator([full.address, other.address], failover_timeout=0.01) as orchestrator:
            generation = await orchestrator.generate(ask(PROMPT, temperature=0))
            assert generation.ids == greedy_output(PROMPT, 20)
            assert len(full.calls) == 1
            assert all(link.breaker.closed for link in orchestrator.core.targets.links)


async def test_a_target_that_was_left_alive_is_told() -> None:
    async with start_target(target_engine()) as first, start_target(target_engine()) as second:
        async with start_orchestrator([first.address, second.address]) as orchestrator:
            (client,) = await streaming(orchestrator, 1)
            # As if it had begun to drain.
            orchestrator.core.targets.links[0].usable = False
            await read_on([client])
            assert [link.sessions for link in orchestrator.core.targets.links] == [0, 1]
            await eventually(lambda: not first.service.load().open_sessions)
            assert second.service.load().open_sessions == 1
            client.cancel()


async def test_g6_a_target_that_keeps_failing_is_not_asked_until_a_trial_goes_well() -> None:
    async with (
        fake_target(failing("ENGINE_FAILED")) as bad,
        start_target(target_engine()) as good,
        start_target(target_engine()) as other,
    ):
        async with start_orchestrator([bad.address, good.address, other.address]) as orchestrator:
            link = orchestrator.core.targets.links[0]
            for index in range(8):
                generation = await orchestrator.generate(ask((index, 1), temperature=0))
                assert generation.ids == greedy_output((index, 1), 20)
            sessions = [one for one in bad.calls if not one.items[0].session_id.startswith("trial-")]
            assert len(sessions) == 3, "three failures in a row, and no session has to try again"
            worker = (await workers_of(orchestrator))[0]
            assert not worker.usable
            assert "last calls failed" in worker.reason
            bad.answer = sampling
            await eventually(lambda: link.breaker.closed)
            assert (await workers_of(orchestrator))[0].usable
            assert bad.calls[-1].items[0].session_id.startswith("trial-")


class StalledTarget(FakeTarget):
    """Takes calls and never answers."""

    async def Verify(self, request: VerifyRequest, context: Any) -> VerifyResponse:
        self.calls.append(request)
        await asyncio.Event().wait()
        raise AssertionError


async def test_g6_a_retry_excludes_the_target_that_stalled_and_begins_with_its_books_even(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        fake_target(sampling, StalledTarget) as stalled,
        start_target(target_engine()) as good,
        start_target(target_engine()) as other,
        # The time for fail-over counts from the first failure: a call may take longer than that.
        start_orchestrator(
            [stalled.address, good.address, other.address], verify_timeout=3, failover_timeout=2.9
        ) as orchestrator,
    ):
        targets = orchestrator.core.targets
        acquire, seen = targets.acquire, []

        async def watched(seconds: float, tokens: Any, tried: Any = ()) -> Any:
            if tried:
                seen.append((targets.links[0].sessions, tried == {targets.links[0]}))
            return await acquire(seconds, tokens, tried)

        monkeypatch.setattr(targets, "acquire", watched)
        generation = await orchestrator.generate(ask(PROMPT, temperature=0))
        assert generation.ids == greedy_output(PROMPT, 20)
        assert seen[0] == (0, True)
        assert len(stalled.calls) == 1


async def test_a_target_that_freezes_loses_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """G7 in small: probes go unanswered while the connection stands; tests/process freezes whole processes."""
    monkeypatch.setattr("orchestrator.links.base.PROBE_SECONDS", 0.05)
    async with fake_target(sampling, StalledTarget) as stalled, start_target(target_engine()) as good:
        async with start_orchestrator([stalled.address, good.address]) as orchestrator:
            link = orchestrator.core.targets.links[0]
            running = asyncio.create_task(orchestrator.generate(ask(PROMPT, temperature=0)))
            await eventually(lambda: stalled.calls)

            async def silent(seconds: float, *, include_token_hashes: bool = False) -> Any:
                raise _late()

            monkeypatch.setattr(link, "_get_info", silent)
            assert (await running).ids == greedy_output(PROMPT, 20)
            assert not link.usable
            assert not link.sessions


def _late() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing, "late")


async def test_two_owners_of_a_session_do_not_share_a_call() -> None:
    async with start_target(target_engine()) as target, start_orchestrator([target.address]) as orchestrator:
        (link,) = orchestrator.core.targets.links
        items = [verify_item("session", PROMPT, epoch=epoch) for epoch in (1, 2)]
        results = await asyncio.gather(*(link.verify(item) for item in items))
        assert [result.status.code for result in results] == [0, 0]
        # The one that is late is told by its epoch.
        late, other = await asyncio.gather(link.verify(items[0]), link.verify(verify_item("other", PROMPT)))
        assert error_of(late).reason == reason("STALE_EPOCH")
        assert other.status.code == 0


async def test_releases_at_a_link_that_is_closed_are_no_error() -> None:
    async with start_target(target_engine()) as target, start_orchestrator([target.address]) as orchestrator:
        (link,) = orchestrator.core.targets.links
        await link.close()
        await link.release("session", 1)
        link.left_by("session", 1)
        assert not target.service.load().open_sessions
