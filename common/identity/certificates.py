"""The roles in a caller's certificate: its URIs urn:baton:router, urn:baton:node and
urn:baton:operator, of which it may have several.

That the certificate is of our authority, TLS has seen to. Whoever is called proves itself by the
names in its own.
"""

from typing import Any

from common.identity.caller import Caller
from common.identity.guard import Identified
from common.identity.refusals import Refused
from common.identity.roles import ROLES, Role

_NAMES = "x509_subject_alternative_name"
_ROLES: dict[bytes, Role] = {f"urn:baton:{role}".encode(): role for role in ROLES}


def identify(_method: str, context: Any) -> Identified:
    """An `Identify`: the roles of the certificate that the call's connection was made with."""
    names = context.auth_context().get(_NAMES, ())
    roles = frozenset(_ROLES[name] for name in names if name in _ROLES)
    if not roles:
        raise Refused("missing", "the caller's certificate has no URI urn:baton:ROLE")
    return Identified(Caller(roles))
