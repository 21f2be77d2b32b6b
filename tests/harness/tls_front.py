"""TLS in front of a server that has none: the Valkey that tests start is built without it."""

import asyncio
import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class TlsFront:
    """A port that speaks TLS and asks clients for a certificate; both sides have the same, signed by itself."""

    port: int
    certificate: Path
    key: Path

    @property
    def query(self) -> str:
        """The connection options of a client that is let in."""
        return f"ssl_ca_certs={self.certificate}&ssl_certfile={self.certificate}&ssl_keyfile={self.key}"


@contextmanager
def tls_front(port: int, directory: Path) -> Iterator[TlsFront]:
    """Passes what comes in over TLS to the port, from a thread of its own: it serves tests with a loop each."""
    certificate, key = _self_signed(directory)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificate))
    context.load_cert_chain(certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pass(reader, back), _pass(there, writer))

    async def start() -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)

    async def end() -> None:
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield TlsFront(server.sockets[0].getsockname()[1], certificate, key)
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # either side went
    finally:
        writer.close()


def _self_signed(directory: Path) -> tuple[Path, Path]:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "store")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - _DAY).not_valid_after(now + _DAY)
    builder = builder.add_extension(address, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
    pem = serialization.Encoding.PEM
    files = directory / "store.crt", directory / "store.key"
    files[0].write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    files[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return files
