"""The whole system on one machine: store, draft worker, target worker and orchestrator as processes of their own."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from outrider.cli.embedded import embedded_store
from outrider.cli.health import until_paired, until_serving
from outrider.cli.options import ProposerName
from outrider.cli.split_times import SHORT_SPIN
from outrider.cli.startup import StartupView
from outrider.cli.supervise import Command, Supervisor
from outrider.net.address import without_credentials
from outrider.v1.orchestrator_pb2 import OrchestratorServiceGetInfoResponse

_PAIRING_SECONDS = 10.0
# Seconds that generations may go on after Ctrl-C, and that a service may take to end beyond (docs/reliability.md).
_GRACE, _ENDING = 3.0, 12.0
# Of the orchestrator, when nothing is said.
_MAX_LOOKAHEAD = 16
_WORKERS = 2
# A tokenizer that was used before a fork warns and stalls otherwise.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"} | SHORT_SPIN
# The whole system of one machine speaks plain text, whatever services elsewhere are told.
_SETTINGS = ("TLS_CERT", "TLS_KEY", "TLS_CA", "WORKER_TLS_CA", "WORKER_TLS_CERT", "WORKER_TLS_KEY", "KEYS", "KEYS_FILE")
_ENVIRONMENT |= {f"OUTRIDER_{name}": "" for name in (*_SETTINGS, "TARGET_TLS_NAME", "DRAFT_TLS_NAME")}


@dataclass(frozen=True)
class SystemOptions:
    """What to start. Empty strings and zeros leave the choice to the service, where nothing else is said.

    Attributes:
        target: MODEL of the target.
        draft: MODEL of the draft worker; with early_exit the target's own, without a model any with its vocabulary.
        store: URL of the session store; empty starts an embedded one.
        lookahead: longest block of requests that do not choose; above 16 it is the limit for those that do. None lets
            the orchestrator choose every round's.
        proposers: what the draft worker offers.
        early_exit_layers: layers of the early exit.
        early_exit: directory of a trained exit, which runs instead.
        medusa: directory of the target's Medusa heads.
        eagle: directory of the target's EAGLE head.
        ahead_blocks: blocks that the draft worker drafts ahead; 0 on one machine, where it would take from the target.
        target_threads, draft_threads: CPU threads of the models; 0 takes `fair_threads`.
        host, port: where the orchestrator listens; port 0 chooses a free one.
        load_seconds: longest time that starting may take.
    """

    target: str
    draft: str
    store: str = field(default="", repr=False)
    lookahead: int | None = None
    proposers: tuple[str, ...] = ("model",)
    early_exit_layers: int = 0
    early_exit: str = ""
    medusa: str = ""
    eagle: str = ""
    ahead_blocks: int = 0
    dtype: str = ""
    device: str = ""
    context_length: int = 0
    target_threads: int = 0
    draft_threads: int = 0
    host: str = "127.0.0.1"
    port: int = 7800
    log_level: str = ""
    load_seconds: float = 600.0


def fair_threads() -> int:
    """CPU threads of each worker: its half of the cores.

    With more threads than cores the threads of one pass wait for each other's turn on a core, at hundreds of barriers
    in each pass: with two threads in each worker, on two cores, a pass took ten times as long as with one.
    """
    return max(1, available_cores() // _WORKERS)


def available_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class System:
    """A running system.

    Attributes:
        supervisor: watches its processes.
        addresses: of each process by name: "orchestrator", "target", "draft", "store".
        info: what the orchestrator said when it was ready.
    """

    supervisor: Supervisor
    addresses: dict[str, str]
    info: OrchestratorServiceGetInfoResponse

    @property
    def address(self) -> str:
        """Of the orchestrator."""
        return self.addresses["orchestrator"]


@asynccontextmanager
async def running_system(options: SystemOptions, view: StartupView) -> AsyncIterator[System]:
    """Starts everything, waits until it serves, and ends everything when the block is left.

    Raises ProcessDied or NotReady, naming the process, when a part does not come up.
    """
    async with AsyncExitStack() as stack:
        supervisor = await stack.enter_async_context(Supervisor(grace=_GRACE + _ENDING, log=view.log))
        with view:
            system = await _started(options, supervisor, view, stack)
        yield system


async def _started(options: SystemOptions, supervisor: Supervisor, view: StartupView, stack: AsyncExitStack) -> System:
    store = options.store or await stack.enter_async_context(embedded_store(supervisor))
    view.update("store", "ready")
    workers = await _start(supervisor, view, _target(options), _draft(options), within=options.load_seconds)
    orchestrator = _orchestrator(options, workers, store)
    addresses = workers | await _start(supervisor, view, orchestrator, within=options.load_seconds)
    await supervisor.guard(_until_all_serve(view, addresses, options.load_seconds))
    info = await supervisor.guard(until_paired(addresses["orchestrator"], _PAIRING_SECONDS))
    return System(supervisor, addresses | {"store": without_credentials(store)}, info)


async def _start(supervisor: Supervisor, view: StartupView, *commands: Command, within: float) -> dict[str, str]:
    """Starts processes beside each other; their addresses by name."""
    children = [await supervisor.start(command) for command in commands]
    addresses = {}
    for child in children:
        view.update(child.command.name, "starting")
        addresses[child.command.name] = await supervisor.announced(child, within)
        view.update(child.command.name, "loading")
    return addresses


async def _until_all_serve(view: StartupView, addresses: dict[str, str], within: float) -> None:
    async def one(name: str, address: str) -> None:
        await until_serving(name, address, within)
        view.update(name, "ready")

    try:
        async with asyncio.TaskGroup() as group:
            for name, address in addresses.items():
                group.create_task(one(name, address))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _service(name: str, module: str, flags: dict[str, str | int]) -> Command:
    given = (word for flag, value in flags.items() if value for word in (f"--{flag}", str(value)))
    return Command(name, (sys.executable, "-m", module, "--grace", str(_GRACE), *given), environment=_ENVIRONMENT)


def _model_flags(options: SystemOptions, model: str, threads: int) -> dict[str, str | int]:
    return {
        "host": "127.0.0.1",
        "port": "0",
        "model": model,
        "dtype": options.dtype,
        "device": options.device,
        "context-length": options.context_length,
        "threads": threads or fair_threads(),
        "log-level": options.log_level,
    }


def _target(options: SystemOptions) -> Command:
    flags = _model_flags(options, options.target, options.target_threads)
    return _service("target", "target_service", flags | _lookahead_limit(options))


def _draft(options: SystemOptions) -> Command:
    flags = _model_flags(options, options.draft, options.draft_threads)
    # The client's own prediction costs the worker nothing to offer.
    offered = dict.fromkeys((*options.proposers, ProposerName.prediction.value))
    flags |= {"proposers": ",".join(offered), "early-exit-layers": options.early_exit_layers}
    flags |= {"early-exit": options.early_exit, "medusa": options.medusa, "eagle": options.eagle}
    flags |= {"ahead-blocks": str(options.ahead_blocks)}
    flags |= {"target-model": options.target}  # a distilled draft shares its embeddings
    return _service("draft", "draft_service", flags)


def _orchestrator(options: SystemOptions, workers: dict[str, str], store: str) -> Command:
    flags: dict[str, str | int] = {
        "targets": workers["target"],
        "drafts": workers["draft"],
        "tokenizer": options.target,
        "lookahead": "" if options.lookahead is None else str(options.lookahead),
        "host": options.host,
        "port": str(options.port),
        "log-level": options.log_level,
    }
    command = _service("orchestrator", "orchestrator", flags | _lookahead_limit(options))
    # Not a flag: everybody on the machine may read those, and the URL may have a password.
    return replace(command, environment={**command.environment, "OUTRIDER_STORE": store})


def _lookahead_limit(options: SystemOptions) -> dict[str, str | int]:
    longest = options.lookahead or 0
    return {"max-lookahead": longest} if longest > _MAX_LOOKAHEAD else {}
