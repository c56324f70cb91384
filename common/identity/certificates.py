"""Roles in a caller's certificate, as URIs urn:baton:ROLE.

ROLE is router, node or operator, and a certificate may have several. TLS has verified its
authority. The callee authenticates by the names in its own certificate.
"""

from typing import Any

from common.identity.caller import Caller
from common.identity.guard import AuthenticatedCaller
from common.identity.refusals import AuthRejection
from common.identity.roles import ROLES, Role

_NAMES = "x509_subject_alternative_name"
_ROLES: dict[bytes, Role] = {f"urn:baton:{role}".encode(): role for role in ROLES}


def identify(_method: str, context: Any) -> AuthenticatedCaller:
    """Return the roles of the certificate of the call's connection. This is an `Identify`."""
    names = context.auth_context().get(_NAMES, ())
    roles = frozenset(_ROLES[name] for name in names if name in _ROLES)
    if not roles:
        raise AuthRejection("missing", "the caller's certificate has no URI urn:baton:ROLE")
    return AuthenticatedCaller(Caller(roles))
