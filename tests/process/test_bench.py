"""`outrider bench` as a user runs it, on models without weights; and what keeps it from measuring."""

import json
from pathlib import Path

import pytest

from outrider.bench.report import Report
from tests.harness.commands import outrider, running
from tests.harness.openai_server import echo_server
from tests.harness.processes import children_of, until_gone
from tests.process.test_up import DRAFT, TARGET, up

PAIR = ("--target", TARGET, "--draft", DRAFT)
LINES = ['{"set": "a", "prompt": "abcab"}', '{"set": "b", "messages": [{"role": "user", "content": "hello"}]}']


def flags(directory: Path, *more: str) -> tuple[str, ...]:
    """The command with two prompts, into a directory of its own."""
    prompts = directory / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text("\n".join(LINES))
    return ("bench", "--prompts", str(prompts), "--output", str(directory / "out"), "--max-tokens", "12", *more)


def report_of(directory: Path) -> Report:
    return Report.model_validate_json((directory / "out" / "report.json").read_text())


async def test_starts_its_own_system_measures_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFT_TIMEOUT", "30")  # a late block would make the rounds differ from the loop's
    code, out, err = await outrider(
        *flags(tmp_path, *PAIR, "--concurrency", "1,3", "--repeats", "2", "--compare", "loop", "--lookahead", "3")
    )
    assert code == 0, err
    assert "\x1b" not in out + err
    report = report_of(tmp_path)
    cells = {(it.prompt_set, it.concurrency, it.way): it for it in report.cells}
    ours = ("speculative", "plain")
    assert list(cells) == [
        (name, level, way) for name in "ab" for level in (1, 3) for way in (*ours, *(["loop"] if level == 1 else []))
    ]
    assert [(it.prompt_set, it.concurrency, it.way) for it in report.not_measured] == [
        ("a", 3, "loop"),
        ("b", 3, "loop"),
    ]
    assert {it.service for it in report.memory} == {"store", "draft", "target", "orchestrator"}
    assert all(it.peak_bytes > 1 << 20 for it in report.memory)
    for (_, level, way), cell in cells.items():
        assert [(run.requests, run.tokens) for run in cell.runs] == [(level, 12 * level)] * 2
        assert cell.same_tokens == 1.0
        assert (cell.speed_up is None) == (way == "plain")
        rounds = cell.rounds
        assert rounds is not None
        assert rounds.times is not None
        if way == "plain":
            assert (rounds.rounds, rounds.tokens_per_pass, rounds.speculation) == (24 * level, 1.0, None)
            continue
        assert (cell.proposer, cell.lookahead) == ("model", 3)
        assert rounds.speculation is not None
        assert rounds.speculation.drafted_at[0] >= rounds.speculation.drafted_at[-1] > 0
        assert rounds.tokens_per_pass is not None
        assert 1 < rounds.tokens_per_pass <= 4
    # The loop does the same rounds as the services do.
    loop, services = cells["a", 1, "loop"].rounds, cells["a", 1, "speculative"].rounds
    assert loop is not None
    assert services is not None
    assert (loop.rounds, loop.speculation) == (services.rounds, services.speculation)
    for words in ("speculative", "loop", "tokens/s", "greedy, at most 12 tokens", "report.html"):
        assert words in out
    assert "a, 3 at once, plain" in err.splitlines()
    assert "<svg" not in (page := (tmp_path / "out" / "report.html").read_text())
    assert page.count("data:image/svg+xml;base64,") == 5


async def test_measures_a_running_system_beside_an_endpoint(tmp_path: Path) -> None:
    async with up(*PAIR, "--lookahead", "2") as system:
        with echo_server(key="secret") as server:
            code, _, err = await outrider(
                *flags(tmp_path, "--address", system.addresses["orchestrator"], "--concurrency", "2", "--repeats", "1"),
                *("--compare", f"openai={server.url}", "--openai-key", "secret", "--temperature", "0.9", "--seed", "4"),
                *("--acceptance", "ratio", "--prompt-set", "b"),
            )
    assert code == 0, err
    report = report_of(tmp_path)
    ours, plain, theirs = report.cells
    assert (report.settings.acceptance, report.settings.seed, report.settings.temperature) == ("ratio", 4, 0.9)
    assert (ours.prompt_set, ours.lookahead, ours.proposer) == ("b", 2, "")
    assert (theirs.way, theirs.rounds, theirs.same_tokens) == (f"openai {server.url}", None, None)
    assert theirs.runs[0].tokens == plain.runs[0].tokens == 24
    assert report.memory == []
    assert report.served.target_threads is None
    assert "secret" not in json.dumps(report.model_dump(mode="json"))


@pytest.mark.parametrize("phase", ["loading", "measuring"])
async def test_ctrl_c_leaves_no_process_and_no_report_and_says_so(tmp_path: Path, phase: str) -> None:
    slow = (f"{TARGET},pass_ms=20", f"{DRAFT},pass_ms=20")
    pair = ("--target", slow[0], "--draft", slow[1], "--compare", "loop", "--concurrency", "1", "--repeats", "99")
    async with running("outrider.cli.main", *flags(tmp_path, *pair)) as bench:
        await bench.line(bench.err, "target: loading" if phase == "loading" else "a, 1 at once, loop")
        children = children_of(bench.process.pid)
        assert len(children) >= 3
        bench.interrupt()
        code, out, err = await bench.end()
        assert (code, out) == (130, "")
        last = err.splitlines()[-1]
        assert last == "interrupted: everything that was started has ended, and no report was written"
        assert "Traceback" not in err
        await until_gone(*children)
    assert not (tmp_path / "out").exists()


async def test_a_service_that_does_not_start_is_told(tmp_path: Path) -> None:
    code, _, err = await outrider(*flags(tmp_path, "--target", TARGET, "--draft", "synthetic:vocab=3"))
    assert code == 1
    assert "draft" in err.splitlines()[-1]
    assert "unknown setting 'vocab'" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--address", "127.0.0.1:1"), "the orchestrator does not answer"),
        (("--address", "127.0.0.1:1", *PAIR), "--address measures a running system"),
        (("--address", "127.0.0.1:1", "--compare", "loop"), "load the models themselves"),
        (("--target", TARGET), "give --draft"),
        ((*PAIR, "--compare", "vllm"), "'vllm' is none of loop, transformers and openai=URL"),
        ((*PAIR, "--compare", "loop", "--temperature", "1"), "decodes greedily"),
        ((*PAIR, "--concurrency", "1,x"), "--concurrency '1,x'"),
        ((*PAIR, "--concurrency", "0"), "--concurrency '0'"),
        ((*PAIR, "--prompt-set", "c"), "there is no prompt set 'c', only a, b"),
        ((*PAIR, "--output", "/dev/null/out"), "cannot write a report to /dev/null/out"),
    ],
)
async def test_what_cannot_be_measured_is_one_line(tmp_path: Path, more: tuple[str, ...], words: str) -> None:
    code, out, err = await outrider(*flags(tmp_path, *more))
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert words in line


@pytest.mark.parametrize(
    ("text", "words"), [("", "holds no prompt"), (f"{LINES[0]}\n{{oops}}\n", "prompts.jsonl, line 2: Invalid JSON")]
)
async def test_bad_prompts_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(text)
    code, out, err = await outrider(*flags(tmp_path, *PAIR))
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert words in err


async def test_what_a_service_refuses_is_one_line_and_ends_the_system(tmp_path: Path) -> None:
    code, out, err = await outrider(*flags(tmp_path, *PAIR, "--acceptance", "greedy", "--temperature", "1"))
    assert (code, out) == (1, "")
    assert "INVALID_FIELD" in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
