"""Tokens: who is let in, and what is never shown."""

import logging
from pathlib import Path

import pytest

from outrider.net import tokens
from outrider.net.tokens import Keys, KeysError, bearer, new_token, parse_keys


def test_a_token_is_known_by_its_hash_alone() -> None:
    token, line = new_token("acme")
    assert token not in line
    assert len(token) > 43, "256 bits and a prefix"
    keys = Keys(line)
    assert keys.tenant_of(token) == "acme"
    for wrong in ("", "Bearer", token[:-1], token + "x", line.partition(":")[2], "\ud800"):
        assert keys.tenant_of(wrong) is None


def test_one_tenant_may_have_several_tokens_and_all_tenants_are_compared() -> None:
    made = [new_token(name) for name in ("a", "b", "a", "c")]
    keys = Keys("# two of a\n" + "\n".join(f" {line}  # comment" for _, line in made) + "\n\n")
    assert [keys.tenant_of(token) for token, _ in made] == ["a", "b", "a", "c"]


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [new_token(f"t{index}") for index in range(5)]
    keys = Keys("\n".join(line for _, line in made))
    compared: list[str] = []
    real = tokens.hmac.compare_digest

    def counted(one: str, other: str) -> bool:
        compared.append(other)
        return real(one, other)

    monkeypatch.setattr(tokens.hmac, "compare_digest", counted)
    for token in ("nobody's", made[0][0], made[4][0]):
        compared.clear()
        keys.tenant_of(token)
        assert len(compared) == 5


@pytest.mark.parametrize("name", ["", "A", "a b", "a/b", "-a", "a" * 33, "é", "a\n"])
def test_a_tenant_has_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="no name of a tenant"):
        new_token(name)


@pytest.mark.parametrize("line", ["acme", "acme:", "acme:xyz", "A:" + "0" * 64, "acme:" + "0" * 63, "a:b:" + "0" * 64])
def test_a_line_that_is_no_key_is_named_by_its_number_and_not_shown(line: str) -> None:
    with pytest.raises(KeysError, match="line 2 is not NAME:SHA256") as refused:
        parse_keys("# keys\n" + line)
    assert "0000" not in str(refused.value)


def test_a_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (old, old_line), (new, new_line) = new_token("a"), new_token("b")
    file, given = tmp_path / "keys", new_token("c")
    file.write_text(old_line)
    keys = Keys(given[1], str(file))
    assert [keys.tenant_of(one) for one in (old, new, given[0])] == ["a", None, "c"]
    file.write_text(f"{new_line}\n# another size\n")
    assert [keys.tenant_of(one) for one in (old, new, given[0])] == [None, "b", "c"]
    file.write_text("broken")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert keys.tenant_of(new) == "b"
    assert caplog.text.count("changed keys are not used") == 1
    file.unlink()
    assert [keys.tenant_of(new) for _ in range(3)] == ["b"] * 3
    assert caplog.text.count("changed keys are not used") == 2
    file.write_text("")
    assert [keys.tenant_of(one) for one in (old, new, given[0])] == [None, None, "c"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="none cannot be read: No such file"):
        Keys("", str(tmp_path / "none"))


def test_no_token_is_no_metadata() -> None:
    assert bearer("") == ()
