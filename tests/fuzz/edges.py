"""What comes in over the network: requests to each of the three services."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.message import DecodeError, Message

from outrider.law.params import LawParams, to_law_spec
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.net.arrays import int32s
from outrider.net.errors import from_status, reason_name
from outrider.v1 import draft_pb2, orchestrator_pb2, target_pb2
from outrider.v1.orchestrator_pb2 import GenerateRequest
from tests.fuzz.case import PATIENCE, Harness, Target, drained, drawing, join, reasons, split, status_of
from tests.harness.faults import draft_engine, greedy_output, target_engine
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import (
    RunningDraft,
    RunningTarget,
    advance_command,
    block_of,
    close_command,
    eventually,
    open_command,
    start_draft,
    start_target,
    verify_item,
)

# Short enough that no request is long.
SMALL = SyntheticSpec(vocab_size=16, context_length=48, eos=15)
SMALL_DRAFT = SyntheticSpec(vocab_size=16, context_length=48, eos=15, noise=0.5)
PROMPT = (0, 1, 2)
PROPOSERS = "model,prompt_lookup,prediction,suffix"


async def exact(orchestrator: RunningOrchestrator, drafted: bool = True) -> None:
    """Greedy output is the model's own, and coupled output is the same with and without a draft."""
    stop = {"max_tokens": 12, "ignore_eos": True}
    greedy, plain, coupled = await asyncio.gather(
        orchestrator.generate(ask(PROMPT, temperature=0, stop=orchestrator_pb2.StopConditions(**stop))),
        orchestrator.generate(ask(PROMPT, seed=3, lookahead=0, stop=orchestrator_pb2.StopConditions(**stop))),
        orchestrator.generate(ask(PROMPT, seed=3, lookahead=4, stop=orchestrator_pb2.StopConditions(**stop))),
    )
    assert greedy.ids == greedy_output(PROMPT, 12, SMALL)
    assert coupled.ids == plain.ids
    assert len(plain.ids) == 12
    async with asyncio.timeout(PATIENCE):
        # On a busy machine a connection may be lost and come back.
        while drafted and not greedy.drafted:
            greedy = await orchestrator.generate(ask(PROMPT, max_tokens=6, temperature=0))


async def nothing_left(orchestrator: RunningOrchestrator) -> None:
    """Returns when the orchestrator holds nothing of any session."""
    core = orchestrator.core
    await eventually(lambda: not core.sessions and not core._endings and not len(orchestrator.servicer.running))
    assert all(link.sessions == 0 for link in (*core.targets.links, *core.drafts.links))
    assert all(not link._told for link in core.drafts.links)  # type: ignore[attr-defined]


def raw(channel: Any, service: str, method: str, *, streams: bool = False) -> Any:
    """A method that takes and gives bytes."""
    return (channel.unary_stream if streams else channel.unary_unary)(f"/outrider.v1.{service}/{method}")


# The public edge.

_REQUESTS: dict[str, type[Message]] = {
    "Generate": GenerateRequest,
    "Resume": orchestrator_pb2.ResumeRequest,
    "GetSession": orchestrator_pb2.GetSessionRequest,
    "CancelSession": orchestrator_pb2.CancelSessionRequest,
    "GetInfo": orchestrator_pb2.OrchestratorServiceGetInfoRequest,
}
_EDGE_REASONS = reasons(
    "INVALID_FIELD",
    "SESSION_NOT_FOUND",
    "SESSION_EXISTS",
    "SESSION_CANCELLED",
    "CONTEXT_EXCEEDED",
    "QUEUE_FULL",
    "NON_FINITE_LOGITS",  # where a law and its grammar have no token in common
)


@cache
def edge_seeds() -> list[bytes]:
    """One request of every kind, and of every way to generate."""
    requests = [
        ask(PROMPT, max_tokens=6, temperature=0),
        ask(PROMPT, max_tokens=6, seed=1, lookahead=4, top_k=4, min_p=0.01, logit_bias={3: 2.0, 4: -100.0}),
        ask(PROMPT, max_tokens=6, acceptance=orchestrator_pb2.ACCEPTANCE_RATIO, repetition_penalty=1.3, top_p=0.9),
        ask(
            PROMPT, max_tokens=6, acceptance=orchestrator_pb2.ACCEPTANCE_BLOCK, row_format=target_pb2.ROW_FORMAT_LOGITS
        ),
        ask(PROMPT, max_tokens=6, allowed_token_ids=[1, 2, 3, 15], banned_token_ids=[2], frequency_penalty=1.0),
    ]
    requests[0].resumable, requests[0].session_id = True, "a"
    requests[1].n, requests[1].session_id, requests[1].logprobs = 3, "b", 2
    requests[2].stop.token_ids[:] = [4, 5]
    requests[2].stop.min_tokens = 2
    requests[3].ClearField("token_ids")
    requests[3].prompt = "abc"
    requests[3].stop.strings[:] = ["h", "de"]
    requests[3].token_by_token = True
    requests[4].grammar.regex = "(b|d)*"
    requests[4].speculation.prediction = "bdb"
    chat = GenerateRequest()
    chat.chat.messages.add(role="user", content="head")
    chat.stop.max_tokens = 6
    others = [("Resume", orchestrator_pb2.ResumeRequest(session_id="a", offset=2))]
    others += [("GetSession", orchestrator_pb2.GetSessionRequest(session_id="a"))]  # type: ignore[list-item]
    others += [("CancelSession", orchestrator_pb2.CancelSessionRequest(session_id="a"))]  # type: ignore[list-item]
    others += [("GetInfo", orchestrator_pb2.OrchestratorServiceGetInfoRequest())]  # type: ignore[list-item]
    cases = [("Generate", one) for one in (*requests, chat)] + others  # type: ignore[operator]
    return [join(head, message.SerializeToString()) for head, message in cases]


@dataclass
class _Edge(Harness):
    orchestrator: RunningOrchestrator
    target: RunningTarget
    draft: RunningDraft

    async def run(self, case: bytes) -> str:
        method, body = split(case)
        if method not in _REQUESTS:
            return "no case"
        streams = method in ("Generate", "Resume")
        call = raw(self.orchestrator.channel, "OrchestratorService", method, streams=streams)(body, timeout=PATIENCE)
        return await status_of(drained(call) if streams else call, _EDGE_REASONS)

    async def golden(self) -> None:
        await exact(self.orchestrator)
        await nothing_left(self.orchestrator)
        await eventually(lambda: not self.target.service.load().open_sessions and not self.target.service.queued)
        await self.draft.until_sessions(0)


@asynccontextmanager
async def _edge() -> AsyncIterator[Harness]:
    async with (
        start_target(target_engine(SMALL)) as target,
        start_draft(draft_engine(SMALL_DRAFT), proposers=PROPOSERS) as draft,
        start_orchestrator([target.address], [draft.address], draft_timeout=PATIENCE) as orchestrator,
    ):
        yield _Edge(orchestrator, target, draft)


# The target service.

_VERIFY: dict[str, type[Message]] = {
    "Verify": target_pb2.VerifyRequest,
    "Release": target_pb2.ReleaseRequest,
    "GetInfo": target_pb2.TargetServiceGetInfoRequest,
}
_ITEM_REASONS = reasons(
    "INVALID_FIELD",
    "SESSION_NOT_FOUND",
    "PREFIX_MISMATCH",
    "STALE_EPOCH",
    "CONTEXT_EXCEEDED",
    "QUEUE_FULL",
    "NON_FINITE_LOGITS",  # where a law and its grammar have no token in common
)
_NEIGHBOUR = [3, 1, 4]


@cache
def verify_seeds() -> list[bytes]:
    """Items of every format, in two calls."""
    items = [
        verify_item("a", PROMPT, (1, 2)),
        verify_item("b", (*PROMPT, 5), (1,), new=1),
        verify_item("x", PROMPT, (4, 5)),
        verify_item("y", PROMPT, (4, 5)),
    ]
    items[2].row_format, items[2].logprobs = target_pb2.ROW_FORMAT_SAMPLE, 3
    items[2].law.CopyFrom(to_law_spec(LawParams(temperature=0.7, top_k=3, stop_token_ids=(15,), min_tokens=2), 4))
    items[3].row_format = target_pb2.ROW_FORMAT_SUPPORT
    items[3].law.CopyFrom(
        to_law_spec(LawParams(repetition_penalty=1.2, logit_bias=((1, 3.0),), stop_token_ids=(15,)), 5)
    )
    items[3].law.grammar.regex = "(b|e|f)*"
    items[3].law.prompt_length = 3
    items[3].support_sizes, items[3].support_ids = b"\2\0\0\0\1\0\0\0", b"\1\0\0\0\4\0\0\0\5\0\0\0"
    cases: list[tuple[str, Message]] = [("Verify", target_pb2.VerifyRequest(items=[item])) for item in items]
    cases.append(("Verify", target_pb2.VerifyRequest(items=items)))
    cases.append(("Release", target_pb2.ReleaseRequest(sessions=[target_pb2.SessionRef(session_id="a", epoch=1)])))
    cases.append(("GetInfo", target_pb2.TargetServiceGetInfoRequest(include_token_hashes=True)))
    return [join(head, message.SerializeToString()) for head, message in cases]


@dataclass
class _Verify(Harness):
    target: RunningTarget

    async def run(self, case: bytes) -> str:
        method, body = split(case)
        if method not in _VERIFY:
            return "no case"
        answer: list[bytes] = []

        async def call() -> None:
            answer.append(await raw(self.target.channel, "TargetService", method)(body, timeout=PATIENCE))

        status = await status_of(call(), reasons("INVALID_FIELD", "QUEUE_FULL"))
        if method != "Verify" or not answer:
            return status
        results = target_pb2.VerifyResponse.FromString(answer[0]).results
        assert len(results) == len(target_pb2.VerifyRequest.FromString(body).items)
        seen = {reason_name(from_status(one.status).reason) if one.status.code else "OK" for one in results}
        assert seen <= {"OK", *_ITEM_REASONS}, seen
        return "+".join(sorted(seen))

    async def golden(self) -> None:
        """A neighbour's session is what it was, however many others came and went."""
        output = greedy_output(_NEIGHBOUR, 4, SMALL)
        tokens, session = list(_NEIGHBOUR), "neighbour"
        for step, token in enumerate(output):
            item = verify_item(session, tokens, new=None if step == 0 else 1)
            item.row_format = target_pb2.ROW_FORMAT_SAMPLE
            if step == 0:
                item.law.CopyFrom(to_law_spec(LawParams(temperature=0.0), 0))
            (result,) = await self.target.verify(item)
            assert result.status.code == 0, result.status
            assert int32s(result.sample.tokens, "tokens").tolist() == [token]
            tokens.append(token)
        await self.target.release((session, 1))
        assert not self.target.service.queued


@asynccontextmanager
async def _verify() -> AsyncIterator[Harness]:
    async with start_target(target_engine(SMALL)) as target:
        yield _Verify(target)


# The draft service.


@cache
def draft_seeds() -> list[bytes]:
    """Streams: each command of a message is sent on its own, and the next once it was answered, where it is."""
    opened = open_command("a", PROMPT, 3, law=LawParams(top_k=5, stop_token_ids=(15,)), top=4)
    coupled = open_command("b", PROMPT, 3, seed=9)
    coupled.open.coupled = coupled.open.omit_law = True
    copying = open_command("c", PROMPT, 4, proposer=draft_pb2.PROPOSER_PREDICTION)
    copying.open.prediction = b"\2\0\0\0\5\0\0\0\6\0\0\0"
    spoken = open_command("d", PROMPT, 2, law=LawParams(stop_token_ids=(15,), prompt_length=3))
    spoken.open.law.grammar.regex = "(b|e|f)*"
    commands = [opened, advance_command("a", (*PROMPT, 4), 3), coupled, advance_command("b", (*PROMPT, 7, 7), 2, new=2)]
    commands += [copying, spoken, close_command("a"), close_command("b")]
    streams = [commands, [opened], [coupled, copying], [spoken], [opened, advance_command("a", (*PROMPT, 4), 64)]]
    return [join("Draft", draft_pb2.DraftRequest(commands=one).SerializeToString()) for one in streams]


@dataclass
class _Draft(Harness):
    draft: RunningDraft

    async def run(self, case: bytes) -> str:
        _, body = split(case)
        seen: list[str] = []
        try:
            commands: Sequence[draft_pb2.DraftCommand] = draft_pb2.DraftRequest.FromString(body).commands
        except DecodeError:
            return await status_of(self._broken(body), reasons("INVALID_FIELD"))

        async def stream() -> None:
            stream = self.draft.stream()
            for command in commands:
                await stream.send(command)
            await stream.call.done_writing()
            async for response in stream.call:
                for event in response.events:
                    said = event.WhichOneof("outcome")
                    seen.append("OK" if said == "block" else reason_name(from_status(event.error).reason))

        status = await status_of(stream(), reasons("INVALID_FIELD"))
        assert set(seen) <= {"OK", *_ITEM_REASONS}, seen
        return "+".join(sorted({status, *seen}))

    async def _broken(self, body: bytes) -> None:
        """A message that cannot be parsed ends its stream, and gRPC says how: nothing of ours sees it."""
        call = self.draft.channel.stream_stream("/outrider.v1.DraftService/Draft")()
        await call.write(body)
        await call.done_writing()
        async with asyncio.timeout(PATIENCE):
            await call.code()

    async def golden(self) -> None:
        stream = self.draft.stream()
        event = await stream.ask(open_command("golden", PROMPT, 4, law=LawParams(temperature=0.0)))
        tokens, _ = block_of(event)
        assert tokens == greedy_output(PROMPT, 4, SMALL_DRAFT)[: len(tokens)]
        assert tokens
        await stream.end()
        await self.draft.until_sessions(0)
        assert not self.draft.service.pending
        assert not self.draft.service.streams


@asynccontextmanager
async def _draft() -> AsyncIterator[Harness]:
    async with start_draft(draft_engine(SMALL_DRAFT), proposers=PROPOSERS) as draft:
        yield _Draft(draft)


EDGES = {
    "edge": Target(edge_seeds, drawing(edge_seeds, lambda head: _REQUESTS.get(head, GenerateRequest)), _edge),
    "target": Target(
        verify_seeds, drawing(verify_seeds, lambda head: _VERIFY.get(head, target_pb2.VerifyRequest)), _verify
    ),
    "draft": Target(draft_seeds, drawing(draft_seeds, lambda _: draft_pb2.DraftRequest), _draft),
}
