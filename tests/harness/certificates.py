"""A certificate authority for a test, and certificates renewed as cert-manager's mounts are."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from outrider.net.tls import ClientTls, TlsFiles

DAY = datetime.timedelta(days=1)
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


class Authority:
    """Signs certificates."""

    def __init__(self, name: str = "Test CA") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(self._name, self._name, self._key.public_key(), DAY)
        self._certificate = builder.add_extension(x509.BasicConstraints(True, 0), critical=True).sign(
            self._key, hashes.SHA256()
        )

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        *names: str,
        valid_for: datetime.timedelta = DAY,
        usages: Sequence[x509.ObjectIdentifier] = (SERVER, CLIENT),
    ) -> tuple[bytes, bytes]:
        """(certificate, key) for host names and addresses; a negative time is one that is over."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        builder = _builder(subject, self._name, key.public_key(), valid_for)
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        return certificate, key.private_bytes(pem, pkcs8, serialization.NoEncryption())


class Mount:
    """A directory with tls.crt, tls.key and ca.crt that is replaced as a whole, through a symbolic link."""

    def __init__(self, path: Path, pair: tuple[bytes, bytes], ca: bytes) -> None:
        self._path, self._generation = path, 0
        path.mkdir(parents=True)
        self.renew(pair, ca)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (path / name).symlink_to(Path("..data") / name)

    def renew(self, pair: tuple[bytes, bytes], ca: bytes) -> None:
        self._generation += 1
        data = self._path / f"..{self._generation}"
        data.mkdir()
        for name, content in zip(("tls.crt", "tls.key", "ca.crt"), (*pair, ca), strict=True):
            (data / name).write_bytes(content)
        (self._path / "..new").symlink_to(data.name)
        os.replace(self._path / "..new", self._path / "..data")

    def settings(self, prefix: str = "tls", *, ca: bool = True) -> dict[str, str]:
        """What a service's configuration says to use it."""
        files = {"cert": "tls.crt", "key": "tls.key"} | ({"ca": "ca.crt"} if ca else {})
        return {f"{prefix}_{name}": str(self._path / file) for name, file in files.items()}

    def files(self, *, ca: bool = True) -> TlsFiles:
        """For a server."""
        return TlsFiles(**{name.removeprefix("tls_"): path for name, path in self.settings(ca=ca).items()})

    def client(self, *, pair: bool = True, name: str = "") -> ClientTls:
        """For a client, with a certificate of its own or without."""
        cert, key, ca = self.settings().values()
        return ClientTls(ca, cert if pair else "", key if pair else "", name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid_for: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * DAY)
        .not_valid_after(now + valid_for)
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
