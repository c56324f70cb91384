"""Data connections over TLS 1.3, with a self-signed certificate of each producer process.

No certificate authority is needed: the producer sends the certificate's fingerprint over the pair
stream. The consumer presents no certificate. Its seal, the first bytes sent inside TLS, identifies
it. Pages are encrypted and decrypted in place, record by record (16 KiB). Each record costs two
calls between Python and C at both ends.
"""

import hashlib
import hmac
import os
import socket
import ssl
from collections.abc import Callable
from typing import TypeAlias

from common.errors import TransferError
from kvtransfer.backends.scatter import Vectors, views
from kvtransfer.backends.tcp.channel import end, is_readable
from kvtransfer.backends.tcp.wire import KEY_BYTES

# SSL_OP_ENABLE_KTLS, which Python exposes from 3.12 on. No effect on a kernel without TLS.
_KERNEL_TLS = 1 << 3

Seal: TypeAlias = Callable[["TlsTcpChannel", bytes], None]


class TlsTcpChannel:
    """One end of a TLS connection."""

    def __init__(self, secured: ssl.SSLSocket, exchange_seal: Seal) -> None:
        self._socket = secured
        self._exchange_seal = exchange_seal

    @property
    def certificate(self) -> bytes:
        """Return the fingerprint of the peer's certificate."""
        return fingerprint(self._socket.getpeercert(binary_form=True) or b"")

    def start(self, seal: bytes, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        try:
            self._socket.do_handshake()
            self._exchange_seal(self, seal)
        except (TimeoutError, ssl.SSLError) as error:
            raise TransferError(f"no TLS: {error}") from None
        self._socket.settimeout(None)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send_vectors(self, vectors: Vectors, num_bytes: int) -> None:
        for view in views(vectors):
            self._socket.sendall(view)

    def receive(self, num_bytes: int) -> bytes:
        received = bytearray(num_bytes)
        self._fill(memoryview(received))
        return bytes(received)

    def receive_vectors(self, vectors: Vectors, num_bytes: int) -> None:
        for view in views(vectors):
            self._fill(view)

    def has_input(self) -> bool:
        return bool(self._socket.pending()) or is_readable(self._socket)

    def end(self) -> None:
        end(self._socket)

    def close(self) -> None:
        self._socket.close()

    def _fill(self, view: memoryview) -> None:
        while len(view):
            count = self._socket.recv_into(view)
            if not count:
                raise TransferError("the connection ended")
            view = view[count:]


class ProducerTls:
    """The producer's TLS context, for all its connections."""

    def __init__(self, pem: bytes, certificate: bytes) -> None:
        """
        Args:
            pem: private key and certificate.
            certificate: fingerprint of the certificate.
        """
        self.certificate = certificate
        self._context = _context(ssl.PROTOCOL_TLS_SERVER)
        self._context.num_tickets = 0  # sessions are never resumed
        # Python's ssl module loads certificates only from files.
        descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
        with open(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            self._context.load_cert_chain(f"/proc/self/fd/{descriptor}")

    def channel(self, connection: socket.socket) -> TlsTcpChannel:
        """Return the producer's end. Owns the connection, which must be blocking."""
        secured = self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )
        return TlsTcpChannel(secured, _check_seal)


def consumer_channel(connection: socket.socket, certificate: bytes) -> TlsTcpChannel:
    """Return the consumer's end. Owns the connection, which must be blocking.

    Args:
        certificate: expected fingerprint of the producer's certificate.
    """

    def send_seal(channel: TlsTcpChannel, seal: bytes) -> None:
        if not hmac.compare_digest(channel.certificate, certificate):
            raise TransferError("the peer does not have the producer's certificate")
        channel.send(seal)

    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint is stronger than an authority
    return TlsTcpChannel(context.wrap_socket(connection, do_handshake_on_connect=False), send_seal)


def fingerprint(certificate: bytes) -> bytes:
    """Return the SHA-256 of a certificate in DER form."""
    return hashlib.sha256(certificate).digest()


def _check_seal(channel: TlsTcpChannel, seal: bytes) -> None:
    if not hmac.compare_digest(channel.receive(KEY_BYTES), seal):
        raise TransferError("the TLS peer is not the consumer")


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= _KERNEL_TLS
    return context
