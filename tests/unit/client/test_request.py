"""Options become the fields that they are named after."""

import pytest

from outrider.client import AsyncClient, Client
from outrider.client.request import Options, make_request
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1.draft_pb2 import PROPOSER_PROMPT_LOOKUP

ALL = Options(
    max_tokens=9, min_tokens=1, stop=["x", "y"], stop_token_ids=[3], ignore_eos=True, temperature=0.5, top_k=4,
    top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, logit_bias={5: -1.0},
    allowed_token_ids=[6], banned_token_ids=[7], seed=8, logprobs=0, json_schema="{}", regex="a", lark="b", lookahead=0,
    acceptance="coupled", proposer="prompt_lookup", prediction="text", max_nodes=7,
)  # fmt: skip


def test_every_option_has_its_field() -> None:
    assert set(ALL) == set(Options.__annotations__)
    request = make_request("p", None, None, ALL)
    assert (request.prompt, request.seed, request.HasField("logprobs")) == ("p", 8, True)
    stop, sampling, speculation = request.stop, request.sampling, request.speculation
    assert (stop.max_tokens, stop.min_tokens, stop.ignore_eos) == (9, 1, True)
    assert (list(stop.strings), list(stop.token_ids)) == (["x", "y"], [3])
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 4, 0.9, 0.1)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == (1.1, 0.2, 0.3)
    assert dict(sampling.logit_bias) == {5: -1.0}
    assert (list(sampling.allowed_token_ids), list(sampling.banned_token_ids)) == ([6], [7])
    assert speculation.HasField("lookahead")
    assert (speculation.acceptance, speculation.proposer) == (pb.ACCEPTANCE_COUPLED, PROPOSER_PROMPT_LOOKUP)
    assert (speculation.prediction, speculation.max_nodes) == ("text", 7)
    assert request.grammar.lark == "b"  # the last one given: a request has one language


def test_inputs() -> None:
    chat = make_request(None, [{"role": "user", "content": "hi"}], None, {})
    assert [(one.role, one.content) for one in chat.chat.messages] == [("user", "hi")]
    assert list(make_request(None, None, [1, 2], {}).token_ids.ids) == [1, 2]
    for several in ((None, None, None), ("p", None, [1])):
        with pytest.raises(TypeError, match="exactly one"):
            make_request(*several, {})


def test_what_no_field_can_hold_is_named() -> None:
    with pytest.raises(TypeError, match="colour is no option"):
        make_request("p", None, None, {"colour": 1})  # type: ignore[typeddict-unknown-key]
    for wrong in ({"max_tokens": -1}, {"seed": "x"}, {"stop_token_ids": ["x"]}, {"acceptance": "always"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            make_request("p", None, None, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["", "nowhere", "h:0"])
def test_addresses_are_checked(wrong: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=r"address|HOST:PORT"):
            kind(wrong)
