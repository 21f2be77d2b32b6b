"""From a name to a connection: DNS and TCP."""

import asyncio
import os
import socket
import time
from dataclasses import dataclass

from outrider.cli.doctor.findings import Finding, broken, ok, unseen
from outrider.net.address import parse_addresses
from outrider.net.tls import ClientTls

DNS = "dns:"


@dataclass(frozen=True)
class Endpoint:
    """One address of one part of the installation.

    Attributes:
        kind: "orchestrator", "target" or "draft".
        address: HOST:PORT.
        tls: how it is checked; None: plain text.
        tls_files: (ca, cert, key) behind `tls`.
        flags: how the settings of `tls` are called, without the last word.
        told: whether an orchestrator named it, and not the user: then it may well be out of reach from here.
    """

    kind: str
    address: str
    tls: ClientTls | None = None
    tls_files: tuple[str, str, str] = ("", "", "")
    flags: str = "--tls"
    told: bool = False

    @property
    def name(self) -> str:
        """As the lines call it."""
        return f"{self.kind} {self.address}"

    @property
    def split(self) -> tuple[str, int]:
        """(host, port)."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


def sources(text: str) -> list[str]:
    """HOST:PORT and dns:NAME:PORT, as they were given. Raises ValueError naming what is neither."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        parse_addresses(part.removeprefix(DNS))
    return list(dict.fromkeys(parts))


async def looked_up(kind: str, source: str) -> tuple[list[str], list[Finding]]:
    """(addresses of a source, what its lookup came to); HOST:PORT stays as it is, for its host is looked up again."""
    address = source.removeprefix(DNS)
    host, _, port = address.rpartition(":")
    subject = f"{kind} {source}"
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        advice = f"check the name, and that this machine's resolver knows it ({host} is looked up as it is)"
        return [], [broken("dns", subject, f"{host} is not found: {error}", advice)]
    hosts = sorted({str(each[4][0]) for each in found})
    finding = ok("dns", subject, f"{len(hosts)} address{'es' if len(hosts) > 1 else ''}: {', '.join(hosts[:16])}")
    if not source.startswith(DNS):
        return [address], [finding]
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts], [finding]


async def connects(endpoint: Endpoint, seconds: float) -> Finding:
    """Whether TCP does within so many seconds."""
    host, port = endpoint.split
    began = time.perf_counter()
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host, port)
    except OSError as error:  # TimeoutError is one
        silent = f"no answer within {seconds:g} s" if isinstance(error, TimeoutError) else str(error)
        why = os.strerror(error.errno) if error.errno else silent
        advice = "start it, or correct the address; if it runs, look for a firewall or NetworkPolicy between"
        return not_from_here(endpoint, "tcp", f"does not connect: {why}", advice)
    writer.close()
    return ok("tcp", endpoint.name, f"connects in {1e3 * (time.perf_counter() - began):.1f} ms")


def not_from_here(endpoint: Endpoint, check: str, seen: str, advice: str) -> Finding:
    """A fault where the user named the address; where an orchestrator did, it may be this machine's place alone."""
    if endpoint.told:
        return unseen(check, endpoint.name, f"cannot be checked from here: {seen}")
    return broken(check, endpoint.name, seen, advice)
