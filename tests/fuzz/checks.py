"""The code that parses and checks what others send, called as its services call it, without them."""

import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status

from draft_service.commands import Peer, parse_command
from draft_service.config import PROPOSERS
from orchestrator.choices import plan_choices
from orchestrator.names import owned
from orchestrator.records import repeats, request_of
from orchestrator.replay import replay
from orchestrator.request import GenerationPlan, ServingLimits
from orchestrator.store.redis import _record
from orchestrator.text.detokenizer import Spelling
from orchestrator.text.output import Output
from outrider.law.audit import Claim, audit_each
from outrider.law.noise import RoundNoise
from outrider.lm.grammars import SessionGrammars
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.tokenizer import load_tokenizer
from outrider.net.arrays import (
    ArrayError,
    law_from_message,
    logits_from_message,
    logprobs_from_message,
    sample_from_message,
    support_from_message,
    tokens_in_vocab,
)
from outrider.net.errors import OutriderError, from_status, to_status
from outrider.v1 import draft_pb2, target_pb2
from outrider.v1.orchestrator_pb2 import GenerateRequest
from target_service.job import parse_item
from tests.fuzz.case import Harness, Target, join, split, vary
from tests.fuzz.edges import SMALL, draft_seeds, edge_seeds, verify_seeds
from tests.fuzz.files import draw_file, file_seeds, read_file
from tests.fuzz.peers import answer_seeds, draw_record, event_seeds, record_seeds

_VOCAB = SMALL.vocab_size
_LIMITS = ServingLimits(_VOCAB, SMALL.context_length, 64, None, (15,))
_TOKENIZER = load_tokenizer(f"synthetic:vocab_size={_VOCAB}")
_GRAMMARS = SessionGrammars(_TOKENIZER, _VOCAB)
_SPELLING = Spelling(_TOKENIZER)
_INFO = SyntheticEngine(SMALL).info
_PROPOSERS = tuple(PROPOSERS.values())


def _request(body: bytes) -> None:
    request = GenerateRequest.FromString(body)
    request.session_id = owned(request.session_id or "x", "")
    for plan in plan_choices(request, _TOKENIZER, _LIMITS, _GRAMMARS):
        _grammar(plan)


def _grammar(plan: GenerationPlan) -> None:
    state = _GRAMMARS.open(plan.law)
    if state is not None:
        state.masks(plan.prompt, len(plan.prompt))


def _items(body: bytes) -> None:
    for item in target_pb2.VerifyRequest.FromString(body).items:
        try:
            parse_item(item, _INFO, 64, lambda: None)
        except OutriderError:
            continue


def _commands(body: bytes) -> None:
    for command in draft_pb2.DraftRequest.FromString(body).commands:
        try:
            parse_command(command, Peer(1), _VOCAB, _PROPOSERS)
        except OutriderError:
            continue


def _results(body: bytes) -> None:
    """Each result as the answer to each block that it could be for."""
    for result in target_pb2.VerifyResponse.FromString(body).results:
        to_status(from_status(result.status))
        for lookahead in (0, 1, 2):
            readers: Sequence[Callable[[], object]] = (
                lambda: sample_from_message(result.sample, lookahead, _VOCAB),  # noqa: B023
                lambda: support_from_message(result.support, lookahead, lookahead, _VOCAB),  # noqa: B023
                lambda: logits_from_message(result.logits, lookahead + 1),  # noqa: B023
                lambda: logprobs_from_message(result.logprobs, lookahead, lookahead, 2, _VOCAB),  # noqa: B023
            )
            for read in readers:
                try:
                    read()
                except ArrayError:
                    continue


def _events(body: bytes) -> None:
    for event in draft_pb2.DraftResponse.FromString(body).events:
        to_status(from_status(event.error))
        try:
            tokens = tokens_in_vocab(event.block.tokens, "tokens", _VOCAB)
            law = law_from_message(event.block.law, len(tokens), 32)
        except ArrayError:
            continue
        if len(tokens):
            audit_each([Claim(tokens, law, RoundNoise(1, 3), _VOCAB)])


def _status(body: bytes) -> None:
    to_status(from_status(Status.FromString(body)))


def _stored(body: bytes) -> None:
    """A record as the store's scripts answer it, taken up as `Orchestrator.take_over` does."""
    try:
        said: Any = json.loads(body)
        state = {str(name): str(value).encode("latin-1") for name, value in said["state"].items()}
        tokens, ttl = str(said["tokens"] or "").encode("latin-1"), int(said["ttl"] or -1)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return
    flat = [part for name, value in state.items() for part in (name.encode("utf-8", "replace"), value)]
    record = _record("damaged", [b"ok", flat, tokens, ttl])
    repeats(record, GenerateRequest())
    (plan,) = plan_choices(request_of(record, _VOCAB), _TOKENIZER, _LIMITS, _GRAMMARS)
    replay(plan, record, Output(plan.stop, _SPELLING, plan.prompt), _GRAMMARS.open(plan.law))


@cache
def _directory() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory()


KINDS: dict[str, tuple[type[Message], Callable[[bytes], None]]] = {
    "request": (GenerateRequest, _request),
    "items": (target_pb2.VerifyRequest, _items),
    "commands": (draft_pb2.DraftRequest, _commands),
    "results": (target_pb2.VerifyResponse, _results),
    "events": (draft_pb2.DraftResponse, _events),
    "status": (Status, _status),
}
_STORE, _FILES = "stored", ("keys", "tenants", "draft", "weights")


def check(case: bytes) -> str:
    """Runs one case. Raises what is no refusal of ours."""
    head, body = split(case)
    if head in _FILES:
        return read_file(case, Path(_directory().name))
    try:
        if head == _STORE:
            _stored(body)
        elif head in KINDS:
            KINDS[head][1](body)
        else:
            return "no case"
    except (OutriderError, DecodeError) as refusal:
        return type(refusal).__name__
    return "read"


def kind_of(head: str) -> type[Message]:
    """The message of a case."""
    return KINDS[head][0]


@cache
def check_seeds() -> list[bytes]:
    """The seeds of the other targets, as far as they are about what is checked here."""
    bodies = {
        "request": [split(one)[1] for one in edge_seeds() if one.startswith(b"Generate")],
        "items": [split(one)[1] for one in verify_seeds() if one.startswith(b"Verify")],
        "commands": [split(one)[1] for one in draft_seeds()],
        "results": [split(one)[1] for one in answer_seeds() if not one.startswith(b"status")],
        "events": [split(one)[1] for one in event_seeds()],
        "status": [split(one)[1] for one in answer_seeds() if one.startswith(b"status")],
    }
    return [join(head, body) for head in KINDS for body in bodies[head]] + record_seeds() + file_seeds()


def draw_check(dice: Random) -> bytes:
    """A new case of any kind."""
    case = dice.choice(check_seeds())
    head = split(case)[0]
    if head == _STORE:
        return draw_record(dice)
    return draw_file(dice) if head in _FILES else vary(dice, case, kind_of)


class _Checks(Harness):
    async def run(self, case: bytes) -> str:
        return check(case)

    async def golden(self) -> None:
        for case in check_seeds():
            assert check(case) in ("read", "OutriderError" if case.startswith(b"request") else "read")


@asynccontextmanager
async def _checks() -> AsyncIterator[Harness]:
    yield _Checks()


CHECKS = {"checks": Target(check_seeds, draw_check, _checks)}
