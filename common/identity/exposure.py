"""Nobody listens beyond this host by accident: who can reach a port must be asked who he is."""

import socket
from ipaddress import ip_address

from common.errors import ConfigError


def check(host: str, *, asked: bool, insecure: bool) -> None:
    """
    Args:
        host: listened on.
        asked: callers need a secret, or a certificate.
        insecure: the user has said that it is meant so.
    Raises:
        ConfigError: they are not asked, it is not meant so, and others than this host reach them.
    """
    if not (asked or insecure or is_loopback(host)):
        raise ConfigError(
            f"--host {host} is reached from other hosts, and callers would need neither secret nor "
            "certificate: give --secret-file (`baton secret` prints a secret) or --tls-ca, or say "
            "--insecure"
        )


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches what listens there."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ip_address(str(where[0]).partition("%")[0]).is_loopback for *_, where in found)
