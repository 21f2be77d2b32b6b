"""What a trace says of a block in the draft worker."""

from draft_service.answers import reason_of
from draft_service.config import PROPOSER_NAMES
from draft_service.job import Answer
from outrider.observe.tracing import Attributes
from outrider.observe.worker_spans import Item


def drafted(answer: Answer) -> Item | None:
    """The item of an answer; None where its round is not traced.

    A block that was drafted ahead is a span of the round that it was drafted in. The command that finds it has a short
    one of its own.
    """
    ask, job = answer.ask, answer.job
    if not ask.traceparent:
        return None
    first = job.first_pass_at if job is not None else None
    began = first if answer.ahead and first is not None else ask.arrived_at
    name = "draft ahead" if answer.ahead else "draft"
    error = reason_of(answer) if answer.error is not None else ""
    return Item(name, ask.traceparent, began, first, job.traced if job is not None else [], _attributes(answer), error)


def _attributes(answer: Answer) -> Attributes:
    attributes: dict[str, str | int] = {
        "outrider.base_length": answer.ask.base_length,
        "outrider.lookahead": answer.ask.lookahead,
    }
    if answer.job is not None:
        attributes |= {
            "outrider.proposer": PROPOSER_NAMES[answer.job.made_by],
            "outrider.drafted": len(answer.job.tokens),
            "outrider.drafted_ahead": len(answer.job.tokens) if answer.ahead else answer.job.ahead_tokens,
        }
    answered = "superseded" if answer.superseded else "held" if answer.silent else "error" if answer.error else "block"
    return attributes | {"outrider.answer": answered}
