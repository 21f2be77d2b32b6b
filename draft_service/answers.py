"""From what the engine thread made to the events of the wire."""

import numpy as np

from draft_service.commands import base_length_of
from draft_service.job import Answer, Job
from outrider.law.sparse import SparseLaw
from outrider.lm.features import Feeding
from outrider.net.arrays import block_message, to_bytes
from outrider.net.errors import OutriderError, reason_name, to_status
from outrider.v1 import draft_pb2
from outrider.v1.draft_pb2 import Proposer


def event_of(answer: Answer) -> draft_pb2.DraftEvent:
    """The event of a block or an error; not for silent answers."""
    ask = answer.ask
    event = draft_pb2.DraftEvent(session_id=ask.key[1], epoch=ask.epoch, base_length=ask.base_length)
    if answer.error is not None:
        event.error.CopyFrom(to_status(answer.error))
    elif answer.job is not None:
        event.block.CopyFrom(_block(answer.job))
    if answer.ahead:
        event.hypothesis = to_bytes(ask.tokens)
    return event


def feeding_message(kind: Proposer.ValueType, feeding: Feeding) -> draft_pb2.Feeding:
    """What a proposer says that it wants."""
    return draft_pb2.Feeding(
        proposer=kind, layers=feeding.layers, hidden_size=feeding.hidden_size, window=feeding.window
    )


def rejection(command: draft_pb2.DraftCommand, error: OutriderError) -> draft_pb2.DraftEvent:
    """The event of a command that never reached the engine thread."""
    return draft_pb2.DraftEvent(
        session_id=command.session_id,
        epoch=command.epoch,
        base_length=base_length_of(command),
        error=to_status(error),
    )


def reason_of(answer: Answer) -> str:
    """OK or the error's reason."""
    return "OK" if answer.error is None else reason_name(answer.error.reason)


def _block(job: Job) -> draft_pb2.Block:
    first_pass_at = job.first_pass_at if job.first_pass_at is not None else job.ask.arrived_at
    timing = draft_pb2.DraftTiming(
        queue_micros=max(0, int((first_pass_at - job.ask.arrived_at) * 1e6)),
        forward_micros=job.forward_micros,
        passes=job.passes,
        ahead_tokens=len(job.tokens) if job.ahead else job.ahead_tokens,
    )
    law = None if job.law.omit_law else SparseLaw.concatenate(job.rows)
    block = block_message(np.array(job.tokens, np.int32), law, timing)
    if job.parents is not None:
        block.parents = to_bytes(job.parents)
    if job.source is not None:
        block.proposer = job.source
    block.translation = job.translation
    return block
