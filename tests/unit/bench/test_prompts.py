"""Prompt sets: what comes with the package, and what a file may hold."""

from pathlib import Path

import pytest

from outrider.bench.prompts import BUILT_IN, built_in, read_prompts
from outrider.cli.run import Failure


def test_built_in_sets_are_conversations() -> None:
    sets = built_in()
    assert tuple(each.name for each in sets) == BUILT_IN
    assert all(len(each.prompts) == 4 and all(it.messages for it in each.prompts) for each in sets)
    assert [each.name for each in built_in(("code",))] == ["code"]


def test_file_with_both_kinds_and_sets(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = ['{"prompt": "once\u2028upon"}', "", '{"set": "b", "messages": [{"role": "user", "content": "hi"}]}']
    path.write_text("\n".join([*lines, '{"prompt": "a"}']), encoding="utf-8")
    first, second = read_prompts(path)
    assert (first.name, [it.prompt for it in first.prompts]) == ("prompts", ["once\u2028upon", "a"])
    assert second.prompts[0].messages[0].content == "hi"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: Invalid JSON"),
        ('"text"', "line 2: Input should be an object"),
        ('{"set": "a"}', "line 2: exactly one of `prompt` and `messages` is needed"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "line 2: exactly one of"),
        ('{"prompt": ""}', "line 2: exactly one of"),
        ('{"prompt": 3}', "line 2: prompt: "),
        ('{"prompt": "a", "promt": "b"}', "line 2: promt: "),
        ('{"messages": [{"role": "user"}]}', "line 2: messages.0.content: "),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(Failure) as failure:
        read_prompts(path)
    assert words in str(failure.value)
    assert str(path) in str(failure.value)


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "holds no prompt"), (b"\n \n", "holds no prompt"), (b"\xff", "UTF-8")]
)
def test_file_without_prompts(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data)
    with pytest.raises(Failure, match=words):
        read_prompts(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="No such file"):
        read_prompts(tmp_path / "none")
