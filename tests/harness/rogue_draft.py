"""A draft service that answers what a test tells it to, within the protocol's messages and outside its rules."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from draft_service.commands import base_length_of
from draft_service.service import SERVICE_NAME
from outrider.lm.engine import EngineInfo
from outrider.lm.model_info import model_info
from outrider.net.arrays import int32s
from outrider.net.server import Server
from outrider.v1 import draft_pb2, draft_pb2_grpc

# (session id, committed tokens, lookahead) -> draft tokens, each shipped as a point mass.
Say = Callable[[str, list[int], int], Sequence[int]]


def point_masses(tokens: Sequence[int]) -> draft_pb2.Block:
    """A block of tokens that were drawn from nothing."""
    ids = np.array(tokens, "<i4").tobytes()
    block = draft_pb2.Block(tokens=ids)
    block.law.sizes = np.ones(len(tokens), "<i4").tobytes()
    block.law.token_ids = ids
    block.law.probs = np.ones(len(tokens), "<f4").tobytes()
    return block


class RogueDraft(draft_pb2_grpc.DraftServiceServicer):
    """Keeps each session's tokens, as a worker does, and says what `say` says.

    Attributes:
        asked: the session ids of the blocks that were asked for.
        change: what is done to every block before it is sent.
    """

    def __init__(self, info: EngineInfo, say: Say) -> None:
        self._info, self.say = info, say
        self._tokens: dict[str, list[int]] = {}
        self.asked: list[str] = []
        self.change: Callable[[draft_pb2.Block], draft_pb2.Block] = lambda block: block

    async def GetInfo(self, request: draft_pb2.DraftServiceGetInfoRequest, context: Any) -> Any:
        model = model_info(self._info, include_token_hashes=request.include_token_hashes)
        return draft_pb2.DraftServiceGetInfoResponse(
            model=model, max_lookahead=64, proposers=[draft_pb2.PROPOSER_MODEL]
        )

    async def Draft(self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> Any:
        async for request in request_iterator:
            for command in request.commands:
                if command.WhichOneof("action") != "close":
                    yield draft_pb2.DraftResponse(events=[self._answer(command)])

    def _answer(self, command: draft_pb2.DraftCommand) -> draft_pb2.DraftEvent:
        asked = command.open if command.WhichOneof("action") == "open" else command.advance
        base = base_length_of(command)
        new = int32s(asked.tokens, "tokens").tolist()
        tokens = self._tokens.setdefault(command.session_id, [])
        tokens[base - len(new) :] = new
        event = draft_pb2.DraftEvent(session_id=command.session_id, epoch=command.epoch, base_length=base)
        event.block.CopyFrom(draft_pb2.Block())
        if asked.lookahead:
            self.asked.append(command.session_id)
            said = self.say(command.session_id, tokens, asked.lookahead)
            event.block.CopyFrom(self.change(point_masses(said)))
        return event


@asynccontextmanager
async def start_rogue_draft(info: EngineInfo, say: Say) -> AsyncIterator[tuple[str, RogueDraft]]:
    """Yields (address, service)."""
    server, service = Server(SERVICE_NAME), RogueDraft(info, say)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server.grpc)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.ready()
    try:
        yield address, service
    finally:
        await server.stop(0)
