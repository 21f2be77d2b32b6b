"""`outrider info`: what a running orchestrator serves."""

import sys

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.access import PlainToken, Reach, Tls, TlsCa, TlsCert, TlsKey, TlsServerName, TokenFile
from outrider.cli.options import DEFAULT_ADDRESS, Address
from outrider.cli.run import run
from outrider.v1.draft_pb2 import Translation
from outrider.v1.orchestrator_pb2 import (
    OrchestratorServiceGetInfoRequest,
    OrchestratorServiceGetInfoResponse,
    WorkerStatus,
)
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

_CALL_SECONDS = 10.0
_NEVER_FOLDED = 10_000


def info(
    address: Address = DEFAULT_ADDRESS,
    tls: Tls = False,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsServerName = "",
    token_file: TokenFile = "",
    plain_token: PlainToken = False,
) -> None:
    """Show what the orchestrator serves, and by which workers."""
    run(_info(address, Reach(tls, tls_ca, tls_cert, tls_key, tls_server_name, token_file, plain_token)))


async def _info(address: str, reach: Reach) -> None:
    connection = reach.to(address)
    async with connection.channel as channel:
        answer = await OrchestratorServiceStub(channel).GetInfo(
            OrchestratorServiceGetInfoRequest(), timeout=_CALL_SECONDS, metadata=connection.metadata
        )
    console = Console() if sys.stdout.isatty() else Console(width=_NEVER_FOLDED)
    for name, value in facts(answer):
        console.print(f"{name:<18} {value}", highlight=False, markup=False, soft_wrap=True)
    console.print(workers_table(answer))


def facts(answer: OrchestratorServiceGetInfoResponse) -> list[tuple[str, str]]:
    """(name, value) pairs of everything but the workers."""
    target = answer.target
    default = answer.default_lookahead if answer.HasField("default_lookahead") else "chosen each round"
    ends = np.frombuffer(target.eos_token_ids, "<i4").tolist()
    return [
        ("version", answer.version),
        ("target", target.model_id or "unknown"),
        ("vocabulary", f"{target.vocab_size} tokens ({target.vocab_fingerprint[:12] or 'unknown'})"),
        ("context", f"{target.context_length} tokens"),
        ("dtype", target.dtype or "unknown"),
        ("end of sequence", ", ".join(map(str, ends)) or "none"),
        ("lookahead", f"{default}, at most {answer.max_lookahead}"),
        ("running sessions", str(answer.running_sessions)),
    ]


def _plain(text: str) -> Text:
    """Without what a terminal, or rich, would obey: workers choose some of the words."""
    return Text("".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text))


def _in_use(worker: WorkerStatus) -> str:
    translated = [f"vocabulary {translation(worker)}"] if worker.HasField("translated") else []
    return "; ".join(["yes", *translated, *worker.shortfalls])


def translation(worker: WorkerStatus) -> str:
    """How the worker's model drafts in a vocabulary that is not its own."""
    known = worker.translated
    ways = " or ".join(Translation.Name(way).removeprefix("TRANSLATION_").lower() for way in known.ways)
    return f"translated ({ways}), {known.shared_tokens} of its {known.own_size} tokens shared"


def workers_table(answer: OrchestratorServiceGetInfoResponse) -> Table:
    """One row a worker; those that are not in use say why."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("worker", "address", "model", "dtype", "context", "block", "in use"):
        table.add_column(name, overflow="fold", no_wrap=name in ("worker", "address"))
    for worker in answer.workers:
        state = _in_use(worker) if worker.usable else f"no: {worker.reason or 'no reason given'}"
        numbers = (str(number or "unknown") for number in (worker.model.context_length, worker.max_lookahead))
        known = (worker.model_id or "unknown", worker.model.dtype or "unknown", *numbers)
        table.add_row(*map(_plain, (worker.kind, worker.address, *known, state)))
    return table
