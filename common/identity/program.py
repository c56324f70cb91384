"""The identity of a process and the guard of its services, from its configuration.

`check_exposure` prevents listening beyond this host without authentication by accident.
"""

import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from common import tls
from common.config import ServerConfig
from common.errors import ConfigError
from common.identity.guard import (
    ROLES,
    AuthenticatedCaller,
    AuthRejection,
    CallAuthenticator,
    Caller,
    Count,
    Role,
    uncounted,
)
from common.identity.secret import keyrings
from common.identity.tokens import Identity, TokenAuthentication


def check_exposure(host: str, *, authenticated: bool, insecure: bool) -> None:
    """Check that a port is not exposed without authentication.

    Args:
        authenticated: callers need a secret or a certificate.
        insecure: the user has explicitly allowed exposure.
    Raises:
        ConfigError: other hosts can reach the port, without authentication and without `insecure`.
    """
    if not (authenticated or insecure or is_loopback(host)):
        raise ConfigError(
            f"--host {host} is reachable from other hosts, and callers would need neither secret "
            "nor certificate: set --secret-file (`baton cluster-secret` prints a secret), --tls-ca "
            "or --insecure"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ip_address(str(where[0]).partition("%")[0]).is_loopback for *_, where in found)


_NAMES = "x509_subject_alternative_name"
_ROLES: dict[bytes, Role] = {f"urn:baton:{role}".encode(): role for role in ROLES}


def identity_of(
    role: Role, name: str, secret_file: Path | None, count: Count = uncounted
) -> Identity | None:
    """Return the identity, or None if no secret is configured.

    Args:
        secret_file: None: the secret may be in the environment.
    Raises:
        ConfigError: the secret is invalid or has no key for `role`.
    """
    found = keyrings(secret_file, role)
    return None if found is None else Identity(role, name, found, count)


def guard_of(
    server: ServerConfig,
    identity: Identity | None,
    certificates: tls.Certificates | None,
    count: Count,
) -> CallAuthenticator | None:
    """Return the guard: by tokens if there is a secret, else by certificates with mutual TLS.

    None if there is neither, because only this host can connect then.

    Raises:
        ConfigError: other hosts could connect too, and this is not explicitly allowed.
    """
    mutual = certificates is not None and certificates.config.mutual
    check_exposure(
        server.host, authenticated=identity is not None or mutual, insecure=server.insecure
    )
    if identity is not None:
        return CallAuthenticator(TokenAuthentication(identity), count)
    return CallAuthenticator(identify_by_certificate, count) if mutual else None


def identify_by_certificate(_method: str, context: Any) -> AuthenticatedCaller:
    """Authenticate a caller by its TLS certificate, as TokenAuthentication does by its token.

    TLS has verified the certificate's authority. Its URIs urn:baton:ROLE name the caller's roles.
    The callee authenticates by the host names in its own certificate.
    """
    names = context.auth_context().get(_NAMES, ())
    roles = frozenset(_ROLES[name] for name in names if name in _ROLES)
    if not roles:
        raise AuthRejection("missing", "the caller's certificate has no URI urn:baton:ROLE")
    return AuthenticatedCaller(Caller(roles))
