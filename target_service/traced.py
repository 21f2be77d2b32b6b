"""What a trace says of a verified block."""

from outrider.net.errors import OutriderError, reason_name
from outrider.observe.worker_spans import Item
from target_service.job import Job


def verified(job: Job) -> Item:
    """The item of a job that has its outcome."""
    error = reason_name(job.outcome.reason) if isinstance(job.outcome, OutriderError) else ""
    attributes = {
        "outrider.base_length": job.base_length,
        "outrider.prefix_tokens": len(job.prefix_tokens),
        "outrider.drafted": len(job.draft_tokens),
    }
    first, passes = (None, []) if job.work is None else (job.work.first_pass_at, job.work.traced)
    return Item("verify block", job.traceparent, job.arrived_at, first, passes, attributes, error)
