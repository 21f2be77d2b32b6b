"""What certificates on disk must be like, and what happens when they change."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.net.tls import TlsError, TlsFiles, server_credentials
from tests.harness.certificates import Authority, Mount

CA = Authority()
PAIR, OTHER = CA.issue("a"), CA.issue("b")


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


WRONG: dict[str, tuple[Callable[[Path], TlsFiles], str]] = {
    "no key": (lambda at: TlsFiles(cert=write(at / "c", PAIR[0])), "--tls-key is required for --tls-cert"),
    "no certificate": (lambda at: TlsFiles(key=write(at / "k", PAIR[1])), "--tls-cert is required for --tls-key"),
    "only a CA": (lambda at: TlsFiles(ca=write(at / "a", CA.pem)), "--tls-cert is required for --tls-ca"),
    "missing": (
        lambda at: TlsFiles(str(at / "none"), write(at / "k", PAIR[1])),
        "none cannot be read: No such file",
    ),
    "another's key": (
        lambda at: TlsFiles(write(at / "c", PAIR[0]), write(at / "k", OTHER[1])),
        "--tls-key: .* is not the key of the certificate",
    ),
    "exchanged": (
        lambda at: TlsFiles(write(at / "c", PAIR[1]), write(at / "k", PAIR[0])),
        "--tls-cert: .* holds no PEM certificate",
    ),
    "cut off": (
        lambda at: TlsFiles(write(at / "c", PAIR[0][:200]), write(at / "k", PAIR[1])),
        "--tls-cert, --tls-key: .* is damaged",
    ),
    "CA cut off": (
        lambda at: TlsFiles(write(at / "c", PAIR[0]), write(at / "k", PAIR[1]), write(at / "a", CA.pem[:200])),
        "--tls-ca: .* is damaged",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_cannot_be_used_are_refused_by_flag(name: str, tmp_path: Path) -> None:
    files, message = WRONG[name]
    with pytest.raises(TlsError, match=message) as refused:
        server_credentials(files(tmp_path))
    assert "PRIVATE" not in str(refused.value)


def test_a_renewal_is_seen_once_and_a_broken_one_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mount = Mount(tmp_path / "tls", PAIR, CA.pem)
    client = mount.client()
    assert client.version == 1
    mount.renew(OTHER, CA.pem)
    assert client.version == client.version == 2
    mount.renew((PAIR[0], OTHER[1]), CA.pem)
    with caplog.at_level(logging.ERROR):
        assert client.version == 2
    assert "a renewed certificate is not used: tls-key:" in caplog.text
    assert "PRIVATE" not in caplog.text
    mount.renew(PAIR, CA.pem)
    assert client.version == 3


def test_a_ca_may_have_its_name_beside_it(tmp_path: Path) -> None:
    named = write(tmp_path / "a", "# Főtanúsítvány\n".encode() + CA.pem)
    server_credentials(TlsFiles(write(tmp_path / "c", PAIR[0]), write(tmp_path / "k", PAIR[1]), named))


def test_nothing_prints_a_key(tmp_path: Path) -> None:
    client = Mount(tmp_path / "tls", PAIR, CA.pem).client()
    (watched,) = (value for value in vars(client).values() if not isinstance(value, str))
    assert "PRIVATE" not in repr(vars(watched))
