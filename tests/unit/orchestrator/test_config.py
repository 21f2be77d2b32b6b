"""Settings that the orchestrator refuses, before it loads or opens anything."""

from collections.abc import Iterator

import pytest

from orchestrator.__main__ import serve
from orchestrator.config import OrchestratorConfig
from outrider.process import run_process
from tests.harness.logs import restored_logging

TOKENIZER = "--tokenizer=synthetic:vocab_size=4"


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    with restored_logging():
        yield


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([TOKENIZER], "--targets: field required"),
        ([TOKENIZER, "--targets=nowhere"], "--targets: 'nowhere' is not HOST:PORT"),
        ([TOKENIZER, "--targets=h:1", "--drafts=h:1,h"], "--drafts: 'h' is not HOST:PORT"),
        ([TOKENIZER, "--targets=h:1", "--store=mysql://h"], "--store: "),
        ([TOKENIZER, "--targets=h:1", "--lookahead=65"], "--lookahead: '65' is neither auto nor a number from 0 to 64"),
        ([TOKENIZER, "--targets=h:1", "--lookahead=-1"], "--lookahead: "),
        ([TOKENIZER, "--targets=h:1", "--lookahead=some"], "--lookahead: "),
        ([TOKENIZER, "--targets=h:1", "--port=70000"], "--port: "),
        ([TOKENIZER, "--targets=h:1", "--colour=red"], "unrecognized arguments: --colour=red"),
    ],
)
def test_wrong_setting_is_one_line_and_exit_code_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_process(OrchestratorConfig, serve, flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_environment_counts_like_a_flag_and_loses_against_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_LOOKAHEAD", "65")
    flags = [TOKENIZER, "--targets=h:1"]
    assert run_process(OrchestratorConfig, serve, flags) == 2
    assert "--lookahead" in capsys.readouterr().err
    assert run_process(OrchestratorConfig, serve, [*flags, "--lookahead=4", "--store=mysql://h"]) == 2
    assert "--store" in capsys.readouterr().err


def test_a_configuration_prints_no_secret() -> None:
    config = OrchestratorConfig(
        targets="h:1", tokenizer="t", store="redis://:open-sesame@h:1", keys="acme:" + "0" * 64, tls_key="key.pem"
    )
    for shown in (repr(config), str(config)):
        assert "open-sesame" not in shown
        assert "0000" not in shown
        assert "key.pem" in shown
