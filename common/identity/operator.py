"""What an operator shows over HTTP, where a call has no token of its own."""

import hmac

from common.identity import tokens
from common.identity.refusals import Refused
from common.identity.secret import Keyrings, operator_keys

AUDIENCE = "http"  # of an operator's token
_BEARER = "bearer "


class OperatorCheck:
    """For any thread.

    Two things are good in `Authorization: Bearer ...`: an operator's key, as `baton secret
    --operator` prints it, or a token of role operator that is made for AUDIENCE, which may come
    more than once until it is over.
    """

    def __init__(self, keyrings: Keyrings) -> None:
        self._keyrings = keyrings

    def check(self, authorization: str | None) -> None:
        """
        Args:
            authorization: the header's value; None: there is none.
        Raises:
            Refused: this is no operator; its `error` has the status and the sentence.
        """
        shown = authorization or ""
        if shown[: len(_BEARER)].lower() != _BEARER:
            raise Refused("missing", "an operator's key is missing: Authorization: Bearer KEY")
        word = shown[len(_BEARER) :].strip()
        keyring = self._keyrings.current()
        if any(hmac.compare_digest(word.encode(), key.encode()) for key in operator_keys(keyring)):
            return
        if word.count(".") != 2:
            raise Refused("secret", "this is no operator's key of this cluster")
        token = tokens.verify(keyring, word, AUDIENCE)
        if token.role != "operator":
            raise Refused("role", f"the token is of role {token.role}, not of an operator")
