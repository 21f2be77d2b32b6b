"""`outrider doctor` over whole installations: one that is well, and one with each fault that it is there to find."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import draft_service.service
import target_service.service
from orchestrator.store import open_store
from outrider.cli.access import Reach
from outrider.cli.doctor.examine import Settings, WorkerTls, examine
from outrider.cli.doctor.findings import Finding, Level, broken, ok, warning
from outrider.cli.doctor.network import Endpoint
from outrider.cli.doctor.report import healthy, show, summary
from outrider.cli.doctor.services import worker
from outrider.cli.doctor.store import StoreSettings
from outrider.lm.model_info import model_info
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.net.tokens import new_token
from outrider.v1 import draft_pb2, types_pb2
from outrider.worker import State
from tests.harness.certificates import CLIENT, DAY, SERVER, Authority, Mount
from tests.harness.commands import outrider
from tests.harness.faults import DRAFT_SPEC, SPEC, VOCAB, draft_engine, target_engine
from tests.harness.orchestrator import RunningOrchestrator, start_orchestrator
from tests.harness.spelled import SpelledEngine
from tests.harness.system import start_system
from tests.harness.tiny_tokenizers import byte_level
from tests.harness.valkey import free_port, valkey_server
from tests.harness.workers import eventually, start_draft, start_target

HOST = "127.0.0.1"
# On a machine with other work; no test waits for them.
SECONDS, ROUND_SECONDS = 30.0, 100.0


async def found_in(settings: Settings) -> list[Finding]:
    settings = replace(settings, seconds=SECONDS, round_seconds=ROUND_SECONDS)
    return [each async for some in examine(settings) for each in some]


def only(findings: Sequence[Finding], check: str, level: Level) -> Finding:
    """The one finding of a check at this level."""
    (found,) = [each for each in findings if (each.check, each.level) == (check, level)]
    return found


def faults(findings: Sequence[Finding]) -> list[str]:
    """What is not well, but for the latency of a store on a machine that is busy with other tests."""
    return [
        f"{each.check}: {each.seen}"
        for each in findings
        if each.level in (Level.broken, Level.warning) and "median of" not in each.seen
    ]


@pytest.mark.timeout(300)  # a process imports torch, on a machine that may be busy
async def test_an_installation_that_is_well_in_plain_text(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hunter2")
    with valkey_server(tmp_path / "store", "--appendfsync", "everysec", "--requirepass", "hunter2") as valkey:
        password, url = str(tmp_path / "password"), f"redis://default@{HOST}:{valkey.port}/0"
        async with AsyncExitStack() as stack:
            target = await stack.enter_async_context(start_target(target_engine()))
            draft = await stack.enter_async_context(start_draft(draft_engine()))
            both = [
                await stack.enter_async_context(
                    start_orchestrator(
                        [target.address],
                        [draft.address],
                        store=open_store(valkey.url, 60.0, password_file=password),
                    )
                )
                for _ in range(2)
            ]
            found = await found_in(Settings([each.address for each in both], store=StoreSettings(url, password)))
    assert faults(found) == []
    assert not [each for each in found if each.level is Level.unseen]
    checked = {each.check for each in found}
    assert {"resume", "block", "round", "scripts", "clock", "persistence", "replicas", "memory"} <= checked
    assert "hunter2" not in str(found)
    assert {each.subject for each in found if each.check == "scripts"} == {f"store {valkey.url}"}
    blocks = [each.seen for each in found if each.check == "block"]
    assert len(blocks) == 2
    assert all("tokens drafted" in seen for seen in blocks)


@pytest.mark.timeout(300)  # a process imports torch, on a machine that may be busy
async def test_the_command_prints_json_and_ends_with_1() -> None:
    nobody = f"{HOST}:{free_port()}"
    async with start_system(target_engine()) as system:
        flags = ("--orchestrator", system.orchestrator.address, "--targets", nobody, "--timeout", "30")
        code, out, err = await outrider("doctor", *flags, "--json")
    told = json.loads(out)
    assert (code, told["healthy"]) == (1, False), err
    assert {each["check"] for each in told["checks"] if each["level"] == "broken"} == {"tcp"}
    assert told["counts"]["broken"] == 1


def test_lines_and_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    found = [ok("dns", "a", "1 address"), warning("tls", "b", "3 days", "renew it"), broken("tcp", "c", "no", "start")]
    show(Console(width=80), found)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["✓ a  dns: 1 address", "! b  tls: 3 days", "    → renew it", "✗ c  tcp: no", "    → start"]
    assert summary(found) == "3 checks: 1 well, 1 warnings, 1 broken, 0 not seen from here"
    assert [healthy(found[:count], strict=strict) for count in (1, 2, 3) for strict in (False, True)] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


async def test_an_installation_that_is_well_with_tls_and_tokens(tmp_path: Path) -> None:
    ca, year = Authority(), 365 * DAY
    workers = Mount(tmp_path / "workers", ca.issue("target", "draft", valid_for=year, usages=[SERVER]), ca.pem)
    edge = Mount(tmp_path / "edge", ca.issue(HOST, valid_for=year, usages=[SERVER]), ca.pem)
    ours = Mount(tmp_path / "ours", ca.issue("orchestrator", valid_for=year, usages=[CLIENT]), ca.pem)
    token, line = new_token("acme")
    (tmp_path / "token").write_text(token)
    async with (
        start_target(target_engine(), **workers.settings()) as target,
        start_draft(draft_engine(), **workers.settings()) as draft,
        start_orchestrator(
            [target.address],
            [draft.address],
            tls=edge.client(pair=False),
            keys=line,
            target_tls_name="target",
            draft_tls_name="draft",
            **edge.settings(ca=False),
            **ours.settings("worker_tls"),
        ) as orchestrator,
    ):
        cert, key, trusted = ours.settings().values()
        settings = Settings(
            [orchestrator.address],
            [target.address],
            [draft.address],
            reach=Reach(tls_ca=trusted, token_file=str(tmp_path / "token")),
            worker_tls=WorkerTls(trusted, cert, key, "target", "draft"),
        )
        found = await found_in(settings)
        assert faults(found) == []
        assert "none is refused" in only(found, "token", Level.ok).seen
        assert not [each for each in found if token in each.seen + each.advice]

        for words, given in (("it wants a token", ""), ("the token is unknown to it", "outrider_wrong")):
            (tmp_path / "token").write_text(given)
            refused = await found_in(settings)
            assert words in only(refused, "token", Level.broken).seen
            assert "no orchestrator answers" in only(refused, "round", Level.unseen).seen
        # Without the workers' certificates they are out of reach, which is no fault of theirs.
        (tmp_path / "token").write_text(token)
        found = await found_in(Settings([orchestrator.address], reach=settings.reach))
        assert faults(found) == []
        assert len([each for each in found if each.check == "tls" and each.level is Level.unseen]) == 2


async def test_workers_that_load_or_drain_or_are_stuck() -> None:
    async with (
        start_target(target_engine(), load=False) as loading,
        start_target(target_engine()) as draining,
        start_draft(draft_engine()) as draining_draft,
        start_target(target_engine()) as stuck,
        start_draft(draft_engine()) as stuck_draft,
    ):
        for each, state in (
            (draining, State.DRAINING),
            (draining_draft, State.DRAINING),
            (stuck, State.STUCK),
            (stuck_draft, State.STUCK),
        ):
            each.host.state = state  # as the host turns it
            await each.host.server.ready(False)
        targets = [loading.address, draining.address, stuck.address]
        found = await found_in(
            Settings([f"{HOST}:{free_port()}"], targets, [draining_draft.address, stuck_draft.address])
        )
    health = {each.subject: each for each in found if each.check == "health"}
    for address, level, words in (
        (f"target {loading.address}", Level.warning, "loading"),
        (f"target {draining.address}", Level.warning, "draining"),
        (f"draft {draining_draft.address}", Level.warning, "draining"),
        (f"target {stuck.address}", Level.broken, "stuck: the engine thread is stuck"),
        (f"draft {stuck_draft.address}", Level.broken, "stuck: the engine thread is stuck"),
    ):
        assert health[address].level is level
        assert words in health[address].seen
    assert only(found, "tcp", Level.broken).subject.startswith("orchestrator")
    assert not healthy(found, strict=False)


async def test_an_orchestrator_without_a_worker_in_use() -> None:
    nobody = f"{HOST}:{free_port()}"
    async with start_orchestrator([nobody], [nobody], expect=(0, 0), failover_timeout=0.1) as orchestrator:
        found = await found_in(Settings([orchestrator.address]))
    assert [each.seen for each in found if each.check == "pools" and each.level is Level.broken] == [
        "it has no target in use: it serves nothing",
        "it has no draft in use: it decodes plainly",
    ]
    assert "NO_WORKER" in only(found, "round", Level.broken).seen
    # What it cannot reach either is told once, as its own word; from here it is out of reach.
    assert {each.level for each in found if each.check == "tcp" and not each.subject.startswith("orch")} == {
        Level.unseen
    }


async def test_a_pair_of_two_vocabularies() -> None:
    other = SpelledEngine(byte_level(), seed=1)
    async with (
        start_target(target_engine()) as target,
        start_draft(draft_engine()) as draft,
        start_draft(other) as stranger,
        start_orchestrator([target.address], [draft.address, stranger.address], expect=(1, 1)) as orchestrator,
    ):
        link = next(each for each in orchestrator.core.drafts.links if each.address == stranger.address)
        await eventually(lambda: "vocabulary" in link.reason)
        found = await found_in(Settings([orchestrator.address]))
    fault = only(found, "vocabulary", Level.broken)
    assert fault.subject == f"draft {stranger.address}"
    assert f"than target {target.address}, first at token id 0" in fault.seen
    assert "another vocabulary" in only(found, "in use", Level.broken).seen
    assert not [each for each in found if each.check == "round" and each.level is Level.broken]


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> str:
    """Workers whose model is called so say that they are of the next law, and of another version."""

    def told(info: object, *, include_token_hashes: bool) -> types_pb2.ModelInfo:
        message = model_info(info, include_token_hashes=include_token_hashes)  # type: ignore[arg-type]
        message.law_version += message.model_id == "newer"
        return message

    for module in (target_service.service, draft_service.service):
        monkeypatch.setattr(module, "model_info", told)
    monkeypatch.setattr(draft_service.service, "__version__", "9.9.9")
    return "newer"


async def test_token_hashes_that_none_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(info: object, *, include_token_hashes: bool) -> types_pb2.ModelInfo:
        message = model_info(info, include_token_hashes=include_token_hashes)  # type: ignore[arg-type]
        message.vocab_fingerprint = "another"
        message.token_hashes = b"abc"
        return message

    monkeypatch.setattr(draft_service.service, "model_info", told)
    async with start_target(target_engine()) as target, start_draft(draft_engine()) as draft:
        found = await found_in(Settings([f"{HOST}:{free_port()}"], [target.address], [draft.address]))
    assert f"draft {draft.address} has token hashes of 3 bytes" in only(found, "vocabulary", Level.broken).seen


async def test_a_newer_worker_may_offer_what_is_not_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    original = draft_service.service.DraftService.GetInfo

    async def told(*arguments: Any) -> draft_pb2.DraftServiceGetInfoResponse:
        answer = await original(*arguments)
        answer.proposers.append(999)
        return answer

    monkeypatch.setattr(draft_service.service.DraftService, "GetInfo", told)
    async with start_draft(draft_engine(), proposers="prompt_lookup") as running:
        known, _ = await worker(Endpoint("draft", running.address), SECONDS)
    assert known is not None
    assert known.proposers == ("prompt_lookup", "number 999")


async def test_versions_and_settings_that_differ(newer: str) -> None:
    short = replace(SPEC, context_length=64)
    async with (
        start_target(target_engine()) as target,
        start_target(SyntheticEngine(short, "other")) as shorter,
        start_target(SyntheticEngine(SPEC, newer)) as of_another_law,
        start_draft(SyntheticEngine(replace(DRAFT_SPEC, context_length=32), "test")) as draft,
        start_draft(draft_engine(), proposers="model,prompt_lookup") as offering_more,
    ):
        targets = [target.address, shorter.address, of_another_law.address]
        found = await found_in(Settings([f"{HOST}:{free_port()}"], targets, [draft.address, offering_more.address]))
    assert f"target {of_another_law.address}" in only(found, "law", Level.broken).seen
    assert f"9.9.9: draft {draft.address}" in only(found, "versions", Level.warning).seen
    assert only(found, "context", Level.warning).seen == "targets 64 tokens, drafts 32 tokens"
    alike = [each.seen for each in found if each.check == "alike" and each.level is Level.warning]
    assert any(f"other in float32 with a context of 64: target {shorter.address}" in seen for seen in alike)
    assert any(f"model, prompt_lookup: draft {offering_more.address}" in seen for seen in alike)


async def test_a_worker_of_another_protocol_or_kind() -> None:
    async with start_draft(draft_engine()) as draft:
        found = await found_in(Settings([f"{HOST}:{free_port()}"], [draft.address]))
    assert "it is no target of this protocol" in only(found, "version", Level.broken).seen


@asynccontextmanager
async def two_orchestrators() -> AsyncIterator[list[RunningOrchestrator]]:
    """Over one target, with a store each, and with other settings."""
    async with (
        start_target(SyntheticEngine(SyntheticSpec(vocab_size=VOCAB))) as target,
        start_orchestrator([target.address]) as one,
        start_orchestrator([target.address], max_lookahead=8) as other,
    ):
        yield [one, other]


async def test_orchestrators_without_a_common_store() -> None:
    async with two_orchestrators() as both:
        found = await found_in(Settings([each.address for each in both]))
    fault = only(found, "resume", Level.broken)
    assert fault.subject == f"orchestrator {both[1].address}"
    assert "their stores differ" in fault.seen
    assert "at most 8" in only(found, "alike", Level.warning).seen
    assert "decodes plainly" in next(each.seen for each in found if each.check == "pools")


async def test_blocks_that_never_come() -> None:
    """A draft that is slower than a round waits for it."""
    slow = draft_engine()
    async with start_system(target_engine(), slow, draft_timeout=0.05) as system:
        slow.hold()
        try:
            found = await found_in(Settings([system.orchestrator.address]))
        finally:
            slow.let_go()
    fault = only(found, "block", Level.broken)
    assert "no block in" in fault.seen
    assert "draft" in fault.seen


async def test_an_orchestrator_that_drains() -> None:
    async with start_system(target_engine()) as system:
        await system.orchestrator.server.ready(False)
        await system.orchestrator.servicer.drain(0)
        found = await found_in(Settings([system.orchestrator.address]))
    assert "it drains, or has no store" in only(found, "health", Level.broken).seen
    assert "DRAINING" in only(found, "round", Level.broken).seen


async def test_what_a_worker_says_is_its_own() -> None:
    async with start_draft(draft_engine(), proposers="prompt_lookup,model") as running:
        known, _ = await worker(Endpoint("draft", running.address), SECONDS)
    assert known is not None
    assert known.proposers == ("prompt_lookup", "model")
