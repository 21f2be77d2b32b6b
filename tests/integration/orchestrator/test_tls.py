"""TLS between all services and at the public edge: who gets in, who does not, and renewal while streams run."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from orchestrator.links.base import describe
from outrider.client import AsyncClient, Client, ClientTls
from outrider.net.channel import connect
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tests.harness.certificates import CLIENT, DAY, SERVER, Authority, Mount
from tests.harness.faults import Client as Reader
from tests.harness.faults import draft_engine, greedy_output, target_engine
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import DEADLINE, eventually, start_draft, start_target

PROMPT = (0, 1, 2)
LONG = 100_000
HOST = "127.0.0.1"
CA, STRANGER = Authority(), Authority("Stranger")


async def seen(address: str, pem: bytes, pair: Path | None = None) -> bytes:
    """The certificate that a new connection gets."""
    context = ssl.create_default_context(cadata=pem.decode())
    context.set_alpn_protocols(["h2"])
    if pair is not None:
        context.load_cert_chain(pair / "tls.crt", pair / "tls.key")
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return ssl.DER_cert_to_PEM_cert(found).encode()


@asynccontextmanager
async def everything(mount: Mount, **settings: object) -> AsyncIterator[RunningOrchestrator]:
    """All services of one certificate, which each shows as a server and as a client."""
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(start_target(target_engine(), **mount.settings()))
        draft = await stack.enter_async_context(start_draft(draft_engine(), **mount.settings()))
        yield await stack.enter_async_context(
            start_orchestrator(
                [target.address],
                [draft.address],
                tls=mount.client(),
                **mount.settings(ca=False),
                **mount.settings("worker_tls"),
                **settings,
            )
        )


async def test_certificates_are_renewed_under_running_streams(tmp_path: Path) -> None:
    mount = Mount(tmp_path / "tls", CA.issue(HOST), CA.pem)
    async with everything(mount) as orchestrator:
        reader = Reader(orchestrator, ask(PROMPT, max_tokens=LONG, temperature=0), timeout=DEADLINE)
        await reader.until_round(lambda one: one.drafted > 0)
        new = CA.issue(HOST)
        mount.renew(new, CA.pem)
        links = (*orchestrator.core.targets.links, *orchestrator.core.drafts.links)
        addresses = [orchestrator.address, *(link.address for link in links)]
        assert [await seen(address, CA.pem, tmp_path / "tls") for address in addresses] == [new[0]] * 3
        count = len(reader.generation.ids)
        generation = await reader.until_tokens(count + 50)
        assert generation.ids == greedy_output(PROMPT, len(generation.ids))
        assert [link.incarnation for link in links] == [1, 1], "the connections of before go on"
        reader.cancel()


async def test_an_orchestrator_shows_its_renewed_certificate_when_it_connects_again(tmp_path: Path) -> None:
    worker = Mount(tmp_path / "worker", CA.issue(HOST), CA.pem)
    ours = Mount(tmp_path / "ours", CA.issue("orchestrator"), CA.pem)
    async with start_target(target_engine(), **worker.settings()) as target:
        async with start_orchestrator([target.address], **ours.settings("worker_tls")) as orchestrator:
            # The whole authority is exchanged; nothing of before is of use any more.
            worker.renew(STRANGER.issue(HOST), STRANGER.pem)
            ours.renew(STRANGER.issue("orchestrator"), STRANGER.pem)
            await target.host.server.grpc.stop(0)
            port = int(target.address.rpartition(":")[2])
            async with start_target(target_engine(), port=port, **worker.settings()):
                (link,) = orchestrator.core.targets.links
                await eventually(lambda: link.incarnation == 2)
                generation = await orchestrator.generate(ask(PROMPT, max_tokens=5, temperature=0))
                assert generation.ids == greedy_output(PROMPT, 5)


async def test_a_clients_next_generation_knows_the_renewed_authority(tmp_path: Path) -> None:
    server = Mount(tmp_path / "server", CA.issue(HOST), CA.pem)
    trust = Mount(tmp_path / "trust", CA.issue("client"), CA.pem)
    async with start_target(target_engine()) as target:
        edge = start_orchestrator([target.address], tls=server.client(), **server.settings())
        async with edge as orchestrator, AsyncClient(orchestrator.address, tls=trust.client()) as client:
            first = [token.id async for token in client.generate(token_ids=PROMPT, max_tokens=5, temperature=0)]
            server.renew(STRANGER.issue(HOST), STRANGER.pem)
            trust.renew(STRANGER.issue("client"), STRANGER.pem)
            # Had the client kept its channel, its connection of before would have served as well: it is closed.
            for channel in client._channels.values():
                await channel.close()
            again = [token.id async for token in client.generate(token_ids=PROMPT, max_tokens=5, temperature=0)]
            assert first == again == greedy_output(PROMPT, 5)


def only(**usages: object) -> Callable[[Path], ClientTls]:
    """A client whose certificate is issued so."""
    return lambda at: Mount(at / "client", CA.issue("client", **usages), CA.pem).client()  # type: ignore[arg-type]


REFUSED_CLIENTS: dict[str, Callable[[Path], ClientTls | None]] = {
    "plain text": lambda at: None,
    "no certificate": lambda at: Mount(at / "client", CA.issue("client"), CA.pem).client(pair=False),
    "a stranger's": lambda at: Mount(at / "client", STRANGER.issue("client"), CA.pem).client(),
    "expired": only(valid_for=-DAY),
    "a worker's own": only(usages=[SERVER]),
}


async def ask_info(kind: str, channel: grpc.aio.Channel) -> object:
    if kind == "target":
        return await target_pb2_grpc.TargetServiceStub(channel).GetInfo(
            target_pb2.TargetServiceGetInfoRequest(), timeout=DEADLINE
        )
    return await draft_pb2_grpc.DraftServiceStub(channel).GetInfo(
        draft_pb2.DraftServiceGetInfoRequest(), timeout=DEADLINE
    )


@pytest.mark.parametrize("kind", ["target", "draft"])
async def test_l6_workers_refuse_clients_without_a_certificate_that_counts(kind: str, tmp_path: Path) -> None:
    mount = Mount(tmp_path / "server", CA.issue(HOST, usages=[SERVER]), CA.pem)
    start = start_target(target_engine(), **mount.settings()) if kind == "target" else None
    async with start or start_draft(draft_engine(), **mount.settings()) as worker:  # type: ignore[union-attr]
        for name, make in REFUSED_CLIENTS.items():
            (tmp_path / name).mkdir()
            async with connect(worker.address, make(tmp_path / name)) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await ask_info(kind, channel)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "does it want TLS, or another client certificate?" in describe(refused.value), name
        async with connect(worker.address, only(usages=[CLIENT])(tmp_path)) as channel:
            assert await ask_info(kind, channel)


REFUSED_SERVERS: dict[str, tuple[Callable[[], tuple[bytes, bytes]], str, str]] = {
    "expired": (lambda: CA.issue(HOST, valid_for=-DAY), "", "certificate has expired"),
    "a stranger's": (lambda: STRANGER.issue(HOST), "", "unable to get local issuer certificate"),
    "for another host": (lambda: CA.issue("elsewhere"), "", "Hostname Verification Check failed"),
    "a draft's as the target's": (lambda: CA.issue("draft"), "target", "Hostname Verification Check failed"),
    "a client's": (lambda: CA.issue(HOST, usages=[CLIENT]), "", "unsupported certificate purpose"),
}


@pytest.mark.parametrize("name", REFUSED_SERVERS)
async def test_an_orchestrator_refuses_a_worker_and_says_why(name: str, tmp_path: Path) -> None:
    issue, wanted, words = REFUSED_SERVERS[name]
    mount = Mount(tmp_path / "server", issue(), CA.pem)
    ours = Mount(tmp_path / "ours", CA.issue("orchestrator"), CA.pem)
    async with start_target(target_engine(), **mount.settings()) as target:
        async with start_orchestrator(
            [target.address], expect=(0, 0), target_tls_name=wanted, **ours.settings("worker_tls")
        ) as orchestrator:
            (link,) = orchestrator.core.targets.links
            await eventually(lambda: words in link.reason)
            assert not link.usable


async def test_workers_that_are_found_by_address_are_known_by_name(tmp_path: Path) -> None:
    targets = Mount(tmp_path / "targets", CA.issue("target.outrider"), CA.pem)
    drafts = Mount(tmp_path / "drafts", CA.issue("draft.outrider"), CA.pem)
    ours = Mount(tmp_path / "ours", CA.issue("orchestrator"), CA.pem)
    async with (
        start_target(target_engine(), **targets.settings()) as target,
        start_draft(draft_engine(), **drafts.settings()) as draft,
        start_orchestrator(
            [target.address],
            [draft.address],
            target_tls_name="target.outrider",
            draft_tls_name="draft.outrider",
            **ours.settings("worker_tls"),
        ) as orchestrator,
    ):
        generation = await orchestrator.generate(ask(PROMPT, temperature=0))
        assert generation.ids == greedy_output(PROMPT, 20)
        assert generation.drafted > 0


async def test_a_client_that_cannot_trust_any_orchestrator_says_so_at_once(tmp_path: Path) -> None:
    server = Mount(tmp_path / "server", CA.issue(HOST), CA.pem)
    stranger = Mount(tmp_path / "stranger", STRANGER.issue("client"), STRANGER.pem).client()
    async with start_target(target_engine()) as target:
        edge = start_orchestrator([target.address], tls=server.client(), **server.settings(ca=False))
        async with edge as orchestrator:
            both = f"{orchestrator.address},{orchestrator.address}"
            async with AsyncClient(both, tls=stranger) as client:
                with pytest.raises(ConnectionError, match="unable to get local issuer certificate"):
                    await client.generate(token_ids=PROMPT, max_tokens=5).text()

            def blocking() -> None:
                with Client(both, tls=stranger) as client:
                    client.generate(token_ids=PROMPT, max_tokens=5).text()

            with pytest.raises(ConnectionError, match="unable to get local issuer certificate"):
                await asyncio.to_thread(blocking)
