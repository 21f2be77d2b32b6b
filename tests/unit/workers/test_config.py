"""Settings: flags before environment before defaults; one sentence for what is wrong."""

import pytest
from pydantic import ValidationError

from draft_service.config import DraftConfig
from outrider.config import ConfigError, parse_config
from outrider.lm.configured import engine_options
from outrider.v1 import draft_pb2
from target_service.config import TargetConfig


def test_flags_come_before_environment_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TOKEN_BUDGET", "77")
    monkeypatch.setenv("OUTRIDER_KV_PAGES", "88")
    config = parse_config(TargetConfig, ["--model", "m", "--kv-pages", "99"])
    assert (config.kv_pages, config.token_budget, config.page_size) == (99, 77, 0)
    with pytest.raises(ValidationError):
        config.kv_pages = 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model: field required"),
        (["--model", "m", "--port", "x"], "--port: input should be a valid integer"),
        (["--model", "m", "--port", "65536"], "--port: input should be less than or equal to 65535"),
        (["--model", "m", "--max-lookahead", "65"], "--max-lookahead: input should be less"),
        (["--model", "m", "--log-level", "loud"], "--log-level: input should be 'debug'"),
        (["--model", "m", "--colour", "red"], "unrecognized arguments: --colour red"),
        (["--model", "m", "--attention", "paged"], "--attention: input should be 'auto', 'gather' or 'flex'"),
        (["--model", "m", "--graphs", "yes"], "--graphs: input should be 'auto', 'on' or 'off'"),
        (["--model"], "argument --model: expected one argument"),
    ],
)
def test_errors_name_the_flag(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as failure:
        parse_config(TargetConfig, arguments)
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_both_workers_say_how_their_engines_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ATTENTION", "flex")
    for worker in (TargetConfig, DraftConfig):
        options = engine_options(parse_config(worker, ["--model", "m", "--graphs", "on"]))
        assert (options.attention, options.graphs, options.page_size) == ("flex", "on", 0)
    options = engine_options(parse_config(TargetConfig, ["--model", "m", "--attention", "gather", "--page-size", "32"]))
    assert (options.attention, options.graphs, options.page_size) == ("gather", "auto", 32)


def test_proposers_are_a_list_with_the_default_first() -> None:
    config = parse_config(DraftConfig, ["--model", "m", "--proposers", "prompt_lookup,model"])
    assert config.kinds == (draft_pb2.PROPOSER_PROMPT_LOOKUP, draft_pb2.PROPOSER_MODEL)


def test_an_early_exit_is_trained_or_bare() -> None:
    arguments = ["--model", "m", "--proposers", "early_exit", "--early-exit", "e"]
    assert parse_config(DraftConfig, arguments).early_exit == "e"
    with pytest.raises(ConfigError, match="needs one of"):
        parse_config(DraftConfig, [*arguments, "--early-exit-layers", "2"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("hydra", "'hydra' is no proposer"),
        ("medusa", "the proposer medusa and --medusa go together"),
        ("eagle", "the proposer eagle and --eagle go together"),
        ("model,model", "a proposer stands twice"),
        ("", "'' is no proposer"),
        ("early_exit", "early_exit needs one of --early-exit-layers and --early-exit"),
    ],
)
def test_bad_proposers_are_named(value: str, message: str) -> None:
    with pytest.raises(ConfigError) as failure:
        parse_config(DraftConfig, ["--model", "m", "--proposers", value])
    assert message in str(failure.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--proposers", "suffix_or_model"), "suffix_or_model needs the proposer model beside it"),
        (("--suffix-history", "4096"), "--suffix-history needs suffix or suffix_or_model"),
        (("--proposers", "suffix", "--suffix-history", "1023"), "fewer than 1024 tokens are of no use; 0 keeps none"),
        (("--proposers", "auto"), "'auto' is no proposer"),
        (("--eagle", "e"), "the proposer eagle and --eagle go together"),
        (("--proposers", "eagle,medusa", "--eagle", "e", "--medusa", "m"), "a worker offers one of them"),
    ],
)
def test_proposers_that_cannot_be_and_outputs_that_nothing_drafts_from(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as failure:
        parse_config(DraftConfig, ["--model", "m", *flags])
    assert message in str(failure.value)
