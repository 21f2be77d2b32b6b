"""Nothing that is secret is logged or shown, also at the most talkative level; and the whole system under TLS."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from redis.asyncio import Redis

from outrider.client import AsyncClient, ClientTls
from outrider.net.tokens import new_token
from tests.harness.certificates import Authority, Mount
from tests.harness.commands import Running, outrider, running
from tests.harness.processes import free_ports
from tests.harness.valkey import valkey_server

MODEL = "synthetic:vocab_size=26,seed=5,order=2,scale=2.5"
PROMPT = "zqxjkvzqxjkv"
PASSWORD = "correct-horse-battery-staple"
HOST = "127.0.0.1"


@dataclass
class System:
    """Services with certificates, tokens and a store with a password; everything they log is kept.

    Attributes:
        address: of the orchestrator.
        tls: how it is checked.
        flags: the same for a command.
    """

    address: str
    tls: ClientTls
    flags: list[str]
    logs: list[bytes] = field(default_factory=list)

    async def keep(self, service: Running) -> None:
        """Reads a service's log to its end."""
        while line := await service.err.readline():
            self.logs.append(line)


@asynccontextmanager
async def system(tmp_path: Path, store: str, token: str, line: str) -> AsyncIterator[System]:
    mount = Mount(tmp_path / "tls", (authority := Authority()).issue(HOST), authority.pem)
    (tmp_path / "keys").write_text(line)
    (tmp_path / "token").write_text(token + "\n")
    shared = ["--log-level", "debug", *flags_of(mount.settings())]
    target, draft, edge = free_ports(3)
    commands = [
        ["target_service", "--model", MODEL, "--port", target],
        ["draft_service", "--model", MODEL, "--port", draft],
        [
            *("orchestrator", "--targets", f"{HOST}:{target}", "--drafts", f"{HOST}:{draft}", "--port", edge),
            *("--tokenizer", MODEL, "--keys-file", str(tmp_path / "keys"), *flags_of(mount.settings("worker_tls"))),
        ],
    ]
    one = System(f"{HOST}:{edge}", mount.client(), flags_of(mount.settings()))
    async with AsyncExitStack() as stack:
        starting = (running(*command, *shared, environment={"OUTRIDER_STORE": store}) for command in commands)
        services = [await stack.enter_async_context(service) for service in starting]
        readers = [asyncio.create_task(one.keep(service)) for service in services]
        yield one
        for service in services:
            service.process.terminate()
        await asyncio.gather(*readers)


def flags_of(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.timeout(300)  # seven processes, each of which loads torch
async def test_neither_prompt_nor_output_nor_token_nor_password_is_logged_or_shown(tmp_path: Path) -> None:
    token, line = new_token("acme")
    with valkey_server(tmp_path) as valkey:
        await Redis(port=valkey.port).config_set("requirepass", PASSWORD)
        store = valkey.url.replace("://", f"://:{PASSWORD}@")
        async with system(tmp_path, store, token, line) as one:
            async with AsyncClient(one.address, token=token, tls=one.tls) as client:
                # It waits until everything has started.
                output = await client.generate(PROMPT, max_tokens=60, temperature=0).text()
            assert len(output) == 60
            reach = ["--address", one.address, *one.flags, "--token-file"]
            (code, out, err), (refused, _, words), (shown_code, shown, _) = await asyncio.gather(
                outrider(
                    *("generate", PROMPT, "--raw", "--max-tokens", "60", "--temperature", "0"),
                    *(*reach, str(tmp_path / "token")),
                ),
                outrider("generate", PROMPT, "--raw", *reach, str(tmp_path / "keys")),
                outrider("info", *reach, str(tmp_path / "token")),
            )
            assert (code, out) == (0, output + "\n"), err
            assert (refused, words) == (1, "error: the orchestrator wants a valid token (see --token-file)\n")
            assert shown_code == 0
    logged = b"".join(one.logs).decode()
    assert "DEBUG" in logged
    for secret in (PROMPT, output, token, line.partition(":")[2], PASSWORD):
        assert secret not in logged
        assert secret not in shown


async def test_what_is_wrong_with_secrets_is_told_without_them(tmp_path: Path) -> None:
    environment = {"OUTRIDER_STORE": f"redis://:{PASSWORD}@{HOST}:1/0", "OUTRIDER_KEYS": f"acme:{PASSWORD}"}
    async with running("orchestrator", "--targets", "h:1", "--tokenizer", MODEL, environment=environment) as service:
        code, _, err = await service.end()
    assert code == 2
    assert PASSWORD not in err
