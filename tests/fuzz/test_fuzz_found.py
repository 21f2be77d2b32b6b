"""What fuzzing found, each in the shortest form that shows it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from orchestrator.handshake import PairRefused, check_pair
from orchestrator.tenants import load_tenants
from outrider.law.params import LAW_VERSION
from outrider.lm.distilled import DistilledDraft
from outrider.lm.engine import ModelRefused
from outrider.lm.source import parse_source
from outrider.lm.tokenizer import load_tokenizer, vocabulary_of
from outrider.net.errors import OutriderError, from_status, to_status
from outrider.v1 import orchestrator_pb2, target_pb2, types_pb2
from outrider.v1.target_pb2 import VerifyResponse, VerifyTiming
from outrider.v1.types_pb2 import Grammar
from tests.fuzz.case import join, split
from tests.fuzz.edges import EDGES, PROMPT
from tests.fuzz.peers import PEERS, answer_seeds, record_seeds
from tests.fuzz.running import Fuzzed, fuzzed
from tests.harness.orchestrator import ask

LARGEST = 2**64 - 1


def ended(running: Fuzzed, case: bytes) -> str:
    """How a case ended, the only one of its kind."""
    running.seen.clear()
    running.run(case)
    (status,) = running.seen
    return status


def answered(timing: VerifyTiming, **status: Any) -> bytes:
    """The right answer to a round without a block, but for its timing and status."""
    head, body = split(answer_seeds()[0])
    response = VerifyResponse.FromString(body)
    (result,) = response.results
    result.timing.CopyFrom(timing)
    if status:
        result.status.CopyFrom(to_status(OutriderError(**status)))
    return join(head, response.SerializeToString())


def test_what_a_target_says_of_its_time_is_held_to_what_can_be_added_up() -> None:
    with fuzzed("rogue target", PEERS["rogue target"]) as running:
        for timing in (
            VerifyTiming(queue_micros=LARGEST, forward_micros=LARGEST, passes=2**32 - 1),
            VerifyTiming(passes=1, batch_items=0, batch_positions=4),
        ):
            assert ended(running, answered(timing)) == "OK"
        # Said again and again for one round, whose sums it makes.
        lost = {"reason": types_pb2.ERROR_REASON_SESSION_NOT_FOUND, "message": "no"}
        huge = VerifyTiming(queue_micros=LARGEST, forward_micros=LARGEST, passes=2**32 - 1)
        assert ended(running, answered(huge, **lost)) == "NO_PROGRESS"
        running.golden()


def test_a_status_that_contradicts_its_call_or_is_none_is_a_failure_of_the_worker() -> None:
    other = to_status(OutriderError(types_pb2.ERROR_REASON_SESSION_NOT_FOUND, "no")).SerializeToString()
    with fuzzed("rogue target", PEERS["rogue target"]) as running:
        for body in (other, b"\xff\xff"):
            # The second once the worker has failed too often.
            assert ended(running, join("status SAMPLE", body)) in ("ENGINE_FAILED", "NO_WORKER")
        running.golden()


@pytest.mark.parametrize("seconds", [2**63 - 1, -(2**63)])
def test_a_detail_that_is_none_and_a_retry_beyond_all_time_are_no_errors_of_ours(seconds: int) -> None:
    status = to_status(OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, "no", retry_after=1.0))
    status.details[0].value = b"\xff"
    status.details[1].value = orchestrator_pb2.GenerateRequest().SerializeToString()
    assert from_status(status).reason == types_pb2.ERROR_REASON_ENGINE_FAILED
    retry = status.details[1]
    retry.value = b"\x0a\x0b\x08" + _varint(seconds)
    assert 0 <= (from_status(status).retry_after or 0.0) <= 86_400
    to_status(from_status(status))


def _varint(value: int) -> bytes:
    value, data = value % 2**64, b""
    while value > 127:
        value, data = value >> 7, data + bytes([value % 128 + 128])
    return data + bytes([value])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"token_hashes": b"\0\0\0"}, "token hashes of 3 bytes"),
        ({"eos_token_ids": b"\1\0"}, "eos_token_ids has 2 bytes"),
        ({"eos_token_ids": b"\xff\xff\xff\xff"}, "eos_token_ids holds token -1"),
    ],
)
def test_a_worker_whose_arrays_are_none_is_refused(change: dict[str, bytes], named: str) -> None:
    vocabulary = vocabulary_of(load_tokenizer("synthetic:vocab_size=16"))
    info = types_pb2.ModelInfo(
        vocab_fingerprint=vocabulary.fingerprint, vocab_size=vocabulary.size, law_version=LAW_VERSION
    )
    check_pair("target", info, vocabulary)
    for name, value in change.items():
        setattr(info, name, value)
    with pytest.raises(PairRefused, match=named):
        check_pair("target", info, vocabulary)


def _state(**fields: str) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["state"].update(fields)


def _meta(**fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        request = orchestrator_pb2.GenerateRequest.FromString(record["state"]["meta"].encode("latin-1"))
        for name, value in fields.items():
            setattr(request, name, value)
        record["state"]["meta"] = request.SerializeToString().decode("latin-1")

    return change


CORRUPT = "SESSION_CORRUPT"
# What GetSession and Resume say.
RECORDS = {
    "a negative prompt": (_state(prompt_length="-1"), [CORRUPT, CORRUPT]),
    "a prompt longer than all": (_state(prompt_length="99"), [CORRUPT, CORRUPT]),
    "an epoch below the first": (_state(epoch="-7"), [CORRUPT, CORRUPT]),
    "an epoch that is not exact": (_state(epoch="9007199254740993"), [CORRUPT, CORRUPT]),
    "a reason beyond the wire": (_state(finish_reason="2147483648"), [CORRUPT, CORRUPT]),
    "a life beyond all calendars": (lambda record: record.update(ttl=10**15), ["OK", "OK"]),
    "a token that is none": (lambda record: record.update(tokens=record["tokens"] + "\x10\0\0\0"), ["OK", CORRUPT]),
    "a negative token": (lambda record: record.update(tokens=record["tokens"] + "\xff" * 4), ["OK", CORRUPT]),
    "another session's request": (_meta(session_id="another"), ["OK", CORRUPT]),
    "a request of many": (_meta(n=2), ["OK", CORRUPT]),
}


def test_a_record_out_of_all_ranges_is_corrupt_and_no_more() -> None:
    with fuzzed("store", PEERS["store"]) as running:
        for name, (change, expected) in RECORDS.items():
            record = json.loads(split(record_seeds()[0])[1])
            change(record)
            status = ended(running, join("stored", json.dumps(record).encode()))
            assert status.split()[:2] == expected, name
        running.golden()


def test_a_grammar_that_leads_where_no_token_goes_on_is_the_requests_fault_in_every_format() -> None:
    with fuzzed("edge", EDGES["edge"]) as running:
        for row_format in (target_pb2.ROW_FORMAT_UNSPECIFIED, target_pb2.ROW_FORMAT_LOGITS):
            request = ask(PROMPT, max_tokens=6, seed=1, row_format=row_format)
            request.grammar.CopyFrom(Grammar(regex="b000"))
            assert ended(running, join("Generate", request.SerializeToString())) == "INVALID_FIELD"
        running.golden()


@pytest.mark.parametrize(
    "text", [b"\xff[default]", b"x = " + b"[" * 50_000, b"x = " + b"9" * 5000], ids=["bytes", "depth", "digits"]
)
def test_a_tenants_file_that_is_no_text_is_refused_in_one_line(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "tenants.toml"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=str(path)) as refusal:
        load_tenants(str(path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ("[" * 200_000, {}),
        (
            '{"format": 1, "target": 5, "layers": 2, "vocab_fingerprint": "x"}',
            {"kept": torch.zeros(1, dtype=torch.int32)},
        ),
        (
            '{"format": 1, "target": "t", "layers": "2", "vocab_fingerprint": "x"}',
            {"kept": torch.zeros(1, dtype=torch.int32)},
        ),
        ('{"format": 1, "target": "t", "layers": 2, "vocab_fingerprint": "x"}', {"norm.weight": torch.zeros(1)}),
        ('{"format": 1, "target": "t", "layers": 2, "vocab_fingerprint": "x"}', {"kept": torch.zeros(1)}),
    ],
    ids=["depth", "target", "layers", "no kept", "kept"],
)
def test_a_draft_of_another_form_is_refused(tmp_path: Path, settings: str, tensors: dict[str, torch.Tensor]) -> None:
    (tmp_path / "draft.json").write_text(settings)
    (tmp_path / "draft.safetensors").write_bytes(save(tensors))
    with pytest.raises(ModelRefused, match="holds no whole draft"):
        DistilledDraft.load(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-at-all/x"])
def test_a_model_that_cannot_be_looked_for_is_refused(name: str) -> None:
    with pytest.raises(ModelRefused, match="cannot be looked for"):
        parse_source(name)
