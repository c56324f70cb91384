"""Protection against listening beyond this host without authentication by accident."""

import socket
from ipaddress import ip_address

from common.errors import ConfigError


def check(host: str, *, asked: bool, insecure: bool) -> None:
    """Check that a port is not exposed without authentication.

    Args:
        host: address listened on.
        asked: callers need a secret or a certificate.
        insecure: the user has allowed it explicitly.
    Raises:
        ConfigError: other hosts can reach the port, without authentication and without `insecure`.
    """
    if not (asked or insecure or is_loopback(host)):
        raise ConfigError(
            f"--host {host} is reached from other hosts, and callers would need neither secret nor "
            "certificate: set --secret-file (`baton cluster-secret` prints a secret), --tls-ca or "
            "--insecure"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ip_address(str(where[0]).partition("%")[0]).is_loopback for *_, where in found)
