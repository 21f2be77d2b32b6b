"""An orchestrator inside the test's own event loop, over real gRPC, and a client that collects what it streams."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import torch

from orchestrator.config import OrchestratorConfig
from orchestrator.core import Orchestrator
from orchestrator.discovery import Resolve, resolve
from orchestrator.metrics import Metrics
from orchestrator.service import SERVICE_NAME, OrchestratorServicer
from orchestrator.store import SessionStore, open_store
from orchestrator.tenants import TenantOf, Tenants, by_token
from outrider.lm.tokenizer import load_tokenizer
from outrider.net.channel import MAX_REQUEST_BYTES, connect
from outrider.net.server import Server
from outrider.net.tls import ClientTls
from outrider.net.tokens import RequireToken
from outrider.observe.tracing import Spans
from outrider.v1 import orchestrator_pb2_grpc
from outrider.v1.orchestrator_pb2 import (
    Finish,
    GenerateRequest,
    GenerateResponse,
    Round,
    Speculation,
    Started,
    StopConditions,
    Token,
    TokenIds,
)
from outrider.v1.types_pb2 import SamplingParams

DEADLINE = 60.0
# A block that is late on a busy machine would be a round without one: exact all the same, but not what is tested.
PATIENT = 30.0


@dataclass
class Generation:
    """Everything that one Generate call streamed."""

    started: Started = field(default_factory=Started)
    tokens: list[Token] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: Finish = field(default_factory=Finish)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def drafted(self) -> int:
        return sum(one.drafted for one in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(one.accepted for one in self.rounds)

    def add(self, response: GenerateResponse) -> None:
        if response.HasField("started"):
            self.started.CopyFrom(response.started)
        self.tokens.extend(response.tokens)
        if response.HasField("round"):
            self.rounds.append(response.round)
        if response.HasField("finish"):
            self.finish.CopyFrom(response.finish)


@dataclass
class RunningOrchestrator:
    """A started orchestrator and a stub that calls it."""

    address: str
    core: Orchestrator
    servicer: OrchestratorServicer
    server: Server
    stub: orchestrator_pb2_grpc.OrchestratorServiceStub
    channel: grpc.aio.Channel

    async def generate(self, request: GenerateRequest, deadline: float = DEADLINE) -> Generation:
        """Runs one generation to its end."""
        generation = Generation()
        async for response in self.stub.Generate(request, timeout=deadline):
            generation.add(response)
        return generation

    async def choices(self, request: GenerateRequest, deadline: float = DEADLINE) -> list[Generation]:
        """Runs all generations of a request to their ends."""
        generations: dict[int, Generation] = defaultdict(Generation)
        async for response in self.stub.Generate(request, timeout=deadline):
            generations[response.choice].add(response)
        return [generations[number] for number in sorted(generations)]

    async def until_linked(self, targets: int, drafts: int, deadline: float = DEADLINE) -> None:
        """Returns when so many workers are in use."""
        pools = self.core
        async with asyncio.timeout(deadline):
            while len(pools.targets.usable) < targets or sum(link.usable for link in pools.drafts.links) < drafts:
                await pools.targets.wait_changed(1.0)


@asynccontextmanager
async def start_orchestrator(
    targets: Sequence[str],
    drafts: Sequence[str] = (),
    *,
    tokenizer: str = "synthetic:vocab_size=16",
    store: SessionStore | None = None,
    metrics: Metrics | None = None,
    tls: ClientTls | None = None,
    expect: tuple[int, int] | None = None,
    resolve: Resolve = resolve,
    tenants: Tenants | None = None,
    tenant_of: TenantOf = by_token,
    spans: Spans | None = None,
    **settings: object,
) -> AsyncIterator[RunningOrchestrator]:
    """Starts an orchestrator on a free port and waits until its workers are linked.

    Args:
        tls: how the stub checks an orchestrator that serves with TLS.
        expect: (targets, drafts) to wait for; all of them by default.
        resolve: looks up names of workers.
        tenants, tenant_of: whose calls there are, and what each may take.
        spans: of what is traced.
        settings: fields of OrchestratorConfig; unless told otherwise lookahead is 4, so that rounds can be counted, and
            no block is late because the machine does a lot beside the test.
    """
    torch.set_num_threads(1)
    config = OrchestratorConfig(
        targets=",".join(targets),
        drafts=",".join(drafts),
        tokenizer=tokenizer,
        port=0,
        **{"lookahead": 4, "draft_timeout": PATIENT, **settings},
    )
    store = store or open_store("memory://", config.session_ttl)
    core = Orchestrator(config, load_tokenizer(tokenizer), store, metrics or Metrics(), resolve, tenants)
    servicer = OrchestratorServicer(core, tenant_of, spans)
    keys = config.accepted_keys()
    interceptors = [RequireToken(keys)] if keys is not None else []
    server = Server(SERVICE_NAME, max_receive_bytes=MAX_REQUEST_BYTES, interceptors=interceptors)
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(servicer, server.grpc)
    port = await server.start("127.0.0.1", 0, config.tls)
    address = f"127.0.0.1:{port}"
    channel = connect(address, tls)
    core.start()
    running = RunningOrchestrator(
        address, core, servicer, server, orchestrator_pb2_grpc.OrchestratorServiceStub(channel), channel
    )
    try:
        await running.until_linked(*(expect or (len(targets), len(drafts))))
        await server.ready()
        yield running
    finally:
        await channel.close()
        await server.stop(0)
        await core.close()


def ask(
    prompt: Sequence[int] = (0, 1, 2),
    *,
    max_tokens: int = 20,
    lookahead: int | None = None,
    seed: int | None = None,
    session_id: str = "",
    stop: StopConditions | None = None,
    acceptance: int = 0,
    row_format: int = 0,
    proposer: int = 0,
    **sampling: object,
) -> GenerateRequest:
    """A request over token ids."""
    conditions = stop or StopConditions()
    if not conditions.HasField("max_tokens"):
        conditions.max_tokens = max_tokens
    request = GenerateRequest(
        token_ids=TokenIds(ids=prompt),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        stop=conditions,
        speculation=Speculation(
            lookahead=lookahead,
            acceptance=acceptance,  # type: ignore[arg-type]
            proposer=proposer,  # type: ignore[arg-type]
            row_format=row_format,  # type: ignore[arg-type]
        ),
        session_id=session_id,
    )
    if seed is not None:
        request.seed = seed
    return request
