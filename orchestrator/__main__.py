"""python -m orchestrator: starts one orchestrator."""

import asyncio
import logging
import os
import sys
from contextlib import suppress
from functools import partial

import torch

from orchestrator.config import OrchestratorConfig
from orchestrator.core import Orchestrator
from orchestrator.metrics import Metrics
from orchestrator.service import SERVICE_NAME, OrchestratorServicer
from orchestrator.store import SessionStore, open_store
from orchestrator.store.base import StoreError
from orchestrator.tenants import Tenants, by_metadata, by_token, load_tenants
from outrider.config import ConfigError
from outrider.lm.tokenizer import load_tokenizer
from outrider.net.address import is_loopback
from outrider.net.channel import MAX_REQUEST_BYTES
from outrider.net.server import Server, close_each, on_signal
from outrider.net.tokens import KeysError, RequireToken
from outrider.observe.export import exported
from outrider.observe.otlp import traces
from outrider.observe.tracing import Spans
from outrider.process import STARTUP_ERRORS, announce, run_process, started
from outrider.v1 import orchestrator_pb2_grpc

log = logging.getLogger(__name__)

STORE_CHECK_SECONDS = 2.0
STORE_FULLNESS_SECONDS = 10.0
# For the last messages of streams that have ended to reach their clients.
FLUSH_SECONDS = 1.0


async def serve(config: OrchestratorConfig) -> int:
    """Runs until SIGTERM or SIGINT; returns the exit code."""
    make = partial(Metrics, model=config.tokenizer)
    async with (
        exported("outrider-orchestrator", config.metrics_address, make) as metrics,
        traces("outrider-orchestrator") as spans,
    ):
        return await _serve(config, metrics, spans)


async def _serve(config: OrchestratorConfig, metrics: Metrics, spans: Spans | None) -> int:
    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tenants, store = _tenants(config), _open(config)
    await store.ping()
    orchestrator = Orchestrator(config, load_tokenizer(config.tokenizer), store, metrics, tenants=tenants)
    server = Server(
        SERVICE_NAME,
        max_receive_bytes=MAX_REQUEST_BYTES,
        interceptors=_authentication(config),
        connection_age=config.connection_age,
    )
    tenant_of = by_metadata(config.tenant_metadata) if config.tenant_metadata else by_token
    follows = config.client_traces == "follow"
    servicer = OrchestratorServicer(orchestrator, tenant_of, spans, follows=follows)
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(servicer, server.grpc)
    stopped = on_signal()
    announce(config.host, await server.start(config.host, config.port, config.tls, config.health_address))
    orchestrator.start()
    started()
    kept = [asyncio.create_task(keep_readiness(server, orchestrator)), asyncio.create_task(keep_fullness(orchestrator))]

    async def stop() -> None:
        for task in kept:
            task.cancel()
        await asyncio.gather(*kept, return_exceptions=True)
        await server.ready(False)
        await servicer.drain(config.grace)
        await server.stop(FLUSH_SECONDS)

    await stopped.wait()
    await close_each([stop, orchestrator.close])
    return 0


async def keep_readiness(server: Server, orchestrator: Orchestrator) -> None:
    """Ready while a target is usable and the store answers; drafts do not matter."""
    while True:
        try:
            ready = bool(orchestrator.targets.usable) and await _answers(orchestrator.store)
        except Exception:
            # Without this loop readiness would stay what it was, for good.
            log.exception("not ready: it cannot be found out")
            ready = False
        await server.ready(ready)
        await orchestrator.targets.wait_changed(STORE_CHECK_SECONDS)


async def keep_fullness(orchestrator: Orchestrator) -> None:
    """Looks how full the store is, for the gauge. One that does not answer is told of by `keep_readiness`."""
    while True:
        with suppress(StoreError):
            await orchestrator.store.fullness()
        await asyncio.sleep(STORE_FULLNESS_SECONDS)


async def _answers(store: SessionStore) -> bool:
    try:
        await store.ping()
    except StoreError as error:
        log.warning("not ready: %s", error)
        return False
    return True


def _authentication(config: OrchestratorConfig) -> list[RequireToken]:
    try:
        keys = config.accepted_keys()
    except KeysError as error:
        raise ConfigError(f"--keys-file, --keys: {error}") from error
    if keys is not None and not config.tls and not is_loopback(config.host):
        log.warning("tokens travel to %s in plain text: set --tls-cert, or end TLS before it", config.host)
    return [] if keys is None else [RequireToken(keys)]


def _open(config: OrchestratorConfig) -> SessionStore:
    try:
        return open_store(
            config.store,
            config.session_ttl,
            timeout=config.store_timeout,
            replicas=config.store_wait_replicas,
            password_file=config.store_password_file,
        )
    except ValueError as error:
        raise ConfigError(f"--store: {error}") from error


def _tenants(config: OrchestratorConfig) -> Tenants:
    try:
        return load_tenants(config.tenants)
    except ValueError as error:
        raise ConfigError(f"--tenants: {error}") from error


if __name__ == "__main__":
    sys.exit(run_process(OrchestratorConfig, serve, sys.argv[1:], startup_errors=(*STARTUP_ERRORS, StoreError)))
