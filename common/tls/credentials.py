"""Certificates from files (watched_files.py), and what gRPC and our HTTP server take of them."""

import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import grpc

from common.config import TlsConfig
from common.errors import ConfigError
from common.logs import kv
from common.tls import pem
from common.watched_files import AGAIN_S, WatchedFiles

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pems:
    """What the files of one TlsConfig held at one moment; b"" for a file that is not configured."""

    cert: bytes
    key: bytes
    ca: bytes


class Certificates:
    """The files of one TlsConfig. Any thread may ask."""

    def __init__(self, config: TlsConfig, knob: str, *, again_s: float = AGAIN_S) -> None:
        """
        Args:
            knob: what users call the record, such as "--front.tls"; for messages.
            again_s: between two looks into files that are of no use.
        Raises:
            ConfigError: a file cannot be read or holds something else, or the certificate is not
                the key's or not valid now.
        """
        self.config = config
        self._knob = knob
        self._files = WatchedFiles(
            [path for path in (config.cert, config.key, config.ca) if path],
            self._read,
            what="certificates",
            knob=knob,
            again_s=again_s,
        )

    def current(self) -> Pems:
        """The same object as long as the files have not changed for the better. Cheap enough to
        be asked before every handshake."""
        return self._files.current()

    def _read(self) -> Pems:
        cert, key, ca = self.config.cert, self.config.key, self.config.ca
        try:
            pems = Pems(cert=_content(cert), key=_content(key), ca=_content(ca))
            if cert and key:
                pem.check_shown(cert, pems.cert, key, pems.key)
            if ca:
                pem.check_authority(ca, pems.ca)
        except ConfigError as error:
            raise ConfigError(f"{self._knob}: {error}") from error
        return pems


def certificates(config: TlsConfig, knob: str) -> Certificates | None:
    """None where nothing is configured. Raises ConfigError, as Certificates does."""
    return Certificates(config, knob) if config.cert or config.ca else None


def kind(certificates: Certificates | None) -> str:
    """For people: "off", "on", or "mutual"."""
    if certificates is None:
        return "off"
    return "mutual" if certificates.config.mutual else "on"


def names_and_end(pems: Pems) -> tuple[list[str], datetime]:
    """For whom the certificate that is shown was made, and until when it is good."""
    return pem.names_and_end(pems.cert)


def shown_end(certificates: Certificates) -> float | None:
    """Unix time until which what is shown is good, with its chain; None: nothing is shown."""
    shown = certificates.current().cert
    return pem.chain_end(shown).timestamp() if shown else None


def authority_end(certificates: Certificates) -> float | None:
    """Unix time until which others can be checked; None: they are not."""
    ca = certificates.current().ca
    return pem.authority_end(ca).timestamp() if ca else None


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """For a gRPC server: every handshake is with the newest certificates. With a `ca`, a caller
    without a certificate signed by it is not heard."""
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
        newer,  # type: ignore[arg-type]  # None is for no change, says the documentation
        require_client_authentication=bool(used.ca),
    )


def channel_credentials(pems: Pems) -> grpc.ChannelCredentials:
    """For a gRPC channel, which keeps them for its life."""
    return grpc.ssl_channel_credentials(pems.ca, pems.key or None, pems.cert or None)


def server_contexts(
    certificates: Certificates, application_protocol: str
) -> Callable[[], ssl.SSLContext]:
    """What to take, before each handshake, for a server that is not gRPC's.

    Raises:
        ConfigError: OpenSSL cannot use the certificate.
    """
    used = certificates.current()
    context = _server_context(used, application_protocol)

    def newest() -> ssl.SSLContext:
        nonlocal used, context
        pems = certificates.current()
        if pems is not used:
            used = pems
            try:
                context = _server_context(pems, application_protocol)
            except ConfigError as error:
                log.warning("new certificates are not used %s", kv(because=error))
        return context

    return newest


def _server_configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    pair = (pems.key, pems.cert)
    return grpc.ssl_server_certificate_configuration([pair], pems.ca or None)


def _server_context(pems: Pems, application_protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([application_protocol])
    # It reads files only, and those that were checked may have been replaced since.
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


# Files --------------------------------------------------------------------------------------------


def _content(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
