"""What the store keeps of a request, so that any replica can go on with it."""

from base64 import urlsafe_b64encode
from hashlib import blake2b

from google.protobuf.message import DecodeError

from orchestrator.request import GenerationPlan
from orchestrator.store.base import SessionCorrupt, SessionRecord
from outrider.v1.orchestrator_pb2 import ACCEPTANCE_UNSPECIFIED, GenerateRequest

FIRST_EPOCH = 1


def new_record(plan: GenerationPlan, request: GenerateRequest) -> SessionRecord:
    """The record of one choice alone, which says what the request left open."""
    stored = GenerateRequest()
    stored.CopyFrom(request)
    stored.ClearField("n")
    stored.session_id, stored.seed, stored.speculation.acceptance = plan.session_id, plan.seed, plan.acceptance
    stored.stop.max_tokens = plan.stop.max_tokens
    return SessionRecord(
        session_id=plan.session_id,
        tokens=plan.prompt,
        prompt_length=len(plan.prompt),
        epoch=FIRST_EPOCH,
        meta=stored.SerializeToString(),
    )


def name_at_targets(record: SessionRecord) -> str:
    """The session's id at target workers: the same for all its owners, and another for any other request.

    Orchestrators that share targets may share no store, and each have a session of the same id. One would go on in the
    other's cache, whose law has another seed.
    """
    return urlsafe_b64encode(blake2b(record.meta, digest_size=9).digest()).decode()


def request_of(record: SessionRecord, vocab_size: int) -> GenerateRequest:
    """The request of a session, its prompt as the tokens that it was taken for. Raises SessionCorrupt, also when it is
    another session's or when the record holds tokens outside [0, vocab_size).
    """
    request = _stored_request(record)
    if request.session_id != record.session_id or request.n:
        raise SessionCorrupt(f"session {record.session_id} is damaged in the store: its request is another session's")
    outside = record.tokens[(record.tokens < 0) | (record.tokens >= vocab_size)]
    if len(outside):
        where = f"it holds token {outside[0]}, outside [0, {vocab_size})"
        raise SessionCorrupt(f"session {record.session_id} is damaged in the store: {where}")
    request.token_ids.ids[:] = record.tokens[: record.prompt_length].tolist()
    return request


def repeats(record: SessionRecord, request: GenerateRequest) -> bool:
    """Whether a request is that of the session, sent again: equal in all that it says. Raises SessionCorrupt."""
    stored, same = _stored_request(record), GenerateRequest()
    same.CopyFrom(request)
    same.ClearField("n")
    if not same.HasField("seed"):
        same.seed = stored.seed
    if same.speculation.acceptance == ACCEPTANCE_UNSPECIFIED:
        same.speculation.acceptance = stored.speculation.acceptance
    if not same.stop.HasField("max_tokens"):
        same.stop.max_tokens = stored.stop.max_tokens
    return same == stored


def _stored_request(record: SessionRecord) -> GenerateRequest:
    try:
        return GenerateRequest.FromString(record.meta)
    except DecodeError as error:
        raise SessionCorrupt(f"session {record.session_id} is damaged in the store: its request is none") from error
