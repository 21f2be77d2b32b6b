"""The n generations of one request: sessions of their own, alike but for id and seed."""

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from orchestrator.request import GenerationPlan, ServingLimits, plan_request
from outrider.law.noise import derived_seed
from outrider.lm.grammars import SessionGrammars
from outrider.net.errors import invalid_field
from outrider.v1.orchestrator_pb2 import GenerateRequest

MAX_CHOICES = 16
# Leaves room for the number of a choice.
_MAX_SHARED_ID = 120


def number_of_choices(request: GenerateRequest) -> int:
    """How many generations are wanted, at least 1. Raises OutriderError(INVALID_FIELD)."""
    if request.n > MAX_CHOICES:
        raise invalid_field(f"n is {request.n}, must be in [0, {MAX_CHOICES}]")
    if request.n > 1 and request.resumable:
        raise invalid_field(f"n is {request.n}, must be 0 or 1 with resumable: every choice is a session of its own")
    return max(1, request.n)


def plan_choices(
    request: GenerateRequest,
    tokenizer: PreTrainedTokenizerBase,
    limits: ServingLimits,
    grammars: SessionGrammars | None = None,
) -> list[GenerationPlan]:
    """The plan of each choice; arguments and errors as in `plan_request`."""
    count = number_of_choices(request)
    if count > 1 and len(request.session_id) > _MAX_SHARED_ID:
        raise invalid_field(f"session_id has {len(request.session_id)} characters, limit {_MAX_SHARED_ID} with n > 1")
    first = plan_request(request, tokenizer, limits, grammars)
    others = (
        replace(first, session_id=f"{first.session_id}.{number}", seed=derived_seed(first.seed, number))
        for number in range(1, count)
    )
    return [first, *others]
