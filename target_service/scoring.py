"""From a pass's logits to the rows of a result."""

from collections.abc import Sequence

import numpy as np
import torch

from outrider.law.answer import Question, answer
from outrider.law.logprobs import LogprobQuestion, LogprobRows, logprob_rows
from outrider.law.noise import RoundNoise
from outrider.law.rows import SupportRows
from outrider.net.arrays import features_message, logits_message, logprobs_message, sample_message, support_message
from outrider.net.errors import OutriderError, to_status
from outrider.v1 import target_pb2
from target_service.job import Job, Rows, Scored


def score(done: Sequence[tuple[Job, torch.Tensor]], vocab_size: int) -> list[Scored | None]:
    """The rows of every block in a pass, as each asks for them; None where the logits are no law.

    Args:
        done: (job that began, its logits [lookahead + 1, vocab_size]); the logits of all on one device.
    """
    dense = [index for index, (job, _) in enumerate(done) if job.row_format == target_pb2.ROW_FORMAT_LOGITS]
    compact = [index for index, (job, _) in enumerate(done) if job.row_format != target_pb2.ROW_FORMAT_LOGITS]
    rows: list[Rows | None] = [None] * len(done)
    for index, good in zip(dense, finite([done[index][1] for index in dense]), strict=True):
        rows[index] = done[index][1].cpu() if good else None
    asked = [(logits, question(job)) for job, logits in (done[index] for index in compact)]
    for index, made in zip(compact, answer(asked, vocab_size), strict=True):
        rows[index] = made
    logprobs = _logprobs([(*block, made) for block, made in zip(done, rows, strict=True)], vocab_size)
    return [
        None if made is None else Scored(made, logprobs.get(job)) for (job, _), made in zip(done, rows, strict=True)
    ]


def _logprobs(scored: Sequence[tuple[Job, torch.Tensor, Rows | None]], vocab_size: int) -> dict[Job, LogprobRows]:
    """The log probabilities of the jobs that ask for them, all in one go."""
    asked = [(job, logits, made) for job, logits, made in scored if job.logprobs is not None and made is not None]
    if not asked:
        return {}
    questions = [_logprob_question(job, made) for job, _, made in asked]
    answers = logprob_rows(torch.cat([logits for _, logits, _ in asked]), questions, vocab_size)
    return {job: made for (job, _, _), made in zip(asked, answers, strict=True)}


def _logprob_question(job: Job, rows: Rows) -> LogprobQuestion:
    """About every token that the round may emit."""
    if isinstance(rows, torch.Tensor) or job.logprobs is None:
        raise ValueError("the job asks for no log probabilities")
    drawn = rows.tail_tokens if isinstance(rows, SupportRows) else rows
    nothing = np.zeros(len(job.draft_tokens), np.int32), np.empty(0, np.int32)
    return LogprobQuestion(drawn, *(job.support or nothing), job.logprobs)


def question(job: Job) -> Question:
    """What a job for SUPPORT or SAMPLE asks, while its session stands at the end of its block."""
    if job.work is None or job.work.session.law is None:
        raise ValueError("the job has not begun, or its session has no law")
    law, tokens = job.work.session.law, job.work.session.tokens
    return Question(law.params, RoundNoise(law.seed, job.base_length), tokens, job.support, job.masks, job.tree)


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
    result = target_pb2.VerifyResult(session_id=job.session_id, base_length=job.base_length, timing=_timing(job))
    if isinstance(job.outcome, OutriderError):
        result.status.CopyFrom(to_status(job.outcome))
        return result
    if job.outcome is None:
        raise ValueError("the job has no outcome yet")
    rows = job.outcome.rows
    if isinstance(rows, torch.Tensor):
        result.logits.CopyFrom(logits_message(rows))
    elif isinstance(rows, SupportRows):
        result.support.CopyFrom(support_message(rows))
    else:
        result.sample.CopyFrom(sample_message(rows))
    if job.outcome.logprobs is not None:
        result.logprobs.CopyFrom(logprobs_message(job.outcome.logprobs))
    if job.tap is not None:
        result.features.CopyFrom(features_message(job.tap.states()[: _useful(job, rows)], job.tap.first))
    return result


def _useful(job: Job, rows: Rows) -> int:
    """How many of the features can come to be of use, as far as the rows say what is accepted."""
    accepted = len(job.draft_tokens)
    if isinstance(rows, np.ndarray) and job.tree is None:
        wrong = np.flatnonzero(rows[:-1] != job.draft_tokens)
        accepted = int(wrong[0]) if len(wrong) else accepted
    assert job.tap is not None
    return job.base_length - job.tap.first + accepted


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
