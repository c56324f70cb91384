"""The configured identity of a process, and the guard of its services."""

from pathlib import Path
from typing import Any

from common import tls
from common.config import ServerConfig
from common.identity import exposure
from common.identity.by_token import TokenAuthentication
from common.identity.caller import Caller
from common.identity.guard import AuthenticatedCaller, CallAuthenticator
from common.identity.identity import Identity
from common.identity.refusals import AuthRejection, Count, uncounted
from common.identity.roles import ROLES, Role
from common.identity.secret import keyrings

_NAMES = "x509_subject_alternative_name"
_ROLES: dict[bytes, Role] = {f"urn:baton:{role}".encode(): role for role in ROLES}


def identity_of(
    role: Role, name: str, secret_file: Path | None, count: Count = uncounted
) -> Identity | None:
    """Return the identity, or None if no secret is configured.

    Args:
        role: of this process.
        name: see Identity.
        secret_file: None: the secret may be in the environment.
        count: called for each failed authentication.
    Raises:
        ConfigError: the secret is invalid or has no key for `role`.
    """
    found = keyrings(secret_file, role)
    return None if found is None else Identity(role, name, found, count)


def guard_of(
    front: ServerConfig,
    identity: Identity | None,
    certificates: tls.Certificates | None,
    count: Count,
) -> CallAuthenticator | None:
    """Return the guard: tokens if there is a secret, else roles in certificates if TLS is mutual.

    None if there is neither. Then only callers on this host are possible.

    Raises:
        ConfigError: other hosts could call too, and this is not explicitly allowed.
    """
    mutual = certificates is not None and certificates.config.mutual
    exposure.check(front.host, asked=identity is not None or mutual, insecure=front.insecure)
    if identity is not None:
        return CallAuthenticator(TokenAuthentication(identity), count)
    return CallAuthenticator(identify_by_certificate, count) if mutual else None


def identify_by_certificate(_method: str, context: Any) -> AuthenticatedCaller:
    """Return the roles in the certificate of the call's connection. This is an `Identify`.

    TLS has verified the certificate's authority. Its URIs urn:baton:ROLE name one or several roles.
    The callee authenticates by the names in its own certificate.
    """
    names = context.auth_context().get(_NAMES, ())
    roles = frozenset(_ROLES[name] for name in names if name in _ROLES)
    if not roles:
        raise AuthRejection("missing", "the caller's certificate has no URI urn:baton:ROLE")
    return AuthenticatedCaller(Caller(roles))
