"""From a pass's logits to the rows of a result."""

from collections.abc import Sequence

import torch

from outrider.net.arrays import logits_message
from outrider.net.errors import OutriderError, to_status
from outrider.v1 import target_pb2
from target_service.job import Job


def finite(blocks: Sequence[torch.Tensor]) -> list[bool]:
    """Whether every row of each block [rows, vocab_size] can be made a law.

    A row cannot when it holds NaN or +inf or nothing above -inf: exactly when its maximum is not finite, since NaN
    propagates through max. One reduction and one transfer for the whole pass.
    """
    if not blocks:
        return []
    maxima = torch.cat([block.amax(dim=-1) for block in blocks])
    good = torch.isfinite(maxima).cpu()
    return [bool(part.all()) for part in torch.split(good, [len(block) for block in blocks])]


def result_message(job: Job) -> target_pb2.VerifyResult:
    """The result of a finished job."""
    result = target_pb2.VerifyResult(
        session_id=job.session_id, base_length=job.base_length, timing=_timing(job), status=None
    )
    if isinstance(job.outcome, OutriderError):
        result.status.CopyFrom(to_status(job.outcome))
    elif job.outcome is not None:
        result.status.SetInParent()
        result.logits.CopyFrom(logits_message(job.outcome))
    else:
        raise ValueError("the job has no outcome yet")
    return result


def _timing(job: Job) -> target_pb2.VerifyTiming:
    work = job.work
    if work is None or work.first_pass_at is None:
        return target_pb2.VerifyTiming()
    return target_pb2.VerifyTiming(
        queue_micros=int((work.first_pass_at - job.arrived_at) * 1e6),
        forward_micros=work.forward_micros,
        passes=work.passes,
        batch_items=work.batch_items,
        batch_positions=work.batch_positions,
        computed_tokens=work.computed,
    )
