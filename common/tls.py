"""TLS for all processes: certificates from files, for gRPC and for the HTTP server.

Files are validated, and read again when they change (watched_files.py).
"""

import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from common.config import TlsConfig
from common.errors import ConfigError
from common.logs import kv
from common.watched_files import AGAIN_S, WatchedFiles

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PemFiles:
    """Content of the files of one TlsConfig. b"": the file is not configured."""

    cert: bytes
    key: bytes
    ca: bytes


class Certificates:
    """The files of one TlsConfig. For any thread."""

    def __init__(self, config: TlsConfig, setting: str, *, again_s: float = AGAIN_S) -> None:
        """Read the files.

        Args:
            setting: name of the setting, such as "--server.tls", for messages.
            again_s: seconds between two attempts to read invalid files.
        Raises:
            ConfigError: a file is unreadable or has other content, or the certificate does not
                match its key or is not valid now.
        """
        self.config = config
        self._setting = setting
        self._files = WatchedFiles(
            [path for path in (config.cert, config.key, config.ca) if path],
            self._read,
            what="certificates",
            setting=setting,
            again_s=again_s,
        )

    def current(self) -> PemFiles:
        """Return the content: the same object until the files change to other valid content.

        Cheap enough for every handshake.
        """
        return self._files.current()

    def _read(self) -> PemFiles:
        cert, key, ca = self.config.cert, self.config.key, self.config.ca
        try:
            pems = PemFiles(cert=_content(cert), key=_content(key), ca=_content(ca))
            if cert and key:
                _check_shown(cert, pems.cert, key, pems.key)
            if ca:
                _check_authority(ca, pems.ca)
        except ConfigError as error:
            raise ConfigError(f"{self._setting}: {error}") from error
        return pems


def certificates(config: TlsConfig, setting: str) -> Certificates | None:
    """Return the certificates, or None if there are none.

    Raises ConfigError as Certificates does.
    """
    return Certificates(config, setting) if config.cert or config.ca else None


def kind(certificates: Certificates | None) -> str:
    """Return the kind of TLS for display: "off", "on" or "mutual"."""
    if certificates is None:
        return "off"
    return "mutual" if certificates.config.mutual else "on"


def shown_end(certificates: Certificates) -> float | None:
    """Return the earliest expiry in this process's chain as Unix time, or None without one."""
    return min(_ends(certificates.current().cert), default=None)


def authority_end(certificates: Certificates) -> float | None:
    """Return the latest expiry of the authorities as Unix time. None: peers are not verified."""
    return max(_ends(certificates.current().ca), default=None)


def _ends(pem: bytes) -> list[float]:
    chain = x509.load_pem_x509_certificates(pem) if pem else []
    return [each.not_valid_after_utc.timestamp() for each in chain]


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return credentials for a gRPC server. Each handshake uses the newest certificates.

    With a `ca`, callers need a certificate signed by it.
    """
    used = certificates.current()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        pems = certificates.current()
        if pems is used:
            return None
        used = pems
        return _server_configuration(pems)

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(used),
        newer,  # type: ignore[arg-type]  # the documentation says that None means no change
        require_client_authentication=bool(used.ca),
    )


def channel_credentials(pems: PemFiles) -> grpc.ChannelCredentials:
    """Return credentials for a gRPC channel, which keeps them for its life."""
    return grpc.ssl_channel_credentials(pems.ca, pems.key or None, pems.cert or None)


def server_contexts(certificates: Certificates) -> Callable[[], ssl.SSLContext]:
    """Return a function that returns the context for the next handshake of an HTTP server.

    Raises:
        ConfigError: OpenSSL cannot use the certificate.
    """
    used = certificates.current()
    context = _server_context(used)

    def newest() -> ssl.SSLContext:
        nonlocal used, context
        pems = certificates.current()
        if pems is not used:
            used = pems
            try:
                context = _server_context(pems)
            except ConfigError as error:
                log.warning("certificate reload failed %s", kv(reason=error))
        return context

    return newest


def _server_configuration(pems: PemFiles) -> grpc.ServerCertificateConfiguration:
    pair = (pems.key, pems.cert)
    return grpc.ssl_server_certificate_configuration([pair], pems.ca or None)


def _server_context(pems: PemFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # OpenSSL reads only files, and the validated files may have been replaced since.
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(file, pems.key + b"\n" + pems.cert)
        context.load_cert_chain(f"/proc/self/fd/{file}")
        if pems.ca:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=pems.ca.decode("ascii", "replace"))
    except ssl.SSLError as error:
        raise ConfigError(f"OpenSSL cannot use a certificate: {error}") from error
    finally:
        os.close(file)
    return context


def _content(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _check_shown(cert: Path, cert_pem: bytes, key: Path, key_pem: bytes) -> None:
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
        raise ConfigError(f"the key of {cert} is not supported: {error}") from error
    if private.public_key().public_bytes(*form) != public:
        raise ConfigError(f"{cert} is not the certificate of the key {key}")
    for each in chain:
        if not _is_valid(each):
            begin, end = each.not_valid_before_utc, each.not_valid_after_utc
            raise ConfigError(f"{cert} is valid from {begin:%FT%TZ} to {end:%FT%TZ}, not now")


def _check_authority(ca: Path, pem: bytes) -> None:
    """Raise ConfigError unless at least one certificate of the authority is valid."""
    if not any(map(_is_valid, _certificates(ca, pem))):
        raise ConfigError(f"no certificate in {ca} is valid now")


def names_and_end(pems: PemFiles) -> tuple[list[str], datetime]:
    """Return the names and the expiry of this process's certificate."""
    shown = x509.load_pem_x509_certificate(pems.cert)
    try:
        names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [], shown.not_valid_after_utc
    return [str(name.value) for name in names], shown.not_valid_after_utc


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion) as error:
        raise ConfigError(f"{path} holds no PEM certificate") from error


def _is_valid(certificate: x509.Certificate) -> bool:
    now = datetime.now(UTC)
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc
