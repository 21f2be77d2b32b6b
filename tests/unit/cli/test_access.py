"""How the commands reach an orchestrator, tokens that they make, and words of workers that they show."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from orchestrator.handshake import PairRefused, check_pair
from outrider.cli.access import Reach
from outrider.cli.info import workers_table
from outrider.cli.main import app
from outrider.cli.run import Failure
from outrider.lm.tokenizer import vocabulary_of
from outrider.net.address import is_loopback, without_credentials
from outrider.net.tokens import Keys
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1 import types_pb2
from tests.harness.tiny_tokenizers import byte_level


def test_a_token_is_shown_once_and_its_line_lets_it_in() -> None:
    result = CliRunner().invoke(app, ["keys", "new", "acme"])
    assert result.exit_code == 0
    token = result.stderr.split()[-1]
    assert token not in result.stdout
    assert Keys(result.stdout).tenant_of(token) == "acme"


def test_a_tenant_without_a_plain_name_gets_no_token() -> None:
    result = CliRunner().invoke(app, ["keys", "new", "A b"])
    assert (result.exit_code, result.stdout) == (2, "")


def test_a_token_is_not_sent_over_a_network_in_plain_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_TOKEN", "secret")
    with pytest.raises(Failure, match=r"would travel to 10\.0\.0\.1:7800 in plain text") as refused:
        Reach().to("10.0.0.1:7800")
    assert "secret" not in str(refused.value)
    for reach, message in (
        (Reach(token_file=str(tmp_path / "none")), "--token-file: .*none cannot be read"),
        (Reach(tls_ca=str(tmp_path / "none")), "none cannot be read"),
    ):
        with pytest.raises(Failure, match=message):
            reach.to("127.0.0.1:1")


def test_words_of_a_worker_do_not_reach_the_terminal_as_commands() -> None:
    worker = pb.WorkerStatus(kind="draft", address="h:1", reason="\x1b[2J[link=http://x]y[/link]\x9b")
    console = Console(file=io.StringIO(), width=1000)
    console.print(workers_table(pb.OrchestratorServiceGetInfoResponse(workers=[worker])))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert "[link=http://x]y[/link]" in shown


@pytest.mark.parametrize("model_id", ["a\nb", "\x1b[2J", "x" * 2_000])
def test_a_worker_whose_model_has_no_name_is_refused(model_id: str) -> None:
    with pytest.raises(PairRefused, match="what is no name") as refused:
        check_pair("draft h:1", types_pb2.ModelInfo(model_id=model_id), vocabulary_of(byte_level()))
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1_200


def test_addresses_for_people_and_for_caution() -> None:
    assert without_credentials("rediss://user:pass@h:1/0?password=x") == "rediss://h:1/0"
    assert without_credentials("memory://") == "memory://"
    assert [is_loopback(host) for host in ("127.3.2.1", "[::1]", "localhost", "0.0.0.0", "10.1.1.1", "a.b")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
