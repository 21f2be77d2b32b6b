"""Whether a metrics endpoint answers, with metrics of ours."""

import asyncio
from contextlib import suppress

from outrider.cli.doctor.findings import Finding, broken, ok
from outrider.net.address import host_and_port

_LONGEST = 8 << 20
_ADVICE = "start the service with --metrics-address, and give that address here"


async def scraped(address: str, seconds: float) -> list[Finding]:
    """One GET /metrics, which may take so many seconds."""
    subject = f"metrics {address}"
    try:
        async with asyncio.timeout(seconds):
            head, _, body = (await _fetched(address)).partition("\r\n\r\n")
    except (OSError, ValueError) as error:  # TimeoutError is one
        why = f"not within {seconds:g} s" if isinstance(error, TimeoutError) else str(error)
        return [broken("metrics", subject, f"GET /metrics is not answered: {why}", _ADVICE)]
    protocol, _, status = head.partition("\r\n")[0].partition(" ")
    if not protocol.startswith("HTTP/"):
        return [broken("metrics", subject, "it answers, and does not speak HTTP", _ADVICE)]
    if not status.startswith("200"):
        return [broken("metrics", subject, f"GET /metrics is answered with {status[:3]}", _ADVICE)]
    ours = {line.partition("{")[0].partition(" ")[0] for line in body.splitlines() if line.startswith("outrider_")}
    if not ours:
        return [broken("metrics", subject, "it answers, without any metric of Outrider's", _ADVICE)]
    return [ok("metrics", subject, f"{len(ours)} metrics of Outrider's")]


async def _fetched(address: str) -> str:
    """The answer, as far as it is read. Raises OSError, ValueError.

    By hand: a blocking client in a thread cannot be called back from an endpoint that says a letter now and then.
    """
    host, port = host_and_port(address)
    parts: list[bytes] = []
    length = 0
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET /metrics HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        # Another kind of server may hang up on a question that it did not read: what it said before is its answer.
        with suppress(ConnectionError):
            while length < _LONGEST and (part := await reader.read(1 << 16)):
                parts.append(part)
                length += len(part)
    finally:
        writer.close()
    return b"".join(parts).decode(errors="replace")
