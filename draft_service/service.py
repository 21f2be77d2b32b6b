"""The draft service's gRPC side: streams in, events out. Nothing here runs the model."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from draft_service.answers import event_of, feeding_message, reason_of, rejection
from draft_service.commands import Ask, CloseStream, Command, Peer, parse_command
from draft_service.config import PROPOSER_NAMES, DraftConfig
from draft_service.job import Answer
from draft_service.scheduler import DraftScheduler
from draft_service.stream import Stream
from draft_service.traced import drafted
from draft_service.translation.engine import TranslatedEngine
from outrider import __version__
from outrider.lm.engine import Engine, EngineInfo
from outrider.lm.engine_load import EngineLoad
from outrider.lm.grammars import SessionGrammars
from outrider.lm.model_info import model_info
from outrider.lm.warm_up import warm_up
from outrider.net.bounds import MAX_COMMANDS, MAX_LOOKAHEAD
from outrider.net.errors import OutriderError, abort, invalid_field, queue_full, reason_name
from outrider.net.tls import identity_of
from outrider.observe.metrics import DraftMetrics
from outrider.observe.tracing import Spans
from outrider.observe.worker_spans import WorkerSpans
from outrider.v1 import draft_pb2, draft_pb2_grpc, types_pb2
from outrider.v1.draft_pb2 import Proposer
from outrider.worker import WorkerHost, loading_error

log = logging.getLogger(__name__)

SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]

# The model behind each proposer that has one, and what the worker as a whole serves.
Engines = tuple[Mapping[Proposer.ValueType, Engine], EngineInfo]


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """The servicer together with its host. Lives on the event loop.

    Args:
        config: settings.
        load_engines: loads the models; runs in the engine thread.
        metrics: where the numbers go.
        spans: of what is traced; None traces nothing.
    """

    def __init__(
        self,
        config: DraftConfig,
        load_engines: Callable[[], Engines],
        metrics: DraftMetrics | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._config, self._load_engines = config, load_engines
        self._metrics = metrics or DraftMetrics()
        self._spans = WorkerSpans(spans) if spans is not None else None
        self._streams: dict[int, Stream] = {}
        self._stream_count = 0
        self._pending = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.host: WorkerHost[Command, Answer] = WorkerHost(
            SERVICE_NAME,
            config,
            build=self._build,
            deliver=self._deliver,
            fail_pending=self._fail_pending,
            drained=self._drained,
        )
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, self.host.server.grpc)
        self.host.watch(self._metrics, self.engine_load, lambda: self.pending)
        self._metrics.watch_suffixes(
            indexed=lambda: self._scheduler.indexed_tokens if self.host.loaded else 0,
            kept=lambda: self._scheduler.histories.tokens if self.host.loaded else 0,
        )

    async def Draft(  # type: ignore[override]  # the reader/writer style: cancellation reaches one place
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Context
    ) -> None:
        """One orchestrator's sessions; see draft.proto."""
        refusal = self.host.refusal()
        if refusal is not None:
            await abort(context, refusal)
        stream = self._open_stream()
        peer = Peer(stream.number, identity_of(context))
        reading = asyncio.create_task(self._read(stream, peer, request_iterator))
        try:
            while events := await stream.next_events():
                await context.write(draft_pb2.DraftResponse(events=events, load=self.load()))
        except OutriderError as error:
            await abort(context, error)
        except asyncio.CancelledError:
            if context.cancelled():
                raise
            # Cancelled from inside: without a status the caller would wait for ever (grpc/grpc#29248).
            await abort(context, OutriderError(types_pb2.ERROR_REASON_ENGINE_FAILED, "the worker ended the stream"))
        finally:
            reading.cancel()
            self._close_stream(stream)

    async def GetInfo(
        self, request: draft_pb2.DraftServiceGetInfoRequest, context: Context
    ) -> draft_pb2.DraftServiceGetInfoResponse:
        """Says what is served; see draft.proto."""
        if not self.host.loaded:
            await abort(context, loading_error())
        return draft_pb2.DraftServiceGetInfoResponse(
            model=model_info(self._info, include_token_hashes=request.include_token_hashes),
            load=self.load(),
            max_lookahead=MAX_LOOKAHEAD,
            proposers=self._config.kinds,
            feedings=[feeding_message(*each) for each in self._feedings.items()],
            history_tokens=self._config.suffix_history,
            instance_id=self.host.instance_id,
            version=__version__,
            translated=self._translated,
        )

    @property
    def streams(self) -> list[Stream]:
        """The streams that are open."""
        return list(self._streams.values())

    @property
    def pending(self) -> int:
        """Commands that the engine thread has not answered yet. May be asked for in any thread."""
        return sum(stream.pending for stream in self._streams.copy().values())

    async def _read(self, stream: Stream, peer: Peer, requests: AsyncIterator[draft_pb2.DraftRequest]) -> None:
        """Commands in order, until the peer half-closes, the call ends, or the worker drains."""
        try:
            async for request in requests:
                if stream.read_all:
                    return
                self._take(stream, peer, request)
                await stream.until_room()
            stream.finish_reading()
        except OutriderError as error:
            stream.fail(error)
        except Exception as error:
            # The call was ended under the reader; the handler is told by its own cancellation.
            log.debug("stream %d: reading ended: %r", stream.number, error)
            stream.finish_reading()

    def _take(self, stream: Stream, peer: Peer, request: draft_pb2.DraftRequest) -> None:
        if len(request.commands) > MAX_COMMANDS:
            raise invalid_field(f"commands has {len(request.commands)} entries, limit {MAX_COMMANDS}")
        rejections = []
        room = self._config.max_queue_items - self.pending
        for message in request.commands:
            try:
                command = parse_command(message, peer, self._info.vocab_size, self._config.kinds, self._feature_width)
                if isinstance(command, Ask):
                    if room <= 0:
                        raise self._queue_full()
                    stream.pending += 1
                    room -= 1
                self.host.thread.post(command)
            except OutriderError as error:
                self._metrics.answered([reason_name(error.reason)])
                rejections.append(rejection(message, error))
        if rejections:
            stream.push(rejections)

    def _open_stream(self) -> Stream:
        self._stream_count += 1
        stream = self._streams[self._stream_count] = Stream(self._stream_count)
        self._idle.clear()
        return stream

    def _close_stream(self, stream: Stream) -> None:
        del self._streams[stream.number]
        self.host.thread.post(CloseStream(stream.number))
        if not self._streams:
            self._idle.set()

    def _queue_full(self) -> OutriderError:
        return queue_full("commands", self._config.max_queue_items)

    def load(self) -> types_pb2.WorkerLoad:
        """How the worker stands at this moment."""
        return self.engine_load().message(self.pending)

    def engine_load(self) -> EngineLoad:
        """How the engines stand; all 0 while they are not there. May be asked for in any thread."""
        return self._scheduler.load if self.host.loaded else EngineLoad()

    # What the host calls.

    def _build(self) -> DraftScheduler:
        engines, self._info = self._load_engines()
        fed = {kind: engine.info.feeding for kind, engine in engines.items()}
        self._feedings = {kind: feeding for kind, feeding in fed.items() if feeding is not None}
        self._feature_width = max((feeding.width for feeding in self._feedings.values()), default=0)
        for engine in engines.values():
            warm_up(engine)
        translated = (engine for engine in engines.values() if isinstance(engine, TranslatedEngine))
        self._translated = next((engine.told(self._config.translation) for engine in translated), None)
        grammars = SessionGrammars(self._info.tokenizer, self._info.vocab_size)
        grammars.prepare()
        self._scheduler = DraftScheduler(engines, grammars, self._config, self._metrics)
        return self._scheduler

    def _deliver(self, answers: list[Answer]) -> None:
        by_stream: dict[int, list[draft_pb2.DraftEvent]] = defaultdict(list)
        for answer in answers:
            stream = self._streams.get(answer.ask.key[0])
            if stream is None:
                continue
            if not answer.ahead:
                stream.pending -= 1
            if not answer.silent:
                by_stream[stream.number].append(event_of(answer))
            elif stream.read_all:
                stream.finish_reading()
        self._count(answers)
        if self._spans is not None:
            for answer in answers:
                self._spans.item(drafted(answer))
        for number, events in by_stream.items():
            self._streams[number].push(events)

    def _count(self, answers: list[Answer]) -> None:
        self._metrics.answered(reason_of(answer) for answer in answers if not (answer.silent or answer.ahead))
        for answer in answers:
            if answer.job is not None:
                self._metrics.shipped(len(answer.job.tokens), PROPOSER_NAMES[answer.job.made_by])
                if not answer.ahead and answer.job.first_pass_at is not None:
                    # A block that was there when it was asked for waited for nothing.
                    self._metrics.waited(max(0.0, answer.job.first_pass_at - answer.job.ask.arrived_at))

    def _fail_pending(self, error: OutriderError) -> None:
        for stream in self._streams.values():
            stream.fail(error)

    async def _drained(self) -> None:
        """Ends every stream once its pending blocks are sent, and returns when none is left."""
        for stream in self._streams.values():
            stream.drain(OutriderError(types_pb2.ERROR_REASON_DRAINING, "the worker is shutting down"))
        await self._idle.wait()
