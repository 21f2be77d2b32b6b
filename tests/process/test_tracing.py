"""I5, I6, I7: one trace per request across client, orchestrator, draft and target, as collectors receive it."""

import asyncio
import secrets
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Container, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from outrider.client import AsyncClient, Client
from outrider.net.channel import connect
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.harness.collector import Collector, attributes, collector
from tests.harness.commands import SECONDS, Running, running
from tests.harness.orchestrator import ask
from tests.harness.processes import free_ports
from tests.process.test_failover import DRAFT, MODEL, PROMPTS, replicas, until_serving

ERROR = 2
# More than any machine has said of all streams before the last one has begun.
LONG = 600


@dataclass
class Processes:
    """One orchestrator, one target, one draft."""

    address: str
    services: list[Running]

    async def ended(self) -> list[str]:
        """What each wrote to stderr, after SIGTERM."""
        for service in self.services:
            service.process.terminate()
        ended = [await service.end() for service in self.services]
        assert [code for code, _, _ in ended] == [0] * len(ended), ended
        return [err for _, _, err in ended]


@asynccontextmanager
async def processes(environment: Mapping[str, str]) -> AsyncIterator[Processes]:
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(running(service, "--model", model, "--port", "0", environment=environment))
            for service, model in (("target_service", MODEL), ("draft_service", DRAFT))
        ]
        target, draft = [await worker.address() for worker in workers]
        flags = ("--targets", target, "--drafts", draft, "--tokenizer", MODEL, "--port", "0")
        orchestrator = await stack.enter_async_context(running("orchestrator", *flags, environment=environment))
        address = await orchestrator.address()
        await until_serving(address)
        yield Processes(address, [orchestrator, *workers])


@contextmanager
def client_traces(received: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test is an application that traces."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{received.http}/v1/traces")))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield
    provider.shutdown()


def header(flags: str = "01") -> tuple[str, str]:
    """(a trace's id, the traceparent of somebody else's span in it)."""
    trace_id = secrets.token_hex(16)
    return trace_id, f"00-{trace_id}-00000000000000ff-{flags}"


async def test_i5_i6_a_hundred_streams_of_which_thirty_are_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collector(tmp_path) as received, processes(received.environment) as system:
        cancelled = await streams(system, received, monkeypatch)
        foreign = bytes.fromhex("00000000000000ff")
        await received.until(lambda: len(received.named("/Generate")) == 100 and not received.orphans([foreign]))
        errors = await system.ended()
        # What is inside of a call, and what is beside it, comes in exports of its own.
        await received.until(lambda: whole(received, cancelled))
    assert not [err for err in errors if "etach" in err or "Traceback" in err], errors
    assert len(received.traces) == 100
    assert received.named("draft")
    for trace_id, spans in received.traces.items():
        names = Counter(span.name for span in spans)
        assert names["outrider.v1.OrchestratorService/Generate"] == 1
        assert names["outrider generation"] == (trace_id not in cancelled)
        assert names["verify block"] >= 1
        call = next(span for span in spans if span.name.endswith("/Generate"))
        code = "CANCELLED" if trace_id in cancelled else "OK"
        assert attributes(call)["rpc.response.status_code"] == code
        assert not [span.name for span in spans if span.status.code == ERROR]
        if trace_id not in cancelled:
            rounds = [attributes(span) for span in spans if span.name == "round"]
            assert sum(each["outrider.emitted"] for each in rounds) == 4
            assert attributes(call)["gen_ai.usage.output_tokens"] == 4


def whole(received: Collector, cancelled: Container[str]) -> bool:
    """Whether each trace of a generation that was not cancelled has what only a round that ended has."""
    inside = {"accept", "commit", "batch wait", "queue", "forward"}
    return all(
        inside <= {span.name for span in spans}
        for trace_id, spans in received.traces.items()
        if trace_id not in cancelled
    )


async def streams(system: Processes, received: Collector, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Runs seventy to their end with our client, and cancels thirty of a client that is not ours. Returns the traces of
    these."""
    ours = asyncio.Semaphore(20)
    cancelled = dict(header() for _ in range(30))

    async def finishes(client: AsyncClient, number: int) -> None:
        async with ours:
            await client.generate(token_ids=(number % 26, 1, 2), max_tokens=4, temperature=0.0, lookahead=2).text()

    async def is_cancelled(stub: OrchestratorServiceStub, value: str) -> None:
        async with ours:
            call = stub.Generate(
                ask(max_tokens=2000, temperature=0), timeout=SECONDS, metadata=(("traceparent", value),)
            )
            while not (await call.read()).tokens:
                pass
            call.cancel()

    with client_traces(received, monkeypatch):
        async with AsyncClient(system.address) as client, connect(system.address) as channel:
            stub = OrchestratorServiceStub(channel)
            await asyncio.gather(
                *(finishes(client, number) for number in range(70)),
                *(is_cancelled(stub, value) for value in cancelled.values()),
            )
    return set(cancelled)


async def test_batches_are_linked_samplers_obeyed_and_texts_stay_out_over_grpc(tmp_path: Path) -> None:
    """To a collector that speaks gRPC; everything that was recorded is sent before the processes end."""
    async with collector(tmp_path, "grpc") as received:
        environment = {**received.environment, "OTEL_BSP_SCHEDULE_DELAY": "60000"}
        async with processes(environment) as system, connect(system.address) as channel:
            stub = OrchestratorServiceStub(channel)
            (out, not_sampled), *sampled = header("00"), *(header() for _ in range(4))
            request = ask((0, 1, 2), max_tokens=30, temperature=0)
            await asyncio.gather(
                *(drained(stub, request, value) for value in (not_sampled, *(value for _, value in sampled)))
            )
            await system.ended()
        foreign = bytes.fromhex("00000000000000ff")
        await received.until(lambda: len(received.named("/Generate")) == 4 and not received.orphans([foreign]))
    assert set(received.traces) == {trace_id for trace_id, _ in sampled}
    assert out not in received.traces
    shared = [span for span in received.named("pass") if len({link.trace_id for link in span.links}) > 1]
    assert shared, "no pass held two sessions"
    assert {link.trace_id.hex() for span in shared for link in span.links} <= set(received.traces)
    told = {key for span in received.spans for key in attributes(span)}
    assert not [key for key in told if key.rpartition(".")[2] in ("prompt", "completion", "text", "messages", "tokens")]
    one = attributes(received.named("round")[-1])
    wanted = "base_length lookahead drafted accepted origin.accepted emitted ahead block_ready wire_bytes session_id"
    assert {f"outrider.{name}" for name in wanted.split()} <= set(one)
    plain = [attributes(span).get("outrider.plain_reason") for span in received.named("round")]
    assert "PREFILL" in plain


async def drained(stub: OrchestratorServiceStub, request: object, value: str) -> None:
    metadata = (("traceparent", value), ("baggage", "a=b"))
    async for _ in stub.Generate(request, timeout=SECONDS, metadata=metadata, wait_for_ready=True):
        pass


async def test_a_stream_that_outlives_its_orchestrator_is_one_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collector(tmp_path) as received, replicas(tmp_path, received.environment) as system:
        with client_traces(received, monkeypatch):
            async with AsyncClient(",".join(system.addresses)) as client:
                # One that began at the orchestrator that will leave.
                generations = [client.generate(token_ids=each, max_tokens=LONG, temperature=0.0) for each in PROMPTS]
                streams = [aiter(each) for each in generations]
                await asyncio.gather(*(anext(stream) for stream in streams))
                system.orchestrators[0].process.send_signal(signal.SIGTERM)
                await asyncio.wait_for(asyncio.gather(*(each.text() for each in generations)), SECONDS)
        await received.until(lambda: len(received.named("outrider generation")) == 8 and not received.orphans())
    resumed = received.named("/Resume")
    assert resumed
    assert len(received.traces) == len(PROMPTS)
    for each in resumed:
        spans = received.traces[each.trace_id.hex()]
        (client_span,) = [span for span in spans if span.name == "outrider generation"]
        (left,) = [span for span in spans if span.name.endswith("/Generate")]
        assert [event.name for event in client_span.events] == ["call lost"]
        assert attributes(client_span)["outrider.resumed"]
        assert attributes(each)["outrider.resumed"]
        assert (left.status.code, attributes(left)["error.type"]) == (ERROR, "DRAINING")
        assert attributes(client_span)["gen_ai.usage.output_tokens"] == LONG


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_i7_a_collector_that_does_not_answer_delays_nothing(protocol: str) -> None:
    """The SDK alone would wait for it for half a minute."""
    (dead,) = free_ports(1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = dead if protocol == "grpc" else silent.getsockname()[1]
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "600",
        }
        async with processes(environment) as system:
            with Client(system.address) as client:
                stream = client.generate(token_ids=(0, 1, 2), max_tokens=40, temperature=0.0)
                assert len(await asyncio.to_thread(list, stream)) == 40
            async with asyncio.timeout(25.0):
                await system.ended()
