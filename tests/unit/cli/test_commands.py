"""What a user meets without a running system: wrong input, no service, refusals."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from outrider.cli.request import set_fields, set_grammar, set_input
from outrider.cli.run import Failure, rpc_failure, run
from outrider.net.errors import OutriderError, abort
from outrider.v1 import draft_pb2, target_pb2, types_pb2
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceServicer, add_OrchestratorServiceServicer_to_server
from tests.harness.commands import SECONDS
from tests.harness.processes import ROOT

TOKEN = pb.Token(
    id=1,
    text="hé",
    origin=pb.TOKEN_ORIGIN_ACCEPTED,
    logprob=-0.5,
    top_logprobs=[pb.TopLogprob(id=4, logprob=-0.25)],
)
ROUND = pb.Round(drafted=1, accepted=1, target_passes=1)


class ScriptedOrchestrator(OrchestratorServiceServicer):
    """Answers with one token, or refuses prompts that say so; keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []

    async def Generate(self, request: pb.GenerateRequest, context) -> AsyncIterator[pb.GenerateResponse]:  # type: ignore[no-untyped-def]
        self.requests.append(request)
        if request.prompt == "full":
            await abort(context, OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, "the queue is full", retry_after=2.5))
        usage = pb.Usage(completion_tokens=1)
        for choice in range(max(1, request.n)):
            yield pb.GenerateResponse(started=pb.Started(session_id="s", seed=7), choice=choice)
            yield pb.GenerateResponse(tokens=[TOKEN], round=ROUND, choice=choice)
            yield pb.GenerateResponse(finish=pb.Finish(reason=pb.FINISH_REASON_STOP, usage=usage), choice=choice)

    async def GetInfo(self, request: Message, context) -> pb.OrchestratorServiceGetInfoResponse:  # type: ignore[no-untyped-def]
        worker = pb.WorkerStatus(kind="draft", address="h:1", usable=False, reason="other vocabulary")
        return pb.OrchestratorServiceGetInfoResponse(version="9", max_lookahead=64, workers=[worker])


@pytest.fixture
async def orchestrator() -> AsyncIterator[tuple[str, ScriptedOrchestrator]]:
    server = grpc.aio.server()
    servicer = ScriptedOrchestrator()
    add_OrchestratorServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}", servicer
    await server.stop(0)


async def outrider(*arguments: str, stdin: bytes = b"") -> tuple[int | None, str, str]:
    """Exit code, stdout, stderr of the command."""
    import asyncio

    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.cli.main", *arguments), cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe
    )
    out, err = await asyncio.wait_for(process.communicate(stdin), SECONDS)
    return process.returncode, out.decode(), err.decode()


async def test_text_goes_to_stdout_and_the_rest_to_stderr(orchestrator: tuple[str, ScriptedOrchestrator]) -> None:
    address, servicer = orchestrator
    arguments = ("--address", address, "--temperature", "0", "--top-k", "3", "--seed", str(2**64 - 1), "--stats")
    code, out, err = await outrider("generate", "hi", "--system", "be brief", "--lookahead", "0", *arguments)
    assert (code, out) == (0, "hé\n")
    assert "1 tokens in" in err
    request = servicer.requests[0]
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert (request.sampling.temperature, request.sampling.top_k, request.seed) == (0, 3, 2**64 - 1)
    assert request.sampling.HasField("temperature")
    assert request.speculation.HasField("lookahead")
    assert not request.stop.HasField("max_tokens")


async def test_every_option_of_the_surface_arrives(
    orchestrator: tuple[str, ScriptedOrchestrator], tmp_path: Path
) -> None:
    address, servicer = orchestrator
    (tmp_path / "expected").write_text("é", encoding="utf-8")
    code, out, err = await outrider(
        *("generate", "hi", "--raw", "--address", address, "--logit-bias", "5=-1.5", "--logit-bias", "6=100"),
        *("--allow-token", "5", "--allow-token", "6", "--ban-token", "7", "--stop-token", "8", "-n", "2"),
        *("--logprobs", "1", "--acceptance", "block", "--row-format", "logits", "--law-top", "9"),
        *("--prediction", str(tmp_path / "expected"), "--proposer", "prediction"),
    )
    assert (code, out) == (0, "hé\nhé\n")
    assert "choice 1:" in err
    assert err.count("-0.5000  4: -0.2500") == 2
    (request,) = servicer.requests
    assert dict(request.sampling.logit_bias) == {5: -1.5, 6: 100}
    assert list(request.sampling.allowed_token_ids) == [5, 6]
    assert (list(request.sampling.banned_token_ids), list(request.stop.token_ids)) == ([7], [8])
    assert (request.n, request.logprobs) == (2, 1)
    speculation = request.speculation
    assert (speculation.acceptance, speculation.row_format) == (pb.ACCEPTANCE_BLOCK, target_pb2.ROW_FORMAT_LOGITS)
    assert (speculation.law_top, speculation.prediction) == (9, "é")
    assert speculation.proposer == draft_pb2.PROPOSER_PREDICTION


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--logit-bias", "5"), "--logit-bias '5' is not ID=VALUE"),
        (("--logit-bias", "x=1"), "--logit-bias 'x=1' is not ID=VALUE"),
        (("--ban-token", str(2**31)), "--ban-token cannot be"),
        (("--prediction", "no/such/file"), "cannot read no/such/file: No such file"),
        (("-n", "-1"), "n cannot be -1"),
    ],
)
async def test_what_the_wire_cannot_carry_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = await outrider("generate", "hi", *arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


async def test_color_can_be_forced(orchestrator: tuple[str, ScriptedOrchestrator]) -> None:
    _, out, err = await outrider("generate", "hi", "--color", "--address", orchestrator[0])
    assert out == "\x1b[32mhé\x1b[0m\n"
    assert "accepted" in err


async def test_refusal_is_one_line_with_reason_and_retry(orchestrator: tuple[str, ScriptedOrchestrator]) -> None:
    code, out, err = await outrider("generate", "full", "--raw", "--address", orchestrator[0])
    assert (code, out) == (1, "")
    assert err == "error: the queue is full (QUEUE_FULL; try again in 2.5 s)\n"


async def test_prompt_from_standard_input(orchestrator: tuple[str, ScriptedOrchestrator]) -> None:
    address, servicer = orchestrator
    code, _, _ = await outrider("generate", "-", "--raw", "--address", address, stdin="né".encode())
    assert (code, servicer.requests[0].prompt) == (0, "né")
    code, _, err = await outrider("generate", "-", "--raw", "--address", address, stdin=b"a\xff")
    assert (code, err) == (1, "error: standard input is not valid UTF-8 at byte 1\n")


async def test_info_says_why_a_worker_is_not_in_use(orchestrator: tuple[str, ScriptedOrchestrator]) -> None:
    code, out, err = await outrider("info", "--address", orchestrator[0])
    assert code == 0, err
    assert "no: other vocabulary" in out


async def test_nobody_answers() -> None:
    code, _, err = await outrider("generate", "hi", "--address", "127.0.0.1:1")
    assert code == 1
    assert err == (
        "error: the orchestrator does not answer, or the connection to it was lost (is `outrider up` running?)\n"
    )


async def test_up_needs_a_draft_for_the_proposer_model() -> None:
    code, _, err = await outrider("up", "--target", "synthetic:vocab_size=4")
    assert code == 2
    assert "--draft" in err


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens"])
def test_l1_value_that_the_field_cannot_hold_is_named(field: str) -> None:
    with pytest.raises(Failure, match=f"^{field.replace('_', '-')} cannot be -1"):
        set_fields(pb.StopConditions(), {field: -1})
    with pytest.raises(Failure, match=r"^seed cannot be 18446744073709551616"):
        set_fields(pb.GenerateRequest(), {"seed": 2**64})


def test_l4_lone_surrogate_is_refused() -> None:
    for chat in (True, False):
        with pytest.raises(Failure, match="not valid UTF-8"):
            set_input(pb.GenerateRequest(), "\udcff", chat=chat, system="")


def test_system_message_needs_a_chat() -> None:
    with pytest.raises(Failure, match="--system needs --chat"):
        set_input(pb.GenerateRequest(), "x", chat=False, system="y")


def test_transport_failures_are_told_apart() -> None:
    def failure(code: grpc.StatusCode) -> str:
        nothing = grpc.aio.Metadata()
        return rpc_failure(grpc.aio.AioRpcError(code, nothing, nothing, details="why"))

    assert "outrider up" in failure(grpc.StatusCode.UNAVAILABLE)
    assert "--timeout" in failure(grpc.StatusCode.DEADLINE_EXCEEDED)
    assert failure(grpc.StatusCode.UNIMPLEMENTED) == "UNIMPLEMENTED: why"


def test_failure_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        raise Failure("two\nlines")

    with pytest.raises(SystemExit) as caught:
        run(work())
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: two lines\n"


def test_a_grammar_is_read_from_its_option(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "string"}')
    request = pb.GenerateRequest()
    set_grammar(request, json_schema=None, regex=None, lark=None)
    assert not request.HasField("grammar")
    set_grammar(request, json_schema=schema, regex=None, lark=None)
    assert request.grammar.json_schema == '{"type": "string"}'
    set_grammar(request, json_schema=None, regex="", lark=None)
    assert request.grammar.WhichOneof("language") == "regex"
    set_grammar(request, json_schema=None, regex=None, lark=schema)
    assert request.grammar.WhichOneof("language") == "lark"


def test_a_grammar_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    request = pb.GenerateRequest()
    with pytest.raises(Failure, match="exclude each other"):
        set_grammar(request, json_schema=tmp_path, regex="a", lark=None)
    with pytest.raises(Failure, match=r"cannot read .*missing"):
        set_grammar(request, json_schema=tmp_path / "missing", regex=None, lark=None)
    latin = tmp_path / "latin"
    latin.write_bytes(b"\xe9")
    with pytest.raises(Failure, match="not valid UTF-8"):
        set_grammar(request, json_schema=None, regex=None, lark=latin)
