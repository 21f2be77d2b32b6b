"""Whether both sides agree on TLS and on each other's certificates: a handshake by a library that says why it fails."""

import asyncio
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress

from outrider.cli.doctor.findings import Finding, broken, ok, warning
from outrider.cli.doctor.network import Endpoint, not_from_here
from outrider.net.tls import ClientTls

# A renewal that has not come by then (cert-manager's comes a month before the end) needs somebody's attention.
SOON_DAYS = 14.0
_DAY = 86_400.0
# What a client of HTTP/2 says first; a server answers with a SETTINGS frame, whose type is the fourth byte.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEAD, _SETTINGS = 9, 4
# OpenSSL's X509_V_FLAG_NO_CHECK_TIME and codes of failed verifications.
_NO_CHECK_TIME = 0x200000
_NOT_YET, _EXPIRED, _PURPOSE, _WRONG_NAME, _WRONG_IP = 9, 10, 26, 62, 64
_UNKNOWN_CA = (2, 18, 19, 20, 21)


async def agrees(endpoint: Endpoint) -> tuple[bool, Finding]:
    """(whether gRPC may be spoken to what listens there, what was found)."""
    return await (_plain(endpoint) if endpoint.tls is None else _tls(endpoint, endpoint.tls))


async def _plain(endpoint: Endpoint) -> tuple[bool, Finding]:
    """Whether the server speaks HTTP/2 in plain text."""
    if _is_settings(await _plain_answer(endpoint)):
        return True, ok("tls", endpoint.name, "plain text, as configured")
    if await _speaks_tls(endpoint):
        advice = f"give {endpoint.flags}-ca (and {endpoint.flags}-cert, -key where it asks for them)"
        return False, not_from_here(endpoint, "tls", "it speaks TLS, and plain text is configured here", advice)
    advice = "is another program listening on this port?"
    return False, broken("tls", endpoint.name, "it answers, but speaks neither HTTP/2 nor TLS", advice)


async def _tls(endpoint: Endpoint, tls: ClientTls) -> tuple[bool, Finding]:
    """A handshake as gRPC does it."""
    context = _context(endpoint)
    try:
        certificate, answer = await _handshake(endpoint, tls, context)
    except ssl.SSLCertVerificationError as error:
        return False, await _refused_by_us(endpoint, tls, error)
    except ssl.SSLError as error:
        return False, _failed(endpoint, error)
    except (OSError, EOFError):
        seen = "it hangs up during the handshake: it may speak plain text"
        return False, broken("tls", endpoint.name, seen, _AGREE.format(flags=endpoint.flags))
    if isinstance(answer, Exception) or not answer:
        return False, _refused_by_them(endpoint, answer)
    return True, _lasting(endpoint, certificate)


_AGREE = "serve with --tls-cert and --tls-key there, or leave out {flags}* here"


def _failed(endpoint: Endpoint, error: ssl.SSLError) -> Finding:
    if error.reason in ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        seen = "it speaks plain text, and TLS is configured here"
        return broken("tls", endpoint.name, seen, _AGREE.format(flags=endpoint.flags))
    return _refused_by_them(endpoint, error)


def _refused_by_them(endpoint: Endpoint, answer: Exception | bytes) -> Finding:
    """It took its own certificate's side of the handshake well, and then hung up: it is ours that it does not like."""
    detail = f" ({answer.reason})" if isinstance(answer, ssl.SSLError) and answer.reason else ""
    if not endpoint.tls_files[1]:
        seen = f"it wants a client certificate, and none is given{detail}"
        advice = f"give {endpoint.flags}-cert and {endpoint.flags}-key, signed by the CA in its --tls-ca"
        return not_from_here(endpoint, "tls", seen, advice)
    seen = f"it refuses the client certificate {endpoint.tls_files[1]}{detail}"
    advice = (
        "its --tls-ca must have signed it, for client authentication, and it must not have expired; its log says more"
    )
    return broken("tls", endpoint.name, seen, advice)


async def _refused_by_us(endpoint: Endpoint, tls: ClientTls, error: ssl.SSLCertVerificationError) -> Finding:
    code, subject = error.verify_code, endpoint.name
    if code in _UNKNOWN_CA:
        seen = f"its certificate is signed by a CA that is not in {endpoint.tls_files[0] or 'the public ones'}"
        advice = f"give the CA that signed it with {endpoint.flags}-ca, or serve a certificate of that CA"
        return broken("tls", subject, seen, advice)
    certificate: dict[str, object] = {}
    with suppress(OSError, EOFError):
        lenient = _context(endpoint)
        lenient.check_hostname = False
        lenient.verify_flags |= _NO_CHECK_TIME
        certificate, _ = await _handshake(endpoint, tls, lenient)
    if code in (_WRONG_NAME, _WRONG_IP):
        seen = (
            f"its certificate is for {', '.join(_names(certificate)) or 'no name'}, not for {_expected(endpoint, tls)}"
        )
        advice = "call it by one of its names, or say which to expect (--tls-server-name, --target-tls-name, ...)"
        return broken("tls", subject, seen, advice)
    if code == _EXPIRED:
        seen = f"its certificate expired {-_days_left(certificate):.1f} days ago"
        return broken("tls", subject, seen, "renew it: the files are read again by themselves, no restart is needed")
    if code == _NOT_YET:
        return broken("tls", subject, "its certificate is not valid yet", "set the clocks of both machines")
    if code == _PURPOSE:
        return broken("tls", subject, "its certificate is not for servers", "issue it with the usage `server auth`")
    return broken("tls", subject, f"its certificate is refused: {error.verify_message}", "issue it anew")


def _lasting(endpoint: Endpoint, certificate: dict[str, object]) -> Finding:
    days = _days_left(certificate)
    seen = f"TLS, the certificate is good for {days:.1f} days"
    if days < SOON_DAYS:
        advice = "renew it: the files are read again by themselves, no restart is needed; is cert-manager at work?"
        return warning("tls", endpoint.name, seen, advice)
    return ok("tls", endpoint.name, seen)


def _context(endpoint: Endpoint) -> ssl.SSLContext:
    ca, cert, key = endpoint.tls_files
    context = ssl.create_default_context(cafile=ca or None)
    context.set_alpn_protocols(["h2"])
    if cert:
        context.load_cert_chain(cert, key)
    return context


def _expected(endpoint: Endpoint, tls: ClientTls) -> str:
    return tls.server_name or endpoint.split[0]


async def _handshake(
    endpoint: Endpoint, tls: ClientTls, context: ssl.SSLContext
) -> tuple[dict[str, object], bytes | Exception]:
    """(the server's certificate, what it said then). Raises OSError, of which SSLError is one, and EOFError.

    In TLS 1.3 a server looks at a client's certificate when the client thinks that all is well.
    """
    host, port = endpoint.split
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=_expected(endpoint, tls))
    try:
        certificate = writer.get_extra_info("peercert") or {}
        try:
            return certificate, await _exchange(reader, writer)
        except (OSError, EOFError) as error:
            return certificate, error
    finally:
        writer.close()


async def _plain_answer(endpoint: Endpoint) -> bytes:
    """What comes after the first words of HTTP/2 in plain text; b"" when nothing but the end does."""
    reader, writer = await asyncio.open_connection(*endpoint.split)
    try:
        return await _exchange(reader, writer)
    except (OSError, EOFError):
        return b""
    finally:
        writer.close()


async def _speaks_tls(endpoint: Endpoint) -> bool:
    """Whether a handshake that trusts everybody succeeds."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    trusting.set_alpn_protocols(["h2"])
    try:
        _, writer = await asyncio.open_connection(*endpoint.split, ssl=trusting)
    except (OSError, EOFError):
        return False
    writer.close()
    return True


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(_PREFACE)
    await writer.drain()
    return await reader.readexactly(_FRAME_HEAD)


def _is_settings(frame: bytes) -> bool:
    return len(frame) == _FRAME_HEAD and frame[3] == _SETTINGS


def _days_left(certificate: dict[str, object]) -> float:
    until = ssl.cert_time_to_seconds(str(certificate["notAfter"])) if "notAfter" in certificate else 0.0
    return (until - time.time()) / _DAY


def _names(certificate: dict[str, object]) -> Iterator[str]:
    pairs = certificate.get("subjectAltName", ())
    assert isinstance(pairs, tuple)
    return (str(value) for _, value in pairs)
