"""Workers that answer by the clock and from one law: load for an orchestrator at a fraction of a worker's CPU.

    python -m bench.scripted_workers --targets 10 --drafts 2

Starts so many target and draft workers in one process and prints `listening on TARGETS/DRAFTS`, addresses separated by
commas. They speak the protocol and are honest: tokens are drawn from the law that is shipped with the session's noise,
which passes the audit, and rows are those of one target law; all blocks of a pass are made in one call of numpy. They
keep no prefix: messages are believed.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import grpc
import numpy as np
import torch
import uvloop

from draft_service.commands import base_length_of
from outrider.law.draft import truncate
from outrider.law.noise import BatchNoise, Purpose
from outrider.lm.model_info import model_info
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.net.server import Server, on_signal
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, types_pb2

DRAFT_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
TARGET_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
SUPPORT, MAX_LOOKAHEAD = 32, 16
# Of the target's logits; the 32 likeliest of 1,000 tokens then hold three quarters of the law.
SCALE = 2.5


class Laws:
    """The two laws: that of the target, and the draft's, which is its likeliest tokens."""

    def __init__(self, vocabulary: int) -> None:
        logits = torch.from_numpy(SCALE * np.random.default_rng(5).standard_normal((1, vocabulary))).float()
        probs = logits.softmax(1)
        ((self.ids, self.draft),) = truncate(probs, SUPPORT)
        target = probs[0].double().numpy()
        self.on_support = target[self.ids].astype("<f4")
        self.tail_ids = np.setdiff1d(np.arange(vocabulary), self.ids).astype("<i4")
        self.tail = np.cumsum(target[self.tail_ids])
        self.all = np.cumsum(target)

    def blocks(self, seeds: Sequence[int], bases: Sequence[int], lookahead: int) -> np.ndarray[Any, Any]:
        """[blocks, lookahead] int32: the winners of the races over the draft's law."""
        rounds = np.repeat(np.arange(len(seeds)), lookahead * SUPPORT)
        places = np.tile(np.repeat(np.arange(lookahead), SUPPORT), len(seeds))
        noise = BatchNoise(np.array(seeds, np.uint64), np.array(bases, np.int64))
        positions = noise.base_lengths[rounds] + places
        ids = np.tile(self.ids, len(seeds) * lookahead)
        race = noise.exponentials(Purpose.PROPOSE, rounds, positions, ids).reshape(-1, SUPPORT) / self.draft
        return self.ids[race.argmin(1)].reshape(len(seeds), lookahead)

    def rows(self, lookahead: int, uniforms: np.ndarray[Any, Any]) -> target_pb2.SupportRows:
        """The rows of one block; `uniforms` [lookahead + 1] draw its tails."""
        drawn = self.tail_ids[np.searchsorted(self.tail, uniforms[:lookahead] * self.tail[-1])]
        bonus = np.searchsorted(self.all, uniforms[lookahead] * self.all[-1])
        return target_pb2.SupportRows(
            probs=np.tile(self.on_support, lookahead).tobytes(),
            tail_masses=np.array([self.tail[-1]] * lookahead + [self.all[-1]], "<f8").tobytes(),
            tail_tokens=np.append(drawn, bonus).astype("<i4").tobytes(),
        )


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """Answers what came while it made the blocks before, `pass_ms` for each token of a block."""

    def __init__(self, laws: Laws, model: types_pb2.ModelInfo, pass_ms: float) -> None:
        self._laws, self._model, self._pass = laws, model, pass_ms / 1e3
        self._seeds: dict[str, int] = {}
        ids, probs = laws.ids.astype("<i4"), laws.draft.astype("<f4")
        self._laws_of = [
            types_pb2.DraftLaw(
                sizes=np.full(length, len(ids), "<i4").tobytes(),
                token_ids=np.tile(ids, length).tobytes(),
                probs=np.tile(probs, length).tobytes(),
            )
            for length in range(MAX_LOOKAHEAD + 1)
        ]

    async def GetInfo(self, request: draft_pb2.DraftServiceGetInfoRequest, context: Any) -> Any:
        """See draft.proto."""
        return draft_pb2.DraftServiceGetInfoResponse(
            model=self._model, max_lookahead=MAX_LOOKAHEAD, proposers=[draft_pb2.PROPOSER_MODEL]
        )

    async def Draft(self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # type: ignore[override]
        """See draft.proto."""
        waiting: list[tuple[float, draft_pb2.DraftCommand]] = []
        arrived = asyncio.Event()

        async def read() -> None:
            async for request in request_iterator:
                now = time.perf_counter()
                waiting.extend(
                    (now, command) for command in request.commands if command.WhichOneof("action") != "close"
                )
                arrived.set()

        reading = asyncio.create_task(read())
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                asked, waiting[:] = waiting[:], []
                await asyncio.sleep(self._pass * max((_lookahead_of(command) for _, command in asked), default=0))
                if asked:
                    await context.write(draft_pb2.DraftResponse(events=self._events(asked)))
        finally:
            reading.cancel()

    def _events(self, asked: Sequence[tuple[float, draft_pb2.DraftCommand]]) -> list[draft_pb2.DraftEvent]:
        """The blocks, and as the time of their passes all that the worker took."""
        commands = [command for _, command in asked]
        for command in commands:
            if command.WhichOneof("action") == "open":
                self._seeds[command.session_id] = command.open.law.seed
        seeds = [self._seeds[command.session_id] for command in commands]
        bases = [base_length_of(command) for command in commands]
        longest = max(map(_lookahead_of, commands))
        blocks = self._laws.blocks(seeds, bases, longest) if longest else np.empty((len(commands), 0), np.int32)
        now = time.perf_counter()
        return [
            draft_pb2.DraftEvent(
                session_id=command.session_id,
                epoch=command.epoch,
                base_length=base,
                block=draft_pb2.Block(
                    tokens=block[:length].tobytes(),
                    law=self._laws_of[length],
                    timing=draft_pb2.DraftTiming(forward_micros=int((now - came) * 1e6), passes=length),
                ),
            )
            for (came, command), base, block, length in zip(
                asked, bases, blocks, map(_lookahead_of, commands), strict=True
            )
        ]


class ScriptedTarget(target_pb2_grpc.TargetServiceServicer):
    """One call after the other, `pass_ms` each; what it takes beyond that counts as the pass's, too."""

    def __init__(self, laws: Laws, model: types_pb2.ModelInfo, pass_ms: float) -> None:
        self._laws, self._model, self._pass = laws, model, pass_ms / 1e3
        self._uniforms = np.random.default_rng(7)
        self._engine = asyncio.Lock()

    async def GetInfo(self, request: target_pb2.TargetServiceGetInfoRequest, context: Any) -> Any:
        """See target.proto."""
        return target_pb2.TargetServiceGetInfoResponse(
            model=self._model, max_lookahead=MAX_LOOKAHEAD, token_budget=1 << 16
        )

    async def Release(self, request: target_pb2.ReleaseRequest, context: Any) -> Any:
        """Nothing is kept."""
        return target_pb2.ReleaseResponse()

    async def Verify(self, request: target_pb2.VerifyRequest, context: Any) -> Any:
        """See target.proto; for SUPPORT rows."""
        came = time.perf_counter()
        async with self._engine:
            began = time.perf_counter()
            await asyncio.sleep(self._pass)
        uniforms = self._uniforms.random((len(request.items), MAX_LOOKAHEAD + 1))
        lengths = [len(item.draft_tokens) // 4 for item in request.items]
        rows = [self._laws.rows(length, row) for length, row in zip(lengths, uniforms, strict=True)]
        timing = target_pb2.VerifyTiming(
            queue_micros=int((began - came) * 1e6),
            forward_micros=int((time.perf_counter() - began) * 1e6),
            passes=1,
            batch_items=len(rows),
        )
        return target_pb2.VerifyResponse(
            results=[
                target_pb2.VerifyResult(
                    session_id=item.session_id, base_length=item.base_length, support=support, timing=timing
                )
                for item, support in zip(request.items, rows, strict=True)
            ]
        )


def _lookahead_of(command: draft_pb2.DraftCommand) -> int:
    asked = command.open if command.WhichOneof("action") == "open" else command.advance
    return asked.lookahead


async def started(name: str, add: Callable[[grpc.aio.Server], None], stack: AsyncExitStack) -> str:
    """Starts one server; its address."""
    server = Server(name)
    add(server.grpc)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    stack.push_async_callback(server.stop, 0)
    await server.ready()
    return address


async def serve(options: argparse.Namespace) -> None:
    spec = SyntheticSpec(vocab_size=options.vocabulary, order=0)
    model, laws = model_info(SyntheticEngine(spec).info, include_token_hashes=True), Laws(options.vocabulary)
    stopped = on_signal()
    async with AsyncExitStack() as stack:

        async def target() -> str:
            one = ScriptedTarget(laws, model, options.verify_ms)
            return await started(TARGET_NAME, partial(target_pb2_grpc.add_TargetServiceServicer_to_server, one), stack)

        async def draft() -> str:
            one = ScriptedDraft(laws, model, options.draft_ms)
            return await started(DRAFT_NAME, partial(draft_pb2_grpc.add_DraftServiceServicer_to_server, one), stack)

        targets = [await target() for _ in range(options.targets)]
        drafts = [await draft() for _ in range(options.drafts)]
        print(f"listening on {','.join(targets)}/{','.join(drafts)}", flush=True)
        await stopped.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--verify-ms", type=float, default=30.0, help="of a Verify call; a worker answers them in turn")
    parser.add_argument("--draft-ms", type=float, default=5.0, help="of each token of the blocks that are made at once")
    uvloop.run(serve(parser.parse_args(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
