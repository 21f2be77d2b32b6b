"""python -m orchestrator: starts one orchestrator."""

import asyncio
import logging
import os
import sys

import torch
import uvloop

from orchestrator.config import OrchestratorConfig
from orchestrator.core import Orchestrator
from orchestrator.metrics import Metrics
from orchestrator.service import OrchestratorServicer
from orchestrator.store import open_store
from orchestrator.store.base import SessionStore, StoreError
from outrider.config import ConfigError, parse_config
from outrider.lm.engine import ModelRefused
from outrider.lm.tokenizer import load_tokenizer
from outrider.net.channel import MAX_REQUEST_BYTES
from outrider.net.server import PortInUse, Server, run_until_signal
from outrider.observe.logging import configure_logging
from outrider.v1 import orchestrator_pb2, orchestrator_pb2_grpc

log = logging.getLogger(__name__)

SERVICE = orchestrator_pb2.DESCRIPTOR.services_by_name["OrchestratorService"].full_name
STORE_CHECK_SECONDS = 2.0


async def serve(config: OrchestratorConfig) -> None:
    """Runs until SIGTERM or SIGINT."""
    tokenizer = load_tokenizer(config.tokenizer)
    store = _open(config)
    await store.ping()
    orchestrator = Orchestrator(config, tokenizer, store, Metrics())
    server = Server(SERVICE, max_receive_bytes=MAX_REQUEST_BYTES)
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(OrchestratorServicer(orchestrator), server.grpc)
    port = await server.start(config.host, config.port)
    print(f"listening on {config.host}:{port}", flush=True)
    orchestrator.start()
    readiness = asyncio.create_task(keep_readiness(server, orchestrator))

    async def stop() -> None:
        readiness.cancel()
        await server.stop(config.grace)

    await run_until_signal([stop, orchestrator.close])


async def keep_readiness(server: Server, orchestrator: Orchestrator) -> None:
    """Ready while a target is usable and the store answers; drafts do not matter."""
    while True:
        await server.ready(bool(orchestrator.targets.usable) and await _answers(orchestrator))
        await orchestrator.targets.wait_changed(STORE_CHECK_SECONDS)


async def _answers(orchestrator: Orchestrator) -> bool:
    try:
        await orchestrator.store.ping()
    except StoreError as error:
        log.warning("not ready: %s", error)
        return False
    return True


def _open(config: OrchestratorConfig) -> SessionStore:
    try:
        return open_store(config.store, config.session_ttl)
    except ValueError as error:
        raise ConfigError(f"--store: {error}") from error


def main() -> int:
    """The exit code: 0 after a signal, 2 with one line when it cannot start."""
    try:
        config = parse_config(OrchestratorConfig, sys.argv[1:])
        configure_logging(config.log_level)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        torch.set_num_threads(1)
        uvloop.run(serve(config))
    except (ConfigError, ModelRefused, PortInUse, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
