"""The self-signed certificate of a producer process, created at its start and never stored.

Separate from tls.py because the cryptography library is slow to import. It is imported only if data
connections are encrypted.
"""

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from kvtransfer.backends.tcp.tls import ProducerTls, fingerprint

_LIFE = timedelta(days=3650)  # not checked: consumers compare the fingerprint


def make_producer_tls() -> ProducerTls:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "baton producer")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _LIFE)
        .not_valid_after(now + _LIFE)
        .sign(key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return ProducerTls(
        private + certificate.public_bytes(Encoding.PEM),
        fingerprint(certificate.public_bytes(Encoding.DER)),
    )
