"""Callers known by the token of their call, which is good for one call; they get a proof back.

Imported only where there is a secret, as tokens.py.
"""

import time
from collections import OrderedDict
from typing import Any

from common.identity.caller import Caller
from common.identity.guard import Identified
from common.identity.identity import Identity
from common.identity.refusals import Refused
from common.identity.tokens import LEEWAY_S, Token

SHOWN = "authorization"  # metadata of a call: Bearer TOKEN
BEARER = "Bearer "
PROOF = "baton-proof"  # initial metadata of its answer
_MAX_NONCES = 1 << 16  # beyond, the oldest are forgotten; who has no key adds none


class ByToken:
    """An `Identify` for one server."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._ends: OrderedDict[str, float] = OrderedDict()  # by nonce, of tokens that came

    def __call__(self, method: str, context: Any) -> Identified:
        token, proof = self._identity.admit(method, _shown(context))
        self._use(token)
        return Identified(Caller(frozenset({token.role}), token.name), ((PROOF, proof),))

    def _use(self, token: Token) -> None:
        now = time.time()
        while self._ends and next(iter(self._ends.values())) + LEEWAY_S < now:
            self._ends.popitem(last=False)
        if token.nonce in self._ends:
            raise Refused("replayed", "the token has been used before, and is good for one call")
        self._ends[token.nonce] = token.ends
        if len(self._ends) > _MAX_NONCES:
            self._ends.popitem(last=False)


def _shown(context: Any) -> str:
    metadata = dict(context.invocation_metadata() or ())
    shown = str(metadata.get(SHOWN, ""))
    if not shown.startswith(BEARER):
        raise Refused("missing", "the call has no token: its caller knows no cluster secret")
    return shown.removeprefix(BEARER)
