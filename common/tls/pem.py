"""Content of PEM files: checks of certificates, keys and authorities for TLS."""

from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from common.errors import ConfigError


def check_shown(cert: Path, cert_pem: bytes, key: Path, key_pem: bytes) -> None:
    """Raise ConfigError unless they are a valid certificate chain and its key."""
    chain = _certificates(cert, cert_pem)
    try:
        private = load_pem_private_key(key_pem, None)
    except TypeError as error:  # the library's error for a password
        raise ConfigError(f"{key} is encrypted") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{key} holds no PEM private key") from error
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    try:
        public = chain[0].public_key().public_bytes(*form)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{cert} is of a key that cannot be used: {error}") from error
    if private.public_key().public_bytes(*form) != public:
        raise ConfigError(f"{cert} is not the certificate of the key {key}")
    for each in chain:
        if not _is_valid(each):
            begin, end = each.not_valid_before_utc, each.not_valid_after_utc
            raise ConfigError(f"{cert} is valid from {begin:%FT%TZ} to {end:%FT%TZ}, not now")


def check_authority(ca: Path, pem: bytes) -> None:
    """Raise ConfigError unless at least one certificate is valid."""
    if not any(map(_is_valid, _certificates(ca, pem))):
        raise ConfigError(f"no certificate in {ca} is valid now")


def names_and_end(cert_pem: bytes) -> tuple[list[str], datetime]:
    """Return the names and the expiry of a certificate."""
    shown = x509.load_pem_x509_certificate(cert_pem)
    try:
        names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [], shown.not_valid_after_utc
    return [str(name.value) for name in names], shown.not_valid_after_utc


def chain_end(cert_pem: bytes) -> datetime:
    """Return the earliest expiry in a chain."""
    return min(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(cert_pem))


def authority_end(ca_pem: bytes) -> datetime:
    """Return the latest expiry of the authorities."""
    return max(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(ca_pem))


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion) as error:
        raise ConfigError(f"{path} holds no PEM certificate") from error


def _is_valid(certificate: x509.Certificate) -> bool:
    now = datetime.now(UTC)
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc
