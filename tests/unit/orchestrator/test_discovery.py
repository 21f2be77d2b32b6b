"""Which workers there are, from what lookups find."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from orchestrator.discovery import Discovery, Members, Sources, parse_sources, resolve


@pytest.mark.parametrize(
    ("text", "addresses", "names"),
    [
        ("", (), ()),
        ("h:1, g:2,h:1", ("h:1", "g:2"), ()),
        ("dns:drafts.default.svc:7802", (), (("drafts.default.svc", 7802),)),
        ("h:1,dns:t:2,[::1]:3,dns:t:2", ("h:1", "[::1]:3"), (("t", 2),)),
    ],
)
def test_a_setting_is_addresses_and_names(
    text: str, addresses: tuple[str, ...], names: tuple[tuple[str, int], ...]
) -> None:
    assert parse_sources(text) == Sources(addresses, names)


@pytest.mark.parametrize("text", ["dns:name", "dns::1", "h", "h:1,dns:t:0", "dns:t:65536"])
def test_what_is_neither_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        parse_sources(text)


def test_members_come_at_once_and_go_when_they_are_missed_twice() -> None:
    members = Members()
    members.found(["b:1", "a:1"])
    assert list(members) == ["a:1", "b:1"]
    members.found(["a:1", "c:1"])
    assert list(members) == ["a:1", "b:1", "c:1"]
    members.found(["b:1", "c:1"])
    assert list(members) == ["a:1", "b:1", "c:1"], "each was missed once, and b came back"
    members.found(["c:1"])
    members.found(["c:1"])
    assert list(members) == ["c:1"]


class Resolver:
    """Answers a lookup with what the test says."""

    def __init__(self, answer: list[str] | OSError) -> None:
        self.answer = answer
        self.lookups = 0

    async def __call__(self, name: str, port: int) -> list[str]:
        self.lookups += 1
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


async def followed(resolver: Callable[[str, int], object]) -> tuple[Discovery, list[list[str]]]:
    told: list[list[str]] = []
    discovery = Discovery(parse_sources("s:1,dns:t:2"), lambda found: told.append(list(found)), resolver)  # type: ignore[arg-type]
    return discovery, told


async def test_lookups_add_to_what_is_static_and_tell_only_changes() -> None:
    resolver = Resolver(["10.0.0.2:2", "10.0.0.1:2"])
    discovery, told = await followed(resolver)
    for _ in range(3):
        await discovery.look_up("t", 2)
    resolver.answer = ["10.0.0.2:2", "s:1"]
    for _ in range(3):
        await discovery.look_up("t", 2)
    assert told == [["s:1", "10.0.0.1:2", "10.0.0.2:2"], ["s:1", "10.0.0.2:2"]], "s:1 is one worker"


@pytest.mark.parametrize("answer", [[], socket.gaierror(-3, "temporary failure")])
async def test_a_lookup_that_fails_or_finds_nothing_drops_nobody_and_is_said_once(
    answer: list[str] | OSError, caplog: pytest.LogCaptureFixture
) -> None:
    resolver = Resolver(["10.0.0.1:2"])
    discovery, told = await followed(resolver)
    await discovery.look_up("t", 2)
    resolver.answer = answer
    for _ in range(5):
        await discovery.look_up("t", 2)
    assert told == [["s:1", "10.0.0.1:2"]]
    assert "1 addresses found before stay" in discovery.problems["dns:t:2"]
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1
    resolver.answer = ["10.0.0.1:2"]
    await discovery.look_up("t", 2)
    assert not discovery.problems


async def test_names_are_looked_up_again_and_again_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.discovery.LOOKUP_SECONDS", 0.001)
    seen, enough = [], asyncio.Event()

    async def resolver(name: str, port: int) -> list[str]:
        seen.append((name, port))
        if len(seen) >= 5:
            enough.set()
        return [f"10.0.0.{len(seen)}:{port}"]

    discovery, told = await followed(resolver)
    discovery.start()
    assert told == [["s:1"]], "what is static is there at once"
    async with asyncio.timeout(20):
        await enough.wait()
    await discovery.close()
    count = len(seen)
    await asyncio.sleep(0.02)
    assert len(seen) == count
    assert len(told) >= 4


async def test_the_systems_resolver_is_asked() -> None:
    assert "127.0.0.1:7801" in await resolve("localhost", 7801)
    assert await resolve("127.0.0.1", 1) == ["127.0.0.1:1"]
    assert await resolve("::1", 1) == ["[::1]:1"]
    with pytest.raises(socket.gaierror):
        await resolve("no-such-name.invalid", 1)
