"""What workers say to an orchestrator, and what it finds in the session store."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from redis.asyncio import Redis

from draft_service.commands import base_length_of
from orchestrator.breaker import Breaker
from orchestrator.handshake import PairRefused
from orchestrator.links import base
from orchestrator.links.base import Info, Misbehaved
from orchestrator.store import open_store
from outrider.net.errors import OutriderError, to_status
from outrider.net.server import Server
from outrider.v1 import draft_pb2, draft_pb2_grpc, orchestrator_pb2, target_pb2, target_pb2_grpc, types_pb2
from outrider.v1.orchestrator_pb2 import GenerateRequest
from tests.fuzz.case import PATIENCE, Harness, Target, drained, drawing, join, reasons, split, status_of, vary
from tests.fuzz.edges import PROMPT, SMALL, SMALL_DRAFT, exact, nothing_left
from tests.fuzz.messages import random_bytes
from tests.harness.faults import FakeDraft, FakeTarget, draft_engine, target_engine
from tests.harness.lies import lookahead_of
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.rogue_draft import point_masses
from tests.harness.valkey import valkey_server
from tests.harness.workers import start_draft, start_target

VOCAB = SMALL.vocab_size
_ALL_REASONS = reasons(*(name.removeprefix("ERROR_REASON_") for name in types_pb2.ErrorReason.keys()[1:]))

# A target that says anything. A case is `FORMAT BLOCK\n` and a VerifyResponse, which is the answer to every item with
# a block of that length; what is not set in it is as asked for. `status FORMAT\n` and a google.rpc.Status fails calls.

_FORMATS = ("SAMPLE", "SUPPORT", "LOGITS")


def _honest(item: target_pb2.VerifyItem) -> target_pb2.VerifyResult:
    """A possible answer of the right shape: token 1 wherever there is a choice."""
    rows, entries = len(item.draft_tokens) // 4 + 1, len(item.support_ids) // 4
    ones = np.ones(rows, "<i4").tobytes()
    result = target_pb2.VerifyResult(session_id=item.session_id, base_length=item.base_length)
    if item.row_format == target_pb2.ROW_FORMAT_SAMPLE:
        result.sample.tokens = ones
    elif item.row_format == target_pb2.ROW_FORMAT_LOGITS:
        logits = np.full((rows, VOCAB), -9, "<f4")
        logits[:, 1] = 9
        result.logits.data, result.logits.vocab_size = logits.tobytes(), VOCAB
        result.logits.dtype = target_pb2.LOGITS_DTYPE_FLOAT32
    else:
        result.support.probs = np.full(entries, 0.5, "<f4").tobytes()
        result.support.tail_masses = np.array([0.5] * (rows - 1) + [1.0], "<f8").tobytes()
        result.support.tail_tokens = ones
    if item.HasField("logprobs") and item.row_format != target_pb2.ROW_FORMAT_LOGITS:
        top = np.tile(np.arange(item.logprobs, dtype="<i4"), rows)
        result.logprobs.support = np.full(entries if result.HasField("support") else 0, -1, "<f4").tobytes()
        result.logprobs.drawn = np.full(rows, -1, "<f4").tobytes()
        result.logprobs.top_ids, result.logprobs.top = top.tobytes(), np.full(len(top), -2, "<f4").tobytes()
    result.timing.passes = result.timing.batch_items = 1
    result.timing.batch_positions, result.timing.forward_micros = rows, 100
    return result


@cache
def answer_seeds() -> list[bytes]:
    """Right answers to a session's first round and to one with a block, in every format, and failures."""
    cases = []
    for name in _FORMATS:
        for block in (0, 1):
            item = target_pb2.VerifyItem(row_format=target_pb2.RowFormat.Value(f"ROW_FORMAT_{name}"))
            item.draft_tokens = item.support_ids = np.ones(block, "<i4").tobytes()
            item.logprobs = 2
            response = target_pb2.VerifyResponse(results=[_honest(item)])
            cases.append(join(f"{name} {block}", response.SerializeToString()))
    for reason in (types_pb2.ERROR_REASON_SESSION_NOT_FOUND, types_pb2.ERROR_REASON_QUEUE_FULL):
        status = to_status(OutriderError(reason, "no", retry_after=0.01))
        response = target_pb2.VerifyResponse(results=[target_pb2.VerifyResult(status=status)])
        cases.append(join("SAMPLE 1", response.SerializeToString()))
        cases.append(join("status SAMPLE", status.SerializeToString()))
    return cases


def _answer_kind(head: str) -> type[Message]:
    return Status if head.startswith("status") else target_pb2.VerifyResponse


class _AnyTarget(FakeTarget):
    """Answers honestly until it is given a case."""

    case = b"\n"

    async def Verify(self, request: target_pb2.VerifyRequest, context: Any) -> target_pb2.VerifyResponse:
        head, body = split(self.case)
        if head.startswith("status"):
            context.set_trailing_metadata((("grpc-status-details-bin", body),))
            await context.abort(grpc.StatusCode.INTERNAL, "as told")
        if not head or not any(len(item.draft_tokens) // 4 == int(head[-1:]) for item in request.items):
            return target_pb2.VerifyResponse(results=map(_honest, request.items))
        response = target_pb2.VerifyResponse.FromString(body)
        for item, result in zip(request.items, response.results, strict=False):
            result.session_id = result.session_id or item.session_id
            result.base_length = result.base_length or item.base_length
        return response


class _Reflecting(FakeDraft):
    """A draft that says 1."""

    async def Draft(self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # type: ignore[override]
        self.context = context
        async for request in requests:
            for command in request.commands:
                if command.WhichOneof("action") != "close":
                    await self.send([_block(command)])


def _block(command: draft_pb2.DraftCommand) -> draft_pb2.DraftEvent:
    event = draft_pb2.DraftEvent(
        session_id=command.session_id, epoch=command.epoch, base_length=base_length_of(command)
    )
    event.block.CopyFrom(point_masses([1] * lookahead_of(command)))
    return event


@dataclass
class _Answers(Harness):
    orchestrator: RunningOrchestrator
    target: _AnyTarget

    async def run(self, case: bytes) -> str:
        head, body = split(case)
        form = next((name for name in _FORMATS if name in head), None)
        if form is None or not (head.startswith("status") or head[-1:] in "01"):
            return "no case"
        try:
            _answer_kind(head).FromString(body)
        except DecodeError:
            if not head.startswith("status"):
                return "no message"
        for link in self.orchestrator.core.targets.links:
            link.breaker = Breaker()
        request = ask(
            PROMPT, max_tokens=5, lookahead=1, seed=1, row_format=target_pb2.RowFormat.Value(f"ROW_FORMAT_{form}")
        )
        if form == "SUPPORT":
            request.speculation.acceptance = orchestrator_pb2.ACCEPTANCE_RATIO
        request.logprobs = 2
        self.target.case = case
        try:
            return await status_of(self.orchestrator.generate(request, deadline=PATIENCE), _ALL_REASONS)
        finally:
            self.target.case = b"\n"

    async def golden(self) -> None:
        for link in self.orchestrator.core.targets.links:
            link.breaker = Breaker()
        for name in _FORMATS[::2]:
            row_format = target_pb2.RowFormat.Value(f"ROW_FORMAT_{name}")
            generation = await self.orchestrator.generate(
                ask(PROMPT, max_tokens=6, temperature=0, row_format=row_format)
            )
            assert generation.ids == [1] * 6
        await nothing_left(self.orchestrator)


@asynccontextmanager
async def _served(service: str, add: Any, fake: Any) -> AsyncIterator[str]:
    server = Server(service)
    add(fake, server.grpc)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.ready()
    try:
        yield address
    finally:
        await server.stop(0)


_serve_target = partial(_served, "outrider.v1.TargetService", target_pb2_grpc.add_TargetServiceServicer_to_server)
_serve_draft = partial(_served, "outrider.v1.DraftService", draft_pb2_grpc.add_DraftServiceServicer_to_server)


@asynccontextmanager
async def _answers() -> AsyncIterator[Harness]:
    target = _AnyTarget(lambda request: target_pb2.VerifyResponse())
    async with (
        _serve_target(target) as address,
        _serve_draft(_Reflecting(lambda command: ())) as draft,
        start_orchestrator([address], [draft], draft_timeout=PATIENCE, failover_timeout=0.1) as orchestrator,
    ):
        yield _Answers(orchestrator, target)


# A draft that says anything: `RULE\n` and the DraftResponse that answers every command that asks for a block.

_RULES = ("greedy", "coupled", "ratio", "block")


@cache
def event_seeds() -> list[bytes]:
    """A right answer for each rule, a block that was pushed, and an error."""
    block = draft_pb2.DraftEvent(block=point_masses([1, 2]))
    block.block.timing.forward_micros = 5
    pushed = draft_pb2.DraftEvent(block=point_masses([3]), base_length=6, hypothesis=b"\1\0\0\0\2\0\0\0")
    error = draft_pb2.DraftEvent(
        error=to_status(OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, "no", retry_after=0.01))
    )
    messages = [draft_pb2.DraftResponse(events=events) for events in ([block], [block, pushed], [error])]
    return [join(rule, message.SerializeToString()) for rule in _RULES for message in messages]


@dataclass
class _AnyDraft(FakeDraft):
    """Answers warm-ups as it should, and what asks for a block with the case."""

    case: draft_pb2.DraftResponse = field(default_factory=draft_pb2.DraftResponse)

    async def Draft(self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # type: ignore[override]
        async for request in requests:
            for command in request.commands:
                if command.WhichOneof("action") == "close":
                    continue
                if lookahead_of(command):
                    await context.write(self._about(command))
                else:
                    await context.write(draft_pb2.DraftResponse(events=[_block(command)]))

    def _about(self, command: draft_pb2.DraftCommand) -> draft_pb2.DraftResponse:
        response = draft_pb2.DraftResponse()
        response.CopyFrom(self.case)
        for event in response.events:
            event.session_id = event.session_id or command.session_id
            event.epoch = event.epoch or command.epoch
            event.base_length = event.base_length or base_length_of(command)
        return response


@dataclass
class _Events(Harness):
    orchestrator: RunningOrchestrator
    draft: _AnyDraft
    outputs: dict[str, list[int]]

    async def run(self, case: bytes) -> str:
        rule, body = split(case)
        if rule not in _RULES:
            return "no case"
        try:
            self.draft.case = draft_pb2.DraftResponse.FromString(body)
        except DecodeError:
            return "no message"
        (link,) = self.orchestrator.core.drafts.links
        await self._until_usable()
        link.breaker = Breaker()
        generation = await self.orchestrator.generate(_by(rule, 4), deadline=PATIENCE)
        if rule in self.outputs:
            assert generation.ids == self.outputs[rule], (generation.ids, self.outputs[rule])
        reason = orchestrator_pb2.PlainReason.Name(max(one.plain_reason for one in generation.rounds[1:]))
        return f"{'used ' if generation.drafted else ''}{reason.removeprefix('PLAIN_REASON_')}"

    async def golden(self) -> None:
        await self._until_usable()
        await exact(self.orchestrator, drafted=False)
        await nothing_left(self.orchestrator)

    async def _until_usable(self) -> None:
        (link,) = self.orchestrator.core.drafts.links
        async with asyncio.timeout(PATIENCE):
            while not link.usable:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


def _by(rule: str, lookahead: int) -> GenerateRequest:
    """A request that is judged by the rule."""
    acceptance = orchestrator_pb2.Acceptance.Value(f"ACCEPTANCE_{rule.upper()}")
    law = {"temperature": 0.0} if rule == "greedy" else {"seed": 5}
    stop = orchestrator_pb2.StopConditions(max_tokens=6, ignore_eos=True)
    return ask(PROMPT, stop=stop, lookahead=lookahead, acceptance=acceptance, **law)  # type: ignore[arg-type]


@asynccontextmanager
async def _events() -> AsyncIterator[Harness]:
    draft = _AnyDraft(lambda command: ())
    pauses = base.RECONNECT_SECONDS, base.LONGEST_PAUSE
    async with (
        start_target(target_engine(SMALL)) as target,
        _serve_draft(draft) as address,
        start_orchestrator([target.address], [address], draft_timeout=0.05) as orchestrator,
    ):
        # As it is to the one who waits for the next case.
        base.RECONNECT_SECONDS, base.LONGEST_PAUSE = 0.005, 0.01
        try:
            outputs = {rule: (await orchestrator.generate(_by(rule, 0))).ids for rule in ("greedy", "coupled")}
            yield _Events(orchestrator, draft, outputs)
        finally:
            base.RECONNECT_SECONDS, base.LONGEST_PAUSE = pauses


# A worker that says anything of itself: `target\n` or `draft\n` and the answer to GetInfo.

_INFOS: dict[str, type[Message]] = {
    "target": target_pb2.TargetServiceGetInfoResponse,
    "draft": draft_pb2.DraftServiceGetInfoResponse,
}


@cache
def info_seeds() -> list[bytes]:
    """What the workers of the tests say, fingerprint included."""
    answers = asyncio.run(_infos())
    return [join(kind, answer.SerializeToString()) for kind, answer in answers.items()]


async def _infos() -> dict[str, Info]:
    fakes = FakeTarget(lambda request: target_pb2.VerifyResponse()), FakeDraft(lambda command: ())
    return {kind: await fake.GetInfo(info, None) for kind, fake, info in zip(_INFOS, fakes, _ASKED, strict=True)}


_ASKED = (
    target_pb2.TargetServiceGetInfoRequest(include_token_hashes=True),
    draft_pb2.DraftServiceGetInfoRequest(include_token_hashes=True),
)


@dataclass
class _Info(Harness):
    orchestrator: RunningOrchestrator

    async def run(self, case: bytes) -> str:
        head, body = split(case)
        if head not in _INFOS:
            return "no case"
        try:
            said: Any = _INFOS[head].FromString(body)
        except DecodeError:
            return "no message"
        core = self.orchestrator.core
        (link,) = core.targets.links if head == "target" else core.drafts.links
        honest: Any = await link._get_info(PATIENCE)

        async def get_info(seconds: float, *, include_token_hashes: bool = False) -> Any:
            again = type(said)()
            again.CopyFrom(said)
            return again

        link._get_info = get_info  # type: ignore[method-assign]
        try:
            await link._check_pair()
        except (PairRefused, Misbehaved) as refusal:
            return type(refusal).__name__
        finally:
            del link._get_info  # type: ignore[method-assign]
        try:
            self.orchestrator.core._links_changed()
            info = orchestrator_pb2.OrchestratorServiceGetInfoRequest()
            await self.orchestrator.stub.GetInfo(info, timeout=PATIENCE)
            request = ask(PROMPT, max_tokens=4, temperature=0)
            return await status_of(self.orchestrator.generate(request, deadline=PATIENCE), _ALL_REASONS)
        finally:
            link._serves(honest)
            link.breaker = Breaker()

    async def golden(self) -> None:
        await exact(self.orchestrator)
        await nothing_left(self.orchestrator)


@asynccontextmanager
async def _info() -> AsyncIterator[Harness]:
    async with (
        start_target(target_engine(SMALL)) as target,
        start_draft(draft_engine(SMALL_DRAFT)) as draft,
        start_orchestrator([target.address], [draft.address], draft_timeout=PATIENCE) as orchestrator,
    ):
        yield _Info(orchestrator)


# A damaged record: `stored\n` and JSON, what stands under the session's keys: `tokens`, `state` by field, all in
# Latin-1, `ttl` in milliseconds or null; a string for `state` is a value of another type than a hash.


@cache
def record_seeds() -> list[bytes]:
    """A session that runs, one that has ended, and one that was cancelled."""
    request = ask(PROMPT, max_tokens=6, temperature=0, session_id="damaged")
    request.resumable, request.seed = True, 7
    request.speculation.acceptance = orchestrator_pb2.ACCEPTANCE_GREEDY
    fields = {
        "version": "1",
        "nonce": "x" * 16,
        "epoch": "1",
        "prompt_length": "3",
        "meta": request.SerializeToString().decode("latin-1"),
        "progress": "",
        "finish_reason": "0",
    }
    tokens = np.array((*PROMPT, 4, 5), "<i4").tobytes().decode("latin-1")
    records = [
        {"state": fields, "tokens": tokens, "ttl": 60_000},
        {"state": fields | {"finish_reason": "2"}, "tokens": tokens, "ttl": 60_000},
        {"state": fields | {"finish_reason": "4", "cancelled": "1"}, "tokens": tokens, "ttl": 60_000},
    ]
    return [join("stored", json.dumps(one).encode()) for one in records]


_FIELD_VALUES = (
    "",
    "0",
    "1",
    "-1",
    "2",
    "3",
    "5",
    "6",
    "99",
    "1e3",
    " 1",
    "0x1",
    "nan",
    "inf",
    "1_0",
    "9" * 20,
    "9" * 400,
)
_LARGE = ("2147483648", "9007199254740992", "9223372036854775807", "18446744073709551616", "\xff", "ä")


def draw_record(dice: Random) -> bytes:
    """A record with something wrong."""
    record = json.loads(split(dice.choice(record_seeds()))[1])
    for _ in range(dice.choice((1, 1, 2))):
        _damage(dice, record)
    return join("stored", json.dumps(record).encode())


def _damage(dice: Random, record: dict[str, Any]) -> None:
    match dice.randrange(7):
        case 0:
            record["tokens"] = random_bytes(dice).decode("latin-1")
        case 1:
            record["tokens"] = dice.choice((None, record["tokens"], (record["tokens"] or "") + "\x10\0\0\0"))
        case 2:
            record["ttl"] = dice.choice((None, 1, 10**15, 9 * 10**15))
        case 3 if dice.randrange(4) == 0:
            record["state"] = "no hash"
        case 4 if isinstance(record["state"], dict):
            record["state"].pop(dice.choice(sorted(record["state"])), None)
        case 5 if isinstance(record["state"], dict):
            stored = record["state"].get("meta", "").encode("latin-1")
            _, meta = split(vary(dice, join("", stored), lambda _: GenerateRequest))
            record["state"]["meta"] = meta.decode("latin-1")
        case _ if isinstance(record["state"], dict):
            name = dice.choice(("version", "epoch", "prompt_length", "finish_reason", "cancelled", "meta"))
            record["state"][name] = dice.choice(_FIELD_VALUES + _LARGE)


@dataclass
class _Stored(Harness):
    orchestrator: RunningOrchestrator
    client: "Redis"

    async def run(self, case: bytes) -> str:
        _, body = split(case)
        try:
            record = json.loads(body)
        except ValueError:
            return "no case"
        calls = (
            orchestrator_pb2.GetSessionRequest,
            orchestrator_pb2.ResumeRequest,
            orchestrator_pb2.CancelSessionRequest,
        )
        stub, seen = self.orchestrator.stub, []
        again = ask(PROMPT, max_tokens=6, temperature=0, session_id="damaged")
        again.resumable = True
        for method, request in (
            (stub.GetSession, calls[0](session_id="damaged")),
            (stub.Resume, calls[1](session_id="damaged")),
            (stub.Generate, again),
            (stub.CancelSession, calls[2](session_id="damaged")),
        ):
            await self._put(record)
            call = method(request, timeout=PATIENCE)
            streams = method in (stub.Resume, stub.Generate)
            seen.append(await status_of(drained(call) if streams else call, _STORED_REASONS))
        await self._put(record)
        return " ".join(seen)

    async def _put(self, record: dict[str, Any]) -> None:
        state, tokens, ttl = record["state"], record["tokens"], record["ttl"]
        keys = "outrider:{damaged}:state", "outrider:{damaged}:tokens"
        await self.client.delete(*keys)
        if isinstance(state, dict):
            if state:
                fields = {name: value.encode("latin-1") for name, value in state.items()}
                await self.client.hset(keys[0], mapping=fields)  # type: ignore[misc, arg-type]
        else:
            await self.client.set(keys[0], state)
        if tokens is not None:
            await self.client.set(keys[1], tokens.encode("latin-1"))
        if ttl is not None:
            for key in keys:
                await self.client.pexpire(key, ttl)

    async def golden(self) -> None:
        for link in self.orchestrator.core.drafts.links:
            # Epochs that go back look to the worker as an owner that lost its session.
            link.breaker = Breaker()
        await exact(self.orchestrator)
        await nothing_left(self.orchestrator)


_STORED_REASONS = reasons(
    "SESSION_CORRUPT", "SESSION_NOT_FOUND", "SESSION_EXISTS", "SESSION_CANCELLED", "INVALID_FIELD", "STALE_EPOCH"
)


@asynccontextmanager
async def _stored() -> AsyncIterator[Harness]:
    with tempfile.TemporaryDirectory() as directory, valkey_server(Path(directory)) as server:
        async with (
            start_target(target_engine(SMALL)) as target,
            start_draft(draft_engine(SMALL_DRAFT)) as draft,
            start_orchestrator(
                [target.address], [draft.address], store=open_store(server.url, 60.0), draft_timeout=PATIENCE
            ) as orchestrator,
            Redis.from_url(server.url) as client,
        ):
            yield _Stored(orchestrator, client)


PEERS = {
    "rogue target": Target(answer_seeds, drawing(answer_seeds, _answer_kind), _answers),
    "rogue draft": Target(event_seeds, drawing(event_seeds, lambda _: draft_pb2.DraftResponse), _events),
    "worker info": Target(info_seeds, drawing(info_seeds, lambda head: _INFOS.get(head, _INFOS["target"])), _info),
    "store": Target(record_seeds, draw_record, _stored),
}
