"""TLS from PEM files that are renewed where they lie, as cert-manager mounts them: tls.crt, tls.key, ca.crt."""

import logging
import os
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc

log = logging.getLogger(__name__)

_Stamp = tuple[tuple[int, int, int], ...]


def identity_of(context: "grpc.aio.ServicerContext[Any, Any]") -> str:
    """The names in the certificate that the client of a call has shown and that was checked; "" without one."""
    return ",".join(sorted(name.decode("utf-8", "replace") for name in context.peer_identities() or ()))


class TlsError(Exception):
    """A certificate, key or CA cannot be used; the message names the flag and the file."""


@dataclass(frozen=True)
class TlsFiles:
    """Where the PEM files lie; "" for one that there is not.

    Attributes:
        cert: certificate chain, leaf first.
        key: its private key, unencrypted.
        ca: certificates that the peer's must be signed by.
        flags: how the settings are called, without the last word: "--tls".
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    flags: str = "--tls"

    def __bool__(self) -> bool:
        return bool(self.cert or self.key or self.ca)


@dataclass(frozen=True)
class _Pem:
    """What the files hold; nothing for a file that there is not."""

    cert: bytes
    key: bytes
    ca: bytes

    def __repr__(self) -> str:
        return "_Pem(...)"  # a private key


class _Watched:
    """The content of the files, read again when they have changed.

    A renewal that is half done or wrong is logged and left alone: what was good before stays in use. May be used from
    several threads. Raises TlsError when the files are no good from the beginning.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        _require_pair(files)
        self._stamp = _stamp(files)
        self._pem = _read(files)
        self._complaint = ""
        self.version = 1

    def current(self) -> tuple[int, _Pem]:
        """(a number that grows with every change, the content)."""
        with self._lock:
            try:
                stamp = _stamp(self._files)
                if stamp != self._stamp:
                    self._renew(stamp)
            except TlsError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    log.error("a renewed certificate is not used: %s", error)
            return self.version, self._pem

    def _renew(self, stamp: _Stamp) -> None:
        pem = _read(self._files)
        if _stamp(self._files) != stamp:
            return  # replaced under our eyes; the next call reads it
        self._stamp, self._pem, self._complaint = stamp, pem, ""
        self.version += 1
        log.info("certificates were renewed: %s", self._files.cert or self._files.ca)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a server. A new connection gets what the files hold by then; running ones go on.

    With a CA, a client without a certificate signed by it is refused. Raises TlsError.
    """
    if not files.cert:
        raise TlsError(f"{files.flags}-cert is required for {files.flags}-{'key' if files.key else 'ca'}")
    watched = _Watched(files)
    told, pem = watched.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal told
        version, pem = watched.current()
        if version == told:
            return None
        told = version
        return _configuration(pem)

    # Its types do not know that no change is None.
    fetcher = cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch)
    return grpc.dynamic_ssl_server_credentials(_configuration(pem), fetcher, bool(files.ca))


class ClientTls:
    """How a client checks servers, and what it shows them. A channel keeps what it was made with.

    Args:
        ca: PEM file with what signs the servers' certificates; "" for the public CAs that gRPC knows.
        cert, key: PEM files with the client's own, for servers that ask for one.
        server_name: that certificates must be valid for, where it is not the host of the address.
        flags: how the settings are called, without the last word.

    Raises TlsError.
    """

    def __init__(self, ca: str = "", cert: str = "", key: str = "", server_name: str = "", flags: str = "tls") -> None:
        self._watched = _Watched(TlsFiles(cert, key, ca, flags))
        self.server_name = server_name

    @property
    def version(self) -> int:
        """Grows whenever the files have changed: a channel made before does not know it."""
        return self._watched.current()[0]

    def credentials(self) -> grpc.ChannelCredentials:
        """Of a new channel."""
        pem = self._watched.current()[1]
        return grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.cert or None)


def refused_certificate(details: str) -> bool:
    """Whether the words of a failed call say that the server's certificate was refused."""
    return "handshake failed" in details or "Hostname Verification Check failed" in details


def explained(details: str) -> str:
    """gRPC's words for a connection that did not come about, and what they leave unsaid: a server that refuses a
    client's certificate, or plain text, just hangs up.
    """
    if "failed to connect" in details and "Socket closed" in details:
        return f"{details} (it hung up: does it want TLS, or another client certificate? Its log says which)"
    return details


def _configuration(pem: _Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.ca or None)


def _require_pair(files: TlsFiles) -> None:
    if bool(files.cert) != bool(files.key):
        given, missing = ("cert", "key") if files.cert else ("key", "cert")
        raise TlsError(f"{files.flags}-{missing} is required for {files.flags}-{given}")


def _stamp(files: TlsFiles) -> _Stamp:
    """Changes when a file does, also when a directory above it is exchanged."""
    try:
        stats = [os.stat(path) for path in (files.cert, files.key, files.ca) if path]
    except OSError as error:
        raise TlsError(f"{error.filename} cannot be read: {error.strerror}") from error
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in stats)


def _read(files: TlsFiles) -> _Pem:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pem = _Pem(
        _content(f"{files.flags}-cert", files.cert, b"-----BEGIN CERTIFICATE-----"),
        _content(f"{files.flags}-key", files.key, b"PRIVATE KEY-----"),
        _content(f"{files.flags}-ca", files.ca, b"-----BEGIN CERTIFICATE-----"),
    )
    if files.cert:
        _check_pair(context, files)
    if files.ca:
        _check_ca(context, files, pem.ca)
    return pem


def _content(flag: str, path: str, must_hold: bytes) -> bytes:
    if not path:
        return b""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise TlsError(f"{flag}: {path} cannot be read: {error.strerror}") from error
    if must_hold not in data:
        raise TlsError(f"{flag}: {path} holds no PEM {'key' if b'KEY' in must_hold else 'certificate'}")
    return data


def _check_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        # Without the callback an encrypted key would ask the terminal for its password.
        context.load_cert_chain(files.cert, files.key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsError(f"{files.flags}-key: {files.key} is not the key of the certificate {files.cert}") from error
        raise TlsError(f"{files.flags}-cert, {files.flags}-key: {files.cert} or {files.key} is damaged") from error
    except OSError as error:  # gone since it was read
        raise TlsError(f"{files.flags}-cert: {files.cert} or its key cannot be read: {error.strerror}") from error


def _check_ca(context: ssl.SSLContext, files: TlsFiles, ca: bytes) -> None:
    try:
        # What is not ASCII is a comment: a CA's name.
        context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
    except ssl.SSLError as error:
        raise TlsError(f"{files.flags}-ca: {files.ca} is damaged") from error
