# SPDX-License-Identifier: Apache-2.0
"""A certificate authority of one cluster."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID = datetime.timedelta(days=30)
# Clocks of machines differ.
_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Credentials:
    """A certificate and its private key, in PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Write both into a folder, and return their paths."""
        paths = folder / f"{name}.crt", folder / f"{name}.key"
        for path, data in zip(paths, (self.certificate, self.key), strict=True):
            path.touch(mode=0o600)
            path.write_bytes(data)
        return paths


def private_key() -> bytes:
    """Return a new private key, in PEM."""
    return _pem(ec.generate_private_key(ec.SECP256R1()))


class Authority:
    """Signs certificates of one cluster.

    Attributes
    ----------
    certificate : bytes
        Its own one, in PEM.
    """

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("dracpu-e2e-ca")
        builder = _builder(self._name, self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.certificate = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def server(self, name: str, addresses: Sequence[str]) -> Credentials:
        """Return what a server needs that is reached by some names or IP addresses."""
        alternatives = x509.SubjectAlternativeName([_general_name(address) for address in addresses])
        return self._sign(_name(name), ExtendedKeyUsageOID.SERVER_AUTH, alternatives)

    def client(self, user: str, groups: Sequence[str]) -> Credentials:
        """Return what makes a client known as a user of some groups."""
        return self._sign(_name(user, groups), ExtendedKeyUsageOID.CLIENT_AUTH)

    def _sign(self, subject: x509.Name, usage: x509.ObjectIdentifier, *extensions: x509.ExtensionType) -> Credentials:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(subject, self._name, key.public_key())
        for extension in (x509.ExtendedKeyUsage([usage]), *extensions):
            builder = builder.add_extension(extension, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Credentials(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _VALID)
    )


def _name(common_name: str, organizations: Sequence[str] = ()) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization) for organization in organizations]
    return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
