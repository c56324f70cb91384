"""Authentication of operators over HTTP, where calls have no token."""

import hmac

from common.identity import tokens
from common.identity.guard import AuthRejection
from common.identity.secret import SecretStore, operator_keys

AUDIENCE = "http"  # of operators' tokens
_BEARER = "bearer "


class OperatorCheck:
    """Check of operators' credentials. For any thread.

    `Authorization: Bearer ...` may contain an operator's key, as printed by `baton cluster-secret
    --operator`, or a token of role operator for AUDIENCE. Such a token may be reused until it
    expires.
    """

    def __init__(self, keyrings: SecretStore) -> None:
        self._keyrings = keyrings

    def check(self, authorization: str | None) -> None:
        """Verify an operator's credentials.

        Args:
            authorization: value of the header. None: it is missing.
        Raises:
            AuthRejection: the caller is no operator. `error` has the status and the message.
        """
        shown = authorization or ""
        if shown[: len(_BEARER)].lower() != _BEARER:
            raise AuthRejection(
                "missing", "an operator's key is missing: Authorization: Bearer KEY"
            )
        word = shown[len(_BEARER) :].strip()
        keyring = self._keyrings.current()
        if any(hmac.compare_digest(word.encode(), key.encode()) for key in operator_keys(keyring)):
            return
        if word.count(".") != 2:
            raise AuthRejection("secret", "this is no operator's key of this cluster")
        token = tokens.verify(keyring, word, AUDIENCE)
        if token.role != "operator":
            raise AuthRejection("role", f"the token is of role {token.role}, not of an operator")
