import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from outrider.cli.embedded import embedded_store
from outrider.cli.run import Failure
from outrider.cli.supervise import Supervisor
from tests.harness.processes import until_gone


async def test_store_answers_on_a_private_socket_and_leaves_nothing() -> None:
    async with Supervisor() as supervisor:
        async with embedded_store(supervisor) as url:
            directory = Path(url.removeprefix("unix://")).parent
            async with Redis.from_url(url) as redis, asyncio.timeout(10):
                assert await redis.set("key", b"\xff")
                assert await redis.get("key") == b"\xff"
                assert await redis.config_get("appendonly", "save", "port") == {
                    "appendonly": "no",
                    "save": "",
                    "port": "0",
                }
            assert directory.stat().st_mode & 0o077 == 0
        pid = supervisor.children[0].pid
    assert not directory.exists()
    await until_gone(pid)


async def test_temporary_directory_too_long_for_a_socket_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    async with Supervisor() as supervisor:
        with pytest.raises(Failure, match="too long for a socket"):
            async with embedded_store(supervisor):
                raise AssertionError("not reached")
    assert list(long.iterdir()) == []
