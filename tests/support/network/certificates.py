"""Certificates for tests, made on demand and written as files."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from common.config import TlsConfig
from common.identity.guard import ROLES, Role

LOOPBACK = ("localhost", "127.0.0.1")


class Authority:
    """A certificate authority. Only processes configured with its certificate trust it."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    def write(
        self,
        directory: Path,
        *names: str,
        not_before: datetime | None = None,
        not_after: datetime | None = None,
        roles: Sequence[Role] = ROLES,
    ) -> TlsConfig:
        """Write a certificate for `names` and `roles`, its key and this authority to `directory`.

        Without names, the certificate is for this machine. Existing files are replaced one by one,
        each atomically.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        issued = self._issued(
            key.public_key(),
            [
                *(_name(name) for name in names or LOOPBACK),
                *(x509.UniformResourceIdentifier(f"urn:baton:{role}") for role in roles),
            ],
            not_before or datetime(2000, 1, 1, tzinfo=UTC),
            not_after or datetime.now(UTC) + timedelta(days=1),
        )
        directory.mkdir(parents=True, exist_ok=True)
        cert_file, key_file = directory / "tls.crt", directory / "tls.key"
        _replace(cert_file, issued.public_bytes(Encoding.PEM))
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        _replace(key_file, pem)
        return TlsConfig(cert=cert_file, key=key_file, ca=self.write_ca(directory))

    def write_ca(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        ca = directory / "ca.crt"
        _replace(ca, self._ca.cert_pem.bytes())
        return ca

    def _issued(
        self,
        key: ec.EllipticCurvePublicKey,
        names: Sequence[x509.GeneralName],
        not_before: datetime,
        not_after: datetime,
    ) -> x509.Certificate:
        authority = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        signer = load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "baton test")])
        return (
            x509.CertificateBuilder(authority.subject, subject, key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(not_before)
            .not_valid_after(not_after)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_of_issuer(authority), critical=False)  # Python 3.13 requires it
            .sign(signer, hashes.SHA256())
        )


def _of_issuer(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    reported = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(reported)


def flags(setting: str, config: TlsConfig) -> list[str]:
    """Return the flags that set `config` as the setting `setting`, such as "server.tls"."""
    given = config.model_dump(exclude_none=True)
    return [f"--{setting}.{name.replace('_', '-')}={value}" for name, value in given.items()]


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)
