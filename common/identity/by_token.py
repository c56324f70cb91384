"""Authentication by tokens. Each is valid for one call and is answered with a proof."""

import time
from collections import OrderedDict
from typing import Any

from common.identity.caller import Caller
from common.identity.guard import AuthenticatedCaller
from common.identity.identity import Identity
from common.identity.refusals import AuthRejection
from common.identity.roles import ROLES, Role
from common.identity.tokens import LEEWAY_S, Token

SHOWN = "authorization"  # metadata of a call: Bearer TOKEN
BEARER = "Bearer "
PROOF = "baton-proof"  # initial metadata of the response
_MAX_NONCES = 1 << 16  # per role; then the oldest are dropped. Only key holders add any


class TokenAuthentication:
    """An `Identify` for one server."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        # Expiry by nonce of used tokens. Separate by role, so that no role can displace another's.
        self._ends: dict[Role, OrderedDict[str, float]] = {role: OrderedDict() for role in ROLES}

    def __call__(self, method: str, context: Any) -> AuthenticatedCaller:
        token, proof = self._identity.admit(method, _shown(context))
        self._use(token)
        return AuthenticatedCaller(Caller(frozenset({token.role}), token.name), ((PROOF, proof),))

    def _use(self, token: Token) -> None:
        now = time.time()
        ends = self._ends[token.role]
        while ends and next(iter(ends.values())) + LEEWAY_S < now:
            ends.popitem(last=False)
        if token.nonce in ends:
            raise AuthRejection(
                "replayed", "the token has been used before, and is good for one call"
            )
        ends[token.nonce] = token.ends
        if len(ends) > _MAX_NONCES:
            ends.popitem(last=False)


def _shown(context: Any) -> str:
    metadata = dict(context.invocation_metadata() or ())
    shown = str(metadata.get(SHOWN, ""))
    if not shown.startswith(BEARER):
        raise AuthRejection("missing", "the call has no token: its caller knows no cluster secret")
    return shown.removeprefix(BEARER)
