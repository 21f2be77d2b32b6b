"""Tokens at the public edge, and sessions that are their tenant's alone."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from orchestrator.names import owned
from outrider.client import AsyncClient, Client
from outrider.client.access import Access
from outrider.net.errors import from_rpc_error
from outrider.net.tokens import bearer, new_token
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.harness.faults import KeptStore, greedy_output, refused, target_engine
from tests.harness.orchestrator import Generation, RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import DEADLINE, eventually, health_of, start_target

PROMPT = (0, 1, 2)
LONG = 100_000
TOKENS = {name: new_token(name) for name in ("acme", "bell")}


@dataclass
class Edge:
    """An orchestrator that asks for tokens, as tenants see it."""

    orchestrator: RunningOrchestrator
    keys: Path

    @property
    def stub(self) -> OrchestratorServiceStub:
        return self.orchestrator.stub

    def client(self, name: str) -> AsyncClient:
        return AsyncClient(self.orchestrator.address, token=TOKENS[name][0])

    async def generate(self, name: str, request: pb.GenerateRequest) -> Generation:
        generation = Generation()
        async for response in self.stub.Generate(request, timeout=DEADLINE, metadata=bearer(TOKENS[name][0])):
            generation.add(response)
        return generation


@asynccontextmanager
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{line}\n" for _, line in TOKENS.values()))
    async with start_target(target_engine()) as target:
        async with start_orchestrator([target.address], keys_file=str(keys), store=KeptStore(60)) as orchestrator:
            yield Edge(orchestrator, keys)


CALLS = {
    "Generate": ask(PROMPT),
    "Resume": pb.ResumeRequest(session_id="s"),
    "GetSession": pb.GetSessionRequest(session_id="s"),
    "CancelSession": pb.CancelSessionRequest(session_id="s"),
    "GetInfo": pb.OrchestratorServiceGetInfoRequest(),
}
SECRET = TOKENS["acme"][0]
BAD: dict[str, Sequence[tuple[str, str]]] = {
    "none": (),
    "wrong": bearer(SECRET[:-1]),
    "of another scheme": (("authorization", f"Basic {SECRET}"),),
    "bare": (("authorization", SECRET),),
    "its hash": bearer(TOKENS["acme"][1].partition(":")[2]),
    "two": (*bearer(SECRET), *bearer(SECRET)),
}


async def call(stub: OrchestratorServiceStub, name: str, metadata: Sequence[tuple[str, str]]) -> None:
    answer = getattr(stub, name)(CALLS[name], timeout=DEADLINE, metadata=metadata)
    if name in ("Generate", "Resume"):
        async for _ in answer:
            pass
    else:
        await answer


async def test_every_call_needs_a_token_and_is_told_no_more(tmp_path: Path) -> None:
    async with edge(tmp_path) as one:
        for name in CALLS:
            for bad in BAD.values():
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await call(one.stub, name, bad)
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert refusal.value.details() == "a valid token is required"
                assert from_rpc_error(refusal.value) is None
        assert one.orchestrator.core.targets.links[0].sessions == 0


async def test_reflection_needs_a_token_and_health_does_not(tmp_path: Path) -> None:
    async with edge(tmp_path) as one:
        assert await health_of(one.orchestrator.channel) == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(one.orchestrator.channel)
        requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            async for _ in reflection.ServerReflectionInfo(iter(requests), timeout=DEADLINE):
                pass
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = bearer(SECRET)
        async for answer in reflection.ServerReflectionInfo(iter(requests), timeout=DEADLINE, metadata=metadata):
            assert answer.list_services_response.service


async def test_a_revoked_token_is_refused_from_the_next_call_on(tmp_path: Path) -> None:
    async with edge(tmp_path) as one:
        assert (await one.generate("acme", ask(PROMPT, max_tokens=3))).finish.usage.completion_tokens == 3
        one.keys.write_text(TOKENS["bell"][1])
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await one.generate("acme", ask(PROMPT))
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await one.generate("bell", ask(PROMPT, max_tokens=3))).finish.usage.completion_tokens == 3


async def test_a_session_does_not_exist_for_another_tenant(tmp_path: Path) -> None:
    acme, bell = bearer(TOKENS["acme"][0]), bearer(TOKENS["bell"][0])
    async with edge(tmp_path) as one:
        stub = one.stub
        running = stub.Generate(
            ask(PROMPT, max_tokens=LONG, temperature=0, session_id="theirs"), timeout=DEADLINE, metadata=acme
        )
        started = await running.read()
        assert started.started.session_id == "theirs"
        said = {}
        for session_id in ("theirs", "absent"):
            get, cancel = pb.GetSessionRequest(session_id=session_id), pb.CancelSessionRequest(session_id=session_id)
            resume = stub.Resume(pb.ResumeRequest(session_id=session_id), timeout=DEADLINE, metadata=bell)
            calls = (
                stub.GetSession(get, timeout=DEADLINE, metadata=bell),
                stub.CancelSession(cancel, timeout=DEADLINE, metadata=bell),
                resume.read(),
            )
            errors = [await refused(one_call, "SESSION_NOT_FOUND") for one_call in calls]
            said[session_id] = [error.message.replace(session_id, "?") for error in errors]
        assert said["theirs"] == said["absent"], "whether another has it cannot be told from the words"
        # The name is free for the other tenant, who gets a session of its own.
        generation = await one.generate("bell", ask(PROMPT, max_tokens=5, temperature=0, session_id="theirs"))
        assert (generation.started.session_id, generation.ids) == ("theirs", greedy_output(PROMPT, 5))
        get = pb.GetSessionRequest(session_id="theirs")
        theirs = await stub.GetSession(get, timeout=DEADLINE, metadata=bell)
        ours = await stub.GetSession(get, timeout=DEADLINE, metadata=acme)
        assert (theirs.session_id, theirs.state) == ("theirs", pb.SESSION_STATE_FINISHED)
        assert (ours.session_id, ours.state) == ("theirs", pb.SESSION_STATE_RUNNING)
        running.cancel()


async def test_the_same_request_of_two_tenants_shares_nothing_at_a_target(tmp_path: Path) -> None:
    async with edge(tmp_path) as one:
        request = ask(PROMPT, max_tokens=50, seed=5, session_id="s")
        request.resumable = True
        for name in ("acme", "bell", "acme"):
            generation = await one.generate(name, request)
            assert len(generation.ids) == 50
        store = one.orchestrator.core.store
        records = [await store.load(owned("s", name)) for name in ("acme", "bell")]
        metas = {record.meta for record in records if record is not None}
        assert len(metas) == 2


async def test_both_clients_send_their_token_and_say_when_it_is_refused(tmp_path: Path) -> None:
    async with edge(tmp_path) as one:
        async with one.client("acme") as client:
            stream = client.generate(token_ids=PROMPT, max_tokens=LONG, temperature=0)
            async for token in stream:
                assert token.id == greedy_output(PROMPT, 1)[0]
                break
            await stream.aclose()
            # Cancelling carried the token too.
            await eventually(lambda: not len(one.orchestrator.servicer.running))
            record = await one.orchestrator.core.store.load(owned(stream.session_id, "acme"))
            assert record is not None
            assert record.finish_reason == pb.FINISH_REASON_CANCELLED
        async with AsyncClient(one.orchestrator.address, token="wrong") as client:
            with pytest.raises(PermissionError, match="a valid token is required") as refusal:
                await client.generate(token_ids=PROMPT).text()
            assert "wrong" not in str(refusal.value)


@pytest.mark.parametrize("make", [AsyncClient, Client, Access])
def test_a_token_does_not_leave_the_machine_in_plain_text(make: type) -> None:
    with pytest.raises(ValueError, match=r"the token would travel to 10\.0\.0\.1:7800 in plain text"):
        make("127.0.0.1:7800,10.0.0.1:7800", token="t")
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "127.8.9.1:1"):
        make(address, token="t")
    make("10.0.0.1:7800", token="t", plain_token=True)
    make("10.0.0.1:7800")
